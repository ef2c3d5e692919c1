"""Which node holds which layers under a plan, how much memory that takes, and what limits the plan: for people, and for
scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dtfm.coordinator.log.wording import name_first, seconds_in_words
from dtfm.scheduler.cost.limits import Limit, limits
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.decision import Decision
from dtfm.scheduler.model.keeping import Held, held_by
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState, in_flight
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Problem, draft_of, problem_of
from dtfm.scheduler.model.rounds import mean_seconds

_BETTER = {
    Limit.DEVICE: "devices twice as fast",
    Limit.LINK: "links twice as good",
    Limit.REDUCTION: "gradients reduced twice as fast",
    Limit.MEMORY: "twice the memory",
}


@dataclass(frozen=True, slots=True)
class Holding:
    """One replica. ``available`` and ``host_available`` are the bytes that a plan may count on. ``host_available`` is None
    where the device computes in the host's own memory."""

    node: str
    stage: int
    layers: tuple[int, int]
    held: Held
    available: float
    host_available: float | None

    def document(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "stage": self.stage,
            "layers": list(self.layers),
            "checkpointing": self.held.keeping.checkpointing.value,
            "optimizer_state": self.held.keeping.optimizer_state.value,
            "memory_bytes": self.held.device_bytes,
            "memory_available_bytes": self.available,
            "host_memory_bytes": self.held.host_bytes,
            "host_memory_available_bytes": self.host_available,
        }


def holdings(problem: Problem, plan: Plan) -> list[Holding]:
    """The replicas of the plan, stage by stage."""
    numbers = {name: number for number, name in enumerate(problem.cluster.ids)}
    made = []
    for island, index, stage in ((i, n, stage) for i in plan.islands for n, stage in enumerate(i.stages)):
        fewest = min(in_flight(index, len(island.stages)), problem.workload.micro_batches)
        for place, name in enumerate(stage.replicas):
            most = min(stage.in_flight[place], problem.workload.micro_batches) if stage.in_flight else fewest
            node = problem.cluster.nodes[numbers[name]]
            keeping = stage.keeping[place] if stage.keeping else Keeping()
            held = held_by(problem, stage.layers, fewest, max(most, fewest), numbers[name], keeping)
            made.append(Holding(name, index, stage.layers, held, node.memory_bytes, node.host_memory_bytes))
    return made


def tokens_per_second(decision: Decision, tokens: int | None, length: int = 0) -> float | None:
    """``tokens`` are a micro-batch's tokens. None if they are not known."""
    predicted = decision.predicted
    mean = mean_seconds(length, predicted.iteration_seconds, predicted.exchange_seconds)
    trains = length / (length + 1) if length else 1.0
    return None if tokens is None else tokens * decision.plan.micro_batches * trains / mean


def _limits(problem: Problem, plan: Plan) -> dict[Limit, float]:
    """The limits of the island that takes longest."""
    of = (problem_of(island, problem.cluster, problem.workload) for island in plan.islands)
    pairs = [(each, draft_of(island, each.cluster)) for each, island in zip(of, plan.islands, strict=True)]
    return limits(*max(pairs, key=lambda pair: simulate(*pair)))


def plan_documents(problem: Problem, decision: Decision, tokens: int | None, length: int = 0) -> dict[str, Any]:
    """Further parts of the output of ``plan --json``, beside the decision: ``nodes``, ``tokens_per_second``, and
    ``limited_by``. The latter has, by limit, the seconds per step that the same plan would save if the limit were twice as
    good."""
    saved = _limits(problem, decision.plan)
    return {
        "tokens_per_second": tokens_per_second(decision, tokens, length),
        "limited_by": next(iter(saved)).value,
        "saved_seconds_if_twice_as_good": {limit.value: seconds for limit, seconds in saved.items()},
        "nodes": [holding.document() for holding in holdings(problem, decision.plan)],
    }


def describe_holdings(problem: Problem, decision: Decision, tokens: int | None, length: int = 0) -> str:
    """A table with a row for each group of nodes that hold the same in the same way, in equal memories. Then a sentence on
    speed and limits."""
    rows = [
        ("stage", "layers", "nodes", "memory planned / available", "host memory", "checkpointing", "optimizer state")
    ]
    for _, group in groupby(holdings(problem, decision.plan), key=_alike):
        same = list(group)
        one = same[0]
        host = "" if not one.held.host_bytes else _of(one.held.host_bytes, one.host_available)
        rows.append(
            (
                str(one.stage),
                f"{one.layers[0]}-{one.layers[1] - 1}",
                name_first([each.node for each in same]),
                _of(max(each.held.device_bytes for each in same), one.available),
                host,
                _CHECKPOINTING[one.held.keeping.checkpointing],
                _STATE[one.held.keeping.optimizer_state],
            )
        )
    seconds = decision.predicted.iteration_seconds
    speed = tokens_per_second(decision, tokens, length)
    limit, saved = next(iter(_limits(problem, decision.plan).items()))
    return (
        f"{_columns(rows)}\n{seconds_in_words(seconds)} per step"
        + (f", {speed:,.0f} tokens per second" if speed is not None else "")
        + f". The {limit.value} limits it: with {_BETTER[limit]}, this plan would take {seconds_in_words(seconds - saved)}."
    )


_CHECKPOINTING = {Checkpointing.NONE: "none", Checkpointing.LAYER: "by layer"}
_STATE = {OptimizerState.DEVICE: "on the device", OptimizerState.HOST: "in the host's memory"}


def _alike(holding: Holding) -> tuple[object, ...]:
    planned = _gib(holding.held.device_bytes), _gib(holding.held.host_bytes)
    return holding.stage, holding.held.keeping, planned, holding.available, holding.host_available


def _columns(rows: Iterable[Sequence[str]]) -> str:
    lines = list(rows)
    widths = [max(len(row[column]) for row in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines
    )


def _of(planned: float, available: float | None) -> str:
    return _gib(planned) if available is None else f"{_gib(planned)} / {_gib(available)} GiB"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
