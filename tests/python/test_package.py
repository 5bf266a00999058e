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
    for binary in [*PREFIX.glob("lib/*.so"), PREFIX / "bin/dataparallel"]:
        dynamic = subprocess.check_output(["readelf", "-d", binary], text=True)
        (paths,) = re.findall(r"R(?:UN)?PATH.*\[(.*)\]", dynamic)
        own = "$ORIGIN" if binary.suffix == ".so" else "$ORIGIN/../lib"
        assert paths == f"{own}:$ORIGIN/../../torch/lib"


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
