"""``dtfm-coordinator plan`` and ``plan-now``: the scheduler on files, and a running coordinator's next plan."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtfm.coordinator.command.background import announced
from dtfm.coordinator.command.options import Json, Where
from dtfm.coordinator.command.planning.gpus import HOST_MEMORY, RESERVED, RESERVED_GIB, SUSTAINED
from dtfm.scheduler.model.decision import Objective

if TYPE_CHECKING:  # the commands that read a log start faster without it
    from dtfm.protos import control_pb2 as wire


def plan(
    workload: Annotated[
        Path | None,
        typer.Option(
            help="WORKLOAD.json: layers, micro_batches. `dtfm-node workload RUN.toml` writes it. Without it --run must do."
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="NETWORK.json: nodes, latency_ms, bandwidth_gbps, lines. Or one of the paper's five networks: paper:worldwide, "
            "paper:regional, paper:universities, paper:spot, paper:data-center."
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help='Instead of --network: GPUs that you may rent, each a machine of its own, like "8x RTX 4090, A100 80GB", or '
            '"2x 4x RTX 4090": two machines of four, which share its line and its memory. '
            f"Their speed counts as {SUSTAINED:.0%} of the data sheet's in the precision of the workload. Their memory "
            f"counts less {RESERVED_GIB} GiB and {RESERVED:.0%}, for the driver and fragmentation."
        ),
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(
            help="With --gpus: what each machine's connection carries, up and down, and the latency between any two, one way, "
            "like 500Mbit/s,40ms."
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            help='With --gpus: what a GPU costs per hour, like "RTX 4090=0.35" or "RTX 4090=0.35 EUR". Once for each kind of GPU.'
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.toml",
            help="The run file. Its train.steps say how long the GPUs are needed. For models of well-known families it needs no "
            "--workload.",
        ),
    ] = None,
    host_memory: Annotated[
        str, typer.Option(help="With --gpus: the memory of each machine beside its GPU, for optimizer state.")
    ] = HOST_MEMORY,
    objective: Annotated[
        Objective,
        typer.Option(
            help="What to minimize: the seconds of a step, or the cost model of the paper (arXiv 2206.01288, section 3) for "
            "equal groups, by the workload's `paper` costs. A network of the paper needs no --workload: it trains GPT-3 1.3B."
        ),
    ] = Objective.STEP,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Number of stages. Default: the scheduler chooses it.")
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds after which the search stops. Default: it stops when a longer one would hardly help. Then "
            "it estimates the gain of islands: some seconds, half a minute for 200 GPUs.",
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
    last sentence says how much a better plan could gain at most. The bound is a time that no plan can beat, and the gap is the
    plan's time divided by it. A plan with gap 1 is perfect; a plan with a larger gap may still be the best there is.

    On a terminal it shows the best plan found so far; elsewhere it says once that it searches. Ctrl-C ends the search and
    prints the best plan found so far.

    Exit codes: 0 a plan was found, 1 no plan is possible, 2 bad input.
    """
    with announced("Loading the scheduler"):
        from dtfm.coordinator.command.planning.by_paper import print_plan_by_paper
        from dtfm.coordinator.command.planning.print_plan import print_plan

    if objective is Objective.PAPER:
        print_plan_by_paper(
            workload=workload,
            network=network,
            gpus=gpus,
            links=links,
            run=run,
            stages=stages,
            deadline=deadline,
            seed=seed,
            threads=threads,
            json_lines=json_lines,
        )
        return
    print_plan(
        workload=workload,
        network=network,
        gpus=gpus,
        links=links,
        price=price,
        run=run,
        host_memory=host_memory,
        stages=stages,
        deadline=deadline,
        seed=seed,
        threads=threads,
        json_lines=json_lines,
    )


def plan_now(where: Where = "", json_lines: Json = False) -> None:
    """Asks a running coordinator to plan again.

    A better plan is adopted after the next step, or with rounds after the next exchange. Prints whether the plan changed, and
    why.
    """
    from dtfm.coordinator.command.client import ask

    reply: wire.PlanNowReply = asyncio.run(ask(where, "PlanNow"))
    if json_lines:
        told = {"changed": reply.changed, "generation": reply.generation, "reason": reply.reason, "run": reply.run}
        print(json.dumps(told))
    else:
        found = "a new plan" if reply.changed else "no change"
        print(f"{reply.run}: {found} (generation {reply.generation}): {reply.reason}")
