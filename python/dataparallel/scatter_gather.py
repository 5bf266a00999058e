"""Cuts batches and joins results, with the signatures of `torch.nn.parallel`."""

from collections.abc import Sequence
from typing import Any

import torch

from dataparallel import _C
from dataparallel._C import InputRule

__all__ = [
    "InputRule",
    "copy",
    "gather",
    "scatter",
    "scatter_kwargs",
    "split",
    "split_by_sample",
]

Device = int | str | torch.device


def split(dim: int) -> InputRule:
    """Rule for an argument whose tensors are cut along `dim`.

    Example:
        >>> import dataparallel
        >>> dataparallel.split(1)
        split(1)
    """
    return _C.split(dim)


def copy() -> InputRule:
    """Rule for an argument that goes whole to every replica, onto its device.

    Example:
        >>> import dataparallel
        >>> dataparallel.copy()
        copy()
    """
    return _C.copy()


def split_by_sample() -> InputRule:
    """Rule for a list with one entry a sample: replicas get their samples' entries.

    Example:
        >>> import dataparallel
        >>> dataparallel.split_by_sample()
        split_by_sample()
    """
    return _C.split_by_sample()


def scatter(inputs: Any, target_gpus: Sequence[Device], dim: int = 0) -> Any:
    """Cut a batch into one part a device, and move each part to its device.

    Tensors `[N, *]` of one dimension or more are cut along `dim`, chunks
    differing by one sample at most, the larger first. Everything else goes to
    each device as it is, tensors without dimensions onto it. Walked: tuples,
    named tuples, lists, mappings, dataclasses and packed sequences of any depth,
    which keep their types. Differentiable.

    Args:
        inputs: A tensor, or anything nested.
        target_gpus: The devices: numbers of the accelerator, names,
            `torch.device`. A device, `"cpu"` too, may come more than once.
        dim: The dimension of the samples.

    Returns:
        A tuple of parts where `inputs` is a tensor, else a list, as in torch. It
        is as long as the devices that got a sample.

    Raises:
        ValueError: A device does not exist, tensors disagree on the number of
            samples, or one does not have the dimension.

    Example:
        >>> import torch, dataparallel
        >>> dataparallel.scatter(torch.arange(3), ["cpu", "cpu"])
        (tensor([0, 1]), tensor([2]))
        >>> dataparallel.scatter({"x": torch.arange(2), "k": 5}, ["cpu", "cpu"])
        [{'x': tensor([0]), 'k': 5}, {'x': tensor([1]), 'k': 5}]
    """
    parts = _C.scatter(inputs, target_gpus, dim)
    return tuple(parts) if isinstance(inputs, torch.Tensor) else parts


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Sequence[Device],
    dim: int = 0,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Cut the arguments of one call; see `scatter`.

    Returns:
        The positional arguments, a tuple a device, and the keyword arguments, a
        dict a device.

    Example:
        >>> import torch, dataparallel
        >>> dataparallel.scatter_kwargs((torch.arange(2), 1), {"k": 5}, ["cpu"] * 2)
        (((tensor([0]), 1), (tensor([1]), 1)), ({'k': 5}, {'k': 5}))
    """
    return _C.scatter_kwargs(tuple(inputs), dict(kwargs or {}), target_gpus, dim)


def gather(outputs: Any, target_device: Device, dim: int = 0) -> Any:
    """Join the replicas' values into one on `target_device`, in their order.

    Tensors `[N_i, *]` are joined along `dim` to `[sum N_i, *]`; those without
    dimensions become a vector with one entry a replica, whatever `dim` is. None
    in all stays None, equal plain values stay, different numbers and texts
    become a list. Containers keep their types. Differentiable.

    Args:
        outputs: One value a replica.
        target_device: Any device; -1 is the CPU, as in torch.
        dim: The dimension of the samples.

    Raises:
        ValueError: Lengths, keys, types, dtypes or shapes do not fit; the message
            has the path and the replicas.
        TypeError: An object that is not walked differs between replicas.

    Example:
        >>> import torch, dataparallel
        >>> dataparallel.gather([{"y": torch.ones(2)}, {"y": torch.zeros(1)}], "cpu")
        {'y': tensor([1., 1., 0.])}
    """
    if isinstance(target_device, int) and target_device == -1:
        target_device = "cpu"
    return _C.gather(outputs, target_device, dim)
