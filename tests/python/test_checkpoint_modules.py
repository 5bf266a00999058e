"""Whole pickled modules: what their state_dict() gives, or what cannot be known."""

import copyreg
import importlib
import pkgutil
import warnings

import pytest
import torch
from checkpoint_oracle import error_of, inspect, load, needs_dump
from test_checkpoint_load import WRITERS, without_metadata

pytestmark = [
    needs_dump,
    pytest.mark.filterwarnings("ignore:.*(experimental|deprecated|prototype|beta)"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

BOTH = pytest.mark.parametrize("writer", ["zip", "legacy, protocol 2"])


def assert_gives_its_state_dict(module, path, writer="zip"):
    torch.save({"net": module}, path, **WRITERS[writer])
    loaded = load(path)
    loaded.assert_equals({"net": without_metadata(module.state_dict())})
    assert not loaded.unknown
    assert not loaded.dropped
    assert not inspect(path)["opaque"]


class Hooked(torch.nn.Module):
    """Whose hooks are methods of itself, of its parent and of its child."""

    def __init__(self, inner=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3))
        self.inner = inner
        self.register_forward_hook(self.note)
        if inner is not None:
            self.register_forward_pre_hook(inner.note)
            inner.register_forward_hook(self.note)
            inner.owner = [self]

    def note(self, *arguments):
        """Does nothing."""

    def forward(self, x):
        return x * self.weight


@BOTH
def test_modules_that_refer_to_themselves_give_their_state_dict(writer, tmp_path):
    net = Hooked(Hooked(Hooked()))
    assert_gives_its_state_dict(net, tmp_path / "net.pt", writer)


def test_a_child_pickled_before_its_parent_is_in_the_parents_state_dict(tmp_path):
    inner = Hooked()
    net = Hooked(inner)
    torch.save([inner.note, inner, net], tmp_path / "net.pt")
    loaded = load(tmp_path / "net.pt")
    _, *modules = loaded.value["list"]
    loaded.value = {"list": modules}
    loaded.assert_equals([without_metadata(m.state_dict()) for m in (inner, net)])


def test_a_module_inside_itself_is_an_error_that_names_it(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential())
    net[1].add_module("up", net)
    torch.save({"net": net}, tmp_path / "net.pt")
    message = error_of(tmp_path / "net.pt")
    assert 'the module "1.up." contains itself' in message
    assert "['net']" in message


def test_a_lazy_module_gives_what_is_there_and_lists_the_rest(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LazyLinear(2))
    torch.save(net, tmp_path / "net.pt")
    loaded = load(tmp_path / "net.pt")
    assert [key for key, _ in loaded.value["items"]] == list(net.state_dict())
    name = "torch.nn.parameter.UninitializedParameter"
    assert loaded.unknown == [("['1.weight']", name), ("['1.bias']", name)]


@BOTH
def test_graph_modules_give_their_state_dict(writer, tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    graph = torch.fx.symbolic_trace(net)
    assert_gives_its_state_dict(graph, tmp_path / "net.pt", writer)
    assert_gives_its_state_dict(
        torch.nn.Sequential(graph, torch.nn.Linear(2, 2)), tmp_path / "net.pt", writer
    )
    classes = inspect(tmp_path / "net.pt")["unknown_classes"]
    assert "torch.fx.graph_module.reduce_graph_module" in classes


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_modules_give_their_state_dict(backend, tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    compiled = torch.compile(net, backend=backend)
    assert list(compiled.state_dict())[0] == "_orig_mod.0.weight"
    assert_gives_its_state_dict(compiled, tmp_path / "net.pt")


class WithSlots(torch.nn.Linear):
    """Of which Python pickles two dictionaries."""

    __slots__ = ("extra",)

    def __init__(self):
        super().__init__(2, 2)
        self.extra = torch.ones(1)


def test_a_module_with_slots_gives_its_state_dict(tmp_path):
    assert_gives_its_state_dict(WithSlots(), tmp_path / "net.pt")


def test_wrapped_and_normalized_modules_give_their_state_dict(tmp_path):
    net = torch.nn.Sequential(
        torch.nn.utils.spectral_norm(torch.nn.Linear(3, 3)),
        torch.nn.utils.weight_norm(torch.nn.Linear(3, 3)),
        torch.nn.LSTM(3, 2),
        torch.nn.MultiheadAttention(4, 2),
    )
    assert_gives_its_state_dict(torch.nn.DataParallel(net), tmp_path / "net.pt")


@pytest.mark.parametrize(
    "make",
    [
        torch.ao.quantization.FakeQuantize,
        torch.ao.quantization.HistogramObserver,
        torch.ao.quantization.MinMaxObserver,
        torch.ao.nn.quantized.FloatFunctional,
    ],
)
def test_modules_of_quantization_without_more_than_buffers_give_them(make, tmp_path):
    assert_gives_its_state_dict(make(), tmp_path / "net.pt")


class OnlyState(torch.nn.Module):
    """Of which other things than its `__dict__` are pickled."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3))

    def __getstate__(self):
        return (3, self.weight)

    def __setstate__(self, state):
        super().__init__()
        self.weight = state[1]


def change_nothing(module, state_dict, prefix, metadata):
    """A hook for state_dict()."""


def with_hook():
    module = torch.nn.Linear(2, 2)
    module._register_state_dict_hook(change_nothing)
    return module


UNKNOWABLE = {
    "only state": (OnlyState, f"{__name__}.OnlyState"),
    "a hook": (with_hook, "torch.nn.modules.linear.Linear"),
    "quantized": (
        lambda: torch.ao.nn.quantized.Linear(2, 2),
        "torch.ao.nn.quantized.modules.linear.Linear",
    ),
    "quantized convolution": (
        lambda: torch.ao.nn.quantized.Conv2d(1, 1, 1),
        "torch.ao.nn.quantized.modules.conv.Conv2d",
    ),
}


@BOTH
@pytest.mark.parametrize("name", UNKNOWABLE)
def test_a_submodule_that_needs_its_code_is_listed(name, writer, tmp_path):
    make, class_name = UNKNOWABLE[name]
    net = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.Sequential(make()), torch.nn.Linear(2, 2)
    )
    torch.save({"net": net}, tmp_path / "net.pt", **WRITERS[writer])
    loaded = load(tmp_path / "net.pt")
    assert loaded.unknown[0] == ("['net']['1.0']", class_name)
    keys = [key for key, _ in dict(loaded.value["items"])["net"]["items"]]
    assert keys == ["0.weight", "0.bias", "1.0", "2.weight", "2.bias"]
    info = inspect(tmp_path / "net.pt")
    assert info["opaque"][0] == ["['net']['1.0']", class_name]
    assert class_name in info["unknown_classes"]


def test_a_module_that_needs_its_code_stays_opaque(tmp_path):
    torch.save(torch.ao.nn.quantized.Linear(2, 2), tmp_path / "net.pt")
    loaded = load(tmp_path / "net.pt")
    assert loaded.unknown[0] == ("", "torch.ao.nn.quantized.modules.linear.Linear")


# Their code writes the buffers and parameters that there are.
NO_MORE_THAN_OTHERS = (
    "torch.ao.quantization.fake_quantize.",
    "torch.ao.quantization.observer.HistogramObserver",
    "torch.nn.modules.batchnorm.",
    "torch.nn.modules.conv.Lazy",
    "torch.nn.modules.instancenorm.",
    "torch.nn.modules.linear.Lazy",
)


def classes_with_code():
    """torch's modules that say themselves what is in their state_dict."""
    for name in ("torch.nn", "torch.ao", "torch.fx", "torch.distributed.nn"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(
            package.__path__, name + ".", onerror=lambda _: None
        ):
            try:
                importlib.import_module(module.name)
            except Exception:  # what needs a package that is not there
                continue
    found, rest = set(), [torch.nn.Module]
    while rest:
        kind = rest.pop()
        rest += kind.__subclasses__()
        for method in ("_save_to_state_dict", "state_dict", "get_extra_state"):
            plain = getattr(torch.nn.Module, method)
            if kind.__module__.startswith("torch.") and (
                getattr(kind, method, plain) is not plain
            ):
                found.add(kind)
    return sorted(found, key=full_name)


def full_name(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


class Imitation:
    """Pickled as a module of that class, with an empty module's members."""

    def __init__(self, kind):
        self.kind = kind

    def __reduce__(self):
        members = vars(torch.nn.Module())
        return (copyreg._reconstructor, (self.kind, object, None), members)


def test_all_classes_of_torch_with_code_for_their_state_dict_are_known(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classes = classes_with_code()
    assert len(classes) > 40
    torch.save([Imitation(kind) for kind in classes], tmp_path / "all.pt")
    known = dict(load(tmp_path / "all.pt").unknown)
    for index, kind in enumerate(classes):
        name = full_name(kind)
        plain = name.startswith(NO_MORE_THAN_OTHERS)
        assert known.get(f"[{index}]") == (None if plain else name)
