"""Runs the program `dataparallel`, which the package carries.

The same as the program itself: ``python -m dataparallel inspect FILE``.
"""

import os
import sys
from pathlib import Path


def main() -> None:
    """Become the program, with this command's arguments."""
    program = Path(__file__).resolve().parent / "bin" / "dataparallel"
    if not program.is_file():
        sys.exit(f"dataparallel: the program {program} is not installed")
    os.execv(program, ["dataparallel", *sys.argv[1:]])


if __name__ == "__main__":
    main()
