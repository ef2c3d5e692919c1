"""A slower device takes as long as its speed says, and the node finds out."""

from __future__ import annotations

import torch

from dtfm.node.host.device import measure_device
from dtfm.node.model.cost.layer_costs import layer_flops
from dtfm.protos import plan_pb2
from tests.node.model.test_stage import model_of
from tests.wan.slow_device import SlowDevice, slowed

CPU = torch.device("cpu")
RUN = plan_pb2.Run(train=plan_pb2.Run.Train(micro_batch=3, global_batch=12))


class Clock:
    """A clock on which only sleeping takes time, unless ``now`` is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_work_takes_its_flops_over_the_speed() -> None:
    clock = Clock()
    device = SlowDevice(10.0, clock, clock.sleep)
    device.queue(20.0)
    device.wait()
    assert clock.now == 102.0


def test_what_the_cpu_takes_is_part_of_it() -> None:
    clock = Clock()
    device = SlowDevice(10.0, clock, clock.sleep)
    device.queue(20.0)
    clock.now += 1.5
    device.wait()
    assert clock.now == 102.0


def test_work_waits_for_the_work_before_it_and_idle_time_is_not_made_up_for() -> None:
    clock = Clock()
    device = SlowDevice(10.0, clock, clock.sleep)
    device.queue(20.0)
    device.queue(10.0)
    device.wait()
    assert clock.now == 103.0
    clock.now += 5.0
    device.queue(10.0)
    device.wait()
    assert clock.now == 109.0


def test_a_node_measures_the_slower_device() -> None:
    """At most: another process may take the core. This machine's own device is many times as fast."""
    with slowed(SlowDevice(1e9)):
        hardware = measure_device(CPU)
    assert hardware.flops <= 1.1e9
    model = model_of("llama")
    speed = 3 * 3 * model.layers[1].flops / 0.04  # so forward and backward take 40 ms
    with slowed(SlowDevice(speed)):
        measured = layer_flops(model, RUN, CPU, hardware)
    assert measured is not None
    assert measured <= 1.1 * speed
