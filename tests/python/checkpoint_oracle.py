"""Runs the C++ reader on a file and compares what it gives with Python's value.

The program `checkpoint_dump` lies beside `train`, whose path is the
environment variable DATAPARALLEL_TRAIN.
"""

import json
import os
import pathlib
import struct
import subprocess

import numpy
import pytest
import torch

DUMP = pathlib.Path(os.environ.get("DATAPARALLEL_TRAIN", "")).parent / "checkpoint_dump"

needs_dump = pytest.mark.skipif(
    not DUMP.is_file(),
    reason="checkpoint_dump is not beside the program DATAPARALLEL_TRAIN",
)

DTYPES = {
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Half": torch.float16,
    "Float": torch.float32,
    "Double": torch.float64,
    "ComplexHalf": torch.complex32,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "Bool": torch.bool,
    "QInt8": torch.qint8,
    "QUInt8": torch.quint8,
    "QInt32": torch.qint32,
    "BFloat16": torch.bfloat16,
    "QUInt4x2": torch.quint4x2,
    "QUInt2x4": torch.quint2x4,
    "Bits1x8": torch.bits1x8,
    "Bits2x4": torch.bits2x4,
    "Bits4x2": torch.bits4x2,
    "Bits8": torch.bits8,
    "Bits16": torch.bits16,
    "Float8_e5m2": torch.float8_e5m2,
    "Float8_e4m3fn": torch.float8_e4m3fn,
    "Float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "Float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "Float8_e8m0fnu": torch.float8_e8m0fnu,
    "Float4_e2m1fn_x2": torch.float4_e2m1fn_x2,
    "UInt16": torch.uint16,
    "UInt32": torch.uint32,
    "UInt64": torch.uint64,
    "BComplex32": torch.bcomplex32,
}


class Loaded:
    """What the C++ reader gave."""

    def __init__(self, answer, blob):
        self.value = answer["value"]
        self.unknown = [tuple(entry) for entry in answer["unknown"]]
        self.dropped = [tuple(entry) for entry in answer["dropped"]]
        self.blob = blob
        self.storages = {}
        self.kept = []  # so that no address is used twice

    def assert_equals(self, expected):
        self._same(self.value, expected, "value")

    def _same(self, got, expected, path):
        compare = getattr(self, "_same_" + type(expected).__name__, None)
        if isinstance(expected, torch.Tensor):
            compare = self._same_tensor
        assert compare, f"{path}: no comparison for {type(expected)}"
        compare(got, expected, path)

    def _plain(self, got, expected, path):
        assert type(got) is type(expected) and got == expected, path

    _same_bool = _same_str = _same_NoneType = _plain

    def _same_int(self, got, expected, path):
        if -(2**63) <= expected < 2**63:
            self._plain(got, expected, path)
        else:
            assert got["opaque"] == "builtins.int", path
            assert int(got["args"][0], 0) == expected, path

    def _same_float(self, got, expected, path):
        bits = struct.unpack("<q", struct.pack("<d", expected))[0]
        assert got["bits"] == bits, f"{path}: {got} for {expected}"

    def _same_complex(self, got, expected, path):
        assert complex(*got["complex"]) == expected, path

    def _same_device(self, got, expected, path):
        assert got == {"device": str(expected)}, path

    def _same_list(self, got, expected, path, kind="list"):
        assert kind in got, f"{path}: {got}"
        assert len(got[kind]) == len(expected), path
        for index, element in enumerate(expected):
            self._same(got[kind][index], element, f"{path}[{index}]")

    def _same_tuple(self, got, expected, path):
        self._same_list(got, expected, path, "tuple")

    def _same_items(self, got, expected, path):
        assert len(got["items"]) == len(expected), path
        for (got_key, got_value), (key, value) in zip(
            got["items"], expected.items(), strict=True
        ):
            self._same(got_key, key, f"{path}.key({key!r})")
            self._same(got_value, value, f"{path}[{key!r}]")

    def _same_mapping(self, got, expected, path, name, attributes):
        if "opaque" in got:  # with keys that C++ cannot hash
            assert got["opaque"] == ("builtins.dict" if name == "dict" else name)
        else:
            assert got["mapping"] == name, path
            if attributes:
                self._same_items(got["attributes"], attributes, path + ".attributes")
            else:
                assert "attributes" not in got, path
        self._same_items(got, expected, path)

    def _same_dict(self, got, expected, path):
        self._same_mapping(got, expected, path, "dict", {})

    def _same_OrderedDict(self, got, expected, path):
        name = "collections.OrderedDict"
        self._same_mapping(got, expected, path, name, vars(expected))

    def _same_Counter(self, got, expected, path):
        self._same_mapping(got, expected, path, "collections.Counter", {})

    def _same_defaultdict(self, got, expected, path):
        assert got["mapping"] == "collections.defaultdict", path
        ((name, factory),) = got["attributes"]["items"]
        assert name == "default_factory", path
        self._same(factory, expected.default_factory, path + ".default_factory")
        self._same_items(got, expected, path)

    def _same_type(self, got, expected, path):
        name = f"{expected.__module__}.{expected.__qualname__}"
        assert (got["opaque"], got["args"]) == ("builtins.type", [name]), path

    def _same_set(self, got, expected, path):
        assert got["opaque"] == f"builtins.{type(expected).__name__}", path
        assert set(got["elements"]) == set(expected), path

    _same_frozenset = _same_set

    def _same_slice(self, got, expected, path):
        assert got["opaque"] == "builtins.slice", path
        assert got["args"] == [expected.start, expected.stop, expected.step], path

    def _same_bytes(self, got, expected, path):
        assert got["opaque"] == f"builtins.{type(expected).__name__}", path
        assert bytes(got["bytes"]) == bytes(expected), path

    _same_bytearray = _same_bytes

    def _same_Size(self, got, expected, path):
        assert got["opaque"] == "torch.Size", path
        assert got["elements"] == list(expected), path

    def _same_constant(self, got, expected, path):
        assert got["opaque"] == f"torch.{type(expected).__name__}", path
        assert got["args"] == [str(expected).removeprefix("torch.")], path

    _same_dtype = _same_layout = _same_memory_format = _same_qscheme = _same_constant

    def _same_Namespace(self, got, expected, path):
        assert got["opaque"] == "argparse.Namespace", path
        self._same(got["state"], vars(expected), path + ".state")

    def _same_ndarray(self, got, expected, path):
        native = numpy.array(
            expected, dtype=expected.dtype.newbyteorder("="), order="K"
        )
        # The strides of an empty array mean nothing, and NumPy's vary.
        tensor = torch.from_numpy(native)
        if not native.size:
            tensor = torch.empty(native.shape, dtype=tensor.dtype)
        self._same_tensor(got, tensor, path)

    def _same_tensor(self, got, expected, path):
        assert DTYPES[got["tensor"]] is expected.dtype, path
        if expected.is_nested:
            self._same_list({"list": got["nested"]}, expected.unbind(), path)
            return
        assert got["shape"] == list(expected.shape), path
        assert got["requires_grad"] == expected.requires_grad, path
        expected = expected.detach()
        if expected.layout is torch.sparse_coo:
            assert got["coalesced"] == expected.is_coalesced(), path
            parts = [expected._indices(), expected._values()]
            self._same_list({"list": got["parts"]}, parts, path)
            return
        if expected.layout is not torch.strided:
            rows = expected.layout in (torch.sparse_csr, torch.sparse_bsr)
            parts = (
                [expected.crow_indices(), expected.col_indices(), expected.values()]
                if rows
                else [
                    expected.ccol_indices(),
                    expected.row_indices(),
                    expected.values(),
                ]
            )
            self._same_list({"list": got["parts"]}, parts, path)
            return
        assert got["stride"] == list(expected.stride()), path
        if expected.device.type == "meta":
            assert got["device"] == "meta", path
            return
        assert got["offset"] == expected.storage_offset(), path
        assert got["conj"] == expected.is_conj(), path
        assert got["neg"] == expected.is_neg(), path
        # Two tensors share memory in C++ exactly where they do in Python.
        memory = expected.untyped_storage()._cdata
        self.kept.append(expected)
        assert self.storages.setdefault(got["storage"], memory) == memory, path
        assert len(set(self.storages.values())) == len(self.storages), path
        if expected.is_quantized:
            self._same_quantizer(got["quantizer"], expected, path)
            if expected.dtype in (torch.quint4x2, torch.quint2x4):
                return
        assert self.bytes_of(got) == elements(expected), path

    def _same_quantizer(self, got, expected, path):
        if expected.qscheme() is torch.per_tensor_affine:
            assert got == [expected.q_scale(), expected.q_zero_point()], path
        else:
            for i, part in enumerate(
                (expected.q_per_channel_scales(), expected.q_per_channel_zero_points())
            ):
                assert self.bytes_of(got[i]) == elements(part), path
            assert got[2] == expected.q_per_channel_axis(), path

    def bytes_of(self, tensor):
        return self.blob[tensor["begin"] : tensor["end"]]


def elements(tensor):
    """The bytes of a tensor's elements in order."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.resolve_conj().resolve_neg()
    size = tensor.element_size()
    if tensor.numel() == 0:
        return b""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if size == 16:
        tensor = torch.view_as_real(tensor)
        size = 8
    return tensor.view(bits[size]).contiguous().numpy().tobytes()


def run_dump(path, *options):
    """The finished process, and the path of the elements' file."""
    blob = str(path) + ".elements"
    process = subprocess.run(
        [DUMP, path, blob, *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return process, blob


def load(path, *options):
    process, blob = run_dump(path, *options)
    assert process.returncode == 0, process.stderr
    with open(blob, "rb") as file:
        return Loaded(json.loads(process.stdout), file.read())


def inspect(path):
    process = subprocess.run(
        [DUMP, "--inspect", path],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return json.loads(process.stdout)


def error_of(path, *options):
    process, _ = run_dump(path, *options)
    assert process.returncode == 1, (process.returncode, process.stderr)
    return process.stderr
