"""The program `dataparallel`, run as its users run it."""

import collections
import json
import os
import pty
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TRAIN = os.environ.get("DATAPARALLEL_TRAIN")
PROGRAM = Path(TRAIN or ".").parent / "dataparallel"

pytestmark = pytest.mark.skipif(
    not PROGRAM.is_file(), reason=f"there is no {PROGRAM}; set DATAPARALLEL_TRAIN"
)


def run(*arguments, code=0, program=(PROGRAM,)):
    result = subprocess.run(
        [*program, *arguments], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout if code < 2 else result.stderr


class Strange:
    """Of a class that the library does not know."""


@pytest.fixture
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


@pytest.fixture
def wrapped(net, tmp_path):
    path = tmp_path / "wrapped.pth"
    state_dict = torch.nn.DataParallel(net).state_dict()
    torch.save({"epoch": 3, "model": {"net": state_dict}}, path)
    return path


def same(a, b):
    assert list(a) == list(b)
    return all(torch.equal(a[name], b[name]) for name in a)


def test_help_and_version_succeed():
    assert "inspect" in run("--help")
    assert "--strip-prefix" in run("convert", "--help")
    assert run("--version").strip()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "A subcommand is required"),
        (["explain", "x"], "A subcommand is required"),
        (["inspect"], "file is required"),
        (["convert", "a", "b", "--dtype", "float"], "--dtype: float not in"),
        (["diff", "a"], "b is required"),
        (["inspect", "a", "--bogus"], "not expected: --bogus"),
    ],
)
def test_wrong_arguments_are_one_sentence_and_code_2(arguments, sentence):
    error = run(*arguments, code=2)
    assert error.startswith("dataparallel: ")
    assert sentence in error


@pytest.mark.parametrize("command", ["inspect", "convert", "diff"])
def test_a_file_that_is_not_there_is_one_sentence_and_code_3(command, tmp_path):
    arguments = [] if command == "inspect" else [tmp_path / "out.pt"]
    error = run(command, tmp_path / "no.pt", *arguments, code=3)
    assert "no.pt" in error
    assert "Exception raised" not in error
    assert not list(tmp_path.iterdir())


def test_inspect_lists_the_tensors(wrapped):
    lines = run("inspect", wrapped).splitlines()
    assert lines[0].split() == ["KEY", "DTYPE", "SHAPE", "DEVICE", "SIZE"]
    assert any(
        "net.module.0.weight" in line and "float32" in line and "[2, 3]" in line
        for line in lines
    )
    assert lines[-1] == "zip, 7 tensors, 72 B"


def test_inspect_prints_json(wrapped):
    info = json.loads(run("inspect", wrapped, "--json"))
    assert info["kind"] == "zip"
    assert info["unknown_classes"] == []
    assert info["tensors"][0] == {
        "key": "model.net.module.0.weight",
        "dtype": "float32",
        "shape": [2, 3],
        "device": "cpu",
        "nbytes": 24,
    }


def test_inspect_names_unknown_classes(tmp_path):
    path = tmp_path / "strange.pt"
    torch.save({"a": torch.ones(2), "b": Strange()}, path)
    assert f"unknown class {__name__}.Strange" in run("inspect", path)
    assert json.loads(run("inspect", path, "--json"))["unknown_classes"] == [
        f"{__name__}.Strange"
    ]


def test_convert_without_options_keeps_everything(wrapped, tmp_path):
    out = tmp_path / "out.pt"
    assert "the whole checkpoint" in run("convert", wrapped, out)
    before = torch.load(wrapped, weights_only=True)
    after = torch.load(out, weights_only=True)
    assert after["epoch"] == 3
    assert same(before["model"]["net"], after["model"]["net"])
    metadata = before["model"]["net"]._metadata
    assert after["model"]["net"]._metadata == metadata


def test_convert_strips_and_adds_prefixes(net, wrapped, tmp_path):
    out = tmp_path / "out.pt"
    run("convert", wrapped, out, "--strip-prefix", "module.")
    bare = torch.load(out, weights_only=True)
    assert isinstance(bare, collections.OrderedDict)
    assert same(bare, net.state_dict())
    assert bare._metadata == net.state_dict()._metadata
    net.load_state_dict(bare)
    arguments = ["--strip-prefix", "module.", "--add-prefix", "backbone."]
    run("convert", wrapped, out, *arguments)
    assert list(torch.load(out))[0] == "backbone.0.weight"


def test_convert_takes_the_state_dict_at_a_key(tmp_path, net):
    path = tmp_path / "two.pt"
    ema = {name: value + 1 for name, value in net.state_dict().items()}
    torch.save({"a": net.state_dict(), "b": ema}, path)
    out = tmp_path / "out.pt"
    run("convert", path, out, "--key", "b")
    assert same(torch.load(out), ema)
    error = run("convert", path, out, "--strip-prefix", "x.", code=3)
    assert "a" in error and "b" in error


def test_convert_changes_floating_point_tensors_only(tmp_path):
    weight = torch.rand(3)
    path = tmp_path / "a.pt"
    torch.save({"a": weight, "tied": weight, "n": torch.tensor(3)}, path)
    out = tmp_path / "out.pt"
    run("convert", path, out, "--dtype", "bfloat16")
    result = torch.load(out)
    assert torch.equal(result["a"], weight.bfloat16())
    assert result["a"].data_ptr() == result["tied"].data_ptr()
    assert result["n"].dtype == torch.int64


def test_convert_writes_safetensors_and_reads_them(wrapped, net, tmp_path):
    out = tmp_path / "out.safetensors"
    run("convert", wrapped, out, "--strip-prefix", "module.")
    back = tmp_path / "back.pt"
    run("convert", out, back)
    result = torch.load(back)
    expected = net.state_dict()
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_convert_refuses_shared_tensors_in_safetensors(tmp_path):
    weight = torch.rand(3)
    path = tmp_path / "a.pt"
    torch.save({"a": weight, "b": weight}, path)
    out = tmp_path / "out.safetensors"
    assert "'a' and 'b' share memory" in run("convert", path, out, code=3)
    assert not out.exists()
    run("convert", path, out, "--copy-shared")
    assert run("diff", path, out).startswith("the same, 2 values")


def test_convert_of_unknown_classes_names_them_and_writes_nothing(tmp_path):
    path = tmp_path / "strange.pt"
    torch.save({"a": torch.ones(2), "b": [Strange()]}, path)
    out = tmp_path / "out.pt"
    out.write_text("old")
    error = run("convert", path, out, code=3)
    assert f"['b'][0]: {__name__}.Strange" in error
    assert out.read_text() == "old"


def test_convert_prints_json(wrapped, tmp_path):
    out = tmp_path / "out.pt"
    text = run("convert", wrapped, out, "--strip-prefix", "module.", "--json")
    assert json.loads(text) == {
        "file": str(out),
        "nbytes": out.stat().st_size,
        "entries": 7,
    }


def test_a_file_can_be_converted_into_itself(wrapped, net):
    run("convert", wrapped, wrapped, "--strip-prefix", "module.")
    assert same(torch.load(wrapped), net.state_dict())


def test_diff_of_the_same_is_0_across_formats(wrapped, tmp_path):
    assert run("diff", wrapped, wrapped) == "the same, 8 values compared\n"
    legacy = tmp_path / "legacy.pt"
    torch.save(torch.load(wrapped), legacy, _use_new_zipfile_serialization=False)
    assert json.loads(run("diff", wrapped, legacy, "--json")) == {
        "same": True,
        "differences": [],
    }


def test_diff_of_different_files_is_1_and_says_what_differs(tmp_path):
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    nan = torch.tensor([float("nan"), 1.0])
    common = {"same": torch.ones(2), "nan": nan, "text": "x", "list": [1, 2.5]}
    torch.save(
        {
            **common,
            "values": torch.tensor([1.0, 2.0, 3.0]),
            "dtype": torch.ones(2),
            "shape": torch.ones(2),
            "only a": torch.ones(1),
            "number": 1,
        },
        a,
    )
    torch.save(
        {
            **common,
            "values": torch.tensor([1.0, 2.5, 1.0]),
            "dtype": torch.ones(2).half(),
            "shape": torch.ones(2, 1),
            "only b": None,
            "number": 1.0,
        },
        b,
    )
    differences = json.loads(run("diff", a, b, "--json", code=1))["differences"]
    assert {item["key"]: (item["a"], item["b"]) for item in differences} == {
        "values": ("float32 [3]", "float32 [3]"),
        "dtype": ("float32 [2]", "float16 [2]"),
        "shape": ("float32 [2]", "float32 [2, 1]"),
        "only a": ("float32 [1]", None),
        "only b": (None, "None"),
        "number": ("1", "1."),
    }
    assert differences[0]["different_values"] == 2
    assert differences[0]["max_difference"] == 2
    table = run("diff", a, b, code=1)
    assert "2 values differ, by 2 at most" in table
    assert table.endswith("6 differences\n")


def test_diff_that_fails_is_neither_0_nor_1(wrapped, tmp_path):
    broken = tmp_path / "broken.pt"
    broken.write_bytes(wrapped.read_bytes()[:100])
    assert "broken.pt" in run("diff", wrapped, broken, code=3)


def test_text_from_a_file_does_not_move_the_cursor(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"\x1b[2J\r": torch.ones(1)}, path)
    assert "\\x1b[2J\\x0d" in run("inspect", path)


def test_progress_is_on_standard_error_of_a_terminal_only(tmp_path):
    path, out = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({str(i): torch.rand(1 << 20) for i in range(200)}, path)
    assert run("convert", path, out)
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [PROGRAM, "diff", path, out], stderr=terminal, stdout=subprocess.PIPE
    )
    os.close(terminal)
    output = b""
    try:
        while chunk := os.read(controller, 4096):
            output += chunk
    except OSError:  # Linux: the last writer has closed the terminal
        pass
    os.close(controller)
    assert process.stdout.read() == b"the same, 200 values compared\n"
    process.stdout.close()
    assert process.wait() == 0
    assert not output or output.startswith(b"\r\x1b[Kcomparing [#")


def test_the_package_offers_the_same_program(wrapped):
    package = pytest.importorskip("dataparallel")
    program = Path(package.cmake_prefix_path) / "bin/dataparallel"
    assert program.stat().st_mode & stat.S_IXUSR
    module = (sys.executable, "-m", "dataparallel")
    assert run("inspect", wrapped, program=module) == run("inspect", wrapped)
    assert "no.pt" in run("inspect", "no.pt", code=3, program=module)
