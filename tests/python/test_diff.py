"""`dataparallel diff`: what is the same, what is not, and what it says of it."""

import collections
import datetime
import enum
import json

import pytest
import torch
from programs import needs_dataparallel, run, run_json

pytestmark = needs_dataparallel


def test_diff_of_the_same_is_0_across_formats(wrapped, tmp_path):
    assert run("diff", wrapped, wrapped) == "the same, 8 values compared\n"
    legacy = tmp_path / "legacy.pt"
    torch.save(torch.load(wrapped), legacy, _use_new_zipfile_serialization=False)
    assert json.loads(run("diff", wrapped, legacy, "--json")) == {
        "same": True,
        "differences": [],
    }


def test_diff_of_different_files_is_1_and_says_what_differs(tmp_path):
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    nan = torch.tensor([float("nan"), 1.0])
    common = {"same": torch.ones(2), "nan": nan, "text": "x", "list": [1, 2.5]}
    torch.save(
        {
            **common,
            "values": torch.tensor([1.0, 2.0, 3.0]),
            "dtype": torch.ones(2),
            "shape": torch.ones(2),
            "only a": torch.ones(1),
            "number": 1,
        },
        a,
    )
    torch.save(
        {
            **common,
            "values": torch.tensor([1.0, 2.5, 1.0]),
            "dtype": torch.ones(2).half(),
            "shape": torch.ones(2, 1),
            "only b": None,
            "number": 1.0,
        },
        b,
    )
    differences = run_json("diff", a, b, code=1)["differences"]
    assert {item["key"]: (item["a"], item["b"]) for item in differences} == {
        "values": ("float32 [3]", "float32 [3]"),
        "dtype": ("float32 [2]", "float16 [2]"),
        "shape": ("float32 [2]", "float32 [2, 1]"),
        "only a": ("float32 [1]", None),
        "only b": (None, "None"),
        "number": ("1", "1.0"),
    }
    assert differences[0] == {
        "key": "values",
        "a": "float32 [3]",
        "b": "float32 [3]",
        "different": ["elements"],
        "different_elements": 2,
        "nan_in_one": 0,
        "max_difference": 2,
    }
    table = run("diff", a, b, code=1)
    assert "2 of 3 elements differ, by 2 at most" in table
    assert "another dtype" in table
    assert table.endswith("6 differences\n")


def with_metadata(**metadata):
    result = collections.OrderedDict(a=torch.ones(1))
    result._metadata = collections.OrderedDict(metadata)
    return result


def quantized(scale=0.5, zero_point=1, dtype=torch.quint8):
    return torch.quantize_per_tensor(torch.eye(3), scale, zero_point, dtype)


def per_channel(scale=0.5, axis=0):
    scales, zeros = torch.full((3,), scale).double(), torch.zeros(3).long()
    values = torch.zeros(3, 3)
    return torch.quantize_per_channel(values, scales, zeros, axis, torch.qint8)


def nested(*sizes, fill=1.0):
    return torch.nested.nested_tensor([torch.full((n, 2), fill) for n in sizes])


def coo(indices, values):
    return torch.sparse_coo_tensor([indices], values, (9,))


def ordered(*keys):
    return collections.OrderedDict((key, 1) for key in keys)


ONES = torch.ones(2)
NAN = float("nan")
# What one file holds, what the other holds, the key, what differs.
DIFFERENT = [
    ({1: 2}, {"1": 2}, "[1]", ["key"]),
    ({1: 2}, {1.0: 2}, "[1]", ["key"]),
    ({1: 2}, {True: 2}, "[1]", ["key"]),
    ({(1, 2): 2}, {(1, "2"): 2}, "[(1, 2)]", ["key"]),
    ({"a.b": ONES}, {"a": {"b": ONES}}, ".a.b", ["key"]),
    ([1, 2], (1, 2), "", ["type"]),
    ({"a": 1}, ordered("a"), "", ["type"]),
    (collections.Counter("a"), {"a": 1}, "", ["type"]),
    (ordered("a", "b"), ordered("b", "a"), "", ["order"]),
    ([1, 2], [1, 2, 3], "[2]", ["key"]),
    ([1], [True], "[0]", ["type"]),
    ([1], [1.0], "[0]", ["type"]),
    ([2**70], [2**70 + 1], "[0]", ["value"]),
    ([{1, 2}], [{1, 3}], "[0][1]", ["value"]),
    ([{1}], [frozenset({1})], "[0]", ["type"]),
    ([b"a"], [b"b"], "[0]", ["value"]),
    ([b"a"], [bytearray(b"a")], "[0]", ["type"]),
    ([torch.float16], [torch.float32], "[0]", ["value"]),
    ([torch.Size([1])], [(1,)], "[0]", ["type"]),
    ([slice(1)], [slice(2)], "[0].args[1]", ["value"]),
    ([None], [0], "[0]", ["type"]),
    ([{}], [[]], "[0]", ["type"]),
    (
        collections.defaultdict(list, a=1),
        collections.defaultdict(int, a=1),
        ".default_factory",
        ["value"],
    ),
    (with_metadata(a=1), with_metadata(a=2), "._metadata.a", ["value"]),
    (with_metadata(a=1), with_metadata(), "._metadata.a", ["key"]),
    ([ONES], [1.0], "[0]", ["type"]),
]


def found_in(ones, others, tmp_path):
    """The first difference at each index, of what differs at each."""
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save(ones, a)
    torch.save(others, b)
    assert run_json("diff", a, a)["same"]
    assert run_json("diff", b, b)["same"]
    found = {}
    for difference in run_json("diff", a, b, code=1)["differences"]:
        index, rest = difference["key"].removeprefix("[").split("]", 1)
        found.setdefault(int(index), {**difference, "key": rest})
    return [found.get(i) for i in range(len(ones))]


def test_diff_sees_every_difference_of_types(tmp_path):
    ones, others, keys, different = zip(*DIFFERENT, strict=True)
    found = found_in(list(ones), list(others), tmp_path)
    for item, one, key, expected in zip(found, ones, keys, different, strict=True):
        assert item is not None, one
        assert (item["key"], item["different"]) == (key, expected), one


# Made in the test, because torch warns of quantized and nested ones.
DIFFERENT_TENSORS = [
    (lambda: ONES, lambda: ONES.clone().requires_grad_(), ["requires_grad"]),
    (lambda: ONES, lambda: ONES.double(), ["dtype"]),
    (lambda: ONES, lambda: ONES.view(2, 1), ["shape"]),
    (lambda: ONES, lambda: ONES.to_sparse(), ["layout"]),
    (lambda: ONES, lambda: ONES.to("meta"), ["presence of values"]),
    (lambda: quantized(), lambda: quantized(scale=0.25), ["quantization", "elements"]),
    (lambda: per_channel(), lambda: per_channel(scale=1.0), ["quantization"]),
    (lambda: per_channel(), lambda: per_channel(axis=1), ["quantization"]),
    (lambda: coo([1], [2.0]), lambda: coo([2], [2.0]), ["indices"]),
    (lambda: coo([1], [2.0]), lambda: coo([1], [3.0]), ["elements"]),
    (
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.eye(2).to_sparse_csc(),
        ["layout"],
    ),
    (lambda: nested(1, 2), lambda: nested(2, 1), ["shape"]),
    (lambda: nested(1, 2), lambda: nested(1, 2, fill=2.0), ["elements"]),
]


@pytest.mark.filterwarnings("ignore")
def test_diff_sees_every_difference_of_tensors(tmp_path):
    ones, others, different = zip(*DIFFERENT_TENSORS, strict=True)
    ones, others = ([make() for make in makers] for makers in (ones, others))
    found = found_in(ones, others, tmp_path)
    for item, one, expected in zip(found, ones, different, strict=True):
        assert item is not None, one
        assert (item["key"], item["different"]) == ("", expected), one


def test_diff_of_values_only_leaves_classes_aside(tmp_path, net):
    a, b = tmp_path / "a.pt", tmp_path / "b.safetensors"
    torch.save({"state_dict": net.state_dict()}, a)
    run("convert", a, tmp_path / "c.pt", "--key", "state_dict")
    run("convert", a, b)
    run("diff", tmp_path / "c.pt", b, code=1)
    run("diff", tmp_path / "c.pt", b, "--values-only")
    torch.save([[ONES], ordered("a", "b")], a)
    torch.save([(ONES.clone().requires_grad_(),), {"b": 1, "a": 1}], b)
    run("diff", a, b, code=1)
    assert run("diff", a, b, "--values-only") == "the same, 3 values compared\n"
    torch.save([(ONES.double(),), {"b": 1, "a": 1}], b)
    run("diff", a, b, "--values-only", code=1)


def test_diff_counts_elements_and_nans(tmp_path):
    tensor, inf = torch.tensor, float("inf")
    many = torch.zeros(3 << 20)
    other = many.clone()
    other[[0, 1 << 20, -1]] = tensor([1.0, 2, 3])
    zero, most = tensor([0]).view(torch.uint64), tensor([-1]).view(torch.uint64)
    cases = [  # and how many elements differ, are NaN in one, by how much at most
        (tensor([1, NAN, 3, NAN]), tensor([1.5, NAN, NAN, 4]), (3, 2, 0.5)),
        (tensor([NAN]), tensor([1.0]), (1, 1, None)),
        (tensor([1.0]), tensor([inf]), (1, 0, "inf")),
        (tensor([inf]), tensor([-inf]), (1, 0, "inf")),
        (tensor([2**62]), tensor([2**62 + 1]), (1, 0, 1)),
        (tensor([-(2**63)]), tensor([2**63 - 1]), (1, 0, 2.0**64)),
        (most, zero, (1, 0, 2.0**64)),
        (tensor([True]), tensor([False]), (1, 0, 1)),
        (tensor([3 + 4j]), tensor([0j]), (1, 0, 5)),
        (many, other, (3, 0, 3)),
    ]
    ones, others, numbers = zip(*cases, strict=True)
    names = "different_elements", "nan_in_one", "max_difference"
    found = found_in(list(ones), list(others), tmp_path)
    assert [tuple(item[name] for name in names) for item in found] == list(numbers)
    table = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", code=1)
    assert "3 of 4 elements differ, by 0.5 at most, 2 of them NaN in one" in table
    assert "1 of 1 element differs, 1 of them NaN in one file only" in table


def test_what_is_equal_is_the_same(tmp_path):
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    base = torch.arange(6.0)
    twice = coo([1, 1], [1.0, 1.0])
    torch.save(
        [base.view(2, 3), torch.tensor([0.0]), {"a", "b"}, twice, {1: 1, 2: 2}], a
    )
    other = base.view(2, 3).t().contiguous().t()
    torch.save(
        [other, torch.tensor([-0.0]), {"b", "a"}, twice.coalesce(), {2: 2, 1: 1}], b
    )
    run("diff", a, b)


@pytest.mark.filterwarnings("ignore")
def test_diff_compares_every_dtype(tmp_path):
    names = (
        "float8_e4m3fn float8_e5m2fnuz float8_e8m0fnu bits8 bits16 "
        "float4_e2m1fn_x2 uint16 uint32 uint64 complex32 bfloat16 bool float64"
    ).split()
    ones, others = (
        [
            torch.full((8,), n, dtype=torch.uint8).view(getattr(torch, name))
            for name in names
        ]
        for n in (0, 1)
    )
    for item, one in zip(found_in(ones, others, tmp_path), ones, strict=True):
        assert item is not None, one.dtype
        assert item["different_elements"] == one.numel(), one.dtype


@pytest.mark.filterwarnings("ignore")
def test_diff_compares_packed_quantized_elements(tmp_path):
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    scales, zeros = torch.ones(1).float(), torch.zeros(1).float()
    values = torch.tensor([[1.0, 2.0, 3.0]])
    for path, last in [(a, 3.0), (b, 4.0)]:
        values[0, 2] = last
        packed = torch.quantize_per_channel(values, scales, zeros, 0, torch.quint4x2)
        torch.save([packed], path)
    run("diff", a, a)
    (found,) = run_json("diff", a, b, code=1)["differences"]
    assert (found["different_elements"], found["max_difference"]) == (1, 1)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({(Color.RED, 0): 1}, {(Color.BLUE, 0): 1}),
        ({(datetime.date(2020, 1, 1), 1): 2}, {(datetime.date(2021, 1, 1), 1): 2}),
        ({(torch.tensor(1),): 0}, {(torch.tensor(2),): 0}),
        ({frozenset([Color.RED]): 0}, {frozenset([Color.BLUE]): 0}),
        (torch.tensor([complex(NAN, 1)]), torch.tensor([complex(NAN, 2)])),
        (torch.tensor([complex(1, NAN)]), torch.tensor([complex(2, NAN)])),
        (complex(NAN, 1), complex(NAN, 2)),
    ],
)
def test_diff_looks_into_keys_and_both_parts_of_a_number(a, b, tmp_path):
    for name, value in (("a.pt", a), ("b.pt", b)):
        torch.save(value, tmp_path / name)
    assert run("diff", tmp_path / "a.pt", tmp_path / "a.pt").startswith("the same")
    assert run_json("diff", tmp_path / "a.pt", tmp_path / "b.pt", code=1)["differences"]


def test_zero_is_zero_whatever_its_sign(tmp_path):
    torch.save([0.0, complex(0, 0.0), torch.tensor([0.0, 0j])], tmp_path / "a.pt")
    torch.save([-0.0, complex(0, -0.0), torch.tensor([-0.0, -0j])], tmp_path / "b.pt")
    assert run("diff", tmp_path / "a.pt", tmp_path / "b.pt").startswith("the same")


@pytest.mark.filterwarnings("ignore")
def test_what_python_writes_again_is_the_same(tmp_path):
    values = [
        {(torch.eye(3) * i).to_sparse() for i in range(1, 5)},
        {
            torch.quantize_per_tensor(torch.ones(3) * i, 1, 0, torch.quint8)
            for i in (1, 2)
        },
        torch.quantize_per_channel(
            torch.ones(2, 3), torch.tensor([NAN, 0.5]), torch.zeros(2), 0, torch.quint8
        ),
        torch.sparse_coo_tensor(
            torch.tensor([[0, 2]]), torch.ones(2).to(torch.float8_e5m2), (4,)
        ),
    ]
    torch.save(values, tmp_path / "a.pt")
    torch.save(torch.load(tmp_path / "a.pt", weights_only=False), tmp_path / "b.pt")
    assert run("diff", tmp_path / "a.pt", tmp_path / "b.pt").startswith("the same")


def test_zeros_of_both_signs_are_one_key_and_one_element(tmp_path):
    torch.save([{-0.0, -1.0}, {-0.0: 1}], tmp_path / "a.pt")
    torch.save([{0.0, -1.0}, {0.0: 1}], tmp_path / "b.pt")
    assert run("diff", tmp_path / "a.pt", tmp_path / "b.pt").startswith("the same")
