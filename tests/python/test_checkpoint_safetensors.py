"""The headers of safetensors files, read by the C++ reader and by the package."""

import json
import struct

import pytest
import safetensors
import torch
from checkpoint_oracle import error_of, inspect, load, needs_dump

pytestmark = needs_dump


def tensor(dtype="F32", shape=(1,), begin=0, end=4, **others):
    return json.dumps(
        {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **others}
    )


def fill(header, *tensors):
    """`header` with the tensors in the places of its #."""
    for one in tensors:
        header = header.replace("#", one, 1)
    return header


ONE = tensor()
NONE = tensor(shape=[0], end=0)

# Header, and the number of bytes behind it.
HEADERS = {
    "plain": (fill('{"a":#}', ONE), 4),
    "empty": ("{}", 0),
    "empty with bytes": ("{}", 4),
    "spaces before": (fill('  {"a":#}', ONE), 4),
    "lines before": (fill('\n\r\t{"a":#}', ONE), 4),
    "spaces behind": (fill('{"a":#} \n\t ', ONE), 4),
    "zero bytes behind": (fill('{"a":#}\0\0', ONE), 4),
    "text behind": (fill('{"a":#}x', ONE), 4),
    "a byte order mark": (fill('\ufeff{"a":#}', ONE), 4),
    "two values": (fill('{"a":#}{}', ONE), 4),
    "a comment": (fill('{"a":# /* */}', ONE), 4),
    "a comma too many": (fill('{"a":#,}', ONE), 4),
    "a list": ("[]", 0),
    "null": ("null", 0),
    "a tensor twice": (fill('{"a":#,"a":#}', ONE, ONE), 4),
    "twice, elsewhere": (fill('{"a":#,"a":#}', ONE, tensor(begin=4, end=8)), 8),
    "twice, then right": (fill('{"a":#,"a":#}', tensor(shape=[9]), ONE), 4),
    "twice, then wrong": (fill('{"a":#,"a":#}', ONE, tensor(shape=[9])), 4),
    "metadata": (fill('{"__metadata__":{"x":"1","y":"2"},"a":#}', ONE), 4),
    "metadata behind": (fill('{"a":#,"__metadata__":{"x":"1"}}', ONE), 4),
    "metadata twice": (fill('{"__metadata__":{},"__metadata__":{},"a":#}', ONE), 4),
    "metadata of a name twice": (
        fill('{"__metadata__":{"x":"1","x":"2"},"a":#}', ONE),
        4,
    ),
    "metadata null": (fill('{"__metadata__":null,"a":#}', ONE), 4),
    "metadata null in it": (fill('{"__metadata__":{"x":null},"a":#}', ONE), 4),
    "metadata a number": (fill('{"__metadata__":{"x":1},"a":#}', ONE), 4),
    "metadata nested": (fill('{"__metadata__":{"x":{}},"a":#}', ONE), 4),
    "metadata a list": (fill('{"__metadata__":[],"a":#}', ONE), 4),
    "metadata like a tensor": (fill('{"__metadata__":#}', ONE), 4),
    "metadata escaped": (fill('{"__metadata\\u005f_":{"x":"1"},"a":#}', ONE), 4),
    "an unknown field": (fill('{"a":#}', tensor(x=1)), 4),
    "unknown fields of all kinds": (
        fill('{"a":#}', tensor(x=[1, -1, 0.5, None, True, "t", {"y": [[]]}], y={})),
        4,
    ),
    "an unknown field twice": (fill('{"a":{"x":1,"x":[],#}', ONE[1:]), 4),
    "an unknown field deep": (
        fill('{"a":{"x":#,#}', "[" * 100 + "]" * 100, ONE[1:]),
        4,
    ),
    "too deep": (fill('{"a":{"x":#,#}', "[" * 200 + "]" * 200, ONE[1:]), 4),
    "a field twice": (fill('{"a":{"dtype":"F32",#}', ONE[1:]), 4),
    "a field escaped": (fill('{"a":#}', ONE.replace("dtype", "\\u0064type")), 4),
    "a field missing": ('{"a":{"shape":[1],"data_offsets":[0,4]}}', 4),
    "a tensor as a number": ('{"a":5}', 4),
    "a tensor as null": ('{"a":null}', 4),
    "dtype in small letters": (fill('{"a":#}', tensor("f32")), 4),
    "dtype a list": (fill('{"a":#}', tensor(["F32"])), 4),
    "shape null": (fill('{"a":#}', ONE.replace("[1]", "null")), 4),
    "shape a mapping": (fill('{"a":#}', ONE.replace("[1]", "{}")), 4),
    "shape with a fraction": (fill('{"a":#}', tensor(shape=[1.0])), 4),
    "shape with an exponent": (fill('{"a":#}', ONE.replace("[1]", "[1e0]")), 4),
    "shape negative": (fill('{"a":#}', tensor(shape=[-1])), 4),
    "shape minus zero": (fill('{"a":#}', NONE.replace("[0]", "[-0]")), 0),
    "shape beyond 64 bits": (fill('{"a":#}', tensor(shape=[0, 2**70], end=0)), 0),
    "shape nested": (fill('{"a":#}', tensor(shape=[[1]])), 4),
    "shape of an object": (fill('{"a":#}', tensor(shape=[{}])), 4),
    "three offsets": (fill('{"a":#}', ONE.replace("[0, 4]", "[0, 4, 4]")), 4),
    "one offset": (fill('{"a":#}', ONE.replace("[0, 4]", "[0]")), 4),
    "no scalar": (fill('{"a":#}', tensor(shape=[])), 4),
    "overlapping": (fill('{"a":#,"b":#}', ONE, ONE), 4),
    "a gap": (fill('{"a":#,"b":#}', ONE, tensor(begin=8, end=12)), 12),
    "a gap before": (fill('{"a":#}', tensor(begin=4, end=8)), 8),
    "bytes behind": (fill('{"a":#}', ONE), 5),
    "too few bytes": (fill('{"a":#}', ONE), 3),
    "another size": (fill('{"a":#}', tensor(shape=[2])), 4),
    "empty tensors": (
        fill('{"a":#,"b":#,"c":#}', NONE, ONE, tensor(shape=[0], begin=4)),
        4,
    ),
    "an empty tensor inside": (
        fill('{"a":#,"b":#}', tensor(shape=[2], end=8), tensor(shape=[0], begin=4)),
        8,
    ),
    "not aligned": (
        fill('{"a":#,"b":#}', tensor("U8", end=1), tensor(begin=1, end=5)),
        5,
    ),
    "a pair of surrogates": (fill('{"\\ud83d\\ude00":#}', ONE), 4),
    "half a pair": (fill('{"\\ud800":#}', ONE), 4),
    "a zero byte in a name": (fill('{"a\\u0000b":#}', ONE), 4),
    "a control character in a name": (fill('{"a\x01":#}', ONE), 4),
    "an empty name": (fill('{"":#}', ONE), 4),
    "a name that is not UTF-8": (b'{"\xff":' + ONE.encode() + b"}", 4),
}


def expected_of(path):
    """What the package reads; None where it refuses the file."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return tensors, file.metadata() or {}
    except safetensors.SafetensorError:
        return None


@pytest.mark.parametrize("name", HEADERS)
def test_headers_are_taken_and_refused_as_by_the_package(name, tmp_path):
    header, count = HEADERS[name]
    header = header if isinstance(header, bytes) else header.encode()
    path = tmp_path / "x.safetensors"
    content = bytes(range(1, count + 1))
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)
    expected = expected_of(path)
    if expected is None:
        assert error_of(path)
        return
    tensors, metadata = expected
    loaded = load(path)
    assert sorted(key for key, _ in loaded.value["items"]) == sorted(tensors)
    for key, value in loaded.value["items"]:
        assert value["shape"] == list(tensors[key].shape)
        assert loaded.bytes_of(value) == tensors[key].numpy().tobytes()
    assert inspect(path)["metadata"] == metadata


def test_what_the_package_writes_is_read(tmp_path):
    from safetensors.torch import save_file

    value = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(3)}
    save_file(value, tmp_path / "x.safetensors", {"format": "pt"})
    loaded = load(tmp_path / "x.safetensors")
    assert dict(loaded.value["items"]).keys() == value.keys()
    assert inspect(tmp_path / "x.safetensors")["metadata"] == {"format": "pt"}
