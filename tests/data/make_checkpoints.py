"""Makes the small checkpoints of tests/data/checkpoints with Python's torch.

They hold the same values in every format, as far as it can.
"""

import collections
import io
import json
import pathlib
import pickle
import struct
import warnings

import torch

FOLDER = pathlib.Path(__file__).parent / "checkpoints"


class Net(torch.nn.Module):
    """Two parameters and a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(6.0).view(2, 3))
            self.linear.bias.copy_(torch.tensor([-1.0, 1.0]))

    def forward(self, x):
        return self.linear(x) - self.mean


def nested():
    """A training checkpoint: a model, a view of its weight, and other things."""
    model = collections.OrderedDict(Net().state_dict())
    model._metadata = collections.OrderedDict({"": {"version": 1}})
    weight = model["linear.weight"]
    return {
        "model": model,
        "optimizer": {"state": {0: {"momentum": weight[1:]}}, "param_groups": []},
        "epoch": 3,
        "best": 0.5,
        "classes": ("cat", "dog"),
    }


class Python2Pickler(pickle._Pickler):
    """Writes text as Python 2 did: as bytes."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_str(self, text):
        data = text.encode("latin-1")
        self.write(b"U" + bytes([len(data)]) + data)
        self.memoize(text)

    dispatch[str] = save_str


class Python2:
    """What torch.save takes for the module pickle."""

    Pickler = Python2Pickler

    @staticmethod
    def dump(value, file, protocol):
        Python2Pickler(file, protocol).dump(value)


def safetensors(tensors):
    header = {}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.numpy().tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def on_device(location):
    """The nested checkpoint as if it had been saved from another device."""
    buffer = io.BytesIO()
    torch.save(nested(), buffer, _use_new_zipfile_serialization=False)
    cpu, other = (
        b"X" + struct.pack("<I", len(tag)) + tag.encode() for tag in ("cpu", location)
    )
    return buffer.getvalue().replace(cpu, other)


class Hooked(torch.nn.Module):
    """Whose hook is a method of itself."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.register_forward_hook(self.note)

    def note(self, *arguments):
        """Does nothing."""


class Subclass(torch.Tensor):
    """A tensor of a class of its own."""


def cycles():
    """A list of itself, and a module with a hook of itself."""
    weight = torch.arange(6.0).view(2, 3)
    value = {"list": [weight], "net": Hooked(weight.clone())}
    value["list"].append(value["list"])
    return value


def attributes():
    """Tensors with attributes, one of which holds the other tensor."""
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    weight.note = "text"
    other = torch.ones(2).as_subclass(Subclass)
    other.note = 5
    other.owners = [weight]
    return {"weight": weight, "other": other}


def main():
    FOLDER.mkdir(exist_ok=True)
    warnings.simplefilter("ignore")
    torch.save(nested(), FOLDER / "zip.pt")
    old = {"_use_new_zipfile_serialization": False}
    torch.save(nested(), FOLDER / "legacy.pt", **old)
    torch.save(nested(), FOLDER / "python2.pt", pickle_module=Python2, **old)
    torch.save(Net(), FOLDER / "module.pt")
    torch.jit.script(Net()).save(str(FOLDER / "script.pt"))
    (FOLDER / "model.safetensors").write_bytes(safetensors(Net().state_dict()))
    torch.save(cycles(), FOLDER / "cycles.pt")
    torch.save(attributes(), FOLDER / "attributes.pt")
    (FOLDER / "cuda7.pt").write_bytes(on_device("cuda:7"))
    (FOLDER / "unknown_device.pt").write_bytes(on_device("warp:1"))


if __name__ == "__main__":
    main()
