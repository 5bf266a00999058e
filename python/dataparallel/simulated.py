"""Simulated devices `sim:0`, `sim:1`, …, for testing without a GPU.

Their memory is the computer's, their kernels the CPU's. They are as strict as
CUDA is: tensors of two devices in one operator are an error. And they see what
a real device hides: a stream that reads what another one wrote, without an event
between them, is a race, and is reported each time.

    >>> import torch, dataparallel
    >>> dataparallel.simulated.start(devices=4)
    >>> x = torch.ones(3, device="sim:1")
    >>> (x + x).to("cpu")
    tensor([2., 2., 2.])
    >>> dataparallel.simulated.races()
    []
"""

import types

import torch

from dataparallel import _C

__all__ = [
    "CorruptCopies",
    "DeviceModel",
    "Hardware",
    "HostModel",
    "LinkModel",
    "Race",
    "Trace",
    "a100",
    "busy_seconds",
    "bytes_copied",
    "clear_races",
    "copies",
    "corrupt_copies",
    "device_count",
    "elapsed_seconds",
    "h200",
    "idle_seconds",
    "kernels_launched",
    "memory_allocated",
    "now",
    "nvlink_3",
    "nvlink_4",
    "pcie_4_x16",
    "pcie_5_x16",
    "peak_memory",
    "races",
    "reset_counters",
    "rtx_4090",
    "server_host",
    "start",
]

CorruptCopies = _C.simulated.CorruptCopies
DeviceModel = _C.simulated.DeviceModel
Hardware = _C.simulated.Hardware
HostModel = _C.simulated.HostModel
LinkModel = _C.simulated.LinkModel
Race = _C.simulated.Race
Trace = _C.simulated.Trace
Device = int | str | torch.device


def start(
    devices: int = 4,
    *,
    memory_bytes: int | None = None,
    fail_on_race: bool = False,
    dry_run: bool = False,
    hardware: Hardware | None = None,
) -> None:
    """Make the devices; `torch.device("sim:1")` can be written from then on.

    They are the process's accelerator then (`torch.accelerator`), so that a bare
    number names one of them. Call it before the process's first backward. A
    second call can change the other arguments, not the number of devices.

    Args:
        devices: How many, 1 to 64.
        memory_bytes: The memory of each; more is an out-of-memory error, as on a
            GPU. Default: no limit.
        fail_on_race: Whether an operator that races raises. Default: it is
            recorded, see `races`.
        dry_run: Shapes only: memory is counted and not allocated. Reading a
            value is an error then.
        hardware: Switches the simulated clock on: how fast the devices and the
            links between them are. See `elapsed_seconds`.

    Raises:
        ValueError: `devices` is not 1 to 64, or not what it was.
        RuntimeError: A backward has run in this process.
    """
    _C.simulated.start(devices, memory_bytes, fail_on_race, dry_run, hardware)
    if not hasattr(torch, "sim"):
        torch._register_device_module("sim", _device_module())


def _device_module() -> types.ModuleType:
    """What torch's Python code asks a device type for, as `torch.sim`."""
    module = types.ModuleType("torch.sim", __doc__)
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = device_count
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = _C.simulated.manual_seed_all
    return module


def device_count() -> int:
    """Count the devices; 0 before `start`."""
    return _C.simulated.device_count()


def races() -> list[Race]:
    """List the races since the start or the last `clear_races`, oldest first."""
    return _C.simulated.races()


def clear_races() -> None:
    """Forget the races seen."""
    _C.simulated.clear_races()


def memory_allocated(device: Device) -> int:
    """Tell the bytes in use on a device."""
    return _C.simulated.memory_allocated(device)


def peak_memory(device: Device) -> int:
    """Tell the most bytes in use on a device since `reset_counters`."""
    return _C.simulated.peak_memory(device)


def kernels_launched(device: Device) -> int:
    """Count the operators run on a device; views and copies between devices not."""
    return _C.simulated.kernels_launched(device)


def copies(source: Device, target: Device) -> int:
    """Count the copies from one device to another; one may be the CPU."""
    return _C.simulated.copies(source, target)


def bytes_copied(source: Device, target: Device) -> int:
    """Count the bytes copied from one device to another."""
    return _C.simulated.bytes_copied(source, target)


def reset_counters() -> None:
    """Set all counters to 0, and peaks to what is in use."""
    _C.simulated.reset_counters()


def h200() -> DeviceModel:
    """Give the numbers of an H200 SXM with 141 GB; the vendor's peaks."""
    return _C.simulated.h200()


def a100() -> DeviceModel:
    """Give the numbers of an A100 SXM with 80 GB."""
    return _C.simulated.a100()


def rtx_4090() -> DeviceModel:
    """Give the numbers of an RTX 4090 with 24 GB."""
    return _C.simulated.rtx_4090()


def nvlink_3() -> LinkModel:
    """Give the numbers of an A100's NVLink."""
    return _C.simulated.nvlink_3()


def nvlink_4() -> LinkModel:
    """Give the numbers of an H200's NVLink."""
    return _C.simulated.nvlink_4()


def pcie_4_x16() -> LinkModel:
    """Give the numbers of 16 lanes of PCIe 4."""
    return _C.simulated.pcie_4_x16()


def pcie_5_x16() -> LinkModel:
    """Give the numbers of 16 lanes of PCIe 5."""
    return _C.simulated.pcie_5_x16()


def server_host() -> HostModel:
    """Give the numbers of a server's processor that runs a C++ program eagerly."""
    return _C.simulated.server_host()


def now() -> float:
    """Tell the calling thread's time by the simulated clock, in seconds.

    Raises:
        RuntimeError: The clock is off, here and in the functions below.
    """
    return _C.simulated.now()


def elapsed_seconds() -> float:
    """Tell the time from the last `reset_counters` to the end of all launched since.

    A kernel takes its device's launch latency and then what its bytes or its flops
    take; a copy its link's latency and what its bytes take; a thread a fixed time
    for each launch. It is the same on every run, and leaves much out: compare
    programs by it, do not expect a stopwatch's seconds. What it leaves out is
    listed in the C++ header simulated_clock.h. The host's time is that of a C++
    program: what Python itself takes is not counted.
    """
    return _C.simulated.elapsed_seconds()


def busy_seconds(device: Device, target: Device | None = None) -> float:
    """Tell how long a device computed in `elapsed_seconds()`.

    With `target`: how long copies from `device` to it were under way; one may be
    the CPU.
    """
    return _C.simulated.busy_seconds(device, target)


def idle_seconds(device: Device, target: Device | None = None) -> float:
    """Tell the rest of `elapsed_seconds()`; see `busy_seconds`."""
    return _C.simulated.idle_seconds(device, target)


def corrupt_copies(source: Device, target: Device) -> CorruptCopies:
    """Make a scope in which copies from one device to another arrive as zeros.

    Example:
        >>> import torch, dataparallel
        >>> dataparallel.simulated.start(devices=4)
        >>> x = torch.ones(2, device="sim:2")
        >>> with dataparallel.simulated.corrupt_copies("sim:2", "sim:3"):
        ...     y = x.to("sim:3")
        >>> y.to("cpu")
        tensor([0., 0.])
    """
    return CorruptCopies(source, target)
