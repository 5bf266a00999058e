"""What tensors have in Python alone: lost in C++, and listed."""

import collections

import numpy
import pytest
import torch
from checkpoint_oracle import inspect, load, needs_dump
from test_checkpoint_load import WRITERS

pytestmark = needs_dump


class Subclass(torch.Tensor):
    """A tensor of a class that only this test has."""


class SubclassWithState(torch.Tensor):
    """Which restores itself."""

    def __setstate__(self, state):
        self.__dict__.update(state)


def with_attributes(tensor, **attributes):
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def make(kind):
    return {
        "parameter": lambda: torch.nn.Parameter(torch.rand(2)),
        "tensor": lambda: torch.rand(2),
        "subclass": lambda: torch.rand(2).as_subclass(Subclass),
        "buffer": lambda: torch.nn.Buffer(torch.rand(2)),
        "sparse": lambda: torch.eye(2).to_sparse(),
    }[kind]()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", ["parameter", "tensor", "subclass", "sparse"])
def test_attributes_of_tensors_are_listed(kind, writer, tmp_path):
    tensor = with_attributes(make(kind), note="text", rate=torch.ones(1), more=[1])
    value = {"model": {"w": tensor}, "plain": torch.ones(1)}
    torch.save(value, tmp_path / "x.pt", **WRITERS[writer])
    loaded = load(tmp_path / "x.pt")
    first = [("['model']['w']", f"{__name__}.Subclass")] * (kind == "subclass")
    assert loaded.dropped == first + [
        ("['model']['w'].note", "str"),
        ("['model']['w'].rate", "Tensor"),
        ("['model']['w'].more", "list"),
    ]
    assert not loaded.unknown
    if kind == "subclass":
        value["model"]["w"] = tensor.as_subclass(torch.Tensor)
    loaded.assert_equals(value)
    info = inspect(tmp_path / "x.pt")
    assert [tuple(entry) for entry in info["dropped"]] == loaded.dropped
    assert info["unknown_classes"] == [f"{__name__}.Subclass"] * (kind == "subclass")


def test_subclasses_that_restore_themselves_are_listed(tmp_path):
    tensor = with_attributes(torch.rand(2).as_subclass(SubclassWithState), note=1)
    torch.save([tensor, tensor], tmp_path / "x.pt")
    assert load(tmp_path / "x.pt").dropped == [
        ("[0]", f"{__name__}.SubclassWithState"),
        ("[0].note", "int"),
    ]


def test_parameters_and_buffers_are_no_loss(tmp_path):
    value = [make("parameter"), make("buffer"), torch.nn.Buffer(torch.ones(1))]
    torch.save(value, tmp_path / "x.pt")
    loaded = load(tmp_path / "x.pt")
    loaded.assert_equals(value)
    assert not loaded.dropped and not loaded.unknown


def test_an_attribute_that_holds_its_tensor_is_listed(tmp_path):
    """Where Python restores it: with its value it would never be freed in C++."""
    first, second = torch.nn.Parameter(torch.rand(2)), torch.nn.Parameter(torch.rand(2))
    first.owner = [first]
    first.other, second.other = second, first
    torch.save({"w": first, "v": second}, tmp_path / "x.pt")
    expected = torch.load(tmp_path / "x.pt", weights_only=False)
    paths = [path for path, _ in load(tmp_path / "x.pt").dropped]
    assert paths == [
        f"['{key}'].{name}" for key in ("w", "v") for name in vars(expected[key])
    ]
    assert "['v'].other" in paths


def test_hooks_of_older_files_are_listed(tmp_path):
    """Which torch wrote with a tensor before it refused to."""

    class Made:
        def __reduce__(self):
            hooks = collections.OrderedDict({0: print})
            storage = torch.arange(2.0)._typed_storage()
            arguments = (storage, 0, (2,), (1,), False, hooks)
            return (torch._utils._rebuild_tensor_v2, arguments)

    torch.save([Made()], tmp_path / "x.pt")
    assert load(tmp_path / "x.pt").dropped == [
        ("[0]._backward_hooks", "collections.OrderedDict")
    ]


def test_a_state_dict_of_a_module_has_no_attributes_in_python_either(tmp_path):
    net = torch.nn.Linear(2, 2)
    net.weight.note = "text"
    torch.save(net, tmp_path / "x.pt")
    assert not vars(net.state_dict()["weight"])
    assert not load(tmp_path / "x.pt").dropped


def test_classes_of_numpy_arrays_are_listed(tmp_path):
    memory = numpy.memmap(tmp_path / "m", float, "w+", shape=(2,))
    torch.save([memory, numpy.ones(2)], tmp_path / "x.pt")
    assert load(tmp_path / "x.pt").dropped == [("[0]", "numpy.memmap")]
