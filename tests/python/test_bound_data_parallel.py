"""`DataParallel` for Python modules, against one module with the whole batch."""

import copy
import dataclasses
import functools
import gc
import inspect
import io
import signal
import threading
import time
import types

import dataparallel
import pytest
import torch
from dataparallel import simulated
from support_modules import DEVICES, Net, assert_close, assert_same_gradients, pair

devices = pytest.mark.parametrize("devices", DEVICES.values(), ids=DEVICES)


@pytest.fixture(autouse=True)
def no_races():
    simulated.clear_races()
    yield
    assert simulated.races() == []


class Looks(torch.nn.Module):
    """Calls `see(self, x)` in forward; a parameter makes it a real module."""

    def __init__(self, see):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.see = see

    def forward(self, x, *args, **kwargs):
        self.see(self, x, *args, **kwargs)
        return x * self.weight


@pytest.mark.parametrize("name", ["replicate", "parallel_apply", "data_parallel"])
def test_signatures_are_those_of_torch(name):
    ours = inspect.signature(getattr(dataparallel, name))
    theirs = inspect.signature(getattr(torch.nn.parallel, name))
    assert [(p.name, p.default) for p in ours.parameters.values()] == [
        (p.name, p.default) for p in theirs.parameters.values()
    ]


def test_the_class_takes_what_torch_takes_in_its_order():
    ours = list(inspect.signature(dataparallel.DataParallel).parameters.values())
    theirs = list(inspect.signature(torch.nn.DataParallel).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [
        (p.name, p.default) for p in theirs
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


@devices
@pytest.mark.parametrize("size", [2, 3, 7, 12])
def test_outputs_and_gradients_are_those_of_one_module(devices, size):
    torch.manual_seed(size)
    net, single = pair(Net().double().eval(), devices[0])
    model = dataparallel.DataParallel(net, devices)
    x = torch.rand(size, 2, 5, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    output = model(x, shift=1.5)
    expected = single(y, shift=1.5)
    assert_close(output, expected)
    assert str(output.device) == devices[0]
    output.square().sum().backward()
    expected.square().sum().backward()
    assert_same_gradients(net, single)
    assert_close(x.grad, y.grad)
    assert net.unused.weight.grad is None and net.frozen.weight.grad is None


@devices
@pytest.mark.parametrize("size", [0, 1])
def test_small_batches_work(devices, size):
    net, single = pair(torch.nn.Linear(3, 2).double(), devices[0])
    model = dataparallel.DataParallel(net, devices)
    x = torch.rand(size, 3, dtype=torch.float64)
    output = model(x)
    assert_close(output, single(x))
    output.sum().backward()
    single(x).sum().backward()
    assert_same_gradients(net, single)


@devices
def test_training_follows_one_module_step_by_step(devices):
    torch.manual_seed(0)
    layers = (torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    net, single = pair(torch.nn.Sequential(*layers).double(), devices[0])
    model = dataparallel.DataParallel(net, devices)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, single)]
    for step in range(4):
        x = torch.rand(5 + step, 4, dtype=torch.float64)
        for module, optimizer in zip((model, single), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        for ours, theirs in zip(net.parameters(), single.parameters(), strict=True):
            assert_close(ours, theirs)


@devices
def test_batch_norm_keeps_the_first_chunks_statistics(devices):
    net, single = pair(torch.nn.BatchNorm1d(3).double(), devices[0])
    model = dataparallel.DataParallel(net, devices)
    x = torch.rand(6, 3, dtype=torch.float64)
    model(x)
    single(dataparallel.scatter(x, ["cpu"] * len(devices))[0])
    assert net.num_batches_tracked.item() == 1
    assert_close(net.running_mean, single.running_mean)
    assert_close(net.running_var, single.running_var)
    model.eval()
    assert_close(model(x), single.eval()(x))
    assert net.num_batches_tracked.item() == 1


@devices
def test_what_changes_between_forwards_is_followed(devices):
    def change_weight(net):
        with torch.no_grad():
            net[0].weight.mul_(2)

    def change_data(net):
        net[0].weight.data.add_(1)

    def change_plain_member(net):
        net[1].negative_slope = 0.5

    def replace_layer(net):
        net[0] = torch.nn.Linear(3, 2, dtype=torch.float64).to(net[2].weight.device)

    def replace_parameter(net):
        net[0].bias = torch.nn.Parameter(torch.zeros_like(net[0].bias))

    def add_layer(net):
        net.append(torch.nn.Tanh())

    def load(net):
        net.load_state_dict({k: v * 3 for k, v in net.state_dict().items()})

    net = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.LeakyReLU(), torch.nn.Linear(2, 2)
    )
    net = net.double().to(devices[0])
    model = dataparallel.DataParallel(net, devices)
    x = torch.randn(7, 3, dtype=torch.float64)
    changes = (
        change_weight,
        change_data,
        change_plain_member,
        replace_layer,
        replace_parameter,
        add_layer,
        load,
    )
    for change in (*changes, lambda net: net.float(), lambda net: net.double()):
        model(x.to(net[0].weight.dtype))
        change(net)
        single = copy.deepcopy(net).cpu()
        now = x.to(net[0].weight.dtype)
        assert_close(model(now), single(now))
        model.zero_grad()
        model(now).sum().backward()
        single(now).sum().backward()
        assert_same_gradients(net, single)


@devices
def test_modes_and_requires_grad_are_followed(devices):
    seen = []
    net = torch.nn.Sequential(Looks(lambda m, x: seen.append(m)), torch.nn.Dropout())
    model = dataparallel.DataParallel(net.to(devices[0]), devices)
    for training in (True, False):
        for requires_grad in (True, False):
            seen.clear()
            model.train(training)
            net[0].weight.requires_grad_(requires_grad)
            output = model(torch.ones(6, 1))
            assert [m.training for m in seen] == [training] * len(devices)
            assert [m.weight.requires_grad for m in seen] == [requires_grad] * len(
                devices
            )
            assert output.requires_grad == requires_grad


@devices
def test_inside_a_replica_everything_is_listed_and_lies_on_its_device(devices):
    seen = []

    def see(module, x):
        assert next(module.parameters()).device == x.device
        seen.append(
            {
                n: (t.device, t.dtype)
                for n, t in [*module.named_parameters(), *module.named_buffers()]
            }
        )
        assert len(module.items) == 2 and len(module.table) == 1
        for parameter in [*module.items, module.items[1], module.table["a"]]:
            assert parameter.device == x.device
        assert dataparallel.current_replica() is not None
        assert x.device.type == "cpu" or (
            torch.accelerator.current_device_index() == x.device.index
        )

    net = Looks(see)
    net.items = torch.nn.ParameterList([torch.ones(1), torch.zeros(2)])
    net.table = torch.nn.ParameterDict({"a": torch.ones(1, dtype=torch.float64)})
    net.register_buffer("buffer", torch.ones(2, dtype=torch.int32))
    net.to(devices[0])
    dataparallel.DataParallel(net, devices)(torch.ones(6, 1))
    names = [n for n, _ in [*net.named_parameters(), *net.named_buffers()]]
    assert len(seen) == len(devices) and dataparallel.current_replica() is None
    for replica in seen:
        assert list(replica) == names
        assert len({str(device) for device, _ in replica.values()}) == 1
    assert {str(next(iter(r.values()))[0]) for r in seen} == set(devices)


@devices
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
@pytest.mark.parametrize("training", [True, False])
def test_recurrent_layers_work_without_warnings(devices, kind, training):
    class Tagger(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(3, 4, num_layers=2, batch_first=True)

        def forward(self, x):
            self.rnn.flatten_parameters()
            assert self.rnn._flat_weights[0] is self.rnn.weight_ih_l0
            assert self.rnn.weight_ih_l0.device == x.device
            return self.rnn(x)[0]

    net, single = pair(Tagger().double().train(training), devices[0])
    model = dataparallel.DataParallel(net, devices)
    x = torch.rand(5, 6, 3, dtype=torch.float64)
    for _ in range(2):
        assert_close(model(x), single(x))
        with torch.no_grad():
            assert_close(model(x), single(x))
    model(x).sum().backward()
    single(x).sum().backward()
    assert_same_gradients(net, single)


@devices
def test_hooks_run_once_a_replica_on_its_tensors(devices):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2)).to(devices[0])
    model = dataparallel.DataParallel(net, devices)
    calls, backward, gradients = [], [], []

    def hook(module, args, output):
        assert module.weight.device == args[0].device == output.device
        calls.append((id(module), str(output.device)))

    handle = net[0].register_forward_hook(hook)
    full = net[0].register_full_backward_hook(lambda m, i, o: backward.append(m))
    net[0].weight.register_hook(gradients.append)
    x = torch.ones(6, 2, requires_grad=True)
    model(x).sum().backward()
    assert sorted(device for _, device in calls) == sorted(devices)
    assert len({module for module, _ in calls}) == len(devices)
    assert len(backward) == len(devices)
    assert len(gradients) == 1 and gradients[0].cpu().tolist() == [[6, 6], [6, 6]]
    handle.remove()
    full.remove()
    calls.clear()
    model(x)
    assert calls == []


def test_hooks_added_in_a_replica_stay_there():
    net = Looks(lambda m, x: m.register_forward_hook(lambda *a: None))
    replica = dataparallel.replicate(net, ["cpu", "cpu"])[1]
    replica(torch.ones(1))
    assert len(replica._forward_hooks) == 1 and len(net._forward_hooks) == 0


@devices
def test_a_replaced_forward_works_on_its_own_replica(devices):
    def bound(self, x):
        return torch.nn.functional.linear(x, self.weight) * 2

    def closing_over(net):
        original = net.forward

        @functools.wraps(original)
        def forward(x):
            return original(x) * 3

        return forward

    def take_module(module, x):
        return module.weight.sum() + x

    for make in (
        lambda net: types.MethodType(bound, net),
        closing_over,
        lambda net: functools.partial(take_module, net),
    ):
        net = torch.nn.Linear(2, 2).double().to(devices[0])
        net.forward = make(net)
        x = torch.rand(6, 2, dtype=torch.float64)
        expected = net(x.to(devices[0]))
        assert_close(dataparallel.DataParallel(net, devices)(x), expected)


@devices
def test_autocast_and_grad_mode_reach_all_replicas(devices):
    kind = torch.device(devices[0]).type
    seen = []

    def see(module, x):
        seen.append(
            (
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
                torch.is_autocast_cache_enabled(),
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
            )
        )

    net = torch.nn.Sequential(Looks(see), torch.nn.Linear(1, 1)).to(devices[0])
    model = dataparallel.DataParallel(net, devices)
    x = torch.ones(6, 1)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(kind, dtype, cache_enabled=False), torch.no_grad():
            output = model(x)
        assert output.dtype == dtype and not output.requires_grad
        assert seen == [(True, dtype, False, False, False)] * len(devices)
        seen.clear()
    with torch.inference_mode():
        assert model(x).is_inference()
    assert all(state[4] for state in seen)
    seen.clear()
    assert model(x).requires_grad
    assert {state[0] for state in seen} == {False}


@devices
def test_second_derivatives_are_those_of_one_module(devices):
    layers = (torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    net, single = pair(torch.nn.Sequential(*layers).double(), devices[0])
    model = dataparallel.DataParallel(net, devices)
    data = torch.rand(5, 3, dtype=torch.float64)
    for module in (model, single):
        x = data.clone().requires_grad_()
        (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        (grad.norm(dim=1) - 1).square().sum().backward()
    assert_same_gradients(net, single)


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extra: dict


@devices
def test_any_arguments_and_results_pass(devices):
    class Model(torch.nn.Module):
        def forward(self, x, table, words, *, mask=None, batch=None, flag=True):
            assert flag and table.shape == (7, 2) and len(words) == len(x)
            assert mask is None and batch["y"].shape == x.shape
            loss = (x + batch["y"]).sum()
            return Result(x * 2, {"words": len(words), "loss": loss, "none": None})

    model = dataparallel.DataParallel(
        Model(),
        devices,
        inputs={1: dataparallel.copy(), 2: dataparallel.split_by_sample()},
    )
    x = torch.rand(5, 3)
    words = ["a", "b", "c", "d", "e"]
    result = model(x, torch.rand(7, 2), words, batch={"y": x})
    assert type(result) is Result
    assert_close(result.logits, x * 2)
    assert sum(result.extra["words"]) == 5 and result.extra["none"] is None
    assert result.extra["loss"].shape == (len(devices),)
    by_name = dataparallel.DataParallel(
        Looks(lambda m, x, table=None: len(table) == 7 or 1 / 0).to(devices[0]),
        devices,
        inputs={"table": dataparallel.copy()},
    )
    by_name(x, table=torch.rand(7))


def test_shares_dimensions_and_an_output_device():
    sizes = {}

    def see(module, x):
        sizes[dataparallel.current_replica()] = x.shape[1]

    model = dataparallel.DataParallel(
        Looks(see), ["cpu"] * 3, "sim:3", 1, chunk_shares=[3, 0.001, 1], output_dims=[1]
    )
    x = torch.rand(2, 8)
    output = model(x)
    assert sizes == {0: 6, 2: 2}
    assert output.device == torch.device("sim:3") and torch.equal(output.cpu(), x)


@devices
def test_an_exception_arrives_as_the_same_object_with_a_note(devices):
    problem = KeyError("mine")
    failing = True

    def fail(module, x):
        if failing and dataparallel.current_replica() == 1:
            raise problem

    model = dataparallel.DataParallel(Looks(fail).to(devices[0]), devices)
    with pytest.raises(KeyError) as error:
        model(torch.ones(6, 1))
    assert error.value is problem
    assert error.value.__notes__ == [f"replica 1 on {devices[1]}"]
    assert any(entry.name == "fail" for entry in error.traceback)
    failing = False
    assert model(torch.ones(6, 1)).shape == (6, 1)  # works as before


def test_wrong_arguments_are_named():
    net = torch.nn.Linear(1, 1)
    make = dataparallel.DataParallel
    with pytest.raises(TypeError, match="module is 3, expected a torch.nn.Module"):
        make(3)
    with pytest.raises(ValueError, match=r"device_ids\[1\] is sim:9, but there are 4"):
        make(net, [0, 9])
    with pytest.raises(ValueError, match="output_device is sim:9"):
        make(net, ["cpu"], 9)
    with pytest.raises(
        ValueError, match="chunk_shares has 1 entries, expected one for"
    ):
        make(net, ["cpu", "cpu"], chunk_shares=[1])
    with pytest.raises(TypeError, match=r"inputs has 0: 'copy', expected a position"):
        make(net, ["cpu", "cpu"], inputs={0: "copy"})
    with pytest.raises(TypeError, match="output_dims has 'a', expected numbers"):
        make(net, ["cpu", "cpu"], output_dims=["a"])
    with pytest.raises(ValueError, match="module.0 is data-parallel itself"):
        make(torch.nn.Sequential(make(net, ["cpu", "cpu"])), ["cpu", "cpu"])
    model = make(Looks(lambda m, x, y: None), ["cpu", "cpu"])
    with pytest.raises(
        ValueError, match=r"inputs\[1\] has 3 samples, but inputs\[0\] has 4"
    ):
        model(torch.ones(4), torch.ones(3))
    with pytest.raises(RuntimeError) as ours:
        make(net, [0, 1])(torch.ones(2, 1))
    assert str(ours.value).startswith(
        "module must have its parameters and buffers on device sim:0 (device_ids[0]) "
        "but found one of them on device: cpu"
    )


def test_compiled_modules_are_refused_with_the_reason():
    net = torch.nn.Sequential(torch.nn.Linear(1, 1))
    net[0]._compiled_call_impl = lambda *args: None  # as Module.compile() sets it
    model = dataparallel.DataParallel(net, ["cpu", "cpu"])
    with pytest.raises(TypeError, match=r"module\.0 is compiled by torch\.compile"):
        model(torch.ones(2, 1))
    with pytest.raises(TypeError, match="module is compiled by torch.compile"):
        dataparallel.DataParallel(net[0], ["cpu", "cpu"])


def test_it_is_a_module_like_torchs():
    net = Net()
    model = dataparallel.DataParallel(net, ["cpu", "cpu"])
    assert isinstance(model, torch.nn.Module) and model.module is net
    assert list(model.state_dict()) == [f"module.{k}" for k in net.state_dict()]
    assert [p is q for p, q in zip(model.parameters(), net.parameters(), strict=True)]
    model.eval()
    assert not net.conv.training
    missing = "'DataParallel' object has no attribute 'fc', nor has the Net that it"
    with pytest.raises(AttributeError, match=missing):
        model.fc  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"the Net that it wraps .* \.module\.conv"
    ):
        model.conv  # noqa: B018
    torchs = torch.nn.DataParallel(copy.deepcopy(net).to("sim:0"))
    torchs.load_state_dict(model.state_dict())
    ours = dataparallel.DataParallel(copy.deepcopy(net).to("sim:0"))
    for name in ("device_ids", "output_device", "dim", "src_device_obj"):
        assert getattr(ours, name) == getattr(torchs, name), name
    x = torch.rand(3, 2, 4)
    before = model(x)
    for again in (copy.deepcopy(model), saved_and_loaded(model)):
        assert torch.equal(again(x), before)
        assert again.module is not net and again.device_ids == model.device_ids


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_methods_can_be_overridden_as_in_torch():
    class Mine(dataparallel.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            parts = [(inputs[0][:1],), (inputs[0][1:],)]
            return tuple(parts), ({}, {})

        def gather(self, outputs, output_device):
            return [len(o) for o in outputs]

    assert Mine(torch.nn.Linear(1, 1), ["cpu", "cpu"])(torch.ones(5, 1)) == [1, 4]


def test_the_functions_work_alone():
    net = torch.nn.Linear(2, 2).double()
    x = torch.rand(5, 2, dtype=torch.float64)
    assert_close(dataparallel.data_parallel(net, x, ["cpu", "cpu"], -1), net(x))
    replicas = dataparallel.replicate(net, ["cpu", "cpu"])
    assert replicas[0] is not net and replicas[0].weight is net.weight
    detached = dataparallel.replicate(net, ["cpu", "cpu"], detach=True)
    assert not any(p.requires_grad for r in detached for p in r.parameters())
    parts = dataparallel.scatter(x, ["cpu", "cpu"])
    outputs = dataparallel.parallel_apply(replicas, parts)
    dataparallel.gather(outputs, "cpu").sum().backward()
    assert_close(net.bias.grad, torch.full((2,), 5.0, dtype=torch.float64))
    assert dataparallel.replicate(net, []) == []
    for arguments in (([net], []), ([net], [x], []), ([net], [x], None, [])):
        with pytest.raises(AssertionError) as theirs:
            torch.nn.parallel.parallel_apply(*arguments)
        with pytest.raises(AssertionError) as ours:
            dataparallel.parallel_apply(*arguments)
        assert str(ours.value) == str(theirs.value)


def test_replicas_run_at_once_and_other_threads_too():
    barrier = threading.Barrier(2, timeout=20)
    counted = 0

    def meet(module, x):
        barrier.wait()
        time.sleep(0.2)

    model = dataparallel.DataParallel(Looks(meet), ["cpu", "cpu"])
    done = threading.Event()

    def count():
        nonlocal counted
        while not done.wait(0.005):
            counted += 1

    counter = threading.Thread(target=count)
    counter.start()
    model(torch.ones(4, 1))
    done.set()
    counter.join()
    assert counted > 5


def test_calls_from_two_threads_take_turns_and_one_from_inside_is_an_error():
    inside, most = 0, 0
    lock = threading.Lock()

    def see(module, x):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.02)
        with lock:
            inside -= 1

    model = dataparallel.DataParallel(Looks(see), ["cpu", "cpu"])
    threads = [
        threading.Thread(target=model, args=(torch.ones(4, 1),)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 2
    again = dataparallel.DataParallel(
        Looks(lambda m, x: again(torch.ones(2, 1))), ["cpu", "cpu"]
    )
    with pytest.raises(RuntimeError, match="called from inside replica 0"):
        again(torch.ones(2, 1))


def test_ctrl_c_ends_a_forward():
    def wait(module, x):
        if dataparallel.current_replica() == 0:
            signal.raise_signal(signal.SIGINT)
        for _ in range(1000):
            time.sleep(0.01)

    model = dataparallel.DataParallel(Looks(wait), ["cpu", "cpu"])
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(4, 1))
    assert time.monotonic() - start < 5


def test_a_python_function_and_hooks_work_with_gradients():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return Double.apply(self.layer(x))

    net = Model()
    net.layer.weight.register_post_accumulate_grad_hook(lambda p: None)
    dataparallel.DataParallel(net, ["cpu", "cpu"])(torch.ones(4, 1)).sum().backward()
    assert net.layer.weight.grad.tolist() == [[8]]


@devices
def test_steps_do_not_grow_memory_with_the_garbage_collector_off(devices):
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.LSTM(4, 4, batch_first=True)
    ).to(devices[0])
    model = dataparallel.DataParallel(net, devices)
    x = torch.rand(6, 2, 4)

    def step():
        model(x)[0].sum().backward()
        model.zero_grad()

    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            step()
        before = len(gc.get_objects())
        for _ in range(200 if devices[0] == "cpu" else 30):
            step()
        assert len(gc.get_objects()) - before < 50
    finally:
        gc.enable()


@devices
def test_all_dtypes_arrive_as_they_are(devices):
    class Tables(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for dtype in (
                torch.bool,
                torch.int16,
                torch.uint8,
                torch.float16,
                torch.complex64,
                torch.float8_e4m3fn,
                torch.uint16,
            ):
                name = str(dtype).split(".")[1]
                self.register_buffer(name, torch.tensor([0, 1]).to(dtype))
            self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex128))
            self.scalar = torch.nn.Parameter(torch.tensor(2.0))
            self.empty = torch.nn.Parameter(torch.empty(0, 3))

        def forward(self, x):
            for name, buffer in self.named_buffers():
                assert (
                    buffer.dtype == getattr(torch, name) and buffer.device == x.device
                )
                assert buffer.view(torch.uint8).sum() > 0
            return (x * self.weight * self.scalar).abs()

    net, single = pair(Tables(), devices[0])
    x = torch.rand(6, 2)
    dataparallel.DataParallel(net, devices)(x).sum().backward()
    single(x).sum().backward()
    assert_same_gradients(net, single)


@devices
def test_sparse_gradients_are_summed(devices):
    net, single = pair(torch.nn.Embedding(5, 2, sparse=True).double(), devices[0])
    x = torch.tensor([[0, 1], [1, 2], [4, 4]])
    dataparallel.DataParallel(net, devices)(x).sum().backward()
    single(x).sum().backward()
    assert net.weight.grad.is_sparse
    assert_close(net.weight.grad.cpu().to_dense(), single.weight.grad.to_dense())


@devices
def test_an_accumulation_copies_the_parameters_once(devices):
    torch.manual_seed(0)
    net, single = pair(Net().double().eval(), devices[0])
    model = dataparallel.DataParallel(net, devices)
    x = torch.rand(6, 2, 5, dtype=torch.float64)

    def copied():
        simulated.reset_counters()
        model(x).pow(2).mean().backward()
        return simulated.copies("sim:0", devices[-1])

    copied()  # makes the replicas
    every_time = copied()
    with model.accumulate():
        with pytest.raises(RuntimeError, match="accumulates already"):
            with model.accumulate():
                pass
        passes = [copied() for _ in range(3)]
        if devices[0] != devices[-1]:
            assert passes == [every_time, every_time - 1, every_time - 1]
        with torch.no_grad():
            for module in (net, single):
                next(module.parameters()).mul_(2)
        assert_close(model(x), single(x))
    assert copied() == every_time
