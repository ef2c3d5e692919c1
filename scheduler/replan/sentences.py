"""Why a layout was chosen, in words."""

from __future__ import annotations

from dtfm.scheduler.assemble.infeasible import size_in_words
from dtfm.scheduler.cost.exchange import tokens_needed
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Reason
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.replan.price import Price, Terms
from dtfm.scheduler.replan.switch import Switch

NAMED = 5
"""The most idle nodes that a sentence names."""

FIRST = "No plan was in force."

OBSTACLES = {
    Reason.NODE_LOST: "The plan used a node that has left.",
    Reason.REQUESTED: "The plan lacked the requested stages, batches or ways to keep what nodes need, "
    "or was for another workload.",
    Reason.INFEASIBLE: "The plan needed a link or memory that is gone.",
    Reason.NOT_PROVEN: "The plan had stages without a proven node.",
}


def faster(new: Price, old: Price) -> str:
    return f"Another plan takes {new.compared:.3g} s per step instead of {old.compared:.3g} s."


def kept(gain: float, least: float, horizon: float, switch: Switch, cluster: Cluster) -> str:
    """Says why the layout stays. ``least`` is the gain that a change would need."""
    sentence = f"The plan stays: another would gain {max(0.0, gain):.1%} in the {horizon:,.0f} s that it should stand, "
    if switch.freeing:
        worst = max(switch.freeing, key=lambda each: each.lacks)
        return (
            f"{sentence}less than the {least:.0%} that is required where nodes have to free memory first: "
            f"{cluster.ids[worst.node]} lacks {size_in_words(worst.lacks)} of memory to hold its old stage and its new one."
        )
    waiting = f", as nodes would wait {switch.seconds:,.0f} s for state" if switch.seconds > 1 else ""
    return f"{sentence}less than the required {least:.0%}{waiting}."


def unproven(stages: int, bare: int) -> str:
    return f"Proven nodes are too few for its {stages} stages: {bare} have none."


def changing(switch: Switch, cluster: Cluster) -> str:
    """Says what nodes do before they train; empty if they do nothing."""
    sentences = []
    if switch.fetch.nodes:
        fetch = switch.fetch
        sentences.append(f"{fetch.nodes} nodes fetch {fetch.size / 1e6:.0f} MB in {fetch.seconds:.3g} s.")
    if switch.freeing:
        worst = max(switch.freeing, key=lambda each: each.lacks)
        lacks, seconds = size_in_words(worst.lacks), max(each.seconds for each in switch.freeing)
        sentences.append(
            f"{len(switch.freeing)} nodes have no memory for their old stage beside their new one. "
            f"They free the old one first, in {seconds:.3g} s; {cluster.ids[worst.node]} lacks the most, {lacks}."
        )
    return " ".join(sentences)


def idle(plan: Plan) -> str:
    named = ", ".join(plan.idle[:NAMED]) + (f" and {len(plan.idle) - NAMED} more" if len(plan.idle) > NAMED else "")
    return f"Idle, because no faster plan uses them: {named}." if plan.idle else ""


def exchanges(problem: Problem, plan: Plan, price: Price, terms: Terms) -> str:
    """Says what rounds take; empty with one island."""
    if (islands := len(plan.islands)) == 1 or not terms.length:
        return ""
    batches = plan.micro_batches // problem.workload.micro_batches
    samples = f" Each step has {batches} batches." if batches > 1 else ""
    share = price.exchange / (terms.length * price.step + price.exchange)
    more = tokens_needed(islands, problem.workload, terms.length) - 1
    by = "as this run's own exchanges show" if problem.workload.islands_cost != 1 else "as other runs have shown"
    return (
        f"{islands} islands exchange every {terms.length} steps: {price.exchange:.3g} s, {share:.0%} of a round. "
        f"For the same loss they need some {more:.0%} more tokens than one island, {by}.{samples}"
    )


def joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))
