"""Makes the replicas for one forward, against torch.nn.parallel.replicate.

The competitor's copies are left out: its broadcast is replaced by one that hands
out the tensors themselves. Ours are two CPU replicas, whose parameters share
memory and whose buffers are copied, which counts.

    python benchmarks/python/replicate_bench.py
"""

import statistics
import sys
import time

import dataparallel
import torch
from dataparallel import _C
from torch.nn.parallel import replicate as torch_replicate

PAIRS = 31


def network(blocks: int) -> torch.nn.Module:
    """Of 3 * blocks + 3 modules."""
    body = [
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        for _ in range(blocks)
    ]
    return torch.nn.Sequential(torch.nn.Sequential(*body), torch.nn.Linear(2, 2))


def hand_out(tensors, devices, detach=False):
    """Stands for torch's broadcast, which needs CUDA."""
    return [list(tensors) for _ in devices]


def seconds(call) -> float:
    """Of the quickest of three calls."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def compare(net: torch.nn.Module) -> None:
    """Print one line."""
    replicas = _C.Replicas("benchmark")
    cpus = [torch.device("cpu")] * 2

    def ours():
        replicas.replicate(net, cpus, [0, 1], itself=True, detach=False)

    def theirs():
        torch_replicate(net, [0, 1])

    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(PAIRS)]
    ratios = statistics.quantiles([b / a for a, b in pairs], n=4)
    print(
        f"{len(list(net.modules()))} modules: ours "
        f"{statistics.median(a for a, _ in pairs) * 1e3:.3g} ms, torch.nn.parallel "
        f"{statistics.median(b for _, b in pairs) * 1e3:.3g} ms, ratio "
        f"{ratios[1]:.3g} [{ratios[0]:.3g} .. {ratios[2]:.3g}]"
    )


def main() -> None:
    """Compare on a middle and a large network."""
    torch.set_num_threads(1)
    print(f"dataparallel {dataparallel.__version__}, torch {torch.__version__}")
    sys.modules["torch.nn.parallel.replicate"]._broadcast_coalesced_reshape = hand_out
    for blocks in (50, 300):
        compare(network(blocks))


if __name__ == "__main__":
    main()
