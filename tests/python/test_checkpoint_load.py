"""Files that Python writes, read by the C++ reader and by Python."""

import argparse
import collections
import pickle
import re
import warnings
import zipfile

import numpy
import pytest
import torch
from checkpoint_oracle import error_of, inspect, load, needs_dump, run_dump

pytestmark = [
    needs_dump,
    # What torch says of its newer dtypes and layouts.
    pytest.mark.filterwarnings("ignore:.*(experimental|deprecated|prototype|beta)"),
]


def dense_tensors():
    base = torch.arange(60, dtype=torch.float32)
    tensors = {
        "base": base,
        "view": base[3:33].view(5, 6),
        "transposed": base[3:33].view(5, 6).t(),
        "expanded": base[:1].expand(4, 3),
        "strided": base[::7],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.rand(3)),
        "frozen": torch.nn.Parameter(torch.rand(3), requires_grad=False),
        "leaf": torch.rand(2, requires_grad=True),
        "buffer": torch.nn.Buffer(torch.rand(3)),
        "conj": torch.rand(3, dtype=torch.complex64).conj(),
        "neg": torch.rand(3, dtype=torch.complex64).conj().imag,
        "meta": torch.empty(3, 4, device="meta").t(),
    }
    tensors["again"] = tensors["view"]
    return tensors


def tensors_of_all_dtypes():
    dtypes = [
        *torch.storage._dtype_to_storage_type_map(),
        *torch.storage._new_dtypes(),
    ]
    plain = [dtype for dtype in dtypes if not str(dtype).startswith("torch.q")]
    result = {}
    for dtype in plain:
        raw = torch.arange(1, 6 * dtype.itemsize + 1, dtype=torch.uint8)
        if dtype is torch.bool:
            raw = raw % 2
        result[str(dtype)] = raw.view(dtype).view(2, 3)
    return result


def quantized_tensors():
    values = torch.arange(24, dtype=torch.float32).view(4, 6) / 7
    scales = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    zeros = torch.tensor([1, 2, 3, 4])
    result = {
        str(dtype): torch.quantize_per_tensor(values, 0.25, 3, dtype)
        for dtype in (torch.qint8, torch.quint8, torch.qint32)
    }
    result["channels"] = torch.quantize_per_channel(
        values, scales, zeros, 0, torch.qint8
    )
    result["transposed"] = result["torch.quint8"].t()
    for dtype in (torch.quint4x2, torch.quint2x4):
        result[str(dtype)] = torch.quantize_per_channel(
            values, scales.float(), zeros.float(), 0, dtype
        )
    return result


def sparse_tensors():
    dense = torch.tensor([[0, 1.5, 0, 0], [2, 0, 0, 3], [0, 0, 0, 0], [4, 0, 5, 0]])
    uncoalesced = torch.sparse_coo_tensor(
        [[0, 0, 1], [1, 1, 2]], torch.tensor([1.0, 2.0, 3.0]), (2, 3)
    )
    return {
        "coo": dense.to_sparse(),
        "uncoalesced": uncoalesced,
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
        "hybrid": torch.rand(3, 4, 2).to_sparse(2),
        "none": torch.zeros(2, 2).to_sparse(),
    }


def plain_values():
    ordered = collections.OrderedDict([("b", 1), ("a", torch.ones(2))])
    ordered._metadata = collections.OrderedDict([("", {"version": 1})])
    shared = ["shared"]
    counter = collections.Counter("abracadabra")
    grouped = collections.defaultdict(list, {"x": [1, 2]})
    return {
        "none": None,
        "booleans": (True, False),
        "integers": [0, 1, 255, 256, 65535, 65536, -1, 2**31, -(2**31), 2**63 - 1],
        "most negative": -(2**63),
        "large": [2**63, -(2**63) - 1, 2**100, -(2**2000), 2**80 - 1],
        "floats": [0.0, -0.0, 1.5, float("inf"), 1e-320],
        "not a number": float("nan"),
        "complex": 1 + 2j,
        "text": ["", "plain", "\x00 é 日本 🎉", "\n\\'\"", "x" * 300],
        "bytes": [b"", b"\x00\xff", bytearray(b"abc\x80"), b"y" * 300],
        "nested": [[], (), {}, [[1, (2, [3])]]],
        "long tuple": tuple(range(9)),
        "shared": [shared, shared],
        "ordered": ordered,
        "counter": counter,
        "grouped": grouped,
        "no factory": collections.defaultdict(None, {"x": 1}),
        "keys": {1: "int", "1": "str", 2.5: "float", 1j: "complex", None: "none"},
        "flags": {True: 1, False: 0},
        "tuple keys": {(0, "a"): 1, "b": 2, ("c", (1, 2)): {(3,): 4}},
        "device keys": {torch.device("cpu"): 1},
        "size": torch.Size([2, 3]),
        "device": [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
        "dtypes": [torch.float32, torch.bfloat16, torch.uint16, torch.quint8],
        "layouts": [torch.strided, torch.sparse_coo],
        "schemes": [torch.per_tensor_affine, torch.per_channel_affine],
        "set": {1, 2, 3},
        "frozen set": frozenset(["a", "b"]),
        "slices": [slice(1, 2), slice(None), slice(None, None, -1)],
        "namespace": argparse.Namespace(lr=0.1, layers=[1, 2], name="net"),
        "types": [int, dict, collections.OrderedDict],
        "many": list(range(2500)),
        "many keys": {f"key {i}": i for i in range(2500)},
    }


def numpy_values():
    matrix = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    return {
        "arrays": [
            numpy.arange(2, dtype=numpy.dtype(code))
            for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
        ],
        "floats": [
            numpy.linspace(0, 1, 3).astype(code)
            for code in ("f2", "f4", "f8", "c8", "c16")
        ],
        "big-endian": numpy.arange(4, dtype=">i4"),
        "big-endian complex": numpy.arange(4).astype(">c8"),
        "fortran": numpy.asfortranarray(matrix),
        "zero-dimensional": numpy.array(3.5),
        "empty": numpy.zeros((0, 2)),
    }


def numpy_scalars():
    return {
        code: numpy.dtype(code).type(3)
        for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2")
        + ("f4", "f8", "c8", "c16")
    }


GROUPS = {
    "dense": dense_tensors,
    "dtypes": tensors_of_all_dtypes,
    "quantized": quantized_tensors,
    "sparse": sparse_tensors,
    "plain": plain_values,
    "numpy": numpy_values,
}

WRITERS = {
    "zip": {},
    **{f"zip, protocol {p}": {"pickle_protocol": p} for p in (1, 3, 4, 5)},
    **{
        f"legacy, protocol {p}": {
            "pickle_protocol": p,
            "_use_new_zipfile_serialization": False,
        }
        for p in (1, 2, 3, 4, 5)
    },
}


@pytest.fixture(scope="module")
def value():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: make() for name, make in GROUPS.items()}


def write(value, folder, writer):
    """A file with the value, and what Python reads from it."""
    path = folder / "all.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, path, **WRITERS[writer])
        # Python cannot read its own newer dtypes from a legacy file.
        legacy = writer.startswith("legacy")
        return path, value if legacy else torch.load(path, weights_only=False)


@pytest.mark.parametrize("writer", WRITERS)
def test_everything_python_writes_is_read_to_the_same_values(writer, value, tmp_path):
    path, expected = write(value, tmp_path, writer)
    load(path).assert_equals(expected)


@pytest.mark.parametrize("option", ["--no-mmap", "--stream", "--bytes"])
@pytest.mark.parametrize("writer", ["zip", "legacy, protocol 2"])
def test_files_streams_and_bytes_give_the_same(option, writer, value, tmp_path):
    path, expected = write(value, tmp_path, writer)
    load(path, option).assert_equals(expected)


@pytest.mark.parametrize("zip_format", [True, False])
def test_a_storage_may_end_within_an_element(zip_format, tmp_path):
    """torch.save then claims the whole elements, and writes all bytes."""
    path = tmp_path / "odd.pt"
    bytes_ = torch.arange(10, dtype=torch.uint8)
    view = bytes_[:8].view(torch.float32)
    torch.save([view], path, _use_new_zipfile_serialization=zip_format)
    # Without mmap torch.load refuses its own file.
    assert torch.equal(torch.load(path, mmap=zip_format)[0], view)
    load(path).assert_equals([view])


def test_a_storage_longer_than_it_claims_is_refused_as_by_torch(tmp_path):
    path, longer = tmp_path / "a.pt", tmp_path / "longer.pt"
    torch.save({"a": torch.ones(4)}, path)
    with zipfile.ZipFile(path) as file, zipfile.ZipFile(longer, "w") as out:
        for name in file.namelist():
            more = b"more" if name.endswith("data/0") else b""
            out.writestr(name, file.read(name) + more)
    with pytest.raises(RuntimeError, match="does not match expected size"):
        torch.load(longer)
    assert "is said to have 16 bytes, but has 20, byte " in error_of(longer)


def test_memory_formats_are_read(tmp_path):
    """Which Python can write with newer protocols only."""
    value = [torch.channels_last, torch.contiguous_format, torch.preserve_format]
    torch.save(value, tmp_path / "formats.pt", pickle_protocol=4)
    load(tmp_path / "formats.pt").assert_equals(value)


def test_numpy_scalars_become_numbers(tmp_path):
    torch.save(numpy_scalars(), tmp_path / "scalars.pt")
    loaded = load(tmp_path / "scalars.pt")
    loaded.assert_equals(
        {name: scalar.item() for name, scalar in numpy_scalars().items()}
    )
    assert not loaded.unknown


@pytest.mark.parametrize("protocol", range(1, 6))
def test_numpy_arrays_of_any_order_are_read(protocol, tmp_path):
    """Of which pickle's protocol 5 keeps the order of the dimensions."""
    whole = numpy.arange(24, dtype=numpy.float32).reshape(2, 3, 4)
    value = [
        whole.transpose(1, 2, 0),
        whole.transpose(2, 0, 1),
        whole.transpose(2, 1, 0),
        whole.astype(">i4").transpose(1, 0, 2),
        whole[::-1, ::2],
        numpy.zeros((2, 0, 3)).transpose(1, 2, 0),
    ]
    torch.save(value, tmp_path / "x.pt", pickle_protocol=protocol)
    loaded = load(tmp_path / "x.pt")
    loaded.assert_equals(torch.load(tmp_path / "x.pt", weights_only=False))
    assert not loaded.unknown


@pytest.mark.parametrize("protocol", [2, 5])
def test_numpy_arrays_of_numpy_1_are_read(protocol, tmp_path):
    """Whose modules had other names."""
    value = [numpy.arange(6.0).reshape(1, 2, 3).transpose(1, 2, 0), numpy.float32(2)]
    torch.save(value, tmp_path / "2.pt", pickle_protocol=protocol)
    with (
        zipfile.ZipFile(tmp_path / "2.pt") as old,
        zipfile.ZipFile(tmp_path / "1.pt", "w") as new,
    ):
        data = old.read("2/data.pkl")
        assert b"numpy._core" in data
        data = re.sub(  # protocols 4 and 5 count the characters
            rb"\x8c(.)numpy\._core",
            lambda found: b"\x8c" + bytes([found[1][0] - 1]) + b"numpy.core",
            data,
            flags=re.DOTALL,
        ).replace(b"cnumpy._core", b"cnumpy.core")
        if data[2:3] == b"\x95":  # the length of all, which changed
            data = data[:2] + data[11:]
        new.writestr("1/data.pkl", data)
    loaded = load(tmp_path / "1.pt")
    loaded.assert_equals([value[0], 2.0])
    assert not loaded.unknown


def test_numbers_beyond_64_bits_become_opaque(tmp_path):
    torch.save([2**64, numpy.uint64(2**63)], tmp_path / "large.pt")
    loaded = load(tmp_path / "large.pt")
    assert not loaded.unknown
    assert [entry["opaque"] for entry in loaded.value["list"]] == ["builtins.int"] * 2
    assert [entry["args"] for entry in loaded.value["list"]] == [
        [str(2**64)],
        [str(2**63)],
    ]


def test_numpy_kinds_that_torch_lacks_become_opaque(tmp_path):
    value = {
        "text": numpy.array(["a", "b"]),
        "objects": numpy.array([{}, None], dtype=object),
        "date": numpy.datetime64("2024-01-01"),
        "kept": torch.ones(2),
    }
    torch.save(value, tmp_path / "kinds.pt")
    loaded = load(tmp_path / "kinds.pt")
    assert [path for path, _ in loaded.unknown if "." not in path] == [
        "['text']",
        "['objects']",
        "['date']",
    ]
    assert loaded.value["items"][3][1]["tensor"] == "Float"


class Unknown:
    """A class that only this test has."""

    def __init__(self, **state):
        self.__dict__.update(state)


class UnknownDict(dict):
    """A mapping of a class that only this test has."""


def test_an_object_of_an_unknown_class_does_not_stop_the_rest(tmp_path):
    value = {
        "model": {"weight": torch.ones(2)},
        "extra": [Unknown(rate=torch.zeros(1)), UnknownDict(a=1)],
        "after": 5,
    }
    torch.save(value, tmp_path / "unknown.pt")
    loaded = load(tmp_path / "unknown.pt")
    assert loaded.unknown == [
        ("['extra'][0]", f"{__name__}.Unknown"),
        ("['extra'][1]", f"{__name__}.UnknownDict"),
    ]
    items = dict(loaded.value["items"])
    first, second = items["extra"]["list"]
    assert first["state"]["items"][0][1]["tensor"] == "Float"
    assert second["items"] == [["a", 1]]
    assert items["after"] == 5


class Evil:
    """Whose pickle would make a file when it is run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_nothing_in_the_file_is_executed(tmp_path):
    torch.save([Evil(str(tmp_path / "made")), 1], tmp_path / "evil.pt")
    loaded = load(tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()
    assert loaded.unknown[0][1] in ("io.open", "_io.open")


def test_an_object_that_contains_itself_is_cut_there(tmp_path):
    value = {"a": [1], "b": (torch.ones(2), Unknown())}
    value["a"].append(value)
    value["b"][1].me = value["b"]
    for writer in ("zip", "legacy, protocol 2"):
        torch.save(value, tmp_path / "cycle.pt", **WRITERS[writer])
        loaded = load(tmp_path / "cycle.pt")
        name = "dataparallel.BackReference"
        assert loaded.unknown == [
            ("['a'][1]", name),
            ("['b'][1]", f"{__name__}.Unknown"),
            ("['b'][1].state['me']", name),
        ]
        items = dict(loaded.value["items"])
        assert items["a"]["list"][1]["args"] == [""]
        state = items["b"]["tuple"][1]["state"]
        assert state["items"][0][1]["args"] == ["['b']"]
        info = inspect(tmp_path / "cycle.pt")
        assert [tuple(entry) for entry in info["opaque"]] == loaded.unknown


def test_objects_that_contain_each_other_are_cut_once(tmp_path):
    first, second = Unknown(), Unknown()
    first.other, second.other = second, first
    grouped = collections.defaultdict(list)
    grouped["self"] = grouped
    ordered = collections.OrderedDict()
    ordered._metadata = {"of": ordered}
    torch.save([first, second, grouped, ordered], tmp_path / "cycles.pt")
    loaded = load(tmp_path / "cycles.pt")
    assert [path for path, name in loaded.unknown if "Back" in name] == [
        "[0].state['other'].state['other']",
        "[2]['self']",
        "[3]._metadata['of']",
    ]


def test_big_endian_files_are_read(tmp_path):
    """The file of a big-endian machine: each number's bytes the other way."""
    import io

    value = {"a": torch.arange(5.0), "b": torch.arange(3).to(torch.uint16)}
    value["c"] = torch.tensor([1 + 2j, 3 - 4j])
    buffer = io.BytesIO()
    torch.save(value, buffer)
    items = {"0": 4, "1": 2, "2": 4}
    with (
        zipfile.ZipFile(buffer) as old,
        zipfile.ZipFile(tmp_path / "big.pt", "w") as new,
    ):
        for name in old.namelist():
            content = old.read(name)
            kind, _, key = name.partition("/")[2].partition("/")
            if kind == "data":
                array = numpy.frombuffer(content, f"<u{items[key]}")
                content = array.byteswap().tobytes()
            new.writestr(name, b"big" if kind == "byteorder" else content)
    load(tmp_path / "big.pt").assert_equals(value)


@pytest.mark.parametrize("root", ["", "any name/"])
def test_old_zip_layouts_are_read(root, tmp_path):
    """Without byteorder and alignment entries, with and without a folder."""
    import io

    value = {"a": torch.arange(5.0), "b": torch.arange(3)}
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with (
        zipfile.ZipFile(buffer) as old,
        zipfile.ZipFile(tmp_path / "old.pt", "w") as new,
    ):
        for name in old.namelist():
            inside = name.partition("/")[2]
            if inside == "data.pkl" or inside.startswith("data/"):
                new.writestr(root + inside, old.read(name))
    load(tmp_path / "old.pt").assert_equals(value)


def test_inspect_lists_tensors_and_unknown_classes(tmp_path):
    value = {"model": {"w": torch.ones(2, 3), "n": torch.tensor(1)}, "x": Unknown(y=1)}
    for writer in ("zip", "legacy, protocol 2"):
        torch.save(value, tmp_path / "nested.pt", **WRITERS[writer])
        info = inspect(tmp_path / "nested.pt")
        assert info["kind"] == writer.split(",")[0]
        assert info["unknown_classes"] == [f"{__name__}.Unknown"]
        assert info["tensors"] == [
            {
                "key": "model.w",
                "dtype": "Float",
                "shape": [2, 3],
                "device": "cpu",
                "nbytes": 24,
                "requires_grad": False,
            },
            {
                "key": "model.n",
                "dtype": "Long",
                "shape": [],
                "device": "cpu",
                "nbytes": 8,
                "requires_grad": False,
            },
        ]


def test_inspect_says_of_every_tensor_what_load_gives(value, tmp_path):
    everything = {name: value[name] for name in ("dense", "dtypes", "sparse", "numpy")}
    everything["module"] = Net()
    path, _ = write(everything, tmp_path, "zip")
    loaded = load(path)
    tensors = []

    def visit(got):
        if isinstance(got, list):
            for element in got:
                visit(element)
        elif isinstance(got, dict) and "tensor" in got:
            tensors.append((got["tensor"], got["shape"], got["requires_grad"]))
        elif isinstance(got, dict):
            for element in got.values():
                visit(element)

    visit(loaded.value)
    assert [
        (tensor["dtype"], tensor["shape"], tensor["requires_grad"])
        for tensor in inspect(path)["tensors"]
    ] == tensors


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_inspect_gives_all_elements_of_a_nested_tensor(tmp_path):
    parts = [torch.ones(2, 3), torch.ones(5, 3)]
    torch.save(torch.nested.nested_tensor(parts), tmp_path / "nested.pt")
    (tensor,) = inspect(tmp_path / "nested.pt")["tensors"]
    assert tensor["shape"] == [6 + 15]
    assert tensor["nbytes"] == (6 + 15) * 4
    assert len(load(tmp_path / "nested.pt").value["nested"]) == 2


@pytest.mark.parametrize("protocol", range(6))
def test_a_plain_pickle_is_no_checkpoint(protocol, tmp_path):
    with open(tmp_path / "plain.pkl", "wb") as file:
        pickle.dump({"a": [1, "text"], "b": Unknown(c=2)}, file, protocol)
    with pytest.raises(Exception, match="."):
        torch.load(tmp_path / "plain.pkl", weights_only=False)
    message = error_of(tmp_path / "plain.pkl")
    assert "is a pickle that torch did not write" in message
    assert "pickle.load" in message


def test_packed_and_foreign_files_are_named(tmp_path):
    import bz2
    import gzip
    import lzma

    torch.save({"a": 1}, tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    numpy.save(tmp_path / "array.npy", numpy.ones(3))
    files = {
        "a gzip file": gzip.compress(content),
        "a bzip2 file": bz2.compress(content),
        "an xz file": lzma.compress(content),
        "a Zstandard file": b"\x28\xb5\x2f\xfd" + content,
        "an HDF5 file": b"\x89HDF\r\n\x1a\n" + content,
        "a NumPy array": (tmp_path / "array.npy").read_bytes(),
        "a GGUF file": b"GGUF\3\0\0\0" + content,
    }
    for name, packed in files.items():
        (tmp_path / "packed").write_bytes(packed)
        message = error_of(tmp_path / "packed")
        assert f"packed is {name}" in message, message


@pytest.mark.parametrize("count", [1, 22, 511, 4096, 65535])
@pytest.mark.parametrize("filler", [b"\0", b"x"])
def test_bytes_behind_the_end_of_a_zip_file_do_no_harm(filler, count, tmp_path):
    """As in torch.load and Python's zipfile: downloads padded to whole blocks."""
    value = {"a": torch.arange(100000.0)}  # in small ones torch itself fails
    torch.save(value, tmp_path / "x.pt")
    with open(tmp_path / "x.pt", "ab") as file:
        file.write(filler * count)
    torch.load(tmp_path / "x.pt")
    load(tmp_path / "x.pt").assert_equals(value)


def test_too_many_bytes_behind_the_end_of_a_zip_file_are_an_error(tmp_path):
    torch.save({"a": torch.arange(5.0)}, tmp_path / "x.pt")
    with open(tmp_path / "x.pt", "ab") as file:
        file.write(b"\0" * (1 << 17))
    with pytest.raises(RuntimeError, match="central directory"):
        torch.load(tmp_path / "x.pt")
    assert "64 KiB" in error_of(tmp_path / "x.pt")


def test_warnings_of_torch_itself_are_not_shown(tmp_path):
    """That it will give up quantized tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(quantized_tensors(), tmp_path / "x.pt")
    for options in ([], ["--map-location", "meta"]):
        process, _ = run_dump(tmp_path / "x.pt", *options)
        assert process.returncode == 0
        assert process.stderr == ""


class Block(torch.nn.Module):
    """Every kind of member that a state_dict has, and some that it leaves out."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("left_out", torch.ones(2), persistent=False)
        self.register_parameter("none", None)
        self.plain = torch.zeros(4)
        self.count = 5

    def forward(self, x):
        return self.norm(x) + self.kept.sum() + self.left_out.sum() + self.plain.sum()


class Net(torch.nn.Module):
    """A module with nested, shared and listed modules."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.linear = torch.nn.Linear(3, 3, bias=False)
        self.tied = self.linear
        self.weight = torch.nn.Parameter(torch.rand(3))
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.ReLU()])

    def forward(self, x):
        x = self.tied(self.linear(self.block(x))) + self.weight
        for layer in self.layers:
            x = layer(x)
        return x


def without_metadata(state_dict):
    """As the reader gives it: the versions are in the modules' code."""
    plain = collections.OrderedDict(state_dict)
    vars(plain).clear()
    return plain


@pytest.mark.parametrize("writer", ["zip", "legacy, protocol 2"])
def test_a_pickled_module_gives_its_state_dict(writer, tmp_path):
    net = Net()
    torch.save({"net": net, "epoch": 3}, tmp_path / "net.pt", **WRITERS[writer])
    loaded = load(tmp_path / "net.pt")
    loaded.assert_equals({"net": without_metadata(net.state_dict()), "epoch": 3})
    classes = inspect(tmp_path / "net.pt")["unknown_classes"]
    assert (
        f"{__name__}.Block" in classes and "torch.nn.modules.linear.Linear" in classes
    )


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_torchscript_archive_gives_its_state_dict(tmp_path):
    torch.jit.script(Net()).save(tmp_path / "net.pt")
    expected = torch.jit.load(tmp_path / "net.pt").state_dict()
    load(tmp_path / "net.pt").assert_equals(without_metadata(expected))
    info = inspect(tmp_path / "net.pt")
    assert info["kind"] == "TorchScript"
    assert [tensor["key"] for tensor in info["tensors"]] == list(expected)


class Made:
    """Written as a call of a function that torch's files contain."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class Subclass(torch.Tensor):
    """A tensor of a class that only this test has."""


def test_all_rebuild_functions_of_torch_are_known(tmp_path):
    ones = numpy.ones((2, 3), dtype=numpy.float32)
    utils = torch._utils
    storage = torch.arange(6.0)._typed_storage()
    attributed = torch.nn.Parameter(torch.rand(2))
    attributed.note = "kept by Python"
    value = [
        Made(utils._rebuild_tensor, storage, 1, (2,), (2,)),
        Made(utils._rebuild_device_tensor_from_numpy, ones, torch.float64, "cpu", True),
        Made(utils._rebuild_xla_tensor, ones, torch.float16, "cpu", False),
        Made(
            utils._rebuild_device_tensor_from_cpu_tensor,
            torch.rand(3),
            torch.bfloat16,
            "cpu",
            False,
        ),
        Made(utils._rebuild_meta_tensor_no_storage, torch.int8, (2,), (1,), False),
        attributed,
    ]
    torch.save(value, tmp_path / "functions.pt")
    loaded = load(tmp_path / "functions.pt")
    loaded.assert_equals(torch.load(tmp_path / "functions.pt", weights_only=False))
    assert not loaded.unknown
    assert loaded.dropped == [("[5].note", "str")]


def test_a_tensor_of_a_subclass_is_that_tensor(tmp_path):
    tensor = torch.rand(3).as_subclass(Subclass)
    torch.save([tensor], tmp_path / "subclass.pt")
    loaded = load(tmp_path / "subclass.pt")
    loaded.assert_equals([tensor.as_subclass(torch.Tensor)])
    assert loaded.dropped == [("[0]", f"{__name__}.Subclass")]


def test_a_subclass_without_memory_of_its_own_stays_opaque(tmp_path):
    function = torch._utils._rebuild_wrapper_subclass
    arguments = (Subclass, torch.float32, (2,), (1,), 0, torch.strided, "cpu", False)
    made = Made(
        torch._tensor._rebuild_from_type_v2,
        function,
        Subclass,
        arguments,
        {"_local_tensor": torch.ones(2)},
    )
    torch.save([made], tmp_path / "wrapper.pt", pickle_protocol=4)
    loaded = load(tmp_path / "wrapper.pt")
    assert loaded.unknown[0] == ("[0]", f"{__name__}.Subclass")
    ((name, tensor),) = loaded.value["list"][0]["state"]["items"]
    assert name == "_local_tensor" and tensor["tensor"] == "Float"


def test_zip_files_with_64_bit_records_are_read(tmp_path):
    """Which torch writes for files beyond 4 GiB."""
    import io
    import struct

    value = {"a": torch.arange(5.0)}
    buffer = io.BytesIO()
    torch.save(value, buffer)
    body = directory = b""
    with zipfile.ZipFile(buffer) as old:
        for name in old.namelist():
            content = old.read(name)
            sizes = struct.pack("<HHQQ", 1, 16, len(content), len(content))
            more = struct.pack("<HHQQQ", 1, 24, len(content), len(content), len(body))
            unknown = 0xFFFFFFFF
            directory += struct.pack(
                "<4s6H3I5H2I",
                *(b"PK\x01\x02", 45, 45, 0, 0, 0, 0, 0, unknown, unknown),
                *(len(name), len(more), 0, 0, 0, 0, unknown),
            )
            directory += name.encode() + more
            body += struct.pack(
                "<4s5H3I2H",
                *(b"PK\x03\x04", 45, 0, 0, 0, 0, 0, unknown, unknown),
                *(len(name), len(sizes)),
            )
            body += name.encode() + sizes + content
        count = len(old.namelist())
    end64 = struct.pack(
        "<4sQ2H2I4Q",
        *(b"PK\x06\x06", 44, 45, 45, 0, 0),
        *(count, count, len(directory), len(body)),
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, len(body) + len(directory), 1)
    end = struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, *[0xFFFFFFFF] * 2, 0
    )
    (tmp_path / "64.pt").write_bytes(body + directory + end64 + locator + end)
    load(tmp_path / "64.pt").assert_equals(value)
