"""Runs the program `dataparallel`, which the package carries.

The same as the program itself: ``python -m dataparallel inspect FILE``.
"""

import importlib.util
import os
import sys
from pathlib import Path


def main() -> None:
    """Become the program, with this command's arguments and this torch."""
    program = Path(__file__).resolve().parent / "bin" / "dataparallel"
    if not program.is_file():
        sys.exit(f"dataparallel: the program {program} is not installed")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit("dataparallel: there is no torch in this environment")
    folders = [str(Path(torch.origin).parent / "lib")]
    if os.environ.get("LD_LIBRARY_PATH"):
        folders.append(os.environ["LD_LIBRARY_PATH"])
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}
    os.execve(program, ["dataparallel", *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
