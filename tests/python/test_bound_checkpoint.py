"""`load`, `save` and their like from Python, with torch.load as the oracle."""

import argparse
import collections
import io
import pathlib
import threading
import warnings

import dataparallel
import numpy
import pytest
import torch


def everything():
    shared = torch.arange(6.0)
    ordered = collections.OrderedDict(b=torch.ones(2), a=shared)
    ordered._metadata = {"": {"version": 1}}
    counts = collections.defaultdict(int, {"x": 1})
    text = ["one", "list"]
    return {
        "tensor": shared,
        "view": shared[2:5],
        "transposed": shared.view(2, 3).t(),
        "grad": torch.ones(2, requires_grad=True),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "meta": torch.empty(2, 3, device="meta"),
        "ordered": ordered,
        "counts": counts,
        "counter": collections.Counter("aab"),
        "numbers": [1, -(2**62), 2**80, -(2**3000), 1.5, float("inf"), 2 + 3j],
        "constants": (None, True, False, ()),
        "texts": [text, text, "ä", ""],
        "bytes": [b"\x00\xff", bytearray(b"ab")],
        "sets": [{1, 2}, frozenset({"a"})],
        "slice": slice(1, None, 2),
        "torch": [torch.float16, torch.device("cuda:1"), torch.Size([2, 3])],
        "namespace": argparse.Namespace(lr=0.1, names=["a"]),
        "keys": {1: "int", (1, 2): "tuple", 0.5: "float"},
    }


def assert_same(got, expected):
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert got.stride() == expected.stride() and got.device == expected.device
        assert got.requires_grad == expected.requires_grad
        assert expected.is_meta or torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
        assert_same(
            getattr(got, "_metadata", None), getattr(expected, "_metadata", None)
        )
        if isinstance(expected, collections.defaultdict):
            assert got.default_factory is expected.default_factory
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, argparse.Namespace):
        assert_same(vars(got), vars(expected))
    else:
        assert got == expected


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.pt"


@pytest.mark.parametrize("zip_format", [True, False])
def test_load_gives_what_torch_load_gives(path, zip_format):
    torch.save(everything(), path, _use_new_zipfile_serialization=zip_format)
    expected = torch.load(path, weights_only=False)
    got = dataparallel.load(path)
    assert_same(got, expected)
    assert got["texts"][0] is got["texts"][1]
    assert got["view"].untyped_storage().data_ptr() == got["tensor"].data_ptr()


def test_torch_load_gives_what_save_wrote(path):
    value = everything()
    dataparallel.save(value, path)
    got = torch.load(path, weights_only=False)
    assert_same(got, value)
    assert got["texts"][0] is got["texts"][1]
    assert got["view"].untyped_storage().data_ptr() == got["tensor"].data_ptr()


def test_save_writes_the_bytes_of_torch_save(tmp_path):
    value = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    ours, theirs = tmp_path / "a" / "m.pt", tmp_path / "b" / "m.pt"
    for file in (ours, theirs):
        file.parent.mkdir()
    dataparallel.save(value.state_dict(), ours)
    torch.save(value.state_dict(), theirs)
    sizes = {len(ours.read_bytes()), len(theirs.read_bytes())}
    assert max(sizes) - min(sizes) < 200  # torch's own record of the data's id
    assert_same(torch.load(ours, weights_only=True), value.state_dict())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_come_as_storages(path):
    torch.save([torch.ones(2).untyped_storage(), torch.FloatStorage([1, 2])], path)
    untyped, typed = dataparallel.load(path)
    assert type(untyped) is torch.UntypedStorage and untyped.nbytes() == 8
    assert type(typed) is torch.storage.TypedStorage
    assert typed.dtype is torch.float32 and typed.tolist() == [1, 2]
    dataparallel.save([untyped], path)
    assert torch.load(path, weights_only=False)[0].nbytes() == 8


def test_parameters_and_numpy_values_come_as_tensors_and_numbers(path):
    torch.save(
        [torch.nn.Parameter(torch.ones(2)), numpy.float64(2), numpy.arange(3)], path
    )
    parameter, number, array = dataparallel.load(path)
    assert type(parameter) is torch.Tensor and parameter.requires_grad
    assert type(number) is float and number == 2
    assert torch.equal(array, torch.arange(3))
    dataparallel.save({"best": numpy.float32(0.5), "n": numpy.int64(3)}, path)
    assert torch.load(path, weights_only=True) == {"best": 0.5, "n": 3}


class Config:
    def __init__(self):
        self.width = 3


def test_objects_of_unknown_classes_come_opaque_and_are_listed(path):
    torch.save({"config": Config(), "w": torch.ones(1)}, path)
    got = dataparallel.load(path)
    assert isinstance(got["config"], dataparallel.Opaque)
    assert got["config"].class_name.endswith("Config")
    assert got["config"].state == {"width": 3}
    (entry,) = dataparallel.opaque_entries(got)
    assert entry.path == "['config']" and entry.class_name == got["config"].class_name
    info = dataparallel.inspect(path)
    assert info.unknown_classes == [entry.class_name]


def test_save_names_what_it_cannot_write_and_leaves_the_file(path):
    path.write_text("before")
    with pytest.raises(
        ValueError, match=r"unknown classes.*\n +\['a'\]\[1\]: .*Config"
    ):
        dataparallel.save({"a": [1, Config()]}, path)
    loop = []
    loop.append({"again": loop})
    with pytest.raises(ValueError, match=r"save: obj\[0\]\['again'\] contains itself"):
        dataparallel.save(loop, path)
    with pytest.raises(TypeError, match="save: path is 3, expected a path"):
        dataparallel.save({}, 3)
    assert path.read_text() == "before"


def test_load_reads_open_files_and_any_kind_of_path(path):
    torch.save({"a": 1}, path)
    for source in (path, str(path), io.BytesIO(path.read_bytes()), path.open("rb")):
        assert dataparallel.load(source) == {"a": 1}
        if hasattr(source, "close"):
            source.close()
    with (
        path.open(encoding="latin-1") as text,
        pytest.raises(TypeError, match="as text"),
    ):
        dataparallel.load(text)
    with pytest.raises(TypeError, match="source is .*expected a path or a file"):
        dataparallel.load(path.read_bytes())


def tagged(path, tag="cuda:7"):
    """A checkpoint that was saved on a device that is not here."""
    torch.save({"w": torch.arange(4.0)}, path)
    data = path.read_bytes()
    # Both are short texts of the pickle: a length, and that many bytes.
    old, new = b"X\x03\x00\x00\x00cpu", b"X" + bytes([len(tag), 0, 0, 0]) + tag.encode()
    import zipfile

    with (
        zipfile.ZipFile(path) as source,
        zipfile.ZipFile(path.with_suffix(".new"), "w") as to,
    ):
        for item in source.infolist():
            content = source.read(item)
            to.writestr(item.filename, content.replace(old, new))
    path.with_suffix(".new").replace(path)
    assert new in data.replace(old, new)
    return path


@pytest.mark.parametrize(
    "map_location",
    [
        "cpu",
        torch.device("cpu"),
        {"cuda:7": "cpu"},
        {"cuda:7": torch.device("cpu")},
        lambda storage, tag: storage,
        lambda storage, tag: storage.cpu() if tag == "cuda:7" else None,
        lambda storage, tag: "cpu",
    ],
)
def test_map_location_takes_what_torch_load_takes(path, map_location):
    got = dataparallel.load(tagged(path), map_location)
    assert got["w"].device.type == "cpu" and got["w"].tolist() == [0, 1, 2, 3]


def test_map_location_reaches_simulated_devices(path):
    for map_location in (
        "sim:2",
        {"cuda:7": "sim:2"},
        lambda s, tag: torch.device("sim:2"),
    ):
        got = dataparallel.load(tagged(path), map_location)
        assert got["w"].device == torch.device("sim:2")
        assert got["w"].cpu().tolist() == [0, 1, 2, 3]
    torch.save(got, path)
    assert dataparallel.load(path)["w"].device == torch.device("sim:2")


def test_a_missing_device_is_one_error_that_says_what_to_pass(path):
    with pytest.raises(
        dataparallel.CheckpointError, match=r'tagged "cuda:7".*not there.*map_location'
    ) as error:
        dataparallel.load(tagged(path))
    assert error.value.file == str(path)
    with pytest.raises(dataparallel.CheckpointError, match=r"maps to sim:9"):
        dataparallel.load(path, "sim:9")


def test_what_a_map_location_raises_arrives_as_it_is(path):
    problem = KeyError("mine")

    def fail(storage, tag):
        raise problem

    with pytest.raises(KeyError, match="mine") as error:
        dataparallel.load(tagged(path), fail)
    assert error.value is problem
    with pytest.raises(TypeError, match="map_location returned 3, expected a storage"):
        dataparallel.load(path, lambda storage, tag: 3)
    with pytest.raises(TypeError, match="map_location is 3, expected a torch.device"):
        dataparallel.load(path, 3)


def test_a_damaged_file_is_a_checkpoint_error_with_file_and_place(path):
    torch.save({"w": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(dataparallel.CheckpointError) as error:
        dataparallel.load(path)
    assert isinstance(error.value, RuntimeError)
    assert error.value.file == str(path)
    assert "C++" not in str(error.value) and "\n#" not in str(error.value)
    with pytest.raises(dataparallel.CheckpointError, match="nowhere.pt"):
        dataparallel.load(path.with_name("nowhere.pt"))


def test_inspect_lists_tensors_without_their_devices(path):
    info = dataparallel.inspect(tagged(path))
    assert info.kind == "zip" and info.unknown_classes == []
    (tensor,) = info.tensors
    assert (tensor.key, tensor.dtype, tensor.shape) == (
        "w",
        torch.float32,
        torch.Size([4]),
    )
    assert (tensor.device, tensor.nbytes, tensor.requires_grad) == ("cuda:7", 16, False)


def test_safetensors_are_written_and_read(tmp_path):
    path = tmp_path / "m.safetensors"
    weights = {"w": torch.rand(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    dataparallel.save_safetensors(weights, path, metadata={"format": "pt"})
    got = dataparallel.load(path)
    assert {k: v.tolist() for k, v in got.items()} == {
        k: v.tolist() for k, v in weights.items()
    }
    assert dataparallel.inspect(path).metadata == {"format": "pt"}
    shared = {"a": weights["w"], "b": weights["w"]}
    with pytest.raises(ValueError, match="share"):
        dataparallel.save_safetensors(shared, path)
    dataparallel.save_safetensors(shared, path, copy_shared=True)


def test_prefixes_come_and_go_with_the_metadata():
    wrapped = torch.nn.DataParallel(torch.nn.Linear(2, 1)).state_dict()
    plain = torch.nn.Linear(2, 1).state_dict()
    stripped = dataparallel.strip_prefix(wrapped)
    assert list(stripped) == list(plain)
    assert stripped._metadata == plain._metadata
    assert stripped["weight"] is wrapped["module.weight"]
    again = dataparallel.add_prefix(stripped)
    assert list(again) == list(wrapped) and again._metadata == wrapped._metadata
    assert list(wrapped) == ["module.weight", "module.bias"]
    with pytest.raises(ValueError, match="'w'"):
        dataparallel.strip_prefix({"module.w": 1, "w": 2})
    with pytest.raises(TypeError, match="expected a mapping"):
        dataparallel.strip_prefix([1])


def test_find_state_dict_finds_it_and_keeps_foreign_objects():
    weights = torch.nn.Linear(2, 1).state_dict()
    found = dataparallel.find_state_dict(
        {"epoch": 1, "config": Config(), "net": weights}
    )
    assert list(found) == ["weight", "bias"] and found["bias"] is weights["bias"]
    with pytest.raises(dataparallel.CheckpointError):
        dataparallel.find_state_dict({"epoch": 1})
    extra = Config()
    assert (
        dataparallel.strip_prefix({"module._extra_state": extra})["_extra_state"]
        is extra
    )


def two_nets():
    make = lambda: torch.nn.Sequential(  # noqa: E731
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )
    return make(), make()


def test_load_state_dict_writes_as_torch_does():
    source, target = two_nets()
    source.double()
    source[1].num_batches_tracked += 3
    parameters = list(target.parameters())
    result = dataparallel.load_state_dict(target, source.state_dict())
    assert result.loaded_keys == list(source.state_dict())
    assert result.converted_keys and not result.missing_keys
    for key, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], value.to(target.state_dict()[key]))
    assert all(a is b for a, b in zip(parameters, target.parameters(), strict=True))


@pytest.mark.parametrize("strict", [True, False])
def test_load_state_dict_has_the_errors_of_torch_and_changes_nothing(strict):
    source, target = two_nets()
    weights = source.state_dict()
    weights["2.weight"] = torch.ones(3, 3)
    weights["other"] = torch.ones(1)
    del weights["0.bias"]
    before = {k: v.clone() for k, v in target.state_dict().items()}
    with pytest.raises(RuntimeError) as theirs:
        two_nets()[0].load_state_dict(weights, strict)
    with pytest.raises(dataparallel.LoadStateDictError) as ours:
        dataparallel.load_state_dict(target, weights, strict)
    assert str(ours.value) == str(theirs.value)
    assert ours.value.keys.mismatched_keys == ["2.weight"]
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())


def test_load_state_dict_not_strict_tells_what_is_left():
    source, target = two_nets()
    weights = source.state_dict()
    del weights["0.bias"]
    weights["other"] = torch.ones(1)
    result = dataparallel.load_state_dict(target, weights, strict=False)
    assert result.missing_keys == ["0.bias"] and result.unexpected_keys == ["other"]
    assert "missing_keys=['0.bias']" in repr(result)


def test_load_state_dict_renames_assigns_and_takes_script_modules():
    source, target = two_nets()
    weights = dataparallel.add_prefix(source.state_dict(), "net.")
    rename = lambda name: name.removeprefix("net.")  # noqa: E731
    dataparallel.load_state_dict(target, weights, assign=True, rename=rename)
    assert target[0].weight.data_ptr() == source[0].weight.data_ptr()
    with pytest.raises(ZeroDivisionError):
        dataparallel.load_state_dict(target, weights, rename=lambda name: 1 // 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(two_nets()[0])
    dataparallel.load_state_dict(script, source.state_dict())
    assert torch.equal(script.state_dict()["0.weight"], source[0].weight)


class Loads(torch.nn.Linear):
    def _load_from_state_dict(self, *args):
        raise AssertionError


def test_load_state_dict_refuses_modules_that_load_by_their_own_code():
    net = torch.nn.Sequential(Loads(2, 2))
    with pytest.raises(TypeError, match=r"module\.0 \(Loads\) overrides _load_from"):
        dataparallel.load_state_dict(net, net.state_dict())
    with pytest.raises(TypeError, match="module is 3, expected a torch.nn.Module"):
        dataparallel.load_state_dict(3, {})
    lazy = torch.nn.LazyLinear(2)
    with pytest.raises(TypeError, match="has a hook|overrides"):
        dataparallel.load_state_dict(lazy, {})


def test_load_state_dict_leaves_non_persistent_buffers_alone():
    net = torch.nn.Linear(1, 1)
    net.register_buffer("scratch", torch.ones(1), persistent=False)
    net.register_buffer("kept", torch.ones(1))
    net.register_parameter("none", None)
    result = dataparallel.load_state_dict(net, net.state_dict())
    assert result.loaded_keys == ["weight", "bias", "kept"]


def test_other_threads_run_while_a_file_is_read_and_written(tmp_path):
    path = tmp_path / "large.pt"
    value = {str(i): torch.ones(100_000) for i in range(30)}
    for call in (
        lambda: dataparallel.save(value, path),
        lambda: dataparallel.load(path),
    ):
        counted, done = 0, threading.Event()

        def work(call=call, done=done):
            for _ in range(3):
                call()
            done.set()

        worker = threading.Thread(target=work)
        worker.start()
        while not done.wait(0.0005):
            counted += 1
        worker.join()
        assert counted > 0


def test_the_data_of_the_repository_reads():
    folder = pathlib.Path(__file__).parents[1] / "data" / "checkpoints"
    read = [dataparallel.load(file, "cpu") for file in sorted(folder.glob("*.pt"))]
    assert all(value is not None for value in read)
