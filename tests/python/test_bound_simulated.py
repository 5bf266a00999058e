"""Simulated devices from Python."""

import json
import subprocess
import sys

import dataparallel
import pytest
import torch
from dataparallel import simulated


def test_the_devices_are_the_accelerator():
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert simulated.device_count() == torch.accelerator.device_count() == 4
    assert torch.sim.is_available() and torch.sim.device_count() == 4
    simulated.start(devices=4)  # again
    with pytest.raises(ValueError, match="devices"):
        simulated.start(devices=3)


def test_they_compute_and_train():
    torch.manual_seed(0)
    x = torch.rand(5, 3, device="sim:1")
    torch.manual_seed(0)
    assert torch.equal(x, torch.rand(5, 3, device="sim:1"))
    net = torch.nn.Linear(3, 2).to("sim:1")
    net(x).sum().backward()
    assert net.weight.grad.device == torch.device("sim:1")
    with torch.autocast("sim", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16
    with pytest.raises(
        RuntimeError, match="found at least two devices, sim:1 and sim:2"
    ):
        x + x.to("sim:2")


def test_counters_count():
    x = torch.ones(4, device="sim:0")
    simulated.reset_counters()
    y = x + x
    z = y.to("sim:2")
    assert simulated.kernels_launched("sim:0") == 1
    assert simulated.copies(torch.device("sim:0"), 2) == 1
    assert simulated.bytes_copied(0, "sim:2") == 16
    assert simulated.peak_memory(2) >= simulated.memory_allocated(2) >= z.nbytes
    with pytest.raises(ValueError, match="memory_allocated"):
        simulated.memory_allocated("cpu")
    with pytest.raises(TypeError, match="kernels_launched: device is None"):
        simulated.kernels_launched(None)


def test_a_missing_event_is_a_race():
    simulated.clear_races()
    x = torch.ones(4, device="sim:0")
    side = torch.Stream("sim:0")
    with side:
        y = x + x
    torch.accelerator.synchronize(0)
    races = simulated.races()
    simulated.clear_races()
    assert [race.kind for race in races] == ["read after write"]
    assert races[0].device == torch.device("sim:0") and "add" in races[0].operator_name
    assert races[0].message() in repr(races[0]) and y.shape == (4,)


def test_copies_can_be_corrupted():
    x = torch.ones(2, device="sim:2")
    with dataparallel.simulated.corrupt_copies("sim:2", "sim:3"):
        assert x.to("sim:3").cpu().tolist() == [0, 0]
    assert x.to("sim:3").cpu().tolist() == [1, 1]


CLOCK = """
import json, sys
import torch
from dataparallel import simulated

hardware = simulated.Hardware(device=simulated.a100(), peer_link=simulated.nvlink_3())
hardware.device.launch_latency_seconds = 0
simulated.start(devices=2, hardware=hardware)
x = torch.ones(1024, 1024, device="sim:0")
simulated.reset_counters()
with simulated.Trace() as trace:
    (x + x).to("sim:1")
    trace.save(sys.argv[1])
print(json.dumps({
    "computing": simulated.busy_seconds("sim:0"),
    "copying": simulated.busy_seconds("sim:0", "sim:1"),
    "idle": simulated.idle_seconds("sim:0"),
    "elapsed": simulated.elapsed_seconds(),
    "expected computing": 2 * x.nbytes / hardware.device.memory_bytes_per_second,
    "expected copying": hardware.peer_link.latency_seconds
    + x.nbytes / hardware.peer_link.bytes_per_second,
}))
assert simulated.now() > 0
try:
    trace.save(sys.argv[1])
except RuntimeError as error:
    assert "outside its `with` block" in str(error)
else:
    raise AssertionError
"""


def test_the_clock_tells_what_a_step_would_take(tmp_path):
    path = tmp_path / "trace.json"
    runs = [
        json.loads(
            subprocess.check_output([sys.executable, "-W", "error", "-c", CLOCK, path])
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    clock = runs[0]
    assert clock["computing"] == pytest.approx(clock["expected computing"])
    assert clock["copying"] == pytest.approx(clock["expected copying"])
    assert clock["elapsed"] >= clock["computing"] + clock["copying"]
    assert clock["idle"] == pytest.approx(clock["elapsed"] - clock["computing"])
    assert json.loads(path.read_text())["traceEvents"]


def test_without_hardware_there_is_no_clock():
    with pytest.raises(RuntimeError, match="clock"):
        simulated.elapsed_seconds()
