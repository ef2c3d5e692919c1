"""Runs the scheduler on files, or for GPUs that somebody may rent, and prints its plan."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar

import typer

from dtfm.coordinator.command.background import announced, in_background, search_shown
from dtfm.coordinator.command.planning.bill import SOME_STEPS, bill, parse_prices
from dtfm.coordinator.command.planning.idle_use import IdleUse, idle_uses
from dtfm.coordinator.command.planning.rented import (
    parse_gpus,
    parse_links,
    parse_size,
    rented_cluster,
    without_bf16,
)
from dtfm.coordinator.command.planning.run_workload import as_begun, workload_of_run
from dtfm.coordinator.core.validation.description import as_the_run_says
from dtfm.coordinator.log.unaudited import describe_unaudited, unaudited
from dtfm.coordinator.log.wording import MOST_GAP, describe_gap, describe_plan
from dtfm.coordinator.view.holdings import describe_holdings, plan_documents
from dtfm.protos.run_file.run_file import RunFile, parse_run, read_table
from dtfm.scheduler.formats.model_config import NoSuchModel
from dtfm.scheduler.formats.network import parse_network
from dtfm.scheduler.formats.paper import PREFIX, SEQUENCE, paper_case, paper_network, paper_workload
from dtfm.scheduler.formats.plan import decision_document, gap
from dtfm.scheduler.formats.workload import parse_workload
from dtfm.scheduler.islands.advice import NO_ROUNDS_PAY, advice
from dtfm.scheduler.islands.layout import lay_out
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.rounds import lengths_within, mean_seconds, spread
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.warm_up import warm_up

Parsed = TypeVar("Parsed")

IDLE_SECONDS, IDLE_TRY_SECONDS = 10.0, 1.0
"""The longest time for looking for uses of idle nodes, and for one try. A shorter --deadline counts instead."""


def print_plan(
    *,
    workload: Path | None,
    network: str | None,
    gpus: str | None,
    links: str | None,
    price: list[str] | None,
    run: Path | None,
    host_memory: str,
    stages: int | None,
    deadline: float | None,
    seed: int,
    threads: int | None,
    json_lines: bool,
) -> None:
    """The command `plan`, with its options."""
    check_source(network, gpus, links, price)
    all_bf16 = gpus is None or not without_bf16(gpus)
    asked = read_run(run).with_precision(bf16=all_bf16) if run is not None else None
    work, tokens, precision = workload_of_files(workload, run, asked, network)
    cluster = cluster_of(network, gpus, links, host_memory, precision)
    length = asked.train.rounds if asked is not None and asked.train.rounds != "auto" else 0
    batches = None if asked is not None and asked.train.batch_grows else 1
    rented = [gpu for machine in parse_gpus(gpus) for gpu in machine] if gpus is not None else []
    prices, currency = parse_prices(price or [], rented)
    with announced("Compiling the scheduler, once"):  # a machine's first search waits for that, up to a minute
        in_background(warm_up)
    stop, began = Event(), time.monotonic()

    def used() -> float:
        return (time.monotonic() - began) / max(deadline or math.inf, 1e-9)

    def searched() -> Decision:
        with search_shown("Planning") as improved:
            if length:
                search = partial(lay_out, length=length, batches=batches, time_used=used)
            else:
                search = partial(
                    schedule,
                    stages=asked.cluster.pinned if stages is None and asked is not None else stages,
                    time_used=None if deadline is None else used,
                    improved=improved,
                )
            many = threads or os.cpu_count() or 1
            kept = work.with_rounds() if length else work
            return in_background(partial(search, cluster, kept, seed=seed, threads=many, stopped=stop.is_set), stop)

    advised, looked = None, False
    try:
        decision, elapsed = searched(), time.monotonic() - began
        if asked is not None and asked.may_have_rounds and not (length or stages or stop.is_set()):
            seconds = decision.predicted.iteration_seconds
            among = lengths_within(asked.train.steps, audited=asked.trust.audits > 0)
            with announced("Looking whether rounds would be faster"):
                look = partial(advice, cluster, work.with_rounds(), seconds, among, seed=seed, batches=batches)
                look = partial(look, stopped=stop.is_set)
                advised = in_background(look, stop)
            looked = advised is not None or not stop.is_set()
            if advised is not None and asked.train.rounds == "auto":
                length, began = advised.rounds, time.monotonic()
                decision, elapsed = searched(), time.monotonic() - began
    except Infeasible as error:
        print(json.dumps({"plan": None, "reason": str(error)}) if json_lines else f"No plan: {error}")
        raise typer.Exit(1) from None
    idle = [number for number, name in enumerate(cluster.ids) if name in decision.plan.idle]
    costs = None
    if asked is not None or prices:
        steps = asked.train.steps if asked is not None else SOME_STEPS
        predicted = decision.predicted
        each = mean_seconds(length, predicted.iteration_seconds, predicted.exchange_seconds)
        grown = spread(length, steps, batches_each=decision.plan.micro_batches // work.micro_batches)
        costs = bill(grown.end(steps), each, prices, idle, currency)
    pinned = asked.cluster.pinned if stages is None and asked is not None else stages
    uses = list[IdleUse]()
    if idle and not length and not isinstance(pinned, tuple) and not stop.is_set():
        with announced("Looking what would put idle GPUs to use"):
            look_for = partial(_idle_uses, cluster, work, decision, pinned, deadline, seed, threads, stop.is_set)
            uses = in_background(look_for, stop)
    alone = dict[str, str]()
    if asked is not None and asked.trust.audits:
        alone = unaudited(decision.plan, str, again=bool(length))
    problem = Problem(cluster, work.with_rounds() if length else work)
    if json_lines:
        more = plan_documents(problem, decision, tokens, length)
        if gpus is not None:
            more |= {"precision": precision, "without_bf16": without_bf16(gpus) if precision == "bf16" else []}
        if costs is not None:
            more |= {"bill": asdict(costs)}
        if looked:
            more |= {"advice": advised and asdict(advised)}
        if alone:
            more |= {"unaudited": alone}
        if uses:
            more |= {"idle_uses": [asdict(use) for use in uses]}
        print(json.dumps(decision_document(decision, elapsed) | more))
    else:
        print(f"{decision.sentence}\n{describe_plan(decision.plan)}")
        print(describe_holdings(problem, decision, tokens, length))
        if alone:
            print(f"As each node counts as another party's, {describe_unaudited(alone)}.")
        for use in uses:
            print(use)
        if looked:
            print(advised or NO_ROUNDS_PAY)
        if gpus is not None:
            print(_speeds(gpus, precision))
        elif all(map(math.isnan, cluster.carries.flat)):
            print(f"{network} names no lines: each node's is taken to be as fast as its fastest link.")
        print(f"{decision.evaluations:,} plans were tried in {elapsed:.1f} s.")
        if costs is not None:
            print(costs)
        if (times := gap(decision)) is not None and times <= MOST_GAP:
            print(describe_gap(decision.lower_bound_seconds, times))


def _idle_uses(
    cluster: Cluster,
    work: Workload,
    decision: Decision,
    stages: int | None,
    deadline: float | None,
    seed: int,
    threads: int | None,
    stopped: Callable[[], bool],
) -> list[IdleUse]:
    """See idle_uses. Each try has the options of the plan."""
    began, most = time.monotonic(), min(IDLE_SECONDS, math.inf if deadline is None else deadline)

    def over() -> bool:
        return stopped() or time.monotonic() - began > most

    def search(cluster: Cluster, work: Workload) -> Decision:
        at, limit = time.monotonic(), min(IDLE_TRY_SECONDS, most)
        return schedule(
            cluster,
            work,
            stages=stages,
            seed=seed,
            threads=threads or os.cpu_count() or 1,
            time_used=lambda: (time.monotonic() - at) / max(limit, 1e-9),
            stopped=over,
        )

    return idle_uses(cluster, work, decision, search, over)


def _speeds(gpus: str, precision: str) -> str:
    """The precision that the GPUs' speeds are for."""
    told = f"The GPUs' speed is for {precision}"
    if precision != "bf16":
        return f'{told}, the precision of this workload; precision = "bf16" in the run file is faster.'
    if old := without_bf16(gpus):
        return f"{told}; {old[0]} cannot compute in it, so its speed here is for fp32."
    return f"{told}, the precision of this workload."


def read_run(path: Path) -> RunFile:
    """The run file without its storage: libraries for the storage need not be installed on a machine that only plans the run."""
    return parse_run({key: table for key, table in read_table(path).items() if key != "checkpoint"}, str(path))


def workload_of_files(
    path: Path | None, run: Path | None, asked: RunFile | None, network: str | None
) -> tuple[Workload, int | None, str]:
    """The workload, its tokens in a micro-batch, and its precision. One of the paper's networks has the paper's workload,
    unless a file gives another."""
    if path is not None:
        parsed = parsed_file(path, parse_workload)
        work = parsed[0]
        if asked is not None and work.micro_batches * asked.train.micro_batch != asked.train.global_batch:
            raise ValueError(
                f"{path} has {work.micro_batches} micro-batches, but {run} has {asked.train.global_batch} samples in "
                f"micro-batches of {asked.train.micro_batch}; write {path} again: dtfm-node workload {run} --output {path}"
            )
        return (work if asked is None else as_the_run_says(work, asked), *parsed[1:])
    if asked is None and network is not None and network.startswith(PREFIX):
        return paper_workload(), SEQUENCE, "fp16"
    if asked is None:
        raise ValueError(
            "give --run RUN.toml, or the --workload WORKLOAD.json that `dtfm-node workload RUN.toml` writes"
        )
    asked = as_begun(asked)
    try:
        return workload_of_run(asked), asked.train.micro_batch * asked.data.sequence_length, asked.train.precision
    except NoSuchModel:
        raise  # a node cannot count it either
    except ValueError as error:
        fix = f"dtfm-node workload {run} --output WORKLOAD.json, where dtfm[node] is installed, and give --workload too"
        raise ValueError(f"{error}. To count on the model itself: {fix}") from None


def check_source(network: str | None, gpus: str | None, links: str | None, price: list[str] | None) -> None:
    if (network is None) == (gpus is None):
        raise ValueError(
            'give either --network NETWORK.json or --gpus, like --gpus "8x RTX 4090" --links 500Mbit/s,40ms'
        )
    if network is not None and links is not None:
        raise ValueError("--links goes with --gpus; a NETWORK.json has its own links")
    if network is not None and price:
        raise ValueError("--price goes with --gpus, whose kinds it names; leave it out with a NETWORK.json")
    if gpus is not None and links is None:
        raise ValueError(
            "--gpus needs --links too: bandwidth and latency between the machines, like --links 500Mbit/s,40ms"
        )


def cluster_of(network: str | None, gpus: str | None, links: str | None, host_memory: str, precision: str) -> Cluster:
    """The cluster of options that `_check_source` has checked."""
    if network is not None and network.startswith(PREFIX):
        return paper_network(paper_case(network))
    if network is not None:
        return parsed_file(Path(network), parse_network)
    assert gpus is not None
    assert links is not None
    return rented_cluster(parse_gpus(gpus), *parse_links(links), parse_size(host_memory), precision)


def parsed_file(path: Path, parse: Callable[[str], Parsed]) -> Parsed:
    try:
        return parse(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
