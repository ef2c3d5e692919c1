"""Parts of several events: words for people, and events that only tell something."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING

from dtfm.scheduler.model.memory import Checkpointing, OptimizerState
from dtfm.scheduler.model.plan import Plan

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

MOST_NAMED = 8
"""The largest number of nodes that one sentence names."""

MOST_ROUTES = 3
"""The number of routes of a plan that are shown."""

_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?!\.?\d)")
_IPV6 = re.compile(
    r"(?:(?<![0-9A-Za-z])|(?<=%5B))\[?([0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,}(?<![:.]))(?:%\w+)?\]?(?::\d+)?"
)

AS_GOOD, MOST_GAP = 1.005, 2.0
"""With a gap below the first, no gain is worth having. With a gap above the second, a bound does not say how good a plan is."""


class Remark:
    """An event that only tells something. It does not change the ledger."""

    __slots__ = ()

    def apply(self, ledger: Ledger) -> Ledger:
        return ledger


def memory_in_words(size: float) -> str:
    """Like "23.6 GiB"; for small sizes "12 MiB" or "0.2 MiB"."""
    if size >= 2**30 / 10:
        return f"{size / 2**30:.1f} GiB"
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**20:.1f} MiB"


def utc(at: float) -> str:
    """A time in seconds since 1970, like "2026-05-31 12:00 UTC"."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def telling_bound(predicted: float | None, bound: float | None, measured: float | None = None) -> float | None:
    """The bound on a step's seconds, if it is informative; otherwise None. It is not if the plan is expected to take more than
    MOST_GAP times as long. Nor is it if steps are ``measured`` to take less: then devices have become faster. Old logs have
    impossible bounds, below 0 or above the prediction."""
    if predicted is None or bound is None or not 0 < predicted <= MOST_GAP * bound:
        return None
    bound = min(bound, predicted)
    return None if measured is not None and measured < bound else bound


def describe_seconds(predicted: float | None, bound: float | None, measured: float | None = None) -> str:
    """A plan's expected seconds, and the best possible seconds if that is informative, like "12.3 s a step, at best 8.1 s"; empty
    if unknown."""
    if predicted is None:
        return ""
    best = telling_bound(predicted, bound, measured)
    return f"{seconds_in_words(predicted)} a step" + (f", at best {seconds_in_words(best)}" if best else "")


def describe_gap(bound: float, gap: float) -> str:
    """How far a plan is from the best possible: ``bound`` seconds a step. The plan takes ``gap`` times that."""
    if gap < AS_GOOD:
        compared = "is as good as any"
    elif gap < 1.1:
        compared = f"takes {gap - 1:.0%} longer"
    else:
        compared = f"takes {gap:.1f} times as long"
    return f"No plan can take less than {seconds_in_words(bound)}; this one {compared}."


def seconds_in_words(seconds: float) -> str:
    """The seconds to three digits, like "8.12 s", "19.0 s", "1,234 s"."""
    if seconds < 10:
        return f"{seconds:.3g} s"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def duration_in_words(seconds: float) -> str:
    """Like "40 s", "12 min" or "3.5 h"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def money_in_words(value: float, currency: str = "") -> str:
    """Like "1,234.50 EUR", "$0.35", or "0.35" without a currency."""
    if len(currency) == 1 and not currency.isalnum():
        return f"{currency}{value:,.2f}"
    return f"{value:,.2f} {currency}".rstrip()


def describe_codecs(tensors: Mapping[str, str]) -> str:
    """The tensors that go over a link and the codec of each, like "activations i8b256, gradients off"."""
    return ", ".join(f"{what} {codec}" for what, codec in sorted(tensors.items()))


def codecs_in_use(codecs: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """The codecs of a plan's links, and the number of links of each, like "i8b256 on 12, off on 3". ``codecs``: by source,
    destination and tensors."""
    used = Counter(codec for links in codecs.values() for tensors in links.values() for codec in tensors.values())
    return ", ".join(f"{codec} on {count}" for codec, count in sorted(used.items()))


def describe_plan(plan: Plan) -> str:
    """The plan as one line, like "2 stages: layers 0-4 on a, b; layers 5-9 on c, d; layers are computed again on a; heaviest
    routes: a -> c 12 micro-batches, b -> d 4, and 3 more"."""
    if len(islands := plan.islands) > 1:
        alone = [island.nodes[0] for island in islands if len(island.nodes) == 1]
        told = [f"all layers on each of {name_first(alone)}"] if alone else []
        told += [_describe_stages(island) for island in islands if len(island.nodes) > 1]
        return f"{len(islands)} islands: {'; '.join(told)}{_describe_keeping(plan)}"
    routes = f"; heaviest routes: {describe_routes(plan)}" if len(plan.stages) > 1 else ""
    return f"{_describe_stages(plan)}{_describe_keeping(plan)}{routes}"


def _describe_stages(plan: Plan) -> str:
    stages = "; ".join(f"layers {s.layers[0]}-{s.layers[1] - 1} on {name_first(s.replicas)}" for s in plan.stages)
    return f"{len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''}: {stages}"


def _describe_keeping(plan: Plan) -> str:
    """The nodes that keep less than usual."""
    ways = [(node, way) for stage in plan.stages for node, way in zip(stage.replicas, stage.keeping, strict=False)]
    again = [node for node, way in ways if way.checkpointing is Checkpointing.LAYER]
    hosted = [node for node, way in ways if way.optimizer_state is OptimizerState.HOST]
    return (f"; layers are computed again on {name_first(again)}" if again else "") + (
        f"; optimizer state is in the host's memory of {name_first(hosted)}" if hosted else ""
    )


def describe_routes(plan: Plan) -> str:
    """The chains of nodes that most micro-batches travel, like "a -> c 12 micro-batches, b -> d 4, and 3 more"."""
    if all(len(stage.replicas) == 1 for stage in plan.stages):
        routes = Counter({tuple(stage.replicas[0] for stage in plan.stages): sum(plan.stages[0].loads)})
    else:
        from dtfm.scheduler.model.chains import chains  # NumPy, which most readers of a log do without

        routes = Counter(chains(plan))
    heaviest = routes.most_common(MOST_ROUTES)
    shown = [f"{' -> '.join(chain)} {count}" for chain, count in heaviest]
    shown[0] += f" micro-batch{'es' if heaviest[0][1] > 1 else ''}"
    return ", ".join(shown) + (f", and {len(routes) - len(shown)} more" if len(routes) > len(shown) else "")


def name_first(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def without_addresses(text: str) -> str:
    """The text with "(address hidden)" in place of each IP address and its port, for readers who may not know where members
    are."""
    return _IPV6.sub(_hide, _IPV4.sub("(address hidden)", text))


def _hide(found: re.Match[str]) -> str:
    try:
        ip_address(found[1])  # a time of day looks like an address, too
    except ValueError:
        return found[0]
    return "(address hidden)"
