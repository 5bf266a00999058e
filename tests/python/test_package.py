"""Tests of the installed Python package, which carries the C++ library."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import dataparallel
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PREFIX = Path(dataparallel.cmake_prefix_path)


def test_the_version_is_the_one_that_cmake_states():
    text = (ROOT / "CMakeLists.txt").read_text()
    assert f"project(dataparallel VERSION {dataparallel.__version__} " in text


@pytest.mark.parametrize(
    "path",
    [
        "_C.pyi",
        "py.typed",
        "bin/dataparallel",
        "include/dataparallel/dataparallel.h",
        "include/dataparallel/export.h",
        "lib/cmake/dataparallel/dataparallelConfig.cmake",
        "lib/libdataparallel.so",
        "lib/libdataparallel_simulated.so",
    ],
)
def test_the_package_holds(path):
    assert (PREFIX / path).is_file()


def test_no_installed_file_names_the_folder_it_was_built_in():
    for file in PREFIX.rglob("*"):
        if file.suffix in {".h", ".cmake", ".py"}:
            assert str(ROOT) not in file.read_text(), file
    (extension,) = PREFIX.glob("_C*.so")
    for binary in [*PREFIX.glob("lib/*.so"), PREFIX / "bin/dataparallel", extension]:
        dynamic = subprocess.check_output(["readelf", "-d", binary], text=True)
        (paths,) = re.findall(r"R(?:UN)?PATH.*\[(.*)\]", dynamic)
        expected = {
            "lib": "$ORIGIN:$ORIGIN/../../torch/lib",
            "bin": "$ORIGIN/../lib:$ORIGIN/../../torch/lib",
            "dataparallel": "$ORIGIN/lib:$ORIGIN/../torch/lib",
        }
        assert paths == expected[binary.parent.name]


def run_python(program):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    "imports", ["import dataparallel", "import torch, dataparallel"]
)
def test_the_package_imports_alone_and_ends_cleanly(imports):
    program = f"""{imports}
import torch.nn
model = dataparallel.DataParallel(torch.nn.Linear(2, 1), ["cpu", "cpu"])
model(torch.ones(4, 2)).sum().backward()
print(model.module.bias.grad.item())
"""
    assert run_python(program) == "4.0\n"


def test_without_an_accelerator_the_module_is_called_as_it_is():
    program = """import dataparallel, torch
if not torch.accelerator.is_available():
    net = torch.nn.Linear(2, 1)
    model = dataparallel.DataParallel(net)
    assert model.device_ids == torch.nn.DataParallel(net).device_ids == []
    assert torch.equal(model(torch.ones(4, 2)), net(torch.ones(4, 2)))
    try:
        dataparallel.DataParallel(net, [0, 1])
    except ValueError as error:
        assert "device_ids[0] is 0, the number of an accelerator" in str(error)
print("done")
"""
    assert run_python(program) == "done\n"


def test_another_torch_is_one_sentence_with_both_versions():
    with pytest.raises(ImportError) as error:
        dataparallel._check_torch("2.14.1+cu130")
    assert str(error.value) == (
        f"dataparallel {dataparallel.__version__} was built with torch "
        f"{torch.__version__.split('+')[0]}, but torch 2.14.1+cu130 is installed: "
        "install torch 2.15 or build dataparallel anew."
    )


def test_a_project_finds_the_library_in_the_package_and_runs(tmp_path):
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [
        *["cmake", "-S", ROOT / "tests/consumer", "-B", tmp_path, *generator],
        f"-DCMAKE_PREFIX_PATH={PREFIX}",
        f"-DDATAPARALLEL_PYTHON={sys.executable}",
        "-DCMAKE_BUILD_TYPE=Release",
    ]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", tmp_path], check=True)
    subprocess.run([tmp_path / "consumer"], check=True)
    cache = (tmp_path / "CMakeCache.txt").read_text()
    assert str(Path(torch.__file__).parent) in cache
