"""Runs a module on several devices at once, as `torch.nn.DataParallel` does."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch.nn import Module

from dataparallel import _C
from dataparallel._C import InputRule
from dataparallel.scatter_gather import Device

__all__ = [
    "DataParallel",
    "current_replica",
    "data_parallel",
    "parallel_apply",
    "replicate",
]

T = TypeVar("T", bound=Module)


class _Parts(tuple):
    """One part a replica, and what only the wrapper knows of them."""

    replicas: Sequence[int]
    whole: bool  # nothing was split, or the batch is empty


class _Devices(list):
    """The devices of the replicas with these numbers."""

    replicas: Sequence[int]


class DataParallel(Module, Generic[T]):
    """A module on several devices, each with its part of the batch.

    Takes the place of `torch.nn.DataParallel`: the same signature, attributes,
    `state_dict` keys and methods to override. Tensors `[N, *]` among forward's
    arguments are split along `dim`, chunks differing by one sample at most; each
    replica runs in its own thread, the results are joined, and gradients arrive
    in the module's own parameters.

    The module lies on `device_ids[0]` and is replica 0: what its forward writes
    (running statistics, counters) stays. The others follow all of it on every
    forward. Autocast with its dtype, and the grad mode, are the caller's in all
    replicas. A batch of 0, or a call in which nothing is split, is one call, on
    the first device.

    Thread safety: one call at a time, further ones wait.

    Args:
        module: The module. One that torch.compile made is refused.
        device_ids: Numbers of the accelerator, names or `torch.device`. A device
            may come more than once: `["cpu", "cpu"]` are two replicas that share
            the parameters. Default: every accelerator; where there is none, the
            module is called as it is, as in torch.
        output_device: Where results lie. Default: the first of `device_ids`.
        dim: The dimension of the samples in arguments and results.
        inputs: Rules for arguments that are not split along `dim`, by position
            or keyword: `split(dim)`, `copy()`, `split_by_sample()`.
        output_dims: The dimension along which each tensor of the result is
            joined: one for all, or nested as the result. Default: `dim`.
        chunk_shares: Each device's share of the batch, positive numbers.
            Default: equal.

    Raises:
        ValueError: A device does not exist, or `module` is or contains a
            data-parallel wrapper.
        TypeError: `module` is no module, or compiled.

    Example:
        >>> import torch, dataparallel
        >>> net = torch.nn.Linear(3, 2)
        >>> model = dataparallel.DataParallel(net, ["cpu", "cpu"])
        >>> output = model(torch.ones(5, 3))
        >>> output.shape
        torch.Size([5, 2])
        >>> output.sum().backward()
        >>> net.bias.grad
        tensor([5., 5.])
    """

    module: T

    def __init__(
        self,
        module: T,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        inputs: Mapping[int | str, InputRule] | None = None,
        output_dims: Any = None,
        chunk_shares: Sequence[float] | None = None,
    ) -> None:
        """Check the arguments; see the class."""
        super().__init__()
        _check_module(module)
        self.dim = dim
        self.inputs = _check_rules(inputs)
        self.output_dims = output_dims
        self._output_dims = [dim] if output_dims is None else _flatten(output_dims)
        if device_ids is None:
            count = torch.accelerator.device_count()
            device_ids = list(range(count))
        self.module = module
        self._devices: list[torch.device] = []
        self.device_ids: list[int | torch.device] = []
        self.chunk_shares = None if chunk_shares is None else list(chunk_shares)
        if not len(device_ids) and not torch.accelerator.is_available():
            return
        self._devices = _C.device_list("DataParallel", "device_ids", device_ids)
        _C.check_shares("DataParallel", self.chunk_shares or [], len(self._devices))
        self.device_ids = [_as_torch(device) for device in self._devices]
        self.src_device_obj = self._devices[0]
        if output_device is None:
            output_device = self._devices[0]
        self._output_device = _C.device_of(
            "DataParallel", "output_device", output_device
        )
        self.output_device = _as_torch(self._output_device)
        self._replicas = _C.Replicas("DataParallel")
        if len(self._devices) == 1:
            self.module.to(self.src_device_obj)

    def __getattr__(self, name: str) -> Any:
        """Say in the error what the wrapped module has."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = vars(self).get("_modules", {}).get("module")
            hint = ""
            if module is not None and hasattr(module, name):
                hint = (
                    f"; the {type(module).__name__} that it wraps has one: "
                    f".module.{name}"
                )
            elif module is not None:
                hint = f", nor has the {type(module).__name__} that it wraps"
            raise AttributeError(f"{error}{hint}", name=name, obj=self) from None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module on the whole batch; see the class.

        Raises:
            RuntimeError: A parameter or buffer is not on `device_ids[0]`.
            ValueError: Arguments that are split disagree on the batch's size, or
                results do not fit together; before any work, or after all.
            Exception: What forward raises, of the lowest replica, after all have
                ended: the same object, with the note `replica 1 on cuda:1`.
        """
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        _C.check_module_device(self.module, self.src_device_obj)
        with self._replicas:
            args, named = self.scatter(inputs, kwargs, self.device_ids)
            if not args and not named:
                args, named = ((),), ({},)
            used = getattr(args, "replicas", range(len(args)))
            whole = getattr(args, "whole", False)
            if len(self.device_ids) == 1:
                output = self.module(*args[0], **named[0])
                if self._output_device == self.src_device_obj:
                    return output
                return _C.join([output], [0], self._output_device, [0], True)
            if len(used) == 1:
                replicas: Sequence[Any] = [self.module]
                outputs = self.parallel_apply(replicas, args, named)
            else:
                devices = _Devices(self.device_ids[i] for i in used)
                devices.replicas = used
                replicas = self.replicate(self.module, devices)
                outputs = self.parallel_apply(replicas, args, named)
                if replicas[0] is self.module:
                    self._replicas.finish_forward(outputs[0], args[0], named[0])
            if whole:
                return _C.join(outputs, [0], self._output_device, [0], True)
            return self.gather(outputs, self.output_device)

    def loss(
        self, loss_fn: Callable[[Any, Any], Any], inputs: Any, targets: Any
    ) -> torch.Tensor:
        """Give the mean loss of the whole batch, computed in the replicas.

        Outputs are not joined. `loss_fn(output, targets)` is called in each
        replica's thread, at the same time, and returns the mean over that
        replica's samples; replicas are weighted by their number of samples.

        Args:
            loss_fn: Returns a tensor without dimensions; or, where the number of
                samples is not the divisor (`ignore_index`, padding), that and the
                divisor, a number or a tensor, 0 or more.
            inputs: A tuple of forward's arguments, or the one argument.
            targets: Anything nested, split along `dim`.

        Returns:
            A tensor without dimensions on `output_device`, with its graph.

        Raises:
            ValueError: The loss has dimensions; else as `forward`.

        Example:
            >>> import torch, dataparallel
            >>> model = dataparallel.DataParallel(torch.nn.Linear(3, 2), ["cpu"] * 2)
            >>> x, y = torch.ones(5, 3), torch.zeros(5, dtype=torch.long)
            >>> loss = model.loss(torch.nn.functional.cross_entropy, x, y)
            >>> loss.backward()
        """
        return self._batch_loss(loss_fn, inputs, targets, backward=False)

    def forward_backward(
        self, loss_fn: Callable[[Any, Any], Any], inputs: Any, targets: Any
    ) -> torch.Tensor:
        """Compute `loss` and its backward, both in the replicas' threads.

        Gradients are added to the module's parameters in replica order, so that
        two runs agree, through autograd, so that hooks on parameters run once. On
        CPU replicas this is the way to run backward in parallel.

        Returns:
            The loss, without a graph.

        Example:
            >>> import torch, dataparallel
            >>> net = torch.nn.Linear(3, 1)
            >>> model = dataparallel.DataParallel(net, ["cpu", "cpu"])
            >>> x, y = torch.ones(5, 3), torch.zeros(5, 1)
            >>> loss = model.forward_backward(torch.nn.functional.mse_loss, x, y)
            >>> net.weight.grad.shape
            torch.Size([1, 3])
        """
        return self._batch_loss(loss_fn, inputs, targets, backward=True)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Copy the parameters to the replicas in the first forward only.

        For the passes between two optimizer steps. Buffers and all else are
        followed as ever, and so is a parameter that torch's version counters say
        has changed; they do not tell of writes through `.data`.

        Raises:
            RuntimeError: The model accumulates already.

        Example:
            >>> import torch, dataparallel
            >>> net = torch.nn.Linear(3, 2)
            >>> model = dataparallel.DataParallel(net, ["cpu", "cpu"])
            >>> with model.accumulate():
            ...     for x in torch.ones(4, 5, 3):
            ...         model(x).sum().backward()
            >>> net.bias.grad
            tensor([20., 20.])
        """
        if not self.device_ids:
            yield
            return
        with self._replicas:
            self._replicas.begin_accumulation()
        try:
            yield
        finally:
            self._replicas.end_accumulation()

    def _batch_loss(
        self, loss_fn: Any, inputs: Any, targets: Any, backward: bool
    ) -> torch.Tensor:
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        if not self.device_ids:
            value = loss_fn(self.module(*args), targets)
            loss = value[0] if isinstance(value, list | tuple) else value
            if backward:
                loss.backward()
            return loss.detach() if backward else loss
        _C.check_module_device(self.module, self.src_device_obj)
        with self._replicas:
            rules = {**self.inputs, len(args): _C.split(self.dim)}
            parts, _, used, sizes, _ = _C.scatter_for_replicas(
                (*args, targets),
                {},
                self._devices,
                self.dim,
                rules,
                self.chunk_shares or [],
            )
            replicas = [self.module]
            if len(used) > 1:
                replicas = self._replicas.replicate(
                    self.module, self._devices, used, itself=True, detach=False
                )
            return _C.batch_loss(
                self._replicas,
                self._devices,
                used,
                replicas,
                loss_fn,
                parts,
                sizes,
                self._output_device,
                backward,
            )

    def replicate(self, module: T, device_ids: Sequence[Device]) -> list[T]:
        """Give the replicas for one forward, the first of them `module` itself."""
        used = getattr(device_ids, "replicas", range(len(device_ids)))
        return self._replicas.replicate(
            module, self._devices, list(used), itself=True, detach=False
        )

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Sequence[Device],
    ) -> Any:
        """Cut the arguments: a tuple and a dict for each replica with samples."""
        args, named, replicas, _, whole = _C.scatter_for_replicas(
            tuple(inputs),
            dict(kwargs or {}),
            _C.device_list("DataParallel", "device_ids", device_ids),
            self.dim,
            self.inputs,
            self.chunk_shares or [],
        )
        parts = _Parts(args)
        parts.replicas, parts.whole = replicas, whole
        return parts, tuple(named)

    def parallel_apply(
        self, replicas: Sequence[T], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call all replicas at once, each in its own thread."""
        used = getattr(inputs, "replicas", range(len(replicas)))
        args = tuple(i if isinstance(i, list | tuple) else (i,) for i in inputs)
        named = tuple(kwargs) if kwargs else ({},) * len(args)
        return self._replicas.parallel_apply(
            self._devices, list(used), list(replicas), args, named
        )

    def gather(self, outputs: Any, output_device: Device) -> Any:
        """Join the results."""
        return _C.join(
            list(outputs),
            list(range(len(outputs))),
            _C.device_of("DataParallel", "output_device", output_device),
            self._output_dims,
            False,
        )


def _check_module(module: Any) -> None:
    if not isinstance(module, Module):
        raise TypeError(
            f"DataParallel: module is {module!r}, expected a torch.nn.Module"
        )
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(
        module, "_orig_mod"
    ):
        raise TypeError(
            "DataParallel: module is compiled by torch.compile, whose code belongs "
            "to that one module and cannot run with a replica's parameters; pass the "
            "module as it was before"
        )
    for name, child in module.named_modules():
        if isinstance(child, DataParallel | torch.nn.DataParallel):
            where = f"module.{name}" if name else "module"
            raise ValueError(
                f"DataParallel: {where} is data-parallel itself; expected one "
                "wrapper around all"
            )


def _check_rules(
    rules: Mapping[int | str, InputRule] | None,
) -> dict[int | str, InputRule]:
    for key, rule in (rules or {}).items():
        if not isinstance(key, int | str) or not isinstance(rule, InputRule):
            raise TypeError(
                f"DataParallel: inputs has {key!r}: {rule!r}, expected a position or "
                "a keyword and split(dim), copy() or split_by_sample()"
            )
        if isinstance(key, int) and key < 0:
            raise ValueError(
                f"DataParallel: inputs has a rule for argument {key}, expected 0 or "
                "more"
            )
    return dict(rules or {})


def _flatten(dims: Any) -> list[int]:
    if isinstance(dims, int):
        return [dims]
    if isinstance(dims, Mapping):
        dims = list(dims.values())
    if not isinstance(dims, list | tuple):
        raise TypeError(
            f"DataParallel: output_dims has {dims!r}, expected numbers, alone or "
            "nested as the result"
        )
    return [dim for part in dims for dim in _flatten(part)]


def _as_torch(device: torch.device) -> int | torch.device:
    """As torch.nn.DataParallel keeps it: a number where that says it all."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and device.type == accelerator.type:
        return device.index
    return device


def data_parallel(
    module: Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Any | None = None,
) -> Any:
    """Call a module once on the whole batch; the function form of `DataParallel`.

    Makes the replicas for this call only: where calls repeat, keep a
    `DataParallel`.

    Args:
        module: The module, on `device_ids[0]`.
        inputs: One argument, or a tuple of them, or None.
        device_ids: As `DataParallel`.
        output_device: As `DataParallel`; -1 is the CPU, as in torch.
        dim: The dimension of the samples.
        module_kwargs: Arguments by keyword.

    Example:
        >>> import torch, dataparallel
        >>> net = torch.nn.Linear(3, 2)
        >>> dataparallel.data_parallel(net, torch.ones(5, 3), ["cpu", "cpu"]).shape
        torch.Size([5, 2])
    """
    if not isinstance(inputs, tuple):
        inputs = (inputs,) if inputs is not None else ()
    if isinstance(output_device, int) and output_device == -1:
        output_device = "cpu"
    model = DataParallel(module, device_ids, output_device, dim)
    return model(*inputs, **(module_kwargs or {}))


def replicate(network: T, devices: Sequence[Device], detach: bool = False) -> list[T]:
    """Make one replica of a module on each device.

    A replica's parameters have gradient edges to the module's own, unless
    `detach` says otherwise, and are listed by its `parameters()`. Replicas on
    the module's own device share its parameters' memory.

    Args:
        network: The module, on the first device.
        devices: Where; a device may come more than once.
        detach: Whether the replicas' parameters need no gradient.

    Example:
        >>> import torch, dataparallel
        >>> net = torch.nn.Linear(3, 2)
        >>> first, second = dataparallel.replicate(net, ["cpu", "cpu"])
        >>> second(torch.ones(1, 3)).sum().backward()
        >>> net.bias.grad
        tensor([1., 1.])
    """
    if not len(devices):
        return []
    return _C.replicate(network, devices, detach)


def parallel_apply(
    modules: Sequence[Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Device | None] | None = None,
) -> list[Any]:
    """Call `modules[i](*inputs[i], **kwargs_tup[i])` all at once, in threads.

    The threads have the caller's grad mode and autocast, and their device is
    current in them.

    Args:
        modules: The modules, or anything callable.
        inputs: For each a tuple or list of arguments, or its one argument.
        kwargs_tup: For each a dict.
        devices: For each its device. Default: that of its first tensor.

    Raises:
        AssertionError: The lists are not equally long; the text is torch's.
        Exception: What the first module that failed raised: the same object, with
            the note `replica 1 on cuda:1`.

    Example:
        >>> import torch, dataparallel
        >>> nets = [torch.nn.Flatten(), torch.nn.Flatten(0)]
        >>> x = torch.ones(1, 2, 3)
        >>> [tuple(y.shape) for y in dataparallel.parallel_apply(nets, [x, x])]
        [(1, 6), (6,)]
    """
    others = (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", devices))
    for name, values in others:
        if values is not None and len(values) != len(modules):
            kind = "inputs" if name == "inputs" else name
            raise AssertionError(
                f"The number of modules {len(modules)} is not equal to "
                f"the number of {kind} {len(values)}"
            )
    if not len(modules):
        return []
    args = [i if isinstance(i, list | tuple) else (i,) for i in inputs]
    named = list(kwargs_tup) if kwargs_tup is not None else [{}] * len(args)
    given = devices if devices is not None else [None] * len(args)
    places = [
        _device_of(module, (one, kw)) if device is None else device
        for module, one, kw, device in zip(modules, args, named, given, strict=True)
    ]
    return _C.parallel_apply(list(modules), [tuple(one) for one in args], named, places)


def _device_of(module: Any, value: Any) -> torch.device:
    tensor = _C.first_tensor(value)
    if tensor is None and isinstance(module, Module):
        tensor = next(module.parameters(), None)
    return torch.device("cpu") if tensor is None else tensor.device


def current_replica() -> int | None:
    """Inside a replica's forward, that replica's number; elsewhere None.

    Example:
        >>> import dataparallel
        >>> dataparallel.current_replica() is None
        True
    """
    return _C.current_replica()
