"""`scatter` and `gather` from Python, beside those of torch.nn.parallel."""

import collections
import dataclasses
import inspect
import types
import typing

import dataparallel
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

CPUS = ["cpu", "cpu"]
SIMS = ["sim:0", torch.device("sim:1"), 2]


class Point(typing.NamedTuple):
    x: torch.Tensor
    label: str = "p"


@dataclasses.dataclass(frozen=True)
class Batch:
    images: torch.Tensor
    crops: list
    name: str = "batch"


class Output(collections.OrderedDict):
    """Like those of libraries that subclass dict."""


@pytest.mark.parametrize("name", ["scatter", "scatter_kwargs", "gather"])
def test_signatures_are_those_of_torch(name):
    ours = inspect.signature(getattr(dataparallel, name))
    theirs = inspect.signature(getattr(torch.nn.parallel.scatter_gather, name))
    assert list(ours.parameters) == list(theirs.parameters)
    for parameter in theirs.parameters:
        assert (
            ours.parameters[parameter].default == theirs.parameters[parameter].default
        )


@pytest.mark.parametrize("devices", [CPUS, SIMS], ids=["cpu", "sim"])
def test_a_tensor_is_cut_and_joined_with_its_gradient(devices):
    x = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)
    parts = dataparallel.scatter(x, devices)
    assert type(parts) is tuple and len(parts) == len(devices)
    assert [len(p) for p in parts] == ([4, 3] if devices is CPUS else [3, 2, 2])
    for part, device in zip(parts, devices, strict=True):
        index = {"sim:0": "sim:0", 2: "sim:2"}.get(device, str(device))
        assert str(part.device) == index
    joined = dataparallel.gather([p * (i + 1) for i, p in enumerate(parts)], devices[0])
    joined.cpu().sum().backward()
    expected = torch.repeat_interleave(
        torch.arange(1.0, len(devices) + 1), torch.tensor([len(p) for p in parts])
    )
    assert torch.equal(x.grad, expected.double()[:, None].expand(7, 3))


@pytest.mark.parametrize("devices", [CPUS, SIMS[:2]], ids=["cpu", "sim"])
def test_containers_of_every_kind_go_there_and_back(devices):
    x = torch.arange(6.0).view(3, 2)
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0), torch.ones(1)])
    value = {
        "tuple": (x, 1, None),
        "list": [x, [x]],
        "point": Point(x),
        "batch": Batch(x, [x, x]),
        "output": Output(x=x),
        "ordered": collections.OrderedDict(x=x),
        "default": collections.defaultdict(list, {"x": x}),
        "user": collections.UserDict(x=x),
        "empty": ((), [], {}),
        "plain": ("text", 1.5, float("nan"), True, torch.float32, torch.Size([3]), ...),
        "scalar": torch.tensor(3.0),
        "packed": packed,
    }
    parts = dataparallel.scatter(value, devices)
    assert len(parts) == 2
    for part, rows in zip(parts, (slice(0, 2), slice(2, 3)), strict=True):
        assert list(part) == list(value)
        for key in ("output", "ordered", "default", "user"):
            assert type(part[key]) is type(value[key])
            assert torch.equal(part[key]["x"].cpu(), x[rows])
        assert part["default"].default_factory is list
        assert type(part["point"]) is Point and part["point"].label == "p"
        assert type(part["batch"]) is Batch and part["batch"].name == "batch"
        for tensor in (part["tuple"][0], part["list"][1][0], part["point"].x):
            assert torch.equal(tensor.cpu(), x[rows])
        assert torch.equal(part["batch"].crops[1].cpu(), x[rows])
        assert part["plain"][:2] == ("text", 1.5) and part["plain"][-1] is ...
        assert part["empty"] == ((), [], {}) and part["scalar"].item() == 3
    assert value["batch"].images is x  # the value itself is left alone
    assert pad_packed_sequence(parts[0]["packed"])[1].tolist() == [3, 2]
    back = dataparallel.gather(parts, "cpu")
    assert torch.equal(back["tuple"][0], x) and back["tuple"][1:] == (1, None)
    assert type(back["point"]) is Point and type(back["batch"]) is Batch
    assert torch.equal(back["user"]["x"], x) and torch.equal(back["output"]["x"], x)
    assert back["scalar"].tolist() == [3, 3]
    assert torch.equal(
        pad_packed_sequence(back["packed"])[0], pad_packed_sequence(packed)[0]
    )


def test_results_of_torch_functions_keep_their_types():
    parts = [torch.rand(n, 3).max(dim=1) for n in (2, 1)]
    joined = dataparallel.gather(parts, "cpu")
    assert type(joined) is type(parts[0])
    assert torch.equal(joined.values, torch.cat([p.values for p in parts]))


def test_arguments_by_keyword_are_cut_with_those_by_position():
    x = torch.arange(3)
    args, kwargs = dataparallel.scatter_kwargs((x, "s"), {"mask": x, "n": None}, CPUS)
    assert [a[0].tolist() for a in args] == [[0, 1], [2]]
    assert [k["mask"].tolist() for k in kwargs] == [[0, 1], [2]]
    assert args[0][1] == "s" and kwargs[1]["n"] is None
    args, kwargs = dataparallel.scatter_kwargs((), {"mask": x}, CPUS)
    assert args == ((), ()) and len(kwargs) == 2
    args, kwargs = dataparallel.scatter_kwargs((x,), None, CPUS)
    assert kwargs == ({}, {})


@pytest.mark.parametrize("size", range(6))
def test_any_number_of_samples_is_cut(size):
    parts = dataparallel.scatter(torch.arange(size), ["cpu"] * 4)
    assert torch.cat(parts).tolist() == list(range(size))
    assert len(parts) == max(1, min(size, 4))
    assert len(dataparallel.scatter([1, "a"], ["cpu"] * 4)) == 4  # nothing to cut


def test_other_dimensions_are_cut_and_joined():
    x = torch.arange(6).view(2, 3)
    parts = dataparallel.scatter(x, CPUS, dim=-1)
    assert [p.shape for p in parts] == [(2, 2), (2, 1)]
    assert torch.equal(dataparallel.gather(parts, -1, dim=1), x)
    scalars = dataparallel.gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu", dim=1)
    assert scalars.tolist() == [1, 2]


def test_plain_results_stay_or_become_a_list():
    same = dataparallel.gather([(1, "a", None), (1, "a", None)], "cpu")
    assert same == (1, "a", None)
    assert dataparallel.gather([{"n": 1}, {"n": 2}], "cpu") == {"n": [1, 2]}
    nan = dataparallel.gather([float("nan"), float("nan")], "cpu")
    assert nan != nan
    thing = types.SimpleNamespace()
    assert dataparallel.gather([thing, thing], "cpu") is thing
    with pytest.raises(TypeError, match=r"result\[0\] is of type object, which is not"):
        dataparallel.gather([(object(),), (object(),)], "cpu")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [torch.ones(1), None],
            "result is a tensor in replica 0 and None in replica 1",
        ),
        ([(1,), (1, 2)], "a tuple of length 1 in replica 0 and a tuple of length 2"),
        ([{"a": 1}, {"b": 1}], r"keys \[\"a\"\] in replica 0 and .* \[\"b\"\] in"),
        (
            [{"a": torch.ones(1, 2)}, {"a": torch.ones(1, 3)}],
            r"result\[\"a\"\] is of sh",
        ),
        ([], "outputs is empty"),
    ],
)
def test_what_cannot_be_joined_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        dataparallel.gather(values, "cpu")


def test_wrong_arguments_are_named():
    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"target_gpus\[1\] is sim:9, but there are 4"):
        dataparallel.scatter(x, ["sim:0", "sim:9"])
    with pytest.raises(ValueError, match="target_gpus is empty"):
        dataparallel.scatter(x, [])
    with pytest.raises(
        TypeError, match=r"target_gpus\[0\] is 1.5, expected a torch.device"
    ):
        dataparallel.scatter(x, [1.5])
    with pytest.raises(TypeError, match="target_gpus is 'cpu', expected a list"):
        dataparallel.scatter(x, "cpu")
    with pytest.raises(
        ValueError, match=r"\[\"b\"\] has 2 samples, but .*\[\"a\"\] has 3"
    ):
        dataparallel.scatter({"a": x, "b": torch.ones(2)}, CPUS)
    with pytest.raises(ValueError, match="cannot be split along dimension 1"):
        dataparallel.scatter(x, CPUS, dim=1)
    with pytest.raises(TypeError, match="target_device is None"):
        dataparallel.gather([x], None)
    loop = []
    loop.append(loop)
    with pytest.raises(RecursionError):
        dataparallel.scatter(loop, CPUS)


def test_no_races_on_simulated_devices():
    dataparallel.simulated.clear_races()
    x = torch.rand(8, 3, device="sim:0")
    parts = dataparallel.scatter(x, range(4))
    assert torch.equal(dataparallel.gather(parts, 0), x)
    assert dataparallel.simulated.races() == []
