"""Data parallelism, and checkpoints of any device, for PyTorch and LibTorch.

In Python:

- `load`, `save`, `inspect`, `find_state_dict`, `strip_prefix`, `add_prefix` and
  `load_state_dict` read and write checkpoints without running anything from
  them;
- `dataparallel.simulated` brings devices `sim:0`, `sim:1`, … that need no
  hardware.

In C++: the package carries the library, its headers and its CMake package. A
project finds it with `find_package(dataparallel)` once CMake is told where it
lies:

    cmake -DCMAKE_PREFIX_PATH=$(python -c \
        'import dataparallel; print(dataparallel.cmake_prefix_path)') ...

Attributes:
    cmake_prefix_path: The folder to add to CMAKE_PREFIX_PATH.
    __version__: The version of the library.

"""

from importlib.metadata import version
from pathlib import Path

import torch  # before the extension, which needs torch's libraries

from dataparallel._built_with import TORCH_VERSION

__version__ = version("dataparallel")
cmake_prefix_path = str(Path(__file__).resolve().parent)


def _check_torch(found: str) -> None:
    """Refuse a torch that the extension does not fit: libtorch has no stable ABI."""
    built, here = ([*v.split(".")[:2]] for v in (TORCH_VERSION, found))
    if here != built:
        raise ImportError(
            f"dataparallel {__version__} was built with torch {TORCH_VERSION}, but "
            f"torch {found} is installed: install torch {'.'.join(built)} or build "
            "dataparallel anew."
        )


_check_torch(torch.__version__)

from dataparallel import simulated  # noqa: E402
from dataparallel.checkpoint import (  # noqa: E402
    CheckpointError,
    CheckpointInfo,
    LoadStateDictError,
    LoadStateDictResult,
    OpaqueEntry,
    TensorInfo,
    add_prefix,
    find_state_dict,
    inspect,
    load,
    load_state_dict,
    opaque_entries,
    save,
    save_safetensors,
    strip_prefix,
)
from dataparallel.data_parallel import (  # noqa: E402
    DataParallel,
    current_replica,
    data_parallel,
    parallel_apply,
    replicate,
)
from dataparallel.opaque import Opaque  # noqa: E402
from dataparallel.scatter_gather import (  # noqa: E402
    InputRule,
    copy,
    gather,
    scatter,
    scatter_kwargs,
    split,
    split_by_sample,
)

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "DataParallel",
    "InputRule",
    "LoadStateDictError",
    "LoadStateDictResult",
    "Opaque",
    "OpaqueEntry",
    "TensorInfo",
    "__version__",
    "add_prefix",
    "cmake_prefix_path",
    "copy",
    "current_replica",
    "data_parallel",
    "find_state_dict",
    "gather",
    "inspect",
    "load",
    "load_state_dict",
    "opaque_entries",
    "parallel_apply",
    "replicate",
    "save",
    "save_safetensors",
    "scatter",
    "scatter_kwargs",
    "simulated",
    "split",
    "split_by_sample",
    "strip_prefix",
]
