"""The loss in the replicas, and modules of TorchScript."""

import warnings

import dataparallel
import pytest
import torch
from support_modules import DEVICES, Net, assert_close, assert_same_gradients, pair
from torch.nn.functional import cross_entropy, mse_loss

devices = pytest.mark.parametrize("devices", DEVICES.values(), ids=DEVICES)


def ignoring(output, target):
    kept = (target >= 0).sum()
    loss = cross_entropy(output, target, ignore_index=-1, reduction="sum")
    return loss / kept.clamp(min=1), kept


@devices
@pytest.mark.parametrize("call", ["loss", "forward_backward"])
@pytest.mark.parametrize("own_weights", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_loss_and_gradients_are_those_of_the_whole_batch(
    devices, call, own_weights, size
):
    torch.manual_seed(size)
    net, single = pair(Net().double().eval(), devices[0])
    model = dataparallel.DataParallel(net, devices)
    x = torch.rand(size, 2, 5, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    target = torch.randint(3, (size,))
    target[1::3] = -1 if own_weights else 0
    loss_fn = ignoring if own_weights else cross_entropy
    expected = (
        ignoring(single(y), target)[0] if own_weights else loss_fn(single(y), target)
    )
    expected.backward()
    loss = getattr(model, call)(loss_fn, x, target)
    assert_close(loss, expected)
    if call == "loss":
        loss.backward()
    assert not loss.requires_grad or call == "loss"
    assert_same_gradients(net, single)
    assert_close(x.grad, y.grad)


@devices
def test_training_with_forward_backward_is_the_same_on_every_run(devices):
    def run():
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        ).to(devices[0])
        model = dataparallel.DataParallel(net, devices)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            x = torch.rand(9, 3)
            losses.append(
                model.forward_backward(mse_loss, (x,), x.sum(1, keepdim=True)).item()
            )
            optimizer.step()
        return losses

    first = run()
    assert run() == first and first[-1] < first[0]


def test_wrong_losses_are_named():
    model = dataparallel.DataParallel(torch.nn.Linear(1, 1), ["cpu", "cpu"])
    x = torch.ones(4, 1)
    for call in (model.loss, model.forward_backward):
        with pytest.raises(ValueError, match="expected a floating-point scalar"):
            call(lambda output, target: output, x, x)
        with pytest.raises(TypeError, match="loss_fn: returned a float, expected"):
            call(lambda output, target: 1.0, x, x)
        with pytest.raises(ZeroDivisionError):
            call(lambda output, target: 1 // 0, x, x)
    with torch.no_grad(), pytest.raises(RuntimeError, match="switched off"):
        model.forward_backward(mse_loss, x, x)
    assert model.module.weight.grad is None
    model.forward_backward(mse_loss, x, x)
    assert model.module.weight.grad is not None


@devices
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_modules_are_replicated(devices, inside):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)
            self.tables = [torch.ones(2), torch.zeros(2)]

        def forward(self, x):
            y = self.layer(x) + self.tables[0] + self.tables[1]
            return y * 2 if self.training else y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(Scaled().double())
    net = (
        torch.nn.Sequential(script, torch.nn.Linear(2, 2).double())
        if inside
        else script
    )
    if devices[0] != "cpu":
        script.tables = [t.to(devices[0]) for t in script.tables]
    net = net.to(devices[0])
    model = dataparallel.DataParallel(net, devices)
    x = torch.rand(7, 3, dtype=torch.float64)
    for training in (True, False):
        model.train(training)
        expected = net(x.to(devices[0]))
        expected.sum().backward()
        gradients = [p.grad.clone() for p in net.parameters()]
        model.zero_grad()
        output = model(x)
        assert_close(output, expected)
        output.sum().backward()
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            assert_close(parameter.grad, gradient)
        model.zero_grad()
