"""Weight files of published packages, compared tensor by tensor.

`checkpoints/fetch.sh` downloads the packages once; `checkpoints/expected` says
what is in their files. Skipped where the package index cannot be reached.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys

import pytest
from checkpoint_oracle import DTYPES, inspect, load, needs_dump

pytestmark = needs_dump

FOLDER = pathlib.Path(__file__).parent.parent / "checkpoints"
EXPECTED = sorted((FOLDER / "expected").glob("*.json"))
CACHE = pathlib.Path(
    os.environ.get(
        "DATAPARALLEL_CHECKPOINTS", FOLDER.parent.parent / "build/checkpoints"
    )
)


@pytest.fixture(scope="session")
def real_files():
    """The folder of the files, fetched when they are not there."""
    fetched = subprocess.run(
        [FOLDER / "fetch.sh", CACHE],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHON": sys.executable},
    )
    if fetched.returncode == 75:
        pytest.skip("the package index cannot be reached: " + fetched.stderr[-200:])
    assert fetched.returncode == 0, fetched.stderr
    return CACHE


def tensors_in(value, path=()):
    """Pairs of dotted key and tensor, in order."""
    if not isinstance(value, dict):
        return
    if "tensor" in value:
        yield ".".join(path), value
    elif "mapping" in value:
        for key, element in value["items"]:
            yield from tensors_in(element, (*path, str(key)))
    else:
        for kind in ("list", "tuple"):
            for index, element in enumerate(value.get(kind, [])):
                yield from tensors_in(element, (*path, str(index)))


def expected_tensors(expected):
    """A TorchScript archive gives its state_dict: what hangs on `data`, without
    constants and plain attributes."""
    tensors = expected["tensors"]
    if expected["path"].endswith(".jit"):
        plain = {"data._state", "data._context"}
        tensors = [
            {**tensor, "key": tensor["key"].removeprefix("data.")}
            for tensor in tensors
            if tensor["key"].startswith("data.") and tensor["key"] not in plain
        ]
    return tensors


@pytest.mark.parametrize("description", EXPECTED, ids=lambda path: path.stem[:40])
def test_a_real_file_is_read_tensor_by_tensor(description, real_files):
    expected = json.loads(description.read_text())
    path = real_files / expected["package"] / expected["path"]
    loaded = load(path, "--map-location", "cpu")
    found = list(tensors_in(loaded.value))
    wanted = expected_tensors(expected)
    assert [key for key, _ in found] == [tensor["key"] for tensor in wanted]
    for (key, tensor), want in zip(found, wanted, strict=True):
        assert str(DTYPES[tensor["tensor"]]) == "torch." + want["dtype"], key
        assert tensor["shape"] == want["shape"], key
        assert tensor["stride"] == want.get("stride", tensor["stride"]), key
        assert tensor["device"] == "cpu", key
        digest = hashlib.sha256(loaded.bytes_of(tensor)).hexdigest()
        assert digest == want["sha256"], key


@pytest.mark.parametrize("description", EXPECTED, ids=lambda path: path.stem[:40])
def test_inspect_says_the_same_of_a_real_file(description, real_files):
    expected = json.loads(description.read_text())
    info = inspect(real_files / expected["package"] / expected["path"])
    wanted = expected_tensors(expected)
    assert [
        (tensor["key"], tensor["shape"], tensor["device"]) for tensor in info["tensors"]
    ] == [(want["key"], want["shape"], want.get("location", "cpu")) for want in wanted]
