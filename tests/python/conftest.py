"""What several of these files test with, and four simulated devices.

These must be there before the process's first backward.
"""

import dataparallel
import pytest
import torch

torch.set_num_threads(1)  # the machines that run this have few cores
dataparallel.simulated.start(devices=4)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


@pytest.fixture
def wrapped(net, tmp_path):
    """The path of a nested checkpoint, whose names begin with `module.`."""
    path = tmp_path / "wrapped.pth"
    state_dict = torch.nn.DataParallel(net).state_dict()
    torch.save({"epoch": 3, "model": {"net": state_dict}}, path)
    return path
