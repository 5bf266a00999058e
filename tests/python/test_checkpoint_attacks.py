"""Files that were made to do harm, each in its own way."""

import os
import random
import struct
import subprocess
import sys
import zipfile

import pytest
import torch
from checkpoint_oracle import error_of, load, needs_dump
from programs import DATAPARALLEL, needs_dataparallel, run, run_json
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


MEASURE = """
import resource, subprocess, sys
with open(sys.argv[1], "w") as output:
    subprocess.run(sys.argv[2:], stdout=output, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss, used.ru_utime)
"""


def measured(*arguments, output):
    """The peak in KiB and the seconds of `dataparallel`.

    Measured by a small process: a peak begins with that of who starts it.
    """
    command = [sys.executable, "-c", MEASURE, output, DATAPARALLEL, *arguments]
    peak, seconds = subprocess.check_output(command, text=True).split()
    return int(peak), float(seconds)


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value


def deep(levels, key_bytes):
    """A tensor in each of many mappings, one in the other, with long keys."""
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\n"
        b"X\1\0\0\0000X\3\0\0\0cpuK\1tQK\0))\x89ccollections\nOrderedDict\n)RtR"
    )
    level = b"}(" + text(b"t") + tensor
    keys = [text(b"k" * key_bytes + str(i).encode()) for i in range(levels)]
    opened = b"".join(level + key for key in keys)
    return b"\x80\x02" + opened + b"K\x01" + b"u" * levels


@needs_dataparallel
@pytest.mark.parametrize("command", ["inspect", "convert", "diff"])
def test_long_keys_one_in_the_other_do_not_take_memory(command, tmp_path):
    path = tmp_path / "deep.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", deep(900, 10_000) + b".")
        file.writestr("a/version", "3\n")
        file.writestr("a/data/0", b"\0" * 4)
    other = {"inspect": [], "convert": [tmp_path / "out.pt"], "diff": [path]}[command]
    peak_kib, _ = measured(command, path, *other, output=tmp_path / "out.txt")
    assert peak_kib < 1_500_000  # torch alone takes 480,000
    assert (tmp_path / "out.txt").stat().st_size < 2_000_000


@needs_dataparallel
def test_a_key_that_holds_itself_many_times_is_compared_at_once(tmp_path):
    data = b"\x80\x02}K\x01\x85" + b"2\x86" * 45 + b"K\x01s."
    path = checkpoint(tmp_path / "shared.pt", data)
    assert "the same" in run("diff", path, path)
    other = checkpoint(tmp_path / "other.pt", data.replace(b"K\x01\x85", b"K\x02\x85"))
    found = run_json("diff", path, other, code=1)["differences"]
    assert [difference["different"] for difference in found] == [["key"], ["key"]]


@needs_dataparallel
@pytest.mark.parametrize("kind", [b"set", b"frozenset"])
def test_what_holds_itself_many_times_is_written_again_at_once(kind, tmp_path):
    shared = b")" + b"2\x86" * 60
    data = (
        b"\x80\x02}" + shared + b"c__builtin__\n" + kind + b"\n]" + shared + b"a\x85Rs."
    )
    path = checkpoint(tmp_path / "shared.pt", data)
    run("convert", path, tmp_path / "out.pt")
    assert "the same" in run("diff", path, tmp_path / "out.pt")


@needs_dataparallel
@pytest.mark.parametrize("command", ["inspect", "convert", "diff"])
@pytest.mark.parametrize("place", ["key", "set"])
def test_a_long_text_held_many_times_is_looked_at_once(place, command, tmp_path):
    held = b"(" + text(b"x" * 1_000_000) + b"q\x050" + b"h\x05" * 20_000 + b"t"
    data = b"\x80\x02}" + held + b"Ns."
    if place == "set":
        data = b"\x80\x02c__builtin__\nset\n]" + held + b"a\x85R."
    path = checkpoint(tmp_path / "held.pt", data)
    other = {"inspect": [], "convert": [tmp_path / "out.pt"], "diff": [path]}[command]
    peak_kib, seconds = measured(command, path, *other, output=os.devnull)
    assert peak_kib < 1_500_000 and seconds < 30


@needs_dataparallel
def test_one_element_many_times_is_compared_and_converted_once(tmp_path):
    value = {"x": torch.zeros(1).expand(3 * 10**10), ("k", torch.ones(1)): 1}
    torch.save(value, tmp_path / "expanded.pt")
    torch.save({**value, "x": torch.ones(1).expand(3 * 10**10)}, tmp_path / "other.pt")
    paths = tmp_path / "expanded.pt", tmp_path / "other.pt"
    assert "the same" in run("diff", paths[0], paths[0])
    (found,) = run_json("diff", *paths, code=1)["differences"]
    assert found["different_elements"] == 3 * 10**10 and found["max_difference"] == 1
    torch.save({"x": value["x"]}, paths[0])
    run("convert", paths[0], tmp_path / "half.pt", "--dtype", "bfloat16")


@needs_dataparallel
def test_what_is_no_checkpoint_and_has_no_end_is_not_read_to_it():
    error = run("inspect", "/dev/zero", code=3)
    assert "is no checkpoint: it begins with" in error


def test_a_namespace_that_is_filled_twice_keeps_both(tmp_path):
    data = b"\x80\x02cargparse\nNamespace\n)\x81}" + text(b"a") + b"K\x01sb}"
    data += text(b"b") + b"K\x02sb."
    loaded = load(checkpoint(tmp_path / "twice.pt", data))
    assert loaded.value["state"]["items"] == [["a", 1], ["b", 2]]


def test_a_torch_export_archive_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "net.pt2", "w") as file:
        file.writestr("net/archive_format", "pt2")
        file.writestr("net/models/model.json", "{}")
    assert "is a torch.export archive (.pt2)" in error_of(tmp_path / "net.pt2")


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
