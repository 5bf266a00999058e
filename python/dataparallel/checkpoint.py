"""Python's checkpoints, read and written by the C++ library.

Nothing in a file is ever run, whatever it holds; damaged and hostile files give
one error, `CheckpointError`.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch

from dataparallel import _C
from dataparallel._C import (
    CheckpointError,
    CheckpointInfo,
    LoadStateDictError,
    LoadStateDictResult,
    OpaqueEntry,
    TensorInfo,
)

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "LoadStateDictError",
    "LoadStateDictResult",
    "OpaqueEntry",
    "TensorInfo",
    "add_prefix",
    "find_state_dict",
    "inspect",
    "load",
    "load_state_dict",
    "opaque_entries",
    "save",
    "save_safetensors",
    "strip_prefix",
]

MapLocation = (
    str
    | torch.device
    | Mapping[str, str | torch.device]
    | Callable[[torch.UntypedStorage, str], Any]
    | None
)


def load(
    source: str | os.PathLike[str] | BinaryIO,
    map_location: MapLocation = None,
    *,
    mmap: bool = True,
) -> Any:
    """Read a checkpoint: every format of `torch.save`, TorchScript, safetensors.

    The value is what `torch.load` gives, save that a Parameter comes as a
    tensor with its `requires_grad`, a NumPy scalar as a number, a NumPy array as
    a tensor, a pickled module as its state_dict, and an object of an unknown
    class as an `Opaque`. Tensors that share a storage in the file share it
    afterwards. The interpreter lock is released while the file is read.

    Args:
        source: A path, or a file opened for reading bytes, which is read to its
            end.
        map_location: Where storages go: a device; a dict from tags of the file
            to devices; or a callable `(storage, tag)` that returns a storage, a
            device or None, called once for each tag with a storage without
            bytes. Default: the device that the tag names.
        mmap: Whether tensors on the CPU lie in memory mapped from the file,
            which must then not be overwritten in place.

    Raises:
        CheckpointError: What is wrong with the file, where in it, and what to do.
        TypeError: `source` or `map_location` is of another type.

    Example:
        >>> import tempfile, torch, dataparallel
        >>> path = tempfile.mkdtemp() + "/model.pt"
        >>> torch.save({"weight": torch.ones(2), "epoch": 3}, path)
        >>> dataparallel.load(path, map_location="cpu")
        {'weight': tensor([1., 1.]), 'epoch': 3}
    """
    return _C.load(source, map_location, mmap)


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Write `obj` as `torch.save` does, all of it or nothing.

    `torch.load(path, weights_only=True)` reads it. The file appears under its
    name complete or not at all, so that a crash never leaves half a file in
    place of a good one. A Parameter is written as a tensor with its
    `requires_grad`, a NumPy scalar as a number. The interpreter lock is released
    while the file is written.

    Args:
        obj: Tensors, numbers, texts, None, and lists, tuples, sets, dicts
            (`OrderedDict`, `defaultdict`, `Counter`) of them.
        path: The file.

    Raises:
        ValueError: `obj` holds objects of other classes (the message has their
            paths), or contains itself.
        CheckpointError: The file cannot be written.

    Example:
        >>> import tempfile, torch, dataparallel
        >>> path = tempfile.mkdtemp() + "/model.pt"
        >>> dataparallel.save(torch.nn.Linear(2, 1).state_dict(), path)
        >>> list(torch.load(path, weights_only=True))
        ['weight', 'bias']
    """
    _C.save(obj, path)


def save_safetensors(
    state_dict: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    copy_shared: bool = False,
) -> None:
    """Write tensors in the safetensors format, as the reference writer does.

    Args:
        state_dict: Names and dense tensors.
        path: The file, which appears complete or not at all.
        metadata: The file's `__metadata__`.
        copy_shared: Whether tensors that share memory, which the format cannot
            express, are each written as a copy.

    Raises:
        ValueError: Tensors share memory; the message names them.
        TypeError: A value is no dense tensor of a dtype that the format has.
        CheckpointError: The file cannot be written.

    Example:
        >>> import tempfile, torch, dataparallel
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> dataparallel.save_safetensors({"weight": torch.ones(2)}, path)
        >>> dataparallel.inspect(path).kind
        'safetensors'
    """
    _C.save_safetensors(state_dict, path, dict(metadata or {}), copy_shared)


def inspect(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Tell what a checkpoint holds, without reading its tensors' bytes.

    Needs none of the devices that the tensors were on.

    Raises:
        CheckpointError: As `load`.

    Example:
        >>> import tempfile, torch, dataparallel
        >>> path = tempfile.mkdtemp() + "/model.pt"
        >>> torch.save(torch.nn.Linear(2, 1).state_dict(), path)
        >>> [(t.key, tuple(t.shape)) for t in dataparallel.inspect(path).tensors]
        [('weight', (1, 2)), ('bias', (1,))]
    """
    return _C.inspect(path)


def opaque_entries(obj: Any) -> list[OpaqueEntry]:
    """List the objects of unknown classes in a value that `load` gave.

    Example:
        >>> import dataparallel
        >>> dataparallel.opaque_entries({"config": dataparallel.Opaque("mylib.Config")})
        [OpaqueEntry(path="['config']", class_name='mylib.Config')]
    """
    return _C.opaque_entries(obj)


def find_state_dict(obj: Any, key: str = "") -> "OrderedDict[str, Any]":
    """Find the state_dict in a checkpoint: `obj` itself, or a mapping inside it.

    Args:
        obj: What `load` or `torch.load` gave.
        key: Where it lies, keys joined by dots. Default: the only one there is,
            or the only one under a usual name ("state_dict", "model", …).

    Returns:
        A new dictionary with the same tensors, and its `_metadata`.

    Raises:
        CheckpointError: There is none, or there are several, which it lists.

    Example:
        >>> import torch, dataparallel
        >>> checkpoint = {"net": {"w": torch.ones(1)}, "epoch": 3}
        >>> list(dataparallel.find_state_dict(checkpoint))
        ['w']
    """
    return _C.find_state_dict(obj, key)


def strip_prefix(
    state_dict: Mapping[str, Any], prefix: str = "module."
) -> "OrderedDict[str, Any]":
    """Take `prefix` from the names that begin with it, once each.

    Returns:
        A new dictionary; order and `_metadata` are kept.

    Raises:
        ValueError: Two entries would get one name, or one no name.

    Example:
        >>> import dataparallel
        >>> list(dataparallel.strip_prefix({"module.w": 1, "b": 2}))
        ['w', 'b']
    """
    return _C.strip_prefix(state_dict, prefix)


def add_prefix(
    state_dict: Mapping[str, Any], prefix: str = "module."
) -> "OrderedDict[str, Any]":
    """Put `prefix` before every name, in a new dictionary.

    Example:
        >>> import dataparallel
        >>> list(dataparallel.add_prefix({"w": 1}))
        ['module.w']
    """
    return _C.add_prefix(state_dict, prefix)


def load_state_dict(
    module: torch.nn.Module,
    state_dict: Mapping[str, Any],
    strict: bool = True,
    assign: bool = False,
    rename: Callable[[str], str] | None = None,
) -> LoadStateDictResult:
    """Write a dictionary's values into a module's tensors, all or nothing.

    Everything is checked, and all memory allocated, before the first value is
    written; `torch.nn.Module.load_state_dict` writes what fits and then raises.
    Values are converted to the module's dtypes and devices.

    Args:
        module: A `torch.nn.Module` or `torch.jit.ScriptModule`.
        state_dict: Names and values.
        strict: Whether missing and unexpected names are errors.
        assign: Give the module the dictionary's tensors themselves; its
            parameters stay the objects they are.
        rename: Maps a name of the dictionary to one of the module.

    Raises:
        LoadStateDictError: It does not fit; the text is torch's. Nothing has
            changed.
        TypeError: A module loads by code of its own (a hook, or an overridden
            method), which is not run here.

    Example:
        >>> import torch, dataparallel
        >>> source, target = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> wrapped = dataparallel.add_prefix(source.state_dict())
        >>> result = dataparallel.load_state_dict(
        ...     target, dataparallel.strip_prefix(wrapped))
        >>> result.loaded_keys
        ['weight', 'bias']
    """
    return _C.load_state_dict(module, state_dict, strict, assign, rename)
