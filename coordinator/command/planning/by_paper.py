"""`plan --objective paper`: finds and prints equal groups at the least cost by the paper's model."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Event

import typer

from dtfm.coordinator.command.background import announced, in_background, search_shown
from dtfm.coordinator.command.planning.print_plan import check_source, cluster_of, read_run, workload_of_files
from dtfm.coordinator.log.wording import describe_gap, name_first, seconds_in_words
from dtfm.scheduler.formats.plan import decision_document, gap
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible
from dtfm.scheduler.model.memory import Checkpointing, OptimizerState
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.paper import plan_by_paper
from dtfm.scheduler.warm_up import warm_up


def print_plan_by_paper(
    *,
    workload: Path | None,
    network: str | None,
    gpus: str | None,
    links: str | None,
    run: Path | None,
    stages: int | None,
    deadline: float | None,
    seed: int,
    threads: int | None,
    json_lines: bool,
) -> None:
    """`plan` with --objective paper. Raises ValueError for GPUs, rounds and memory, which the paper's model ignores."""
    check_source(network, gpus, links, None)
    if gpus is not None:
        raise ValueError(
            "--objective paper counts links alone: --gpus has memory limits, which need --objective step; give --network"
        )
    asked = read_run(run) if run is not None else None
    if asked is not None and asked.train.rounds not in (0, "auto"):
        raise ValueError(f"--objective paper knows no rounds, and {run} has train.rounds; leave one of them out")
    pinned = asked.cluster.pinned if stages is None and asked is not None else stages
    work, _, precision = workload_of_files(workload, run, asked, network)
    _check_memory(work, workload or run)
    cluster = cluster_of(network, None, None, "", precision)
    with announced("Compiling the scheduler, once"):
        in_background(warm_up)
    stop, began = Event(), time.monotonic()

    def used() -> float:
        return (time.monotonic() - began) / max(deadline or math.inf, 1e-9)

    try:
        with search_shown("Planning") as improved:
            search = partial(
                plan_by_paper,
                stages=pinned,
                seed=seed,
                time_used=None if deadline is None else used,
                threads=threads or os.cpu_count() or 1,
                improved=improved,
                stopped=stop.is_set,
            )
            decision = in_background(partial(search, cluster, work), stop)
    except Infeasible as error:
        print(json.dumps({"plan": None, "reason": str(error)}) if json_lines else f"No plan: {error}")
        raise typer.Exit(1) from None
    elapsed = time.monotonic() - began
    if json_lines:
        print(json.dumps(decision_document(decision, elapsed)))
    else:
        print("\n".join(_told(cluster, decision, elapsed)))


def _check_memory(work: Workload, said_in: Path | None) -> None:
    """Raises ValueError if the user asks for less memory than usual: the paper's model ignores memory."""
    for key, value, wanted in (
        ("checkpointing", work.checkpointing, Checkpointing.LAYER),
        ("optimizer_state", work.optimizer_state, OptimizerState.HOST),
    ):
        if value is wanted:
            raise ValueError(
                f'--objective paper counts no memory, and {said_in} has {key} "{wanted.value}"; leave that out or use '
                "--objective step"
            )


def _told(cluster: Cluster, decision: Decision, elapsed: float) -> list[str]:
    """The lines for people."""
    paper, times = decision.predicted.paper, gap(decision)
    assert paper is not None
    region = {node.id: node.region for node in cluster.nodes}
    lines = [decision.sentence]
    for number, stage in enumerate(decision.plan.stages):
        where = _regions([region[name] for name in stage.replicas])
        lines.append(
            f"Group {number + 1}, layers {stage.layers[0]}-{stage.layers[1] - 1}: {name_first(stage.replicas)}{where}"
        )
    if decision.plan.idle:
        lines.append(f"Idle: {name_first(decision.plan.idle)}")
    lines.append(
        f"Data-parallel {paper.data_parallel:.4f} s (the slowest group) and pipeline {paper.pipeline:.4f} s "
        f"(all boundaries): {paper.total:.4f} s a step by the paper's cost model."
    )
    lines.append(
        f"As dtfm trains, which overlaps these: {seconds_in_words(decision.predicted.iteration_seconds)} a step. "
        "With --objective step it plans for that."
    )
    lines.append(f"{decision.evaluations:,} plans were tried in {elapsed:.1f} s.")
    if times is not None:
        lines.append(describe_gap(decision.lower_bound_seconds, times))
    return lines


def _regions(names: Sequence[str]) -> str:
    """Like " (4 Ohio, 4 Virginia)"; nothing where no node has a region."""
    counts = {name: names.count(name) for name in sorted(set(names)) if name}
    if not counts:
        return ""
    return f" ({', '.join(f'{count} {name}' for name, count in counts.items())})"
