"""Makes the files of tests/data/hostile: each is wrong in one way.

tests/cpp/checkpoint_hostile_test.cpp says what the reader must say of each.
"""

import json
import pathlib
import pickle
import struct
import zlib

FOLDER = pathlib.Path(__file__).parent / "hostile"


class Entry:
    """An entry of a zip file, and what its records say of it."""

    def __init__(self, name, data=b"", **claims):
        self.name = name
        self.data = data
        self.claims = claims  # of its own header, or `central_...`

    def said(self, what, honest, central=False):
        if central and "central_" + what in self.claims:
            return self.claims["central_" + what]
        return self.claims.get(what, honest)


def zip_file(*entries, end=b"", count=None, size=None, offset=None, headers=None):
    body = b""
    directory = b""
    for entry in entries:
        at = len(body)
        numbers = {
            "flags": 0,
            "method": 0,
            "stored": len(entry.data),
            "size": len(entry.data),
        }
        own = {key: entry.said(key, value) for key, value in numbers.items()}
        other = {key: entry.said(key, value, True) for key, value in numbers.items()}
        name = entry.said("own_name", entry.name).encode()
        fields = "<HHHHHIIIHH"
        body += b"PK\x03\x04" + struct.pack(
            fields,
            20,
            own["flags"],
            own["method"],
            0,
            0,
            0,
            own["stored"],
            own["size"],
            len(name),
            0,
        )
        body += name + entry.data
        name = entry.name.encode()
        directory += b"PK\x01\x02" + struct.pack(
            "<HHHHHHIIIHHHHHII",
            20,
            20,
            other["flags"],
            other["method"],
            0,
            0,
            0,
            other["stored"],
            other["size"],
            len(name),
            0,
            0,
            0,
            0,
            0,
            entry.said("header", at, True),
        )
        directory += name
    count = len(entries) if count is None else count
    size = len(directory) if size is None else size
    offset = len(body) if offset is None else offset
    record = struct.pack("<HHHHIIH", 0, 0, count, count, size, offset, 0)
    return body + directory + end + b"PK\x05\x06" + record


# Pickles, put together by hand.


def proto(*parts):
    return b"\x80\x02" + b"".join(parts) + b"."


def text(value):
    value = value.encode()
    return b"X" + struct.pack("<I", len(value)) + value


def number(value):
    data = value.to_bytes(8, "little", signed=True)
    return b"\x8a\x08" + data


def many(*parts):
    """A tuple."""
    return b"(" + b"".join(parts) + b"t"


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def call(function, *arguments):
    return function + many(*arguments) + b"R"


def storage(kind="FloatStorage", key="0", numel=4, *view):
    parts = [text("storage"), name("torch", kind), text(key), text("cpu")]
    return many(*parts, number(numel), *view) + b"Q"


def ints(*values):
    return many(*map(number, values))


HOOKS = call(name("collections", "OrderedDict"))


def tensor(sizes, strides, offset=0, grad=b"\x89", memory=None):
    function = name("torch._utils", "_rebuild_tensor_v2")
    memory = storage() if memory is None else memory
    return call(
        function, memory, number(offset), ints(*sizes), ints(*strides), grad, HOOKS
    )


def longs(sizes, strides, offset=0, key="1", numel=4):
    return tensor(sizes, strides, offset, memory=storage("LongStorage", key, numel))


def numbers(*values):
    return struct.pack(f"<{len(values)}q", *values)


def checkpoint(*parts, extra=(), storages=None):
    """A zip file with that value, and a storage of four floats."""
    if storages is None:
        storages = {"0": struct.pack("<4f", 1, 2, 3, 4)}
    entries = [Entry("a/data.pkl", proto(*parts))]
    entries += [Entry("a/data/" + key, data) for key, data in storages.items()]
    return zip_file(*entries, *extra)


def with_longs(*parts, values=(0, 1, 2, 3)):
    storages = {"0": struct.pack("<4f", 1, 2, 3, 4), "1": numbers(*values)}
    return checkpoint(*parts, storages=storages)


def layout(kind):
    return call(name("torch.serialization", "_get_layout"), text("torch." + kind))


def sparse(kind, *data):
    return call(
        name("torch._utils", "_rebuild_sparse_tensor"), layout(kind), many(*data)
    )


def quantized(*quantizer, sizes=(2, 2), strides=(2, 1)):
    return call(
        name("torch._utils", "_rebuild_qtensor"),
        storage("QInt8Storage", "0", 16),
        number(0),
        ints(*sizes),
        ints(*strides),
        many(*quantizer),
        b"\x89",
        HOOKS,
    )


def array(shape, data, code="f4"):
    dtype = call(name("numpy", "dtype"), text(code), b"\x89", b"\x88")
    raw = b"B" + struct.pack("<I", len(data)) + data
    made = call(
        name("numpy.core.multiarray", "_reconstruct"),
        name("numpy", "ndarray"),
        ints(0),
        b"C\x01b",
    )
    return made + many(number(1), ints(*shape), dtype, b"\x89", raw) + b"b"


def shared_modules(depth):
    """Modules that each hold the one below twice: 2**depth in all."""

    def members(names):
        pairs = b"".join(text(key) + value for key, value in names.items())
        return b"}(" + pairs + b"u"

    module = name("__main__", "Net") + b")\x81"
    below = members({"w": tensor([1], [1])})
    state = {"_parameters": below, "_buffers": b"}", "_modules": b"}"}
    value = module + members(state) + b"bq\x00"
    for level in range(1, depth):
        get = b"h" + bytes([level - 1])
        state = {
            "_parameters": b"}",
            "_buffers": b"}",
            "_modules": members({"a": get, "b": get}),
        }
        value += b"0" + module + members(state) + b"bq" + bytes([level])
    return value


def module_in_itself():
    state = {"_parameters": b"}", "_buffers": b"}"}
    pairs = b"".join(text(key) + value for key, value in state.items())
    pairs += text("_modules") + b"}" + text("up") + b"h\x00s"
    return name("__main__", "Net") + b")\x81q\x00}(" + pairs + b"ub"


def frombuffer(shape, order, axes, data):
    dtype = call(name("numpy", "dtype"), text("f4"), b"\x89", b"\x88")
    raw = b"B" + struct.pack("<I", len(data)) + data
    function = name("numpy._core.numeric", "_frombuffer")
    return call(function, raw, dtype, ints(*shape), text(order), ints(*axes))


def legacy(value, keys, *storages, version=1001):
    pickles = [
        pickle.dumps(0x1950A86A20F9469CFC6C, 2),
        pickle.dumps(version, 2),
        pickle.dumps({"little_endian": True}, 2),
        proto(value),
        pickle.dumps(keys, 2),
    ]
    return b"".join(pickles) + b"".join(storages)


def stored(numel, data):
    return struct.pack("<q", numel) + data


def safetensors(header, data=b"", length=None):
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    length = len(header) if length is None else length
    return struct.pack("<Q", length) + header + data


def floats(*offsets, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def deflated(data):
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def packed(path, data, size=None):
    return Entry(
        path,
        deflated(data),
        method=8,
        size=len(data) if size is None else size,
    )


GOOD = proto(tensor([2], [1]))
FLOATS = struct.pack("<4f", 1, 2, 3, 4)
WHOLE = [Entry("a/data.pkl", GOOD), Entry("a/data/0", FLOATS)]
SCRIPT = proto(name("__torch__", "Net"), b")\x81}(", text("w"), tensor([2], [1]), b"ub")


def files():
    # Zip files.
    yield "zip_truncated", zip_file(*WHOLE)[:-30]
    yield "zip_compressed_pickle", zip_file(packed("a/data.pkl", GOOD), WHOLE[1])
    yield "zip_compressed_storage", zip_file(WHOLE[0], packed("a/data/0", FLOATS))
    yield "zip_duplicate", zip_file(*WHOLE, WHOLE[1])
    yield "zip_parent_folder", zip_file(*WHOLE, Entry("a/../../etc/passwd"))
    yield "zip_parent_folder_backslash", zip_file(*WHOLE, Entry("a\\..\\b"))
    yield "zip_overlap", zip_file(*WHOLE, Entry("a/data/1", b"", central_header=3))
    yield (
        "zip_outside",
        zip_file(*WHOLE, Entry("a/data/1", b"", central_header=0x7FFFFFFF)),
    )
    yield (
        "zip_own_size",
        zip_file(WHOLE[0], Entry("a/data/0", FLOATS, size=999, central_size=16)),
    )
    yield (
        "zip_two_sizes",
        zip_file(WHOLE[0], Entry("a/data/0", FLOATS, central_size=12)),
    )
    yield (
        "zip_own_name",
        zip_file(WHOLE[0], Entry("a/data/0", FLOATS, own_name="a/data/9")),
    )
    yield "zip_encrypted", zip_file(Entry("a/data.pkl", GOOD, flags=1), WHOLE[1])
    yield "zip_many_entries", zip_file(*WHOLE, count=0xFFFE)
    yield "zip_directory_outside", zip_file(*WHOLE, offset=0x7FFFFFF0)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, 2**63, 1)
    yield "zip64_outside", zip_file(*WHOLE, end=locator, offset=0xFFFFFFFF)
    yield "zip_without_pickle", zip_file(Entry("a/readme", b"hello"))
    yield "zip_two_pickles", zip_file(*WHOLE, Entry("b/data.pkl", GOOD))
    yield "zip_package", zip_file(Entry("a/.data/extern_modules"), Entry("a/m/m.pkl"))
    yield "zip_old_script", zip_file(Entry("a/model.json", b"{}"))
    yield "zip_byteorder", zip_file(*WHOLE, Entry("a/byteorder", b"middle"))
    yield "zip_missing_storage", zip_file(WHOLE[0])
    yield "zip_long_storage", zip_file(WHOLE[0], Entry("a/data/0", FLOATS + b"more"))
    yield "zip_short_storage", zip_file(WHOLE[0], Entry("a/data/0", FLOATS[:12]))
    constants = Entry("a/constants.pkl")
    script = [Entry("a/data.pkl", SCRIPT), WHOLE[1], constants]
    code = "a/code/__torch__.py"
    yield "script_bomb", zip_file(*script, packed(code, bytes(1 << 20)))
    yield (
        "script_damaged",
        zip_file(*script, Entry(code, b"\xff" * 9, method=8, size=50)),
    )
    yield "script_size", zip_file(*script, packed(code, b"class Net", size=2000))
    yield "script_no_module", zip_file(*script, Entry(code, b"x = 1\n"))

    # Pickles.
    yield "pickle_underflow", checkpoint(b"s")
    yield "pickle_pop_below_mark", checkpoint(b"K\x01(\x85")
    yield "pickle_unknown_opcode", checkpoint(b"\xf0")
    yield "pickle_protocol", checkpoint(b"\x80\x06")
    yield "pickle_memo", checkpoint(b"h\x07")
    yield "pickle_far_memo", checkpoint(b"Nr\xff\xff\xff\x7fj\xfe\xff\xff\x7f")
    yield "pickle_without_mark", checkpoint(b"t")
    yield "pickle_text", checkpoint(b"X\x02\x00\x00\x00\xc3\x28")
    yield "pickle_long_text", checkpoint(b"X\xff\xff\xff\xff")
    yield "pickle_long_bytes", checkpoint(b"\x8e" + b"\xff" * 7 + b"\x7f")
    steps = [text("x")] * 200 + [text("é"), text("last")]
    yield "pickle_long_path", checkpoint(*(b"}(" + step for step in steps), b"s")
    yield "pickle_frame", checkpoint(b"\x95" + b"\xff" * 8)
    yield "pickle_without_stop", zip_file(Entry("a/data.pkl", b"\x80\x02N"))
    yield "pickle_deep", checkpoint(b"]" * 1200 + b"a" * 1199)
    yield "pickle_module_in_itself", checkpoint(module_in_itself())
    yield "pickle_odd_items", checkpoint(b"}(K\x01u")
    yield "pickle_persistent_text", checkpoint(b"Pstorage\n")
    yield "pickle_persistent_number", checkpoint(b"K\x01Q")
    yield "pickle_buffer", checkpoint(b"\x97")
    yield "pickle_call_without_tuple", checkpoint(name("builtins", "set"), b"K\x01R")
    yield "pickle_state_of_number", checkpoint(b"K\x01}b")
    yield "pickle_append_to_number", checkpoint(b"K\x01K\x02a")
    yield "pickle_number", checkpoint(b"I12x\n")
    copies = b"".join(b"h\x00h\x01R0" for _ in range(4000))
    big = b"B" + struct.pack("<I", 16000) + bytes(16000)
    yield (
        "pickle_copies",
        checkpoint(
            name("builtins", "bytearray"), b"q\x00", big, b"\x85q\x01", copies, b"N"
        ),
    )
    yield "pickle_shared_modules", checkpoint(shared_modules(40))

    # Tensors.
    yield "view_behind_storage", checkpoint(tensor([5], [1]))
    yield "view_offset", checkpoint(tensor([2], [1], 3))
    yield "view_negative_offset", checkpoint(tensor([2], [1], -1))
    yield "view_negative_size", checkpoint(tensor([-2], [1]))
    yield "view_negative_stride", checkpoint(tensor([2], [-1]))
    yield "view_strides", checkpoint(tensor([2], [1, 1]))
    yield "view_overflow", checkpoint(tensor([2**40, 2**40], [0, 0]))
    yield "view_offset_overflow", checkpoint(tensor([2], [2**62], 2**62))
    yield "storage_huge", checkpoint(tensor([2], [1], memory=storage(numel=2**62)))
    yield "storage_negative", checkpoint(tensor([2], [1], memory=storage(numel=-1)))
    yield "storage_too_long", checkpoint(tensor([2], [1], memory=storage(numel=5)))
    yield "storage_other_size", checkpoint(many(storage(numel=4), storage(numel=9)))
    whole = longs([2], [1], 0, "0", 2)[:-1]
    whole = whole.replace(b"\x89", b"\x88", 1) + b"R"
    yield "gradient_of_integers", checkpoint(whole)
    yield "tensor_of_text", checkpoint(tensor([2], [1], memory=text("memory")))
    yield (
        "sparse_index",
        with_longs(
            sparse("sparse_coo", longs([1, 4], [4, 1]), tensor([4], [1]), ints(3))
        ),
    )
    yield (
        "sparse_rows",
        with_longs(
            sparse(
                "sparse_csr",
                longs([3], [1]),
                longs([4], [1]),
                tensor([4], [1]),
                ints(2, 4),
            ),
        ),
    )
    indices = longs([1, 2**40], [0, 0])
    expanded = sparse("sparse_coo", indices, tensor([2**40], [0]), ints(3))
    yield "sparse_expanded", with_longs(expanded)
    yield (
        "sparse_layout",
        with_longs(
            sparse(
                "strided",
                longs([3], [1]),
                longs([4], [1]),
                tensor([4], [1]),
                ints(2, 4),
            )
        ),
    )
    per_channel = name("torch", "per_channel_affine")
    doubles = tensor([2], [1])
    yield (
        "quantizer_axis",
        with_longs(quantized(per_channel, doubles, longs([2], [1]), number(7))),
    )
    yield (
        "quantizer_scales",
        with_longs(
            quantized(per_channel, tensor([3], [1]), longs([2], [1]), number(0))
        ),
    )
    scales = (per_channel, tensor([2**40], [0]), longs([2**40], [0]), number(0))
    expanded = quantized(*scales, sizes=(2**40,), strides=(0,))
    yield "quantizer_expanded", with_longs(expanded)
    yield (
        "quantizer_scheme",
        checkpoint(quantized(name("torch", "per_tensor_symmetric"))),
    )
    yield (
        "nested_outside",
        with_longs(
            call(
                name("torch._utils", "_rebuild_nested_tensor"),
                tensor([4], [1]),
                longs([2, 1], [1, 1], 1),
                longs([2, 1], [1, 1], 0),
                longs([2], [1], 2),
            )
        ),
    )
    yield (
        "nested_expanded",
        with_longs(
            call(
                name("torch._utils", "_rebuild_nested_tensor"),
                tensor([4], [1]),
                longs([2**40, 1], [0, 0]),
                longs([2**40, 1], [0, 0]),
                longs([2**40], [0]),
            )
        ),
    )
    yield "numpy_bytes", checkpoint(array([3], bytes(8)))
    yield "numpy_axes", checkpoint(frombuffer([2, 1], "K", [0, 0], bytes(8)))
    yield "numpy_overflow", checkpoint(array([2**32, 2**32], b""))

    # The older format.
    good = tensor([2], [1])
    yield "legacy_version", legacy(good, ["0"], stored(4, FLOATS), version=1002)
    yield "legacy_truncated", legacy(good, ["0"], stored(4, FLOATS[:10]))
    yield "legacy_count", legacy(good, ["0"], stored(3, FLOATS))
    yield (
        "legacy_huge",
        legacy(
            tensor([2], [1], memory=storage(numel=2**50)), ["0"], stored(2**50, FLOATS)
        ),
    )
    yield "legacy_unknown_key", legacy(good, ["9"], stored(4, FLOATS))
    yield "legacy_twice", legacy(good, ["0", "0"], stored(4, FLOATS), stored(4, FLOATS))
    yield "legacy_missing", legacy(good, [])
    view = many(text("1"), number(3), number(2))
    yield (
        "legacy_view",
        legacy(tensor([2], [1], memory=storage("FloatStorage", "0", 4, view)), ["0"]),
    )

    # safetensors.
    yield "safetensors_length", safetensors({}, length=2**26)
    yield "safetensors_no_json", safetensors(b'{"a": ')
    yield "safetensors_two_values", safetensors(b"{} {}")
    yield "safetensors_deep", safetensors(b'{"a":' * 5000)
    yield (
        "safetensors_overlap",
        safetensors({"a": floats(0, 4), "b": floats(2, 6)}, bytes(6)),
    )
    yield "safetensors_outside", safetensors({"a": floats(0, 4)}, bytes(3))
    for stem, end in ("huge", 2**62), ("largest", 2**64 - 1):
        yield (
            f"safetensors_{stem}_offset",
            safetensors({"a": floats(0, end, shape=[1])}, bytes(4)),
        )
    huge = floats(0, 2**64, shape=[1])
    yield "safetensors_huge_number", safetensors({"a": huge}, bytes(4))
    huge = floats(0, 4, shape=[2**63])
    yield "safetensors_huge_shape", safetensors({"a": huge}, bytes(4))
    yield "safetensors_reversed", safetensors({"a": floats(4, 0)}, bytes(4))
    yield "safetensors_gap", safetensors({"a": floats(4, 8)}, bytes(8))
    yield "safetensors_rest", safetensors({"a": floats(0, 4)}, bytes(5))
    one = json.dumps(floats(0, 4)).encode()
    yield (
        "safetensors_twice",
        safetensors(b'{"a":{"dtype":"F32",%b}' % one[1:], bytes(4)),
    )
    yield (
        "safetensors_twice_elsewhere",
        safetensors(
            b'{"a":%b,"a":%b}' % (one, json.dumps(floats(4, 8)).encode()), bytes(8)
        ),
    )
    yield (
        "safetensors_metadata_twice",
        safetensors(b'{"__metadata__":{},"__metadata__":{},"a":%b}' % one, bytes(4)),
    )
    yield "safetensors_zero_byte", safetensors(b'{"a":%b}\0' % one, bytes(4))
    yield (
        "safetensors_unknown_deep",
        safetensors(b'{"a":{"x":' + b"[" * 5000, bytes(4)),
    )
    yield "safetensors_negative", safetensors({"a": floats(0, 4, shape=[-1])}, bytes(4))
    yield "safetensors_shape", safetensors({"a": floats(0, 4, shape=[2])}, bytes(4))
    yield (
        "safetensors_overflow",
        safetensors({"a": floats(0, 4, shape=[2**40, 2**40])}, bytes(4)),
    )
    yield "safetensors_dtype", safetensors({"a": floats(0, 4, dtype="F5")}, bytes(4))
    yield "safetensors_missing", safetensors({"a": {"dtype": "F32"}})
    yield "safetensors_fraction", safetensors({"a": floats(0, 4.5)}, bytes(4))

    # Other files.
    yield "empty", b""
    yield "gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\3\3\0\0\0\0\0\0\0\0\0"
    npy = b"\x93NUMPY\x01\0\x0e\0{'shape': ()}\n"
    yield "npy", npy
    yield "npz", zip_file(Entry("a.npy", npy))
    yield "pickle_plain", pickle.dumps({"a": 1}, 2)
    yield "html", b"<!DOCTYPE html><html>404</html>"
    yield "tar", bytes(257) + b"ustar\x0000" + bytes(248)
    yield "lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"


def main():
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for stem, content in files():
        (FOLDER / stem).write_bytes(content)


if __name__ == "__main__":
    main()
