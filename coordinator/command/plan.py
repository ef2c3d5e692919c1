"""``dtfm-coordinator plan`` and ``plan-now``: the scheduler on files, and a running coordinator's next plan."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dtfm.coordinator.command.background import announced, in_background
from dtfm.coordinator.command.gpus import HOST_MEMORY, RESERVED, RESERVED_GIB, SUSTAINED
from dtfm.coordinator.command.options import Json, Where
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.decision import Decision, Infeasible, Objective

if TYPE_CHECKING:  # these take seconds to load
    from dtfm.scheduler.model.cluster import Cluster

Parsed = TypeVar("Parsed")


def plan(
    workload: Annotated[
        Path, typer.Option(help="WORKLOAD.json: layers, micro_batches. `dtfm-node workload RUN.toml` writes it.")
    ],
    network: Annotated[
        Path | None,
        typer.Option(help="NETWORK.json: nodes, latency_ms, bandwidth_gbps."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help='Instead of --network: GPUs that you may rent, each a machine of its own, like "8x RTX 4090, 2x A100 80GB". '
            f"Their speed counts as {SUSTAINED:.0%} of the data sheet's in the precision of the workload, their memory less "
            f"{RESERVED_GIB} GiB and {RESERVED:.0%} for the driver and fragmentation."
        ),
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(
            help="With --gpus: what each machine's connection carries, up and down, and the latency between any two, one way, "
            "like 500Mbit/s,40ms. Nothing is compressed."
        ),
    ] = None,
    host_memory: Annotated[
        str, typer.Option(help="With --gpus: the memory of each machine beside its GPU, for optimizer state.")
    ] = HOST_MEMORY,
    objective: Annotated[
        Objective, typer.Option(help="What to minimize: the seconds per step, or the paper's cost model.")
    ] = Objective.ITERATION,
    incumbent: Annotated[
        Path | None,
        typer.Option(help="PLAN.json of the plan in force, which is kept unless another is clearly better."),
    ] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Number of stages. Default: the scheduler chooses it.")
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds after which the search stops. Default: it stops when more of it is not worth it."
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=0, help="Seed of the search. Without --deadline, the same seed and files give the same plan."),
    ] = 0,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads that search at the same time. Default: one per core of this machine."),
    ] = None,
    json_lines: Json = False,
) -> None:
    """Runs the scheduler alone: on files, or for GPUs that you may rent.

    Prints who computes what, the memory that this needs, the seconds per step that it should take, what limits it, and why. The
    last sentence says how much a better
    plan could gain at most: the bound is a time that no plan can beat, and the gap is the plan's time divided by it. A plan
    with gap 1 is perfect; one with a larger gap may still be the best there is.

    A search of more than two seconds shows its progress on standard error. Ctrl-C ends it and prints the best plan found so far.

    Exit codes: 0 a plan was found, 1 no plan is possible, 2 bad input.
    """
    with announced("Loading the scheduler"):
        from rich.console import Console

        from dtfm.coordinator.command.rented import without_bf16
        from dtfm.coordinator.log.wording import describe_gap, describe_plan
        from dtfm.coordinator.view.holdings import describe_holdings, plan_documents
        from dtfm.coordinator.view.search_progress import SearchProgress
        from dtfm.scheduler.formats.plan import decision_document, gap, parse_plan
        from dtfm.scheduler.formats.workload import parse_precision, parse_tokens, parse_workload
        from dtfm.scheduler.model.problem import Problem
        from dtfm.scheduler.schedule import schedule
        from dtfm.scheduler.warm_up import warm_up

    _check_source(network, gpus, links)
    work, tokens, precision = _parsed(
        workload, lambda text: (parse_workload(text), parse_tokens(text), parse_precision(text))
    )
    cluster = _cluster(network, gpus, links, host_memory, precision)
    current = _parsed(incumbent, parse_plan) if incumbent is not None else None
    with announced("Compiling the scheduler, once"):  # a machine's first search waits for that, up to a minute
        in_background(warm_up, lambda: None)
    began = time.monotonic()
    stop = Event()
    with SearchProgress(Console(stderr=True)) as progress:

        def time_used() -> float:
            assert deadline is not None
            return (time.monotonic() - began) / max(deadline, 1e-9)

        def search() -> Decision:
            return schedule(
                cluster,
                work,
                current,
                stages=stages,
                objective=objective,
                seed=seed,
                time_used=None if deadline is None else time_used,
                generation=current.generation + 1 if current is not None else 0,
                threads=threads or os.cpu_count() or 1,
                improved=progress.improved,
                bounded=progress.bounded,
                stopped=stop.is_set,
            )

        try:
            decision = in_background(search, progress.show, stop)
        except Infeasible as error:
            print(json.dumps({"plan": None, "reason": str(error)}) if json_lines else f"No plan: {error}")
            raise typer.Exit(1) from None
    elapsed = time.monotonic() - began
    problem = Problem(cluster, work)
    if json_lines:
        more = plan_documents(problem, decision, tokens)
        if gpus is not None:
            more |= {"precision": precision, "without_bf16": without_bf16(gpus) if precision == "bf16" else []}
        print(json.dumps(decision_document(decision, elapsed, objective) | more))
    else:
        print(f"{decision.sentence}\n{describe_plan(decision.plan)}")
        print(describe_holdings(problem, decision, tokens))
        if gpus is not None:
            print(_speeds(gpus, precision))
        print(f"{decision.evaluations:,} plans were tried in {elapsed:.1f} s.")
        if (times := gap(decision, objective)) is not None:
            print(describe_gap(decision.lower_bound_seconds, times))


def plan_now(where: Where = "", json_lines: Json = False) -> None:
    """Asks a running coordinator to plan again.

    A better plan is adopted at the next commit. Prints whether the plan changed, and why.
    """
    from dtfm.coordinator.command.client import ask

    call = ask(where, lambda stub: stub.PlanNow, wire.PlanNowRequest())
    reply: wire.PlanNowReply = asyncio.run(call)
    if json_lines:
        print(json.dumps({"changed": reply.changed, "generation": reply.generation, "reason": reply.reason}))
    else:
        print(f"{'A new plan' if reply.changed else 'No change'} (generation {reply.generation}): {reply.reason}")


def _speeds(gpus: str, precision: str) -> str:
    """The precision that the GPUs' speeds are for."""
    from dtfm.coordinator.command.rented import without_bf16

    told = f"The GPUs' speed is that of {precision}"
    if precision != "bf16":
        return f'{told}, in which this workload computes; precision = "bf16" in the run file is faster.'
    if old := without_bf16(gpus):
        return f"{told}; {old[0]} cannot compute in it, so its speed here is that of fp32."
    return f"{told}, in which this workload computes."


def _check_source(network: Path | None, gpus: str | None, links: str | None) -> None:
    if (network is None) == (gpus is None):
        raise ValueError(
            'give either --network NETWORK.json or --gpus, like --gpus "8x RTX 4090" --links 500Mbit/s,40ms'
        )
    if network is not None and links is not None:
        raise ValueError("--links goes with --gpus; a NETWORK.json has its own links")
    if gpus is not None and links is None:
        raise ValueError(
            "--gpus needs --links too: bandwidth and latency between the machines, like --links 500Mbit/s,40ms"
        )


def _cluster(network: Path | None, gpus: str | None, links: str | None, host_memory: str, precision: str) -> Cluster:
    """Of options that `_check_source` has checked."""
    from dtfm.coordinator.command.rented import parse_gpus, parse_links, parse_size, rented_cluster
    from dtfm.scheduler.formats.network import parse_network

    if network is not None:
        return _parsed(network, parse_network)
    assert gpus is not None
    assert links is not None
    return rented_cluster(parse_gpus(gpus), *parse_links(links), parse_size(host_memory), precision)


def _parsed(path: Path, parse: Callable[[str], Parsed]) -> Parsed:
    try:
        return parse(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
