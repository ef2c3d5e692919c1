"""Finds uses for the nodes that a plan leaves idle: the scheduler plans again with better lines, memory or batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtfm.coordinator.log.wording import name_first, seconds_in_words
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible
from dtfm.scheduler.model.workload import Workload

MOST_GROUPS = 3
"""The number of groups of equal idle nodes to look at, the largest first."""
LINES, MEMORIES, BATCHES = (2, 4, 10), (2, 4), (2, 4, 8)
"""The factors to try."""
WORTH = 0.98
"""A sample must take less than this part of the time. Otherwise equal nodes have only changed places."""

Search = Callable[[Cluster, Workload], Decision]
"""Returns a plan. Raises Infeasible."""


@dataclass(frozen=True, slots=True)
class Use:
    """``what``: the remedy that would put nodes to use, for people. ``times``: its factor over the present. ``seconds``: of a
    step then."""

    what: str
    times: int
    seconds: float


@dataclass(frozen=True, slots=True)
class IdleUse:
    """Idle nodes that are equal. ``uses``: the remedies that would put them to use; ``tried``: all remedies that were tried."""

    nodes: tuple[str, ...]
    uses: tuple[Use, ...]
    tried: tuple[str, ...]

    def __str__(self) -> str:
        them = "it" if len(self.nodes) == 1 else "them"
        named = name_first(self.nodes)
        if not self.uses:
            return f"Idle: {named}. Nothing that was tried would put {them} to use: {', '.join(self.tried)}."
        told = [f"{use.what} (then {seconds_in_words(use.seconds)} a step)" for use in self.uses]
        return f"Idle: {named}. What would put {them} to use: {'; '.join(told)}."


def idle_uses(
    cluster: Cluster, workload: Workload, decision: Decision, search: Search, over: Callable[[], bool] = lambda: False
) -> list[IdleUse]:
    """The remedies that would put the decision's idle nodes to use. ``over``: whether to stop looking."""
    found, standing = [], decision.predicted.iteration_seconds / workload.micro_batches

    def is_better(better: Decision, given: Workload) -> bool:
        return better.predicted.iteration_seconds / given.micro_batches < WORTH * standing

    for numbers in _groups(cluster, decision)[:MOST_GROUPS]:
        names = tuple(cluster.ids[number] for number in numbers)
        uses, tried = list[Use](), list[str]()
        for what, factors, changed in _remedies(cluster, workload, numbers):
            if over():
                break
            if what is _all_lines and any(use.what.startswith(("its line", "their line")) for use in uses):
                continue  # that follows
            tried.append(what(factors[-1]))
            use = _least(names, what, factors, changed, is_better, search, over)
            if use is not None:
                uses.append(use)
        if tried:
            found.append(IdleUse(names, tuple(uses), tuple(tried)))
    return found


Remedy = tuple[Callable[[int], str], tuple[int, ...], Callable[[int], tuple[Cluster, Workload]]]
"""Words for a factor; the factors; the cluster and the workload with one of them."""


def _remedies(cluster: Cluster, workload: Workload, numbers: Sequence[int]) -> Iterator[Remedy]:
    everybody, its = range(len(cluster.nodes)), "its" if len(numbers) == 1 else "their"
    rate = _rate(cluster, numbers)
    yield (
        lambda factor: f"{its} line at {_bits(rate * factor)} instead of {_bits(rate)}",
        LINES,
        lambda factor: (with_lines(cluster, numbers, factor), workload),
    )
    memory = cluster.nodes[numbers[0]].memory_bytes / 2**30
    yield (
        lambda factor: f"{memory * (factor - 1):.1f} GiB more memory",
        MEMORIES,
        lambda factor: (with_memory(cluster, numbers, factor), workload),
    )
    yield (
        _all_lines,
        LINES,
        lambda factor: (with_lines(cluster, everybody, factor), workload),
    )
    yield (
        lambda factor: f"a global batch {factor} times as large",
        BATCHES,
        lambda factor: (cluster, replace(workload, micro_batches=workload.micro_batches * factor)),
    )


def _all_lines(factor: int) -> str:
    return f"all lines {factor} times as fast"


def _least(
    names: Sequence[str],
    what: Callable[[int], str],
    factors: Sequence[int],
    changed: Callable[[int], tuple[Cluster, Workload]],
    is_better: Callable[[Decision, Workload], bool],
    search: Search,
    over: Callable[[], bool],
) -> Use | None:
    """The least of the factors that makes the planner use a node of these ``names``, and that is worth it. None: no factor
    does."""
    found = None
    for factor in reversed(factors):
        cluster, workload = changed(factor)
        try:
            decision = search(cluster, workload)
        except Infeasible:
            break
        if not set(names) & set(decision.plan.nodes) or not is_better(decision, workload):
            break
        found = Use(what(factor), factor, decision.predicted.iteration_seconds)
        if over():
            break
    return found


def _groups(cluster: Cluster, decision: Decision) -> list[list[int]]:
    """The numbers of the idle nodes in groups of equal ones, the largest group first."""
    groups = dict[tuple[object, ...], list[int]]()
    for number, node in enumerate(cluster.nodes):
        if node.id in decision.plan.idle:
            alike = (
                node.flops,
                node.memory_bytes,
                node.host_memory_bytes,
                round(math.log(_rate(cluster, [number]) or 1), 1),
            )
            groups.setdefault(alike, []).append(number)
    return sorted(groups.values(), key=len, reverse=True)


def with_lines(cluster: Cluster, numbers: Sequence[int], factor: float) -> Cluster:
    """The cluster with the lines of these nodes ``factor`` times as fast. A link between one of them and another node carries
    no more than the other's line."""
    chosen = np.isin(np.arange(len(cluster.nodes)), list(numbers))
    ups, downs = (np.where(np.isnan(row), np.inf, row) for row in cluster.carries)
    most = np.minimum(np.where(chosen, np.inf, ups)[:, None], np.where(chosen, np.inf, downs)[None, :])
    touched = chosen[:, None] | chosen[None, :]
    faster = np.maximum(cluster.bandwidth, np.minimum(cluster.bandwidth * factor, most))
    shared = {cluster.nodes[number].line for number in numbers}
    return replace(
        cluster,
        nodes=tuple(
            replace(node, up=_times(node.up, factor), down=_times(node.down, factor)) if chosen[number] else node
            for number, node in enumerate(cluster.nodes)
        ),
        bandwidth=np.where(touched, faster, cluster.bandwidth),
        lines=tuple(
            replace(line, up=line.up * factor, down=line.down * factor) if line.id in shared else line
            for line in cluster.lines
        ),
    )


def with_memory(cluster: Cluster, numbers: Sequence[int], factor: float) -> Cluster:
    """The cluster with ``factor`` times the memory on the devices of these nodes."""
    chosen = set(numbers)
    return replace(
        cluster,
        nodes=tuple(
            replace(node, memory_bytes=node.memory_bytes * factor) if number in chosen else node
            for number, node in enumerate(cluster.nodes)
        ),
    )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _rate(cluster: Cluster, numbers: Sequence[int]) -> float:
    """Bytes per second of the fastest link of the first of these nodes; 0: it has none."""
    links = cluster.bandwidth[numbers[0]].copy()
    links[numbers[0]] = 0.0
    return float(links.max(initial=0.0))


def _bits(rate: float) -> str:
    return f"{rate * 8 / 1e9:.3g} Gbit/s" if rate * 8 >= 1e9 else f"{rate * 8 / 1e6:.3g} Mbit/s"
