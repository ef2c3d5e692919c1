"""Has the scheduler compiled before the first plan is wanted, and asks it for plans, within the time that a question has."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from dtfm.compiled_code import compile_apart
from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.coordinator.core.transition import PlanWanted
from dtfm.coordinator.log.wording import describe_seconds, name_first
from dtfm.scheduler.islands import layout
from dtfm.scheduler.islands.advice import NO_ROUNDS_PAY, advice, advice_of
from dtfm.scheduler.islands.within_round import grown
from dtfm.scheduler.model.chains import chains
from dtfm.scheduler.model.decision import Decision, Infeasible
from dtfm.scheduler.model.population import Population
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.rounds import NO_ROUNDS
from dtfm.scheduler.replan.failover import rerouted
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.search.search import TimeUsed
from dtfm.scheduler.warm_up import is_compiled, warm_up

log = logging.getLogger(__name__)

WORTH_A_WORD = 2.0
"""Seconds after which a message says what is taking the time."""
LOOKING = 4.0
"""Times a plan's seconds that it may take to find out whether rounds pay, and which."""
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


@dataclass(slots=True)
class Kept:
    """What a search leaves for the next one. For one thread at a time."""

    plans: Population = ()
    """Of the last search for a plan of one island; empty before the first."""
    layouts: Population = ()
    """Of the last search for a layout with rounds."""


def choose(
    wanted: PlanWanted, stopped: Callable[[], bool] = lambda: False, kept: Kept | None = None
) -> PlanChosen | str:
    """The best plan found in about ``wanted.seconds`` (some times that where rounds may pay), or a sentence that says why these
    nodes allow none. Ends soon after ``stopped`` says that nobody wants it any more. Searches begin with what was ``kept``, and
    leave theirs there.

    For a thread of its own. It uses half of the cores, as nodes may be training on this machine. Raises ValueError if what
    the run asks for is impossible with any nodes.
    """
    began = time.monotonic()
    if stopped():
        return "the question was dropped"
    if (carried := carried_on(wanted)) is not None:
        return carried
    try:
        found = _choose(wanted, stopped, Kept() if kept is None else kept)
    except Infeasible as error:
        return str(error)
    seconds = describe_seconds(found.predicted_seconds, found.lower_bound_seconds)
    log.info("planned in %.1f s: %s", time.monotonic() - began, seconds)
    return found


def _choose(wanted: PlanWanted, stopped: Callable[[], bool], kept: Kept) -> PlanChosen:
    """Raises Infeasible."""
    (standing, *others), known = wanted.lengths, layout.Known()
    if (soon := within_round(wanted, stopped)) is not None:
        return soon
    if not others:
        return _chosen(_planned(wanted, standing, stopped, known, kept), standing, "")
    plain, workload = _planned(wanted, 0, stopped, known, kept), wanted.workload.with_rounds()
    without, used = plain.predicted.iteration_seconds, _time_used(LOOKING * wanted.seconds)
    best = advice(
        wanted.cluster(),
        workload,
        without,
        [each for each in wanted.lengths if each],
        standing=standing,
        population=kept.layouts,
        overhead=wanted.overhead,
        numbers=wanted.islands,
        seed=wanted.seed,
        stopped=lambda: stopped() or used() > 1,
        known=known,
        held=wanted.incumbent,
        batches=wanted.batches,
    )
    if best is not None:
        decision = _planned(wanted, best.rounds, stopped, known, kept)
        found = advice_of(decision, best.rounds, workload, without)
        if found.pays(standing):
            return _chosen(decision, best.rounds, f"{found.gain}.")
    return _chosen(plain, 0, NO_ROUNDS_PAY)


def within_round(wanted: PlanWanted, stopped: Callable[[], bool]) -> PlanChosen | None:
    """The plan in force with islands of nodes that are idle, if that pays before the next exchange."""
    incumbent = wanted.incumbent
    if incumbent is None or not wanted.steps_left:
        return None
    found = grown(
        wanted.cluster(),
        wanted.workload.with_rounds(),
        incumbent,
        length=wanted.lengths[0],
        steps_left=wanted.steps_left,
        overhead=wanted.overhead,
        uncertainty=wanted.uncertainty,
        seed=wanted.seed,
        stopped=stopped,
    )
    if found is None:
        return None
    decision = found.decision
    seconds, reason = decision.predicted.iteration_seconds, f"{decision.sentence} It begins within the round."
    return PlanChosen(decision.plan, reason, seconds, within_round=True, with_moments=found.with_moments)


def _planned(wanted: PlanWanted, length: int, stopped: Callable[[], bool], known: layout.Known, kept: Kept) -> Decision:
    ask = partial(schedule, stages=wanted.stages, population=kept.plans)
    workload, incumbent = wanted.workload, wanted.incumbent
    if length:
        ask = partial(layout.lay_out, length=length, population=kept.layouts, numbers=wanted.islands, known=known)
        ask = partial(ask, batches=wanted.batches)
        workload = workload.with_rounds()
    elif incumbent is not None and incumbent.rounds.count:  # one island goes on, with the others' nodes
        ask = partial(ask, held=incumbent)
        largest = max(incumbent.islands, key=lambda island: len(chains(island)))
        incumbent = replace(layout.with_share(largest, workload.micro_batches), idle=(), rounds=NO_ROUNDS)
    decision = ask(
        wanted.cluster(),
        workload,
        incumbent,
        overhead=wanted.overhead,
        uncertainty=wanted.uncertainty,
        seed=wanted.seed,
        time_used=_time_used(wanted.seconds),
        generation=wanted.generation,
        horizon=wanted.horizon,
        threads=max(1, (os.cpu_count() or 1) // 2),
        stopped=stopped,
    )
    if length:
        kept.layouts = decision.population
    else:
        kept.plans = decision.population
        (island,) = layout.renumbered([decision.plan], wanted.islands)
        decision = replace(decision, plan=island)
    return decision


def _time_used(seconds: float) -> TimeUsed:
    began = time.monotonic()
    return lambda: (time.monotonic() - began) / seconds


def _chosen(decision: Decision, length: int, gain: str) -> PlanChosen:
    reason, predicted = f"{decision.sentence} {gain}".strip(), decision.predicted.iteration_seconds
    return PlanChosen(decision.plan, reason, predicted, decision.lower_bound_seconds, length)


def carried_on(wanted: PlanWanted) -> PlanChosen | None:
    """The plan that trained until now, without its nodes that are gone; None: it is not asked for, or not possible."""
    if wanted.carry_on is None or wanted.incumbent is None:
        return None
    cluster = wanted.carry_on.cluster()
    if wanted.incumbent.rounds.count:
        plan = layout.carried_on(wanted.incumbent, cluster, wanted.workload)
    else:
        plan = rerouted(wanted.incumbent, Problem(cluster, wanted.workload), wanted.carry_on.holders)
    if plan is None:
        return None
    gone = sorted(set(wanted.incumbent.nodes) - set(plan.nodes))
    return PlanChosen(plan, f"the same stages without {name_first(gone)}" if gone else "the same plan as before")
