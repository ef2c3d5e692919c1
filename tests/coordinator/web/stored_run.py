"""A run of six nodes as its log would have it: one of them is lost, one comes late and one is quarantined."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import sqlalchemy as sa

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.store.store import Record, Store
from dtfm.coordinator.view.condition.pace import planned_seconds
from dtfm.scheduler.model.plan import Flow, Plan, Stage, Takeover
from dtfm.scheduler.model.workload import Layer, Workload

MARKUP = "<img src=x onerror=document.title='hacked'>"
LONG = "a-device-with-a-long-name " * 400
DEVICES = {
    "lab-a100": ev.DeviceSeen("cuda", "NVIDIA A100-SXM4-40GB", 40 << 30, 1.2e14, 64 << 30),
    "lab-3090": ev.DeviceSeen("cuda", "NVIDIA GeForce RTX 3090", 24 << 30, 5.5e13, 32 << 30),
    "home-4090": ev.DeviceSeen("cuda", "NVIDIA GeForce RTX 4090", 24 << 30, 1.1e14, 64 << 30),
    "vast-7": ev.DeviceSeen("cuda", LONG, 24 << 30, 5.1e13, 32 << 30),
    "attic": ev.DeviceSeen("cuda", MARKUP, 12 << 30, 4.4e13, 16 << 30),
    "runpod-2": ev.DeviceSeen("cuda", "NVIDIA L40S", 48 << 30, 9e13, 48 << 30),
}
FIRST = [name for name in DEVICES if name != "runpod-2"]
LAYERS = 24
TIMED = 0.8
"""Of its measured speed, a device delivers this part in the run's layers."""


@dataclass(slots=True)
class Telling:
    """The records so far, with times in seconds since the run began."""

    records: list[Record] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    at: float = 0.0

    def tell(self, event: ev.Event, after: float = 0.0) -> None:
        self.at += after
        self.ledger = event.apply(self.ledger)
        self.records.append(Record(len(self.records) + 1, self.at, event))

    def join(self, node: str) -> None:
        self.tell(ev.NodeJoined(node, "first contact", "203.0.113.7:7000", DEVICES[node], "0.1", f"{node}-1"), 4)
        self.tell(ev.DeviceTimed(node, DEVICES[node].flops * TIMED), 14)
        others = [other for other in self.ledger.members if other != node]
        self.tell(ev.LinksMeasured(node, tuple(_links(node, others))), 9)

    def train(self, steps: int, slow: str = "", rise: float = 0.0) -> None:
        """``slow``: a node that takes 2.9 times as long as planned; ``rise``: by how much the loss rises with each step."""
        plan = self.ledger.training.plan
        assert plan is not None
        speeds = {node: each.flops * TIMED for node, each in DEVICES.items()}
        planned = planned_seconds(self.ledger, plan, speeds)
        began = self.ledger.training.step
        for _ in range(steps):
            step = self.ledger.training.step + 1
            loss = 3.1 + 7.2 * math.exp(-step / 60) + 0.12 * math.sin(step * 1.7) + rise * (step - began)
            norm = 0.6 + 2.1 * math.exp(-step / 30) + 0.15 * math.sin(step * 2.3)
            rate = 3e-4 * min(step / 20, 0.5 + 0.5 * math.cos(math.pi * step / 240))
            times = {node: 2.9 if node == slow else 1 + 0.04 * math.sin(step + len(node)) for node in plan.nodes}
            busy = {node: planned[node] * times[node] for node in plan.nodes}
            seconds = max(7.5 + 0.4 * math.sin(step) + (2.5 if len(plan.nodes) < 5 else 0), *busy.values())
            waited = {node: seconds - busy[node] for node in busy}
            generation = self.ledger.training.generation
            event = ev.StepCommitted(
                step, generation, loss, 65_536, norm, seconds, 32, busy, waited, learning_rate=rate
            )
            self.tell(event, seconds)
            if step % 50 == 0:
                self.tell(ev.Evaluated(step, loss + 0.2, 64, 9.1), 2)

    def adopt(self, plan: Plan, reason: str, predicted: float | None = None, bound: float | None = None) -> None:
        step = self.ledger.training.step
        self.tell(ev.PlanAdopted(plan.generation, plan, reason, step, predicted, bound), 1)
        codecs: dict[str, dict[str, dict[str, str]]] = {}
        for flow in (flow for flows in plan.flows for flow in flows):
            codecs.setdefault(flow.sender, {})[flow.receiver] = {"activations": "i8b256"}
        self.tell(ev.PlanStarted(plan.generation, step + 1, 0, codecs), 12)


def _links(node: str, others: list[str]) -> Iterator[ev.Link]:
    names = list(DEVICES)
    for other in others:
        for a, b in ((node, other), (other, node)):
            far = 1 + abs(names.index(a) - names.index(b))
            lab = a.startswith("lab") and b.startswith("lab")
            rate = 1.2e9 if lab else 4.2e7 / far * (1.5 if a < b else 1)
            if {a, b} == {"vast-7", "attic"}:
                yield ev.Link(a, b, 0.0, 0.0, "no route", "")
            else:
                yield ev.Link(a, b, 0.0002 if lab else 0.011 * far, rate, "", "lan" if lab else "public")


def stored_run(steps: int = 180) -> list[Record]:
    """About ``steps`` steps, and all around them."""
    return telling_of_a_run(steps).records


def slow_run() -> list[Record]:
    """The same, and then a node becomes slow."""
    telling = telling_of_a_run(180)
    telling.train(12, slow="runpod-2")
    return telling.records


def rising_run() -> list[Record]:
    """The same, and then the loss rises."""
    telling = telling_of_a_run(180)
    telling.train(30, rise=0.05)
    return telling.records


def idle_run() -> list[Record]:
    """The same, until the first plan, which does without a node, trains."""
    return telling_of_a_run(180).records[:80]


def early_run() -> list[Record]:
    """The same, until its second node joins."""
    records = telling_of_a_run(180).records
    return records[: [record.sequence for record in records if isinstance(record.event, ev.NodeJoined)][1]]


def finished_run() -> list[Record]:
    """The same to its end, and all nodes have gone home."""
    telling = telling_of_a_run(180)
    telling.train(60)
    telling.tell(ev.RunFinished(240, "all 240 steps are done"), 20)
    for node in [*telling.ledger.members]:
        telling.tell(ev.NodeLeft(node, "goodbye: the run is over"), 1)
    return telling.records


def telling_of_a_run(steps: int) -> Telling:
    telling = Telling()
    prices = {"prices": {"a100": 1.2, "RTX": 0.35}, "currency": "EUR"}
    run = {"name": "stories-1b", "train": {"steps": 240}, "cluster": {"lease": 10.0, **prices}}
    telling.tell(ev.RunStarted("id", run))
    layers = tuple(Layer(f"layer {number}", 8e11, 9e7, 1.6e7) for number in range(LAYERS))
    for node in FIRST:
        telling.join(node)
        if node == FIRST[0]:
            telling.tell(ev.RunDescribed(ev.Described(Workload(layers, 32), "ab12", 9000, 64, 9.1, 2048, 24), node))
    for node in FIRST:
        telling.tell(ev.NodeReady(node), 1)
    two = Plan(
        1,
        (Stage((0, 12), ("lab-a100", "lab-3090"), (20, 12)), Stage((12, 24), ("home-4090", "vast-7"), (21, 11))),
        ((Flow("lab-a100", "home-4090", 16), Flow("lab-a100", "vast-7", 4),
          Flow("lab-3090", "home-4090", 5), Flow("lab-3090", "vast-7", 7)),),
        ("attic",),
    )  # fmt: skip
    telling.adopt(two, "the first plan: two stages of two, and the slow line of attic would hold it up", 9.4, 6.2)
    telling.train(steps // 3)
    telling.tell(ev.NodeLeft("vast-7", "no heartbeat for 30 s"), 30)
    carried_on = Plan(
        2,
        (two.stages[0], Stage((12, 24), ("home-4090",), (32,))),
        two.flows,
        ("attic",),
        (Takeover(1, "vast-7", 1, (("home-4090", 11),)),),
    )
    telling.adopt(carried_on, "vast-7 left: home-4090 takes its micro-batches over, and nothing is moved")
    telling.train(steps // 6)
    telling.join("runpod-2")
    telling.tell(ev.NodeReady("runpod-2"), 3)
    three = Plan(
        3,
        (
            Stage((0, 10), ("lab-a100", "lab-3090"), (21, 11)),
            Stage((10, 17), ("home-4090",), (32,)),
            Stage((17, 24), ("runpod-2", "attic"), (22, 10)),
        ),
        (
            (Flow("lab-a100", "home-4090", 21), Flow("lab-3090", "home-4090", 11)),
            (Flow("home-4090", "runpod-2", 22), Flow("home-4090", "attic", 10)),
        ),
    )
    telling.adopt(three, "runpod-2 joined: three stages save 2.1 s a step, which is worth moving 1.9 GB", 6.9, 6.2)
    telling.train(steps // 3)
    step = telling.ledger.training.step
    telling.tell(ev.NodeQuarantined("attic", Charge.AUDIT, "lab-a100 got other activations", step), 3)
    telling.tell(ev.NodeLeft("attic", "it is quarantined"))
    four = Plan(
        4,
        (*three.stages[:2], Stage((17, 24), ("runpod-2",), (32,))),
        (three.flows[0], (Flow("home-4090", "runpod-2", 32),)),
    )
    telling.adopt(four, "attic is quarantined: runpod-2 computes the last stage alone", 8.8, 6.6)
    telling.train(steps // 6)
    return telling


def write(store: Store, records: list[Record], began: float) -> None:
    """Puts the records into the store, with their times as if the run had begun then."""
    rows = [
        {"sequence": each.sequence, "time": began + each.time, "event": json.dumps(ev.to_json(each.event))}
        for each in records
    ]
    with store._engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO events VALUES (:sequence, :time, :event)"), rows)
