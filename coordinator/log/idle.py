"""Why the plan in force leaves out a node, and what would put the node to use, as far as the log shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.members import Member, planned_flops
from dtfm.scheduler.model.plan import Plan

MOST_COMPARED = 48
"""A node's links are compared with the links of at most this number of nodes of the plan."""
STANDS_OUT = 1.5
"""A line, or a device, stands out if it is this number of times slower than the slowest in the plan."""


@dataclass(frozen=True, slots=True)
class Idle:
    """``why``: what stands out in the node. ``remedy``: what would let the planner use it; empty: not known."""

    why: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.why}. It would help: {self.remedy}" if self.remedy else self.why


def idle_nodes(ledger: Ledger, nodes: Iterable[str], most: int | None = None) -> dict[str, Idle]:
    """By idle node, why the plan leaves it out. Leaves out nodes that compute, or cannot be planned with yet. ``most``: the
    number of nodes to look at."""
    plan = ledger.training.plan
    if plan is None:
        return {}
    taking_part, members, found = set(plan.nodes), ledger.members, {}
    out = {node: each.why for node, each in ledger.health.items() if each.out}
    idle = (n for n in nodes if (n not in taking_part or n in out) and members[n].ready and members[n].relay != "only")
    shown = [*islice(idle, most)]
    peers = plan.nodes[:MOST_COMPARED] if shown else ()
    rates = [rate for each in peers if (rate := _rate(ledger, each, peers)) is not None]
    at_work = [node for node in plan.nodes if node in members] if shown else []
    speeds = planned_flops(ledger, [*at_work, *shown])
    its, slowest = dict(zip(shown, speeds[len(at_work) :], strict=True)), min(speeds[: len(at_work)], default=0.0)
    for node in shown:
        member = members[node]
        if node in out:
            found[node] = Idle(
                f"it is left out until it has been tested, which comes by itself, because it failed: {out[node]}"
            )
            continue
        if member.leaving:
            found[node] = Idle(f"it is leaving: {member.leaving}")
            continue
        memory, line = _memory(ledger, plan, node), _line(_rate(ledger, node, peers), min(rates, default=0.0))
        found[node] = memory or line or _device(member, its[node], slowest) or _newcomer(plan, node) or _work(plan)
    return found


def _memory(ledger: Ledger, plan: Plan, node: str) -> Idle | None:
    if ledger.described is None:
        return None
    workload, has = ledger.described.workload, ledger.members[node].device.memory_bytes
    needs = min(
        sum(
            workload.least_on_device(layer.parameter_bytes, layer.orthogonal_bytes) + layer.frozen_bytes
            for layer in workload.layers[slice(*stage.layers)]
        )
        for stage in plan.stages
    )
    if has >= needs:
        return None
    why = f"its memory of {has / 2**30:.1f} GiB holds no stage of this plan; the smallest needs {needs / 2**30:.1f} GiB"
    return Idle(why, f"{(needs - has) / 2**30:.1f} GiB more memory")


def _line(its: float | None, slowest: float) -> Idle | None:
    """``its`` best link to the plan, and the best link of the plan's node with the ``slowest``, in bytes per second."""
    if its is None or not slowest:
        return None
    if its <= 0:
        return Idle("nothing passes between it and the nodes of the plan", "a way to them, like an open port")
    if slowest < STANDS_OUT * its:
        return None
    why = f"its fastest link to the plan's nodes carries {_megabits(its)}; in the plan each has one of at least"
    return Idle(f"{why} {_megabits(slowest)}", f"a line of {_megabits(slowest)}")


def _rate(ledger: Ledger, node: str, others: tuple[str, ...]) -> float | None:
    """The bytes per second of the best of its links to and from the ``others``; None: none was measured."""
    links = ledger.reach.links
    pairs = [(links.get(node, {}).get(o), links.get(o, {}).get(node)) for o in others if o != node]
    known = [min(one.bandwidth, back.bandwidth) for one, back in pairs if one is not None and back is not None]
    return max(known, default=None)


def _device(member: Member, its: float, slowest: float) -> Idle | None:
    """``its`` speed, and the speed of the plan's ``slowest`` node, in FLOP/s."""
    if its <= 0 or slowest < STANDS_OUT * its:
        return None
    times = slowest / its
    if member.timed_beside:
        return Idle(
            f"beside other programs its device was {times:.1f} times slower than the slowest in the plan",
            "a quiet machine: once other programs rest, the device is timed again within minutes",
        )
    return Idle(
        f"its device is {times:.1f} times slower than the slowest in the plan, which would wait for it",
        f"a device {times:.1f} times as fast, or smaller micro-batches (train.micro_batch)",
    )


def _newcomer(plan: Plan, node: str) -> Idle | None:
    if node in plan.idle:
        return None
    return Idle(
        f"it came after plan {plan.generation} was made, and no plan with it has been found that saves more than it costs",
        "time: the planner looks again when something changes, and now and then",
    )


def _work(plan: Plan) -> Idle:
    if all(max(stage.loads) <= 1 for stage in plan.stages):
        return Idle(
            "each node of the plan computes a single micro-batch of a step, so no micro-batch is left",
            "a larger train.global_batch, or smaller micro-batches",
        )
    return Idle(
        "the planner found no faster plan with it: what it would save is less than the exchange with it costs",
        "a larger train.global_batch; `dtfm-coordinator plan` says how much",
    )


def _megabits(rate: float) -> str:
    return f"{rate * 8 / 1e6:,.0f} Mbit/s" if rate * 8 >= 1e7 else f"{rate * 8 / 1e6:.2g} Mbit/s"
