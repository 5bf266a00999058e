"""Builds the wheel: one extension step that runs CMake.

The wheel holds the extension `dataparallel._C`, and the C++ library, its headers
and its CMake package inside the Python package, which thus is a prefix for CMake.

Environment variables:
    DATAPARALLEL_BUILD_DIR: the folder CMake builds in, kept for the next time.
    CMAKE_BUILD_PARALLEL_LEVEL, CMAKE_CXX_COMPILER_LAUNCHER, CMAKE_ARGS: as in
        CMake; the last one is added to the command line of the configuration.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def project_version() -> str:
    """The version, which CMakeLists.txt alone states."""
    text = (ROOT / "CMakeLists.txt").read_text()
    return re.search(r"project\(dataparallel VERSION (\S+)", text).group(1)


class CMakeBuild(build_ext):
    """Installs what CMake builds into the package."""

    def run(self) -> None:
        """Configure, build and install."""
        if not shutil.which("cmake"):
            raise SystemExit("dataparallel: building needs CMake 3.25 or later on PATH")
        build_dir = Path(os.environ.get("DATAPARALLEL_BUILD_DIR", self.build_temp))
        package = Path(self.get_ext_fullpath("dataparallel._")).resolve().parent
        configure = [
            *["cmake", "-S", str(ROOT), "-B", str(build_dir)],
            *(["-G", "Ninja"] if shutil.which("ninja") else []),
            f"-DDATAPARALLEL_PYTHON={sys.executable}",
            "-DCMAKE_BUILD_TYPE=Release",
            "-DCMAKE_INSTALL_LIBDIR=lib",
            "-DDATAPARALLEL_BUILD_TESTS=OFF",
            "-DDATAPARALLEL_BUILD_BENCHMARKS=OFF",
            "-DDATAPARALLEL_BUILD_PYTHON=ON",
            # The library finds torch beside it, wherever the wheel goes.
            "-DDATAPARALLEL_INSTALL_TORCH_RPATH=OFF",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build_dir)], check=True)
        subprocess.run(
            ["cmake", "--install", str(build_dir), "--prefix", str(package)],
            check=True,
        )


setup(
    version=project_version(),
    # Names no file: it makes setuptools tag the wheel for this platform.
    ext_modules=[Extension("dataparallel._", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
