"""The program `dataparallel`, run as its users run it."""

import collections
import json
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from programs import (
    DATAPARALLEL,
    needs_dataparallel,
    run,
    run_json,
    run_on_terminal,
    run_program,
)

pytestmark = needs_dataparallel


def left_out(path, *keys):
    return f"left out of {path}: " + ", ".join(map(repr, keys))


class Strange:
    """Of a class that the library does not know."""


def write_safetensors(path, floats, metadata):
    header, data = {"__metadata__": metadata}, b""
    for name, values in floats.items():
        raw = struct.pack(f"<{len(values)}f", *values)
        offsets = [len(data), len(data) + len(raw)]
        shape = [len(values)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


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
        ([], "a subcommand is required; expected inspect, convert or diff"),
        (["explain", "x"], "no subcommand explain; expected inspect, convert"),
        (["inspect"], "file is required"),
        (["convert", "a", "b", "--dtype", "float"], "--dtype: float not in"),
        (["diff", "a"], "b is required"),
        (["inspect", "a", "--bogus"], "not expected: --bogus"),
        (["convert", "a", "b.pt", "--copy-shared"], "b.pt does not end with"),
        (["convert", "a", "b.pt", "--allow-overflow"], "--dtype, which is not"),
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
        "requires_grad": False,
    }


def test_inspect_names_unknown_classes(tmp_path):
    path = tmp_path / "strange.pt"
    torch.save({"a": torch.ones(2), "b": Strange()}, path)
    assert f"unknown class {__name__}.Strange" in run("inspect", path)
    assert json.loads(run("inspect", path, "--json"))["unknown_classes"] == [
        f"{__name__}.Strange"
    ]


def test_inspect_names_what_does_not_arrive(tmp_path):
    path = tmp_path / "lossy.pt"
    noted = torch.nn.Parameter(torch.ones(2))
    noted.note = "kept in Python alone"
    torch.save({"a": noted, "b": Strange()}, path)
    text = run("inspect", path)
    assert f"opaque ['b']: {__name__}.Strange" in text
    assert "dropped ['a'].note: str" in text
    info = json.loads(run("inspect", path, "--json"))
    assert info["opaque"] == [{"path": "['b']", "class": f"{__name__}.Strange"}]
    assert info["dropped"] == [{"path": "['a'].note", "class": "str"}]


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
    warned = left_out(out, "epoch")
    run("convert", wrapped, out, "--strip-prefix", "module.", warned=warned)
    bare = torch.load(out, weights_only=True)
    assert isinstance(bare, collections.OrderedDict)
    assert same(bare, net.state_dict())
    assert bare._metadata == net.state_dict()._metadata
    net.load_state_dict(bare)
    arguments = ["--strip-prefix", "module.", "--add-prefix", "backbone."]
    run("convert", wrapped, out, *arguments, warned=warned)
    assert list(torch.load(out))[0] == "backbone.0.weight"


def test_convert_takes_the_state_dict_at_a_key(tmp_path, net):
    path = tmp_path / "two.pt"
    ema = {name: value + 1 for name, value in net.state_dict().items()}
    torch.save({"a": net.state_dict(), "b": ema}, path)
    out = tmp_path / "out.pt"
    run("convert", path, out, "--key", "b", warned=left_out(out, "a"))
    assert same(torch.load(out), ema)
    error = run("convert", path, out, "--strip-prefix", "x.", code=3)
    assert 'say which by --key: "a", "b"' in error


def test_convert_says_what_it_leaves_out(tmp_path, net):
    path, out = tmp_path / "a.pt", tmp_path / "out.safetensors"
    model = {"net": net.state_dict(), "note": "x"}
    optimizer = torch.optim.SGD(net.parameters(), 0.1).state_dict()
    torch.save({"epoch": 3, "optimizer": optimizer, "model": model, 5: 1}, path)
    keys = ["epoch", "optimizer", "5", "model.note"]
    result = run_json("convert", path, out, warned=left_out(out, *keys))
    assert result["left_out"] == keys
    assert result["entries"] == 7


def test_convert_keeps_the_metadata_of_safetensors(tmp_path):
    path, out = tmp_path / "a.safetensors", tmp_path / "out.safetensors"
    write_safetensors(path, {"a": [1.0, 2.0]}, {"format": "pt", "by": "me"})
    run("convert", path, out, "--dtype", "float64")
    assert run_json("inspect", out)["metadata"] == {"format": "pt", "by": "me"}
    out = tmp_path / "out.pt"
    warned = left_out(out, "__metadata__.by", "__metadata__.format")
    run("convert", path, out, warned=warned)


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


def test_convert_keeps_views_of_one_storage(tmp_path):
    path, out = tmp_path / "a.pt", tmp_path / "out.pt"
    base = torch.arange(12, dtype=torch.float32)
    tensors = {
        "base": base,
        "tied": base,
        "matrix": base.view(3, 4).t(),
        "overlapping": base[2:8],
        "expanded": base[1:2].expand(3),
        "negative": torch._neg_view(base[:2]),
        "sparse": torch.eye(3).to_sparse(),
        "half": torch.ones(2, dtype=torch.float16),
        "parameter": torch.nn.Parameter(base[:2]),
        "complex": torch.ones(2, dtype=torch.complex64),
    }
    torch.save(tensors, path)
    run("convert", path, out, "--dtype", "float16")
    result = torch.load(out, weights_only=False)
    for name, tensor in tensors.items():
        if name != "complex":
            assert torch.equal(result[name].to_dense(), tensor.to_dense().half())
    strided = ["tied", "matrix", "overlapping", "expanded", "negative", "parameter"]
    for name in strided:
        storage = result[name].untyped_storage()
        assert storage.data_ptr() == result["base"].untyped_storage().data_ptr()
        assert result[name].stride() == tensors[name].stride()
    assert result["parameter"].requires_grad
    assert not result["base"].requires_grad
    assert result["complex"].dtype == torch.complex64
    result["base"][2] = 100
    assert result["overlapping"][0] == 100 == result["matrix"][2, 0]


def test_convert_names_a_tensor_that_cannot_be_converted(tmp_path):
    path, out = tmp_path / "a.pt", tmp_path / "out.pt"
    odd = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save({"a": torch.ones(2), "odd": odd}, path)
    error = run("convert", path, out, "--dtype", "float32", code=3)
    assert "'odd', of dtype float4_e2m1fn_x2, cannot become float32" in error
    assert not out.exists()


FLOATS = {
    "inf": torch.tensor([float("inf"), 1.0]),
    "nan": torch.tensor([float("nan"), 1e5]),
    "many": torch.tensor([[1e5, -1e5], [65504.0, 1.0]]),
    "one": torch.tensor([1e39], dtype=torch.float64),
    "sparse": torch.diag(torch.tensor([1e5, 1.0])).to_sparse(),
    "whole": torch.tensor([2**40]),
}


def test_convert_refuses_values_that_the_dtype_cannot_hold(tmp_path):
    path, out = tmp_path / "a.pt", tmp_path / "out.pt"
    torch.save(FLOATS, path)
    error = run("convert", path, out, "--dtype", "float16", code=3)
    assert "--dtype float16: values beyond 65504, its largest, in 'nan' " in error
    assert "'many' (2 of 4 values), 'one' (1 of 1 value), 'sparse' (1 of " in error
    assert error.endswith("expected values that it can hold, or --allow-overflow\n")
    error = run("convert", path, out, "--dtype", "float32", code=3)
    assert "in 'one' (1 of 1 value); expected" in error
    error = run("convert", path, out, "--dtype", "float8_e4m3fn", code=3)
    assert "'many' (3 of 4 values)" in error
    assert not out.exists()
    run("convert", path, out, "--dtype", "float64")


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2", "float8_e4m3fn"])
def test_convert_writes_what_overflows_if_told(dtype, tmp_path):
    path, out = tmp_path / "a.pt", tmp_path / "out.pt"
    torch.save(FLOATS, path)
    run("convert", path, out, "--dtype", dtype, "--allow-overflow")
    result = torch.load(out, weights_only=False)
    for name in ("inf", "nan", "many", "one"):
        expected = FLOATS[name].to(getattr(torch, dtype)).double()
        assert torch.equal(result[name].double().nan_to_num(7), expected.nan_to_num(7))
    assert result["whole"].dtype == torch.int64


def test_convert_does_not_look_at_values_that_no_tensor_has(tmp_path):
    path, out = tmp_path / "a.pt", tmp_path / "out.pt"
    torch.save({"view": torch.tensor([1e5, 1.0])[1:]}, path)
    run("convert", path, out, "--dtype", "float16")


def test_convert_writes_safetensors_and_reads_them(wrapped, net, tmp_path):
    out = tmp_path / "out.safetensors"
    arguments = ["--strip-prefix", "module."]
    run("convert", wrapped, out, *arguments, warned=left_out(out, "epoch"))
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
    error = run("convert", path, out, code=3)
    assert "'a' and 'b' share memory" in error
    assert "--copy-shared writes a copy of each" in error
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
    arguments = ["--strip-prefix", "module."]
    assert run_json(
        "convert", wrapped, out, *arguments, warned=left_out(out, "epoch")
    ) == {
        "file": str(out),
        "nbytes": out.stat().st_size,
        "entries": 7,
        "left_out": ["epoch"],
    }


def test_a_file_can_be_converted_into_itself(wrapped, net):
    arguments = ["--strip-prefix", "module."]
    warned = left_out(wrapped, "epoch")
    run("convert", wrapped, wrapped, *arguments, warned=warned)
    assert same(torch.load(wrapped), net.state_dict())


@pytest.mark.parametrize("arguments", [["--help"], ["inspect"], ["convert"], ["diff"]])
@pytest.mark.parametrize("target", ["/dev/full", None])
def test_output_that_cannot_be_written_is_an_error(arguments, target, tmp_path):
    path = tmp_path / "a.pt"
    torch.save({f"layer.{i}": torch.ones(1) for i in range(500)}, path)
    files = {"inspect": [path], "convert": [path, tmp_path / "out.pt"]}
    files["diff"] = [path, path]
    shell = 'exec "$@" > ' + target if target else 'exec "$@" >&-'
    command = ["-c", shell, "sh", DATAPARALLEL, *arguments]
    result = run_program("sh", *command, *files.get(arguments[0], []))
    assert result.returncode == 3
    assert "standard output cannot be written (" in result.stderr


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_convert_leaves_the_old_file(signal_number, tmp_path):
    path, out = tmp_path / "a.pt", tmp_path / "out.pt"
    torch.save({str(i): torch.zeros(1 << 18) for i in range(300)}, path)
    out.write_text("old")
    process = subprocess.Popen(
        [DATAPARALLEL, "convert", path, out],
        # Of a shell in the background, children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal_number, signal.SIG_DFL),
    )
    while process.poll() is None and len(list(tmp_path.iterdir())) < 3:
        time.sleep(0.001)
    process.send_signal(signal_number)
    process.wait()
    assert process.returncode == -signal_number
    assert out.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_prefix_that_no_name_has_is_told(tmp_path, net):
    path, out = tmp_path / "a.pt", tmp_path / "out.pt"
    torch.save(net.state_dict(), path)
    warned = "no name begins with 'module.'"
    run("convert", path, out, "--strip-prefix", "module.", warned=warned)
    assert same(torch.load(out), net.state_dict())


def test_a_pipe_gets_the_checkpoint_and_nothing_else(wrapped, tmp_path):
    out = tmp_path / "out.pt"
    script = '"$0" convert "$1" /dev/stdout | cat > "$2"'
    result = run_program("bash", "-c", script, DATAPARALLEL, wrapped, out)
    assert result.stderr == "/dev/stdout: the whole checkpoint\n"
    run("diff", wrapped, out)
    result = run_program(DATAPARALLEL, "convert", wrapped, "/dev/null", "--json")
    assert json.loads(result.stderr)["nbytes"] is None


def test_a_checkpoint_is_read_from_a_pipe(wrapped, tmp_path):
    out = tmp_path / "out.pt"
    script = 'cat "$1" | "$0" convert /dev/stdin "$2"'
    assert not run_program("bash", "-c", script, DATAPARALLEL, wrapped, out).stderr
    run("diff", wrapped, out)


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
    output, result = run_on_terminal("stderr", DATAPARALLEL, "diff", path, out)
    assert result == b"the same, 200 values compared\n"
    assert not output or output.startswith(b"\r\x1b[Kcomparing [#")


def test_the_package_offers_the_same_program(wrapped):
    package = pytest.importorskip("dataparallel")
    program = Path(package.cmake_prefix_path) / "bin/dataparallel"
    assert program.stat().st_mode & stat.S_IXUSR
    module = (sys.executable, "-m", "dataparallel")
    assert run("inspect", wrapped, program=module) == run("inspect", wrapped)
    assert "no.pt" in run("inspect", "no.pt", code=3, program=module)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("transposed", [False, True])
def test_nested_tensors_are_converted(transposed, tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.full((1, 3), 0.5)])
    value = nested.transpose(1, 2) if transposed else nested
    torch.save({"a": value}, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--dtype", "float16")
    converted = torch.load(tmp_path / "b.pt", weights_only=False)["a"]
    for part, expected in zip(converted.unbind(), value.unbind(), strict=True):
        assert torch.equal(part, expected.half())
