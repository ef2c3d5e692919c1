"""Has the scheduler compiled before the first plan is wanted, and asks it for plans, within the time that a question has."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial

from dtfm.compiled_code import compile_apart
from dtfm.coordinator.core.state import PlanChosen
from dtfm.coordinator.core.transition import PlanWanted
from dtfm.coordinator.log.wording import describe_seconds, name_first
from dtfm.scheduler.islands import layout
from dtfm.scheduler.islands.advice import NO_ROUNDS_PAY, advice
from dtfm.scheduler.model.decision import Infeasible
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.replan.failover import rerouted
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.warm_up import is_compiled, warm_up

log = logging.getLogger(__name__)

WORTH_A_WORD = 2.0
"""Seconds after which a message says what is taking the time."""
_NICENESS = 10
"""So much more than other processes does the compiler give way: nodes may be training on this machine."""


async def compile_scheduler() -> None:
    """Returns when nothing is left to compile: after half a second, or after a minute on a machine's first start."""
    began = time.monotonic()
    if not await asyncio.to_thread(is_compiled):
        await compile_apart("dtfm.scheduler.warm_up", _NICENESS)
    try:
        await asyncio.to_thread(warm_up)
    except Exception:
        log.exception("the scheduler could not be compiled")  # the first question to the planner fails in the same way
        return
    took = time.monotonic() - began
    if took > WORTH_A_WORD:
        log.info("Compiled the scheduler in %.0f s; this is kept for the next start.", took)


def choose(wanted: PlanWanted, stopped: Callable[[], bool] = lambda: False) -> PlanChosen | str:
    """The best plan found in about ``wanted.seconds``, or a sentence that says why these nodes allow none. Ends soon after
    ``stopped`` says that nobody wants it any more.

    For a thread of its own. It uses half of the cores, as nodes may be training on this machine. Raises ValueError if what
    the run asks for is impossible with any nodes.
    """
    began = time.monotonic()
    if stopped():
        return "the question was dropped"
    if (carried := carried_on(wanted)) is not None:
        return carried

    def time_used() -> float:
        return (time.monotonic() - began) / wanted.seconds

    ask = partial(schedule, stages=wanted.stages, overhead=wanted.overhead)
    if wanted.rounds.length:
        ask = partial(layout.lay_out, rounds=wanted.rounds, numbers=wanted.islands)
    try:
        decision = ask(
            wanted.cluster(),
            wanted.workload,
            wanted.incumbent,
            seed=wanted.seed,
            time_used=time_used,
            generation=wanted.generation,
            horizon=wanted.horizon,
            threads=max(1, (os.cpu_count() or 1) // 2),
            stopped=stopped,
        )
    except Infeasible as error:
        return str(error)
    predicted, bound = decision.predicted.iteration_seconds, decision.lower_bound_seconds
    log.info(
        "planned in %.1f s: %s; %d plans tried",
        time.monotonic() - began,
        describe_seconds(predicted, bound),
        decision.evaluations,
    )
    if wanted.choices is None:
        return PlanChosen(decision.plan, decision.sentence, predicted, bound)
    work = wanted.workload.with_rounds()
    found = advice(wanted.cluster(), work, predicted, wanted.choices, seed=wanted.seed, stopped=stopped)
    if found is None:
        return PlanChosen(decision.plan, f"{decision.sentence} {NO_ROUNDS_PAY}", predicted, bound, rounds=0)
    return PlanChosen(decision.plan, str(found), rounds=found.rounds)


def carried_on(wanted: PlanWanted) -> PlanChosen | None:
    """The plan that trained until now, without its nodes that are gone; None: it is not asked for, or not possible."""
    if wanted.carry_on is None or wanted.incumbent is None:
        return None
    cluster = wanted.carry_on.cluster()
    if wanted.rounds.length:
        plan = layout.carried_on(wanted.incumbent, cluster, wanted.workload)
    else:
        plan = rerouted(wanted.incumbent, Problem(cluster, wanted.workload), wanted.carry_on.holders)
    if plan is None:
        return None
    gone = sorted(set(wanted.incumbent.nodes) - set(plan.nodes))
    return PlanChosen(plan, f"the same stages without {name_first(gone)}" if gone else "the same plan as before")
