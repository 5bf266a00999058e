"""Every opcode of every protocol, in files put together by hand."""

import collections
import io
import pickle
import pickletools
import struct
import zipfile

import numpy
import pytest
import torch
from checkpoint_oracle import error_of, load, needs_dump
from test_checkpoint_load import plain_values

pytestmark = needs_dump

# The opcodes seen in the files of this test.
SEEN = set()


def checkpoint(path, data, storages=()):
    """A zip file with that pickle."""
    SEEN.update(opcode.name for opcode, _, _ in pickletools.genops(data))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", data)
        for key, content in storages:
            file.writestr(f"a/data/{key}", content)
    return path


def plain_python_values():
    """Those that pickle can write by itself, by all protocols."""
    values = plain_values()
    # torch's constants have no form in the older protocols outside torch.save.
    for name in ("dtypes", "layouts", "schemes", "ordered"):
        del values[name]
    return values


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("pickler", [pickle.dumps, pickle._dumps])
def test_all_protocols_of_both_picklers_are_read(protocol, pickler, tmp_path):
    value = plain_python_values()
    data = pickler(value, protocol)
    path = checkpoint(tmp_path / "plain.pt", data)
    load(path).assert_equals(pickle.loads(data))


LONG_TEXT = "é" * 10

BY_HAND = {
    "a string of Python 2": b"S'it\\'s\\n\\x41\\101'\n.",
    "a string of Python 2 in double quotes": b'S"it\'s"\n.',
    "binary strings of Python 2": b"(U\x03abcT\x03\x00\x00\x00defl.",
    "text with escapes": b"V\\u65e5\xe9 \\U0001f389\n.",
    "numbers in lines": b"(I01\nI00\nI-12\nL-7L\nL7\nF1.5\nF-inf\nl.",
    "a large number in a line": b"L1234567890123456789012345L\n.",
    "long numbers": b"(\x8a\x00\x8a\x01\xff\x8b\x02\x00\x00\x00\x00\x80l.",
    "long texts": b"\x8d" + struct.pack("<Q", 20) + LONG_TEXT.encode() + b".",
    "long bytes": b"\x8e" + struct.pack("<Q", 3) + b"abc.",
    "bytes that can change": b"\x96" + struct.pack("<Q", 3) + b"abc.",
    "tuples": b"(K\x01K\x02tK\x02\x86.",
    "values dropped": b"K\x01K\x020.",
    "a value twice": b"K\x012\x86.",
    "values dropped to a mark": b"K\x01(K\x02K\x031.",
    "a mark dropped": b"K\x01(0.",
    "a list at once": b"(K\x01K\x02l.",
    "a dictionary at once": b"(K\x01K\x02Vx\nNd.",
    "memo by lines": b"Vx\np7\n0g7\n.",
    "memo by four bytes": b"Vx\nr\x00\x01\x00\x000j\x00\x01\x00\x00.",
    "memo in any order": b"Vx\nq\x05Vy\nq\x02\x86h\x05\x86h\x02\x86.",
    "an instance of Python 2": b"(icollections\nOrderedDict\n.",
    "an object of Python 2": b"(ccollections\nOrderedDict\no.",
    "an object with keywords": b"ccollections\nOrderedDict\n)}\x92.",
    "a set": b"\x8f(K\x01K\x02\x90.",
    "a frozen set": b"(K\x01K\x02\x91.",
    "a class by texts": b"\x8c\x0bcollections\x8c\x0bOrderedDict\x93)R.",
    "a frame": b"\x80\x04\x95" + struct.pack("<Q", 3) + b"K\x01.",
}


ONE, TWO, NEGATIVE_ZERO, TWO_TO_64 = (
    b"G" + struct.pack(">d", value) for value in (1.0, 2.0, -0.0, 2.0**64)
)
COMPLEX_ONE = b"c__builtin__\ncomplex\n" + ONE + b"K\x00\x86R"
NAN = b"G" + struct.pack(">d", float("nan"))

# Python's pickler never gives one key twice.
EQUAL_KEYS = {
    "a number and a truth": b"K\x01Va\n\x88Vb\n",
    "a truth and numbers": b"\x88Va\nK\x01Vb\n" + ONE + b"Vc\n",
    "numbers of all kinds": COMPLEX_ONE + b"Va\n\x88Vb\nK\x02Vc\n" + TWO + b"Vd\n",
    "zeros": NEGATIVE_ZERO + b"Va\nK\x00Vb\n\x89Vc\n",
    "numbers that no double is": b"L9223372036854775807L\nVa\n"
    + (b"G" + struct.pack(">d", 2.0**63) + b"Vb\n"),
    "texts": b"Vx\nVa\nVx\nVb\n",
    "no numbers": NAN + b"Va\n" + NAN + b"Vb\n",
    "none": b"NVa\nNVb\nK\x01Vc\n\x88Vd\nVx\nVe\nVx\nVf\n",
    "tuples": b"K\x01Va\n)Vb\nK\x01K\x02\x86Vc\n\x88" + TWO + b"\x86Vd\n)Ve\n",
    "tuples that differ": b"K\x01Vb\n\x86Va\nVb\nK\x01\x86Vb\nK\x01K\x01\x85\x86Vc\n",
    "large numbers": b"L18446744073709551616L\nVa\n" + TWO_TO_64 + b"Vb\n",
    "byte strings": b"C\x01xVa\nVx\nVb\nC\x01xVc\n",
    "constants": b"ctorch\nint8\nVa\nctorch\nint8\nVb\nctorch\nint16\nVc\n",
}


@pytest.mark.parametrize("name", EQUAL_KEYS)
@pytest.mark.parametrize("kind", [b"}", b"ccollections\nOrderedDict\n)R"])
def test_a_key_given_twice_is_one_as_in_python(name, kind, tmp_path):
    data = kind + b"(" + EQUAL_KEYS[name] + b"u."
    load(checkpoint(tmp_path / "x.pt", data)).assert_equals(pickle.loads(data))


@pytest.mark.parametrize("name", BY_HAND)
def test_opcodes_put_together_by_hand(name, tmp_path):
    data = BY_HAND[name]
    load(checkpoint(tmp_path / "x.pt", data)).assert_equals(pickle.loads(data))


def test_a_class_by_its_number_is_a_reference_that_can_be_listed(tmp_path):
    data = b"(\x82\x05\x83\x00\x01\x84\x00\x00\x01\x00l."
    loaded = load(checkpoint(tmp_path / "extension.pt", data))
    assert [name for _, name in loaded.unknown] == [
        "copyreg.extension_5",
        "copyreg.extension_256",
        "copyreg.extension_65536",
    ]


def test_bytes_of_python_2_that_are_no_text_become_latin_1(tmp_path):
    data = b"U\x03a\xe9\xff."
    loaded = load(checkpoint(tmp_path / "latin1.pt", data))
    assert loaded.value == "aéÿ"


def test_numpy_arrays_of_python_2_are_read(tmp_path):
    """Their elements are a byte string, UTF-8 or not."""
    for array in (numpy.float64([1.5, -2]), numpy.uint8([65, 66]), numpy.int8([-1])):
        code = array.dtype.str[1:].encode()
        raw = array.tobytes()
        data = (
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
            + b"K\x00\x85U\x01b\x87R(K\x01K"
            + bytes([len(array)])
            + b"\x85cnumpy\ndtype\nU\x02"
            + code
            + b"K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xff"
            + b"J\xff\xff\xff\xffK\x00tb\x89U"
            + bytes([len(raw)])
            + raw
            + b"tb."
        )
        path = checkpoint(tmp_path / "numpy.pt", data)
        expected = pickle.loads(data, encoding="latin1")
        assert (expected == array).all()
        load(path).assert_equals(expected)


def storage_id(kind, key, numel):
    return (
        b"(X\x07\x00\x00\x00storagectorch\n"
        + kind
        + b"\nX\x01\x00\x00\x00"
        + key
        + b"X\x03\x00\x00\x00cpu"
        + b"K"
        + bytes([numel])
        + b"tQ"
    )


def test_tensors_of_torch_before_0_4_are_read(tmp_path):
    """A tensor whose state follows, and a parameter made of it."""
    tensor = (
        b"ctorch\nFloatTensor\n)\x81q\x00("
        + storage_id(b"FloatStorage", b"0", 4)
        + b"K\x01K\x02\x85K\x01\x85tbq\x01"
    )
    parameter = b"ctorch.nn.parameter\nParameter\nh\x00\x85R(\x89\x89Ntb"
    variable = b"ctorch.autograd.variable\nVariable\nh\x00\x85R(\x88\x89Ntb"
    data = b"\x80\x02(" + tensor + parameter + variable + b"h\x00t."
    floats = torch.arange(4.0)
    path = checkpoint(tmp_path / "old.pt", data, [("0", floats.numpy().tobytes())])
    first = floats[1:3]
    expected = (
        first,
        first.detach(),
        torch.nn.Parameter(first),
        first,
    )
    load(path).assert_equals(expected)


def test_a_view_of_a_storage_in_an_old_file_shares_it(tmp_path):
    """Files of torch before 0.4 say that a storage is a part of another."""
    buffer = io.BytesIO()
    base = torch.arange(6.0)
    torch.save([base, base[2:4]], buffer, _use_new_zipfile_serialization=False)
    data = buffer.getvalue()
    key = str(base.untyped_storage()._cdata).encode()
    # The second tensor: a view from element 2 on, of 4 elements, of which it
    # has the first two.
    second = data.rindex(b"cpu") if data.count(b"cpu") > 1 else None
    assert key in data and (second is None or second > 0)
    view = b"X\x01\x00\x00\x00vK\x02K\x04\x87"
    start = data.index(b"Q", data.index(b"Q") + 1)
    head, tail = data[:start], data[start:]
    assert head.endswith(b"t") or head.endswith(b"q" + head[-1:])
    marker = head.rindex(b"N")
    changed = (
        head[:marker]
        + view
        + head[marker + 1 :]
        + tail.replace(b"K\x02K", b"K\x00K", 1)
    )
    (tmp_path / "view.pt").write_bytes(changed)
    expected = torch.load(tmp_path / "view.pt", weights_only=False)
    assert expected[1].tolist() == [2, 3]
    loaded = load(tmp_path / "view.pt")
    first, other = loaded.value["list"]
    assert first["storage"] == other["storage"]
    assert other["offset"] == 2
    assert loaded.bytes_of(other) == struct.pack("<2f", 2, 3)


def test_storages_themselves_are_opaque_with_their_elements(tmp_path):
    torch.save(torch.arange(3).untyped_storage(), tmp_path / "storage.pt")
    loaded = load(tmp_path / "storage.pt")
    assert not loaded.unknown
    assert loaded.value["opaque"] == "torch.storage.UntypedStorage"
    assert loaded.value["args"][0]["shape"] == [24]


def test_a_dictionary_that_becomes_opaque_stays_one_object(tmp_path):
    """Its first key can be hashed in C++, a later one cannot."""
    shared = {"a": 1, (1, 2): 2}
    value = [shared, collections.OrderedDict(shared), shared]
    torch.save(value, tmp_path / "shared.pt")
    loaded = load(tmp_path / "shared.pt")
    loaded.assert_equals(value)


def test_objects_outside_the_file_are_an_error(tmp_path):
    assert "outside" in error_of(checkpoint(tmp_path / "p.pt", b"Pname\n."))
    assert "buffer" in error_of(checkpoint(tmp_path / "b.pt", b"\x97\x98."))


def test_every_opcode_was_in_one_of_these_files():
    """Runs last: the tests above fill the set."""
    everything = {opcode.name for opcode in pickletools.opcodes}
    if not SEEN & {"PERSID"}:
        pytest.skip("the other tests of this file did not run")
    assert not everything - SEEN
