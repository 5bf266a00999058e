"""The main job, `benchmarks/train.cpp`, run as its users run it."""

import collections
import os
import re
import subprocess

import pytest
import torch
from programs import TRAIN, needs_train, run_on_terminal, run_program

pytestmark = needs_train

EPOCH_LINE = re.compile(
    r"epoch +(\d+)/2  loss \d+\.\d{4}  accuracy +\d+\.\d %  +\d+ samples/s"
)


def train(*arguments, **environment):
    return run_program(TRAIN, *arguments, env={**os.environ, **environment})


def accuracies(output):
    return re.findall(r"^Held-out accuracy, .*: ([\d.]+) % ", output, re.MULTILINE)


@pytest.fixture(scope="module")
def short_run():
    result = train("--devices", "cpu,cpu", "--epochs", "2")
    assert result.returncode == 0, result.stderr
    return result


def test_help_is_shown_and_succeeds():
    result = train("--help")
    assert result.returncode == 0
    assert "--devices" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--devices", ""], "the list is empty"),
        (["--devices", "cpu,"], "got '', expected cpu, cuda"),
        (["--devices", "gpu"], "got 'gpu', expected cpu, cuda"),
        (["--devices", "cpu:1"], "there is one CPU device"),
        (["--devices", "cuda:99"], r"there are \d+ CUDA devices"),
        (["--devices", "sim"], "expected a number with it"),
        (["--devices", "sim:x"], "expected a number after sim:"),
        (["--devices", "sim:64"], "expected sim:0 to sim:63"),
        (["--devices", "sim:0,nope"], "got 'nope'"),
        (["--epochs", "0"], "--epochs: .* not in range 1"),
        (["--batch-size", "-3"], "--batch-size: .* not in range 1"),
        (["--learning-rate", "nan"], "--learning-rate: got 'nan'"),
        (["--learning-rate", "0"], "expected a number above 0"),
        (["--learning-rate", "1e300"], "--learning-rate: got '1e300', expected"),
        (["--seed", "-1"], "--seed: .* not in range 0"),
        (["--data", "no/such/file"], "--data: .* no/such/file"),
        (["--save", "no/such/folder/x.pt"], "is not a file in a folder"),
        (["--save", ""], "--save: got '', expected the path of a file"),
        (["--save", "/"], "'/' is not a file in a folder"),
        (["--save", "/dev/full"], "'/dev/full' is a device or a pipe"),
        (["--save", "/proc/x.pt"], "'/proc/x.pt' cannot be written: "),
        (["--save", "x" * 300], "x' is not a file in a folder"),
        (["--bogus"], "not expected: --bogus"),
    ],
)
def test_bad_arguments_are_refused_with_one_sentence(arguments, sentence):
    result = train(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(rf"train: .*{sentence}.*\n", result.stderr)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused_with_one_sentence(tmp_path):
    tmp_path.chmod(0o500)
    result = train("--save", str(tmp_path / "x.pt"))
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(r"train: .*cannot be written: .*\n", result.stderr)


def test_no_folder_for_temporary_files_is_found_before_training(tmp_path):
    result = train("--devices", "cpu", TMPDIR=str(tmp_path / "none"))
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(r"train: .*temp_directory_path.*\n", result.stderr)


def test_a_folder_that_goes_while_training_is_one_sentence_and_a_failure(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    arguments = ["--devices", "cpu", "--epochs", "2", "--save", str(folder / "x.pt")]
    process = subprocess.Popen(
        [TRAIN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith("Devices: ")
    folder.rmdir()
    _, complaint = process.communicate(timeout=300)
    assert process.returncode == 1
    assert re.fullmatch(r"train: .*x\.pt cannot be written.*\n", complaint)


def test_output_that_cannot_be_written_is_a_failure():
    with open("/dev/full", "w") as full:
        result = run_program(TRAIN, "--devices", "cpu", "--epochs", "1", stdout=full)
    assert result.returncode == 1
    assert re.fullmatch(r"train: .*\n", result.stderr)


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"", "has 0 bytes, expected two or more rows of 65"),
        (bytes(64), "has 64 bytes, expected two or more rows of 65"),
        (bytes(65), "has 65 bytes, expected two or more rows of 65"),
        (bytes([17]) + bytes(129), "a pixel above 16"),
        (bytes(129) + bytes([10]), "a label above 9"),
    ],
)
def test_a_bad_data_file_is_refused_with_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "digits.u8"
    path.write_bytes(content)
    result = train("--devices", "cpu", "--data", str(path))
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(rf"train: .*{sentence}.*\n", result.stderr)


def test_cuda_without_a_gpu_is_refused():
    result = train("--devices", "cuda", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert "there are 0 CUDA devices" in result.stderr


def test_each_replica_names_its_device_and_batch_size_once(short_run):
    lines = short_run.stdout.splitlines()
    forward = [line for line in lines if line.startswith("Forward")]
    assert "Devices: cpu, cpu" in lines
    assert sorted(forward) == [
        "Forward on cpu (replica 0), batch size: 16",
        "Forward on cpu (replica 1), batch size: 16",
    ]


def test_the_reloaded_network_is_as_accurate_as_the_wrapped_one(short_run):
    wrapped, reloaded = accuracies(short_run.stdout)
    assert wrapped == reloaded
    assert float(wrapped) > 90


def test_progress_is_one_plain_line_an_epoch_when_not_on_a_terminal(short_run):
    epochs = [line for line in short_run.stdout.splitlines() if "epoch" in line]
    assert [EPOCH_LINE.fullmatch(line)[1] for line in epochs] == ["1", "2"]
    assert "\r" not in short_run.stdout
    assert "\x1b" not in short_run.stdout


def test_progress_is_a_bar_redrawn_in_place_on_a_terminal():
    arguments = ["--devices", "cpu,cpu", "--epochs", "1"]
    output, _ = run_on_terminal("stdout", TRAIN, *arguments)
    assert re.search(rb"\r\x1b\[Kepoch  1/1 \[#*\.*\] loss ", output)


def test_simulated_devices_report_what_they_did():
    result = train("--devices", "sim:0,sim:1", "--epochs", "1")
    assert result.returncode == 0, result.stderr
    for device in ("sim:0", "sim:1"):
        report = rf"^{device}: [1-9]\d* kernels launched, [1-9]\d* bytes copied"
        assert re.search(report, result.stdout, re.MULTILINE)
        assert f"Forward on {device} (replica {device[-1]})" in result.stdout
    assert "Races found: 0\n" in result.stdout


@pytest.mark.parametrize("devices", ["cpu,cpu", "sim:0,sim:1"])
def test_python_reads_the_state_dict_that_is_saved(tmp_path, devices):
    path = tmp_path / "digits.pt"
    result = train("--devices", devices, "--epochs", "1", "--save", str(path))
    assert result.returncode == 0, result.stderr
    assert f"Saved: {path}" in result.stdout
    weights = torch.load(path, map_location="cpu", weights_only=True)
    assert isinstance(weights, collections.OrderedDict)
    assert all(name.startswith("module.") for name in weights)
    assert all(isinstance(value, torch.Tensor) for value in weights.values())
    assert list(weights._metadata)[:2] == ["", "module"]


def test_held_out_accuracy_reaches_97_percent():
    result = train("--devices", "cpu,cpu")
    assert result.returncode == 0, result.stderr
    assert min(map(float, accuracies(result.stdout))) >= 97
