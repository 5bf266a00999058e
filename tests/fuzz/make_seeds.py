"""Writes small checkpoints of every kind, for the fuzzer to begin with.

Usage: make_seeds.py FOLDER
"""

import collections
import json
import pathlib
import struct
import sys
import warnings

import numpy
import torch


class Module(torch.nn.Module):
    """One parameter, one buffer, one module."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 2)
        self.register_buffer("mean", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.linear(x) + self.mean


class Thing:
    """Of a class that no reader knows."""


def values():
    ordered = collections.OrderedDict(weight=torch.ones(2), bias=torch.ones(1))
    ordered._metadata = collections.OrderedDict({"": {"version": 1}})
    base = torch.arange(6.0)
    quantized = torch.quantize_per_tensor(base, 0.5, 1, torch.quint8)
    channels = torch.quantize_per_channel(
        base.view(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8
    )
    thing = Thing()
    thing.x = [1]
    return {
        "state_dict": ordered,
        "nested": {"model": ordered, "epoch": 3, "best": 0.5, "name": "net"},
        "views": [base, base[2:], base.view(2, 3).t(), base],
        "dtypes": [
            torch.zeros(1, dtype=d)
            for d in (torch.uint16, torch.bfloat16, torch.bool, torch.complex64)
        ],
        "parameter": torch.nn.Parameter(torch.ones(1)),
        "quantized": [quantized, channels],
        "coo": torch.eye(2).to_sparse(),
        "csr": torch.eye(2).to_sparse_csr(),
        "bsc": torch.eye(2).to_sparse_bsc((1, 1)),
        "nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
        "meta": torch.empty(2, device="meta"),
        "numpy": [numpy.ones((1, 2)), numpy.float32(1), numpy.array(["a"])],
        "fortran": numpy.asfortranarray(numpy.ones((2, 2), dtype=">i2")),
        "sets": [{1}, frozenset("a"), slice(1, 2), torch.Size([1]), b"\xff", 1j],
        "keys": {(1, "a"): 2, None: 1, 2.5: [()]},
        "counters": [collections.Counter("ab"), collections.defaultdict(list, a=[1])],
        "numbers": [2**70, -1, 300, 70000, 2**40, True, None],
        "unknown": [thing, Thing, torch.float32, torch.device("cpu")],
        "module": Module(),
    }


def safetensors():
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    other = {"dtype": "I8", "shape": [2, 1], "data_offsets": [8, 10]}
    header = json.dumps({"__metadata__": {"a": "b"}, "x": entry, "y": other}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(10)


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name, value in values().items():
        for protocol in (1, 2, 4, 5):
            for new in (True, False):
                kind = "zip" if new else "legacy"
                torch.save(
                    value,
                    folder / f"{name} {kind} {protocol}",
                    pickle_protocol=protocol,
                    _use_new_zipfile_serialization=new,
                )
    torch.jit.script(Module()).save(str(folder / "script"))
    (folder / "safetensors").write_bytes(safetensors())
    (folder / "tar").write_bytes(bytes(257) + b"ustar" + bytes(250))


main()
