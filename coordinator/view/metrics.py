"""The run's figures in Prometheus' format. docs/metrics.md has the same names and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import PROCESS_COLLECTOR, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dtfm.coordinator.log.wording import telling_bound, without_addresses
from dtfm.coordinator.view.members import STATUSES, status
from dtfm.coordinator.view.so_far import STATES, SoFar, is_stalled

Values = Mapping[str, float | None]
"""Figures by the value of the label. None: not known, and left out."""


@dataclass(frozen=True, slots=True)
class Figures(Collector):
    """The figures of a run."""

    so_far: SoFar
    disk_bytes: int
    """The size of the coordinator's disk."""
    free_bytes: int
    """The free part of it."""
    reserves: int | None
    """See Store. None: also if it is not known."""
    now: float
    """In seconds since 1970."""

    def text(self) -> bytes:
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        yield from self._of_the_run()
        yield from self._of_nodes()
        yield from PROCESS_COLLECTOR.collect()

    def _of_the_run(self) -> Iterator[Metric]:
        so_far, ledger, training = self.so_far, self.so_far.ledger, self.so_far.ledger.training
        last, told, doing = training.last, ledger.evaluated, Counter(status(ledger, node) for node in ledger.members)
        yield _each("run_info", "The run's name; always 1.", "run", {str(ledger.run.get("name", "")): 1})
        yield _each("run_state", "1: the run is in this state.", "state", {s: s == so_far.state for s in STATES})
        yield _one("run_stalled", "1: the next commit is long overdue.", is_stalled(ledger, so_far.awaited, self.now))
        yield _one("step", "The last committed step.", training.step)
        yield _one("steps", "The number of steps that the run has.", so_far.run_steps)
        yield _one("last_commit_timestamp_seconds", "The time of the last commit.", so_far.committed or None)
        yield _one("loss", "The last step's loss.", last.loss if last else None)
        yield _one("held_out_loss", "The last held-out loss.", told.loss if told else None)
        yield _one("tokens_per_second", "The mean over the last 20 steps.", so_far.tokens_per_second)
        yield _one("step_seconds", "The time of a step: the median of the plan's last 20.", so_far.measured)
        yield _one("step_predicted_seconds", "The time of a step that the planner expects.", training.predicted)
        bound = telling_bound(training.predicted, training.bound, so_far.measured)
        yield _one(
            "step_bound_seconds", "The time of a step that no plan can beat, if the bound says something.", bound
        )
        yield _one("generation", "The number of the last plan.", training.generation)
        yield _one("checkpoint_step", "The step of the newest checkpoint, or 0.", ledger.copies.checkpoint_step)
        yield _each("nodes", "Members, by what they do.", "doing", {each: doing[each] for each in STATUSES})
        yield _one("quarantined", "Quarantines in force.", len(ledger.trust.quarantined))
        yield _one("disk_bytes", "The coordinator's disk, where dtfm-runs/ is.", self.disk_bytes)
        yield _one("disk_free_bytes", "The free space there.", self.free_bytes)
        yield _one(
            "reserves", "The coordinators that wait to take over, where the log is in PostgreSQL.", self.reserves
        )
        yield _count("events", "The log's events, by name.", "event", so_far.events)

    def _of_nodes(self) -> Iterator[Metric]:
        """The figures of members alone: the log may know any number of other nodes."""
        ledger, given, joins = self.so_far.ledger, self.so_far.given, self.so_far.joins
        timed, plan, members = ledger.training.timed, ledger.training.plan, ledger.members

        def each(value: Callable[[str], float | None]) -> Values:
            return {node: value(node) for node in members}

        busy, waits = (timed.compute_seconds, timed.wait_seconds) if timed else ({}, {})
        yield _each("node_stage", "The node's stage, if it has one.", "node", each(plan.stage_of) if plan else {})
        yield _each("node_busy_seconds", "The time that the node computed in a recent step.", "node", each(busy.get))
        yield _each("node_wait_seconds", "The time that the node waited in a recent step.", "node", each(waits.get))
        memory, speed = each(lambda n: members[n].device.memory_bytes), each(lambda n: members[n].device.flops)
        yield _each("node_memory_bytes", "The memory of the node's device.", "node", memory)
        yield _each("node_flops", "The speed of the node's device without other work.", "node", speed)
        work = each(lambda n: given[n].micro_batches if n in given else 0)
        yield _count("node_micro_batches", "The micro-batches of committed steps that the node computed.", "node", work)
        yield _count("node_joins", "How often the node was let in.", "node", each(joins.get))


def _one(name: str, text: str, value: float | None) -> Metric:
    return GaugeMetricFamily(f"dtfm_{name}", text, value=value)


def _each(name: str, text: str, label: str, values: Values) -> Metric:
    return _filled(GaugeMetricFamily(f"dtfm_{name}", text, labels=[label]), values)


def _count(name: str, text: str, label: str, values: Values) -> Metric:
    return _filled(CounterMetricFamily(f"dtfm_{name}", text, labels=[label]), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    """The family with its values. Names that look like addresses are hidden: all of them are shown as one."""
    for label, value in {without_addresses(label): value for label, value in values.items()}.items():
        if value is not None:
            family.add_metric([label], value)
    return family
