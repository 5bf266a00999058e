"""The competitors of checkpoint_bench: torch and safetensors in Python.

    checkpoint_bench.py OPERATION FILE

does OPERATION three times and prints the least seconds, the least seconds of
processor time and the peak of extra memory, in bytes; "none" if the package is
not installed.
"""

import os
import sys
import time

import torch

REPEATS = 3
PAGE_BYTES = 4096


def resident(field):
    """Bytes by a field of /proc/self/status."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise RuntimeError(field)


def touch(tensors):
    """Read every page."""
    for tensor in tensors.values():
        tensor.flatten().view(torch.uint8)[::PAGE_BYTES].sum()


def safetensors_torch():
    """The module; without it the program says so and ends."""
    try:
        import safetensors.torch
    except ImportError:
        print("none")
        sys.exit()
    return safetensors.torch


def torch_save(tensors, path):
    """As users call it: the disk may not have it yet."""
    torch.save(tensors, path)


def torch_save_sync(tensors, path):
    """With what it takes to be lasting."""
    torch.save(tensors, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def safetensors_save(tensors, path):
    """Not synced either."""
    safetensors_torch().save_file(tensors, path)


def safetensors_save_sync(tensors, path):
    """With what it takes to be lasting."""
    safetensors_save(tensors, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def safetensors_read(path):
    """Into memory, which load_file does not."""
    with open(path, "rb") as file:
        return safetensors_torch().load(file.read())


OPEN = {
    "torch_open": lambda path: torch.load(path, mmap=True),
    "safetensors_open": lambda path: safetensors_torch().load_file(path),
}
READ = {
    "torch_read": lambda path: touch(torch.load(path)),
    "safetensors_read": lambda path: touch(safetensors_read(path)),
    "torch_touch": lambda path: touch(torch.load(path, mmap=True)),
    "safetensors_touch": lambda path: touch(safetensors_torch().load_file(path)),
}
SAVE = {
    "torch_save": torch_save,
    "torch_save_sync": torch_save_sync,
    "safetensors_save": safetensors_save,
    "safetensors_save_sync": safetensors_save_sync,
}


def main():
    """Measure."""
    operation, path = sys.argv[1:]
    if operation in SAVE:
        is_torch = operation.startswith("torch")
        tensors = torch.load(path) if is_torch else OPEN["safetensors_open"](path)
        touch(tensors)

        def act():
            SAVE[operation](tensors, path + ".copy")
    else:

        def act():
            return {**OPEN, **READ}[operation](path)

    if operation.startswith("safetensors"):
        safetensors_torch()
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak starts anew
    before = resident("VmRSS")
    seconds, cpu_seconds = [], []
    for _ in range(REPEATS):
        start, cpu_start = time.perf_counter(), time.process_time()
        result = act()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        del result
    print(min(seconds), min(cpu_seconds), resident("VmHWM") - before)


main()
