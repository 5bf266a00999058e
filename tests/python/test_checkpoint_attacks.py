"""Files that were made to do harm, each in its own way."""

import random
import struct

import pytest
import torch
from checkpoint_oracle import error_of, load, needs_dump
from test_checkpoint_pickle import checkpoint

pytestmark = needs_dump

# What c10's hash table multiplies hashes with, modulo 2**64.
FIBONACCI = 11400714819323198485


def crowding_keys(count):
    """Integers that all have their place at the table's beginning."""
    inverse = pow(FIBONACCI, -1, 2**64)
    keys = [inverse * i % 2**64 for i in range(1, count + 1)]
    return [key - 2**64 if key >= 2**63 else key for key in keys]


@pytest.mark.parametrize("zip_format", [True, False])
@pytest.mark.parametrize("count", [24, 100])
def test_keys_that_crowd_in_a_hash_table_do_not_take_all_memory(
    count, zip_format, tmp_path
):
    value = dict.fromkeys(crowding_keys(count), 0)
    path = tmp_path / "crowd.pt"
    torch.save(value, path, _use_new_zipfile_serialization=zip_format)
    assert "more memory than a file of its size can need" in error_of(path)


@pytest.mark.parametrize("step", [1, 7, 2**10, 2**32, 2**44, -(2**50)])
def test_numbers_in_steps_and_at_random_do_not_crowd(step, tmp_path):
    keys = [i * step for i in range(5000)]
    if step == 7:
        keys = [random.Random(i).getrandbits(62) for i in range(5000)]
    keys = [key for key in keys if -(2**63) <= key < 2**63]
    path = tmp_path / "steps.pt"
    torch.save(dict.fromkeys(keys, 0), path)
    assert [key for key, _ in load(path).value["items"]] == keys


def test_a_zip_file_shorter_than_its_64_bit_directory(tmp_path):
    path = tmp_path / "short.pt"
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, 0x7FFF00000000, 1)
    end = b"PK\x05\x06" + struct.pack(
        "<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0
    )
    path.write_bytes(b"PK\x03\x04" + locator + end)
    assert "the 64-bit zip directory lies outside the file" in error_of(path)


@pytest.mark.parametrize("name", ["dtype", "layout", "memory_format", "qscheme"])
def test_a_class_of_constants_is_not_called(name, tmp_path):
    """torch.load does not either; and a name is no place for a pickle."""
    text = "float32\n0cos\nsystem\n(S'true'\ntR0S'x'"
    data = b"\x80\x02ctorch\n" + name.encode() + b"\nX"
    data += struct.pack("<I", len(text)) + text.encode() + b"\x85R."
    path = checkpoint(tmp_path / "called.pt", data)
    assert f"torch.{name} is called" in error_of(path)


@pytest.mark.parametrize("kind", [b"set", b"frozenset"])
def test_what_is_equal_in_python_is_once_in_a_set(kind, tmp_path):
    """{1, True, 1.0} is {1}; the elements come in a list or one by one."""
    elements = b"(K\x01\x88G" + struct.pack(">d", 1.0) + b"K\x02I02\n"
    elements += b"X\x01\x00\x00\x00aX\x01\x00\x00\x00a"
    data = b"\x80\x02c__builtin__\n" + kind + b"\n]" + elements + b"e\x85R."
    loaded = load(checkpoint(tmp_path / "called.pt", data))
    assert loaded.value["elements"] == [1, 2, "a"]
    build = b"\x8f" + elements + b"\x90" if kind == b"set" else elements + b"\x91"
    loaded = load(checkpoint(tmp_path / "built.pt", b"\x80\x04" + build + b"."))
    assert loaded.value["elements"] == [1, 2, "a"]


def test_byte_strings_of_lengths_and_numbers_are_as_in_python(tmp_path):
    data = b"\x80\x02]("
    data += b"c__builtin__\nbytearray\n]K\x01aK\xffa\x85R"  # bytearray([1, 255])
    data = data.replace(b"]K\x01aK\xffa", b"](K\x01K\xffe")
    data += b"c__builtin__\nbytearray\nK\x03\x85Re."
    loaded = load(checkpoint(tmp_path / "bytes.pt", data))
    assert [entry["opaque"] for entry in loaded.value["list"]] == [
        "builtins.bytearray"
    ] * 2
    huge = b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\xff\xff\xff\xff\xff\x00\x85R."
    path = checkpoint(tmp_path / "huge.pt", huge)
    assert "more memory than a file of its size can need" in error_of(path)


@pytest.mark.parametrize("number", [1, -1, 127, -128, 2**62, -(2**63)])
def test_integers_with_their_sign_repeated_are_integers(number, tmp_path):
    digits = number.to_bytes(12, "little", signed=True)
    data = b"\x80\x02\x8a\x0c" + digits + b"."
    assert load(checkpoint(tmp_path / "long.pt", data)).value == number
