"""Whole training scripts give the same losses with and without the wrapper."""

import copy

import dataparallel
import pytest
import torch
from support_modules import DEVICES
from torch.nn.functional import cross_entropy

STEPS = 6


class Convolutions(torch.nn.Module):
    """Batch norm takes its statistics of each chunk, so it is in eval mode."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Linear(4 * 36, 5)

    def forward(self, images):
        self.norm.eval()
        return self.head(torch.relu(self.norm(self.conv(images))).flatten(1))

    @staticmethod
    def batch():
        return torch.rand(7, 1, 8, 8), torch.randint(5, (7,))


class Tagger(torch.nn.Module):
    """An LSTM over tokens; the last state decides."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.rnn = torch.nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0][:, -1])

    @staticmethod
    def batch():
        return torch.randint(20, (7, 6)), torch.randint(5, (7,))


class Transformer(torch.nn.Module):
    """An encoder whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))

    @staticmethod
    def batch():
        return torch.randint(20, (7, 6)), torch.randint(20, (7,))


def train(module, batches, amp):
    device = next(module.parameters()).device
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            output = module(inputs.to(device))
            loss = cross_entropy(output.float(), targets.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("devices", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("kind", [Convolutions, Tagger, Transformer])
def test_losses_are_the_same_with_and_without_the_wrapper(devices, kind):
    torch.manual_seed(0)
    net = kind().to(devices[0])
    batches = [kind.batch() for _ in range(STEPS)]
    amp = kind is Transformer
    without = train(copy.deepcopy(net), batches, amp)
    losses = train(dataparallel.DataParallel(net, devices), batches, amp)
    assert losses == pytest.approx(without, rel=2e-2 if amp else 1e-4)
    assert len(set(losses)) == STEPS
