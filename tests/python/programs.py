"""The programs that tests run as their users do.

`train`'s path is the environment variable DATAPARALLEL_TRAIN; `dataparallel`
lies beside it.
"""

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

TRAIN = os.environ.get("DATAPARALLEL_TRAIN")
DATAPARALLEL = Path(TRAIN or ".").parent / "dataparallel"

needs_train = pytest.mark.skipif(
    not TRAIN, reason="DATAPARALLEL_TRAIN, the path of train, is not set"
)
needs_dataparallel = pytest.mark.skipif(
    not DATAPARALLEL.is_file(), reason=f"there is no {DATAPARALLEL}"
)

TIMEOUT_SECONDS = 300


def run_program(program, *arguments, **options):
    return subprocess.run(
        [program, *arguments],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def run_on_terminal(stream, program, *arguments):
    """Run it, `stream` ("stdout" or "stderr") being a terminal.

    Returns what it wrote there and on the other stream.
    """
    other = {"stdout": "stderr", "stderr": "stdout"}[stream]
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [program, *arguments], **{stream: terminal, other: subprocess.PIPE}
    )
    os.close(terminal)
    output = b""
    try:
        while chunk := os.read(controller, 4096):
            output += chunk
    except OSError:  # Linux: the last writer has closed the terminal
        pass
    os.close(controller)
    rest = getattr(process, other).read()
    getattr(process, other).close()
    assert process.wait(TIMEOUT_SECONDS) == 0
    return output, rest


def run(*arguments, code=0, program=(DATAPARALLEL,), warned=""):
    """What `dataparallel` prints; its complaint where `code` is an error's.

    `warned` is what it is to say on standard error.
    """
    result = run_program(*program, *arguments)
    assert result.returncode == code, result.stdout + result.stderr
    if code >= 2:
        return result.stderr
    assert result.stderr.removeprefix("dataparallel: ").strip() == warned
    return result.stdout


def run_json(*arguments, **options):
    """What `dataparallel ... --json` prints."""
    return json.loads(run(*arguments, "--json", **options))
