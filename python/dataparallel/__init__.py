"""The C++ library `dataparallel`, its headers and its CMake package.

Data parallelism for LibTorch. A C++ project finds the library with
`find_package(dataparallel)` once CMake is told where it lies:

    cmake -DCMAKE_PREFIX_PATH=$(python -c \
        'import dataparallel; print(dataparallel.cmake_prefix_path)') ...

Attributes:
    cmake_prefix_path: The folder to add to CMAKE_PREFIX_PATH.
    __version__: The version of the library.

"""

from importlib.metadata import version
from pathlib import Path

__all__ = ["__version__", "cmake_prefix_path"]

__version__ = version("dataparallel")
cmake_prefix_path = str(Path(__file__).resolve().parent)
