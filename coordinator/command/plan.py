"""``dtfm-coordinator plan`` and ``plan-now``: the scheduler on files, and a running coordinator's next plan."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from dtfm.coordinator.command.client import ask
from dtfm.coordinator.command.options import DEFAULT_ADDRESS, Address, Json, TokenFile, read_token
from dtfm.coordinator.view.narration import describe_plan
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.formats import decision_document, parse_any_network, parse_plan, parse_workload
from dtfm.scheduler.model.decision import Infeasible, Objective
from dtfm.scheduler.schedule import schedule

Parsed = TypeVar("Parsed")


def plan(
    network: Annotated[
        Path, typer.Option(help="NETWORK.json: nodes, latency_ms, bandwidth_gbps; for thousands of nodes also classes.")
    ],
    workload: Annotated[Path, typer.Option(help="WORKLOAD.json: layers, micro_batches.")],
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
    deadline: Annotated[float | None, typer.Option(min=0, help="Seconds after which the search stops.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the search: the same seed and files give the same plan.")
    ] = 0,
    json_lines: Json = False,
) -> None:
    """Runs the scheduler alone, on files.

    Prints who computes what, the seconds per step that this should take, and why. Exit codes: 0 a plan was found, 1 no plan is
    possible, 2 bad input.
    """
    cluster, work = _parsed(network, parse_any_network), _parsed(workload, parse_workload)
    current = _parsed(incumbent, parse_plan) if incumbent is not None else None
    began = time.monotonic()
    try:
        decision = schedule(
            cluster,
            work,
            current,
            stages=stages,
            objective=objective,
            seed=seed,
            deadline=None if deadline is None else lambda: time.monotonic() - began > deadline,
            generation=current.generation + 1 if current is not None else 0,
        )
    except Infeasible as error:
        print(json.dumps({"plan": None, "reason": str(error)}) if json_lines else f"No plan: {error}")
        raise typer.Exit(1) from None
    if json_lines:
        print(json.dumps(decision_document(decision, time.monotonic() - began)))
    else:
        print(f"{decision.sentence}\n{describe_plan(decision.plan)}")


def plan_now(address: Address = DEFAULT_ADDRESS, token_file: TokenFile = None, json_lines: Json = False) -> None:
    """Asks a running coordinator to plan again.

    A better plan is adopted at the next commit. Prints whether the plan changed, and why.
    """
    call = ask(address, read_token(token_file), lambda stub: stub.PlanNow, wire.PlanNowRequest())
    reply: wire.PlanNowReply = asyncio.run(call)
    if json_lines:
        print(json.dumps({"changed": reply.changed, "generation": reply.generation, "reason": reply.reason}))
    else:
        print(f"{'A new plan' if reply.changed else 'No change'} (generation {reply.generation}): {reply.reason}")


def _parsed(path: Path, parse: Callable[[str], Parsed]) -> Parsed:
    try:
        return parse(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
