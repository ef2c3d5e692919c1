"""What would put idle GPUs to use: the scheduler is asked again, each time with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dtfm.coordinator.log.wording import seconds_in_words
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible
from dtfm.scheduler.model.workload import Workload

LEAST_GAIN = 1.05
"""A change that makes less than 5 % more work per second does not help, however many GPUs it uses."""

Ask = Callable[[str, Cluster, Workload], Decision]
"""The scheduler's decision on a changed cluster and workload. The text says what was changed. Raises Infeasible."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The smallest change of a kind that helps. If none does, ``words`` names the largest that was tried, and ``idle`` is None.

    ``gain`` is the FLOP/s over those without the change.
    """

    words: str
    idle: int | None = None
    seconds: float = 0.0
    gain: float = 1.0


def changed(kind: str, cluster: Cluster, workload: Workload, factor: int) -> tuple[Cluster, Workload]:
    """With ``factor`` times as fast a connection for each machine, as large a batch, or as many layers between first and last."""
    if kind == "lines":
        nodes = tuple(replace(n, up=n.up and factor * n.up, down=n.down and factor * n.down) for n in cluster.nodes)
        return replace(cluster, nodes=nodes, bandwidth=factor * cluster.bandwidth), workload
    if kind == "batch":
        return cluster, replace(workload, micro_batches=factor * workload.micro_batches)
    layers = workload.layers
    return cluster, replace(workload, layers=layers[:1] + factor * layers[1:-1] + layers[1:][-1:])


KINDS = {
    "lines": {2: "lines twice as fast", 10: "lines ten times as fast"},
    "batch": {2: "a batch twice as large", 4: "a batch four times as large"},
    "layers": {2: "a model with twice as many layers", 4: "a model with four times as many layers"},
}
"""Kinds of change, each with its factors, smallest first."""


def advice(
    cluster: Cluster, workload: Workload, now: Decision, ask: Ask, stopped: Callable[[], bool]
) -> Iterator[Advice]:
    """One of each kind of change, until ``stopped``."""
    for kind, factors in KINDS.items():
        tried = ""
        for factor, words in factors.items():
            altered = changed(kind, cluster, workload, factor)
            try:
                then = ask(words, *altered)
            except Infeasible:
                break  # a larger change takes more memory still
            tried = words
            if stopped():
                return
            gain = (
                _work(altered[1]) / _work(workload) * now.predicted.iteration_seconds / then.predicted.iteration_seconds
            )
            if len(then.plan.idle) < len(now.plan.idle) and gain >= LEAST_GAIN:
                yield Advice(words, len(then.plan.idle), then.predicted.iteration_seconds, gain)
                tried = ""
                break
        if tried:
            yield Advice(tried)


def describe_advice(found: list[Advice], idle: int, nodes: int) -> str:
    """What would give work to the ``idle`` GPUs, of ``nodes`` in all: a line for each change that helps."""
    helps = [each for each in found if each.idle is not None]
    useless = [each.words for each in found if each.idle is None]
    told = [f"{idle} of {nodes} would be idle."]
    if helps:
        told[0] += " What would put more of them to use:"
        told += [
            f"  {each.words}: {each.idle or 'none'} idle, {each.gain:.2g} times as much work per second "
            f"({seconds_in_words(each.seconds)} a step)"
            for each in helps
        ]
    if useless:
        told.append(f"Not enough for that: {', '.join(useless)}.")
    return "\n".join(told)


def _work(workload: Workload) -> float:
    return max(1.0, workload.micro_batches * sum(layer.forward_flops for layer in workload.layers))
