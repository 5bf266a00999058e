"""Modules and comparisons that the tests of the wrapper share."""

import copy

import torch

DEVICES = {"cpu": ["cpu", "cpu"], "sim": ["sim:0", "sim:1", "sim:2"]}


class Net(torch.nn.Module):
    """A convolution, batch norm, a tie, a buffer, an unused and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(2, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(4)
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.unused = torch.nn.Linear(2, 2)
        self.frozen = torch.nn.Linear(4, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.nothing = None

    def forward(self, x, *, shift=0.0):
        y = torch.relu(self.norm(self.conv(x))).mean(-1)
        return self.frozen(self.second(torch.tanh(self.first(y)))) * self.scale + shift


def pair(module, device):
    """The module on `device`, and a copy on the CPU to compare with."""
    single = copy.deepcopy(module)
    return module.to(device), single


def assert_close(got, expected):
    tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(
        got.detach().cpu(), expected.detach().cpu(), rtol=tolerance, atol=tolerance
    )


def assert_same_gradients(module, single):
    for (name, ours), (_, theirs) in zip(
        module.named_parameters(), single.named_parameters(), strict=True
    ):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert_close(ours.grad, theirs.grad)
