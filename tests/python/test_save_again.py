"""Files of Python's, read and written again in C++: not one byte differs."""

import argparse
import collections

import pytest
import torch
from programs import DATAPARALLEL, needs_dataparallel, run_program

pytestmark = [
    needs_dataparallel,
    # What torch says of its newer dtypes and layouts.
    pytest.mark.filterwarnings("ignore:.*(experimental|deprecated|prototype|beta)"),
    pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants"),
]


def trained_network():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 2), torch.nn.BatchNorm2d(2), torch.nn.Flatten()
    )
    optimizer = torch.optim.Adam(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(2):
        net(torch.rand(3, 1, 4, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "epoch": 2,
        "best": 0.25,
        "state_dict": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "args": argparse.Namespace(rate=0.1, layers=[1, 2], name="net"),
    }


def shared_tensors():
    base = torch.rand(6, 4)
    return [base, base.t(), base[1:3], base[:, ::2], {"again": base}, (base, base)]


def every_kind_of_value():
    text = "shared text"
    inner = [text, text]
    return {
        "numbers": [0, -1, 255, 2**16, 2**40, -(2**62), 1.5, True, None, 2j],
        "large": [2**63, -(2**63) - 1, 2**64, -(2**80), 2**2100, -(2**3000) + 7],
        "text": ["", "é", "x" * 300, text, "日本"],
        "bytes": [b"", b"a\xff", bytearray(b"x")],
        "sets": [{1}, frozenset("a"), slice(1, None)],
        "mappings": [
            collections.OrderedDict(a=1, b=[]),
            collections.defaultdict(list, {"k": [1]}),
            collections.Counter("aab"),
            {(1, 2): "tuple key", 3: "int key", None: "none key"},
            collections.defaultdict(int, {(1, 2): 3}),
            collections.defaultdict(None, {None: 3}),
            collections.Counter({(1, 2): 3}),
            collections.OrderedDict([((1, 2), 3)]),
        ],
        "torch": [
            torch.Size([1, 2]),
            torch.float16,
            torch.strided,
            torch.device("cuda:1"),
            torch.per_tensor_affine,
        ],
        "shared": [inner, inner, (inner,), ()],
        "long": list(range(1500)),
    }


def every_kind_of_tensor():
    eye = torch.eye(4)
    return [
        eye.to_sparse(),
        eye.to_sparse_csr(),
        torch.eye(3).to_sparse_csr().requires_grad_(),
        torch.quantize_per_tensor(eye, 0.5, 1, torch.quint8),
        torch.ones(2, 3, device="meta"),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.zeros(4, dtype=torch.uint16),
        eye.to(torch.float8_e4m3fn),
        torch.zeros(0, 3),
        torch.tensor(1.0, requires_grad=True),
        torch.ones(2, dtype=torch.float64)[1:],
        torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)]),
        torch.nested.nested_tensor([torch.ones(1)], dtype=torch.float16),
    ]


def every_kind_of_storage():
    floats, longs = torch.rand(5), torch.arange(3)
    untyped = torch.rand(3).untyped_storage()
    quantized = torch.quantize_per_tensor(floats, 0.5, 1, torch.qint32)
    return [
        *[untyped, untyped, torch.zeros(0).untyped_storage()],
        *[floats.storage(), floats[1:3], floats.storage(), {"long": longs.storage()}],
        quantized.storage(),
    ]


@pytest.mark.parametrize(
    "make",
    [
        trained_network,
        shared_tensors,
        every_kind_of_value,
        every_kind_of_tensor,
        every_kind_of_storage,
    ],
    ids=lambda make: make.__name__,
)
def test_a_file_of_pythons_comes_back_byte_for_byte(make, tmp_path):
    (tmp_path / "out").mkdir()
    path, out = tmp_path / "file.pt", tmp_path / "out/file.pt"
    # What is read from a file has told which of its texts are one object.
    torch.save(make(), path)
    torch.save(torch.load(path, weights_only=False), path)
    assert run_program(DATAPARALLEL, "convert", path, out).returncode == 0
    assert out.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.ones(2).to(torch.float8_e4m3fn),
        lambda: torch.ones(2, dtype=torch.complex32),
        lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        lambda: torch.ones(2, dtype=torch.bfloat16),
    ],
    ids=["sparse", "csr", "float8", "complex32", "float4", "bfloat16"],
)
def test_what_needs_a_gradient_still_does(make, tmp_path):
    path, out = tmp_path / "file.pt", tmp_path / "out.pt"
    weight = torch.nn.Parameter(make())
    torch.save({"a": weight, "b": weight}, path)
    assert run_program(DATAPARALLEL, "convert", path, out).returncode == 0
    again = torch.load(out, weights_only=True)
    assert again["a"].requires_grad
    assert again["a"] is again["b"]
    assert again["a"].dtype == weight.dtype
    assert again["a"].layout == weight.layout


def test_safetensors_of_every_dtype_are_the_reference_writers(tmp_path):
    from safetensors.torch import save_file

    path, out = tmp_path / "file.pt", tmp_path / "out.safetensors"
    bits = torch.arange(16, dtype=torch.uint8)
    names = "float4_e2m1fn_x2 float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    names += "float8_e5m2fnuz float8_e8m0fnu int16 bfloat16 float16 complex64 float64"
    values = {name: bits.clone().view(getattr(torch, name)) for name in names.split()}
    torch.save(values, path)
    save_file(values, tmp_path / "reference.safetensors")
    assert run_program(DATAPARALLEL, "convert", path, out).returncode == 0
    assert out.read_bytes() == (tmp_path / "reference.safetensors").read_bytes()
