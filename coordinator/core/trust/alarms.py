"""What members find unusual in each other's work, and which of it is done again at once.

An alarm proves nothing, and costs nobody any standing: it directs an audit. What alarms can cost is bounded by an allowance
of each party. In the long run all parties together have as many micro-batches done again as the draw has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from dtfm.coordinator.core.trust.audits import Passed
from dtfm.coordinator.core.trust.draw import Drawn, must_have, neighbours_of
from dtfm.coordinator.core.validation.refusal import malformed
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from dtfm.scheduler.model.chains import micro_batches_of
from dtfm.scheduler.model.plan import Plan

MOST_UNUSUAL = 8
"""Alarms in a vote."""

MOST_DEVIATIONS = 1e6

MOST_FOLLOWED = 4
"""Alarms that are followed in a step, each of another node's work."""

BURST = 3
"""So many whole shares can be done again for a party's alarms at once."""

NOBODY = ""
"""Raises the alarm if a node sends the same bytes twice."""

_KINDS = (Kind.ACTIVATION, Kind.GRADIENT, Kind.REDUCE)


@dataclass(frozen=True, slots=True)
class Alarm:
    """``by`` says that what ``of`` sent it is unusual: the tensors of these micro-batches (ACTIVATION, GRADIENT), or what it
    added to a bucket (REDUCE)."""

    by: str
    of: str
    kind: Kind
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Followed:
    """What is done again for an alarm."""

    alarm: Alarm
    drawn: Drawn


def read_alarms(vote: wire.StepReady, node: str, passed: Passed) -> tuple[Alarm, ...]:
    """What the node's vote says is unusual, of what it votes to have got. Raises Refused."""
    if len(vote.unusual) > MOST_UNUSUAL:
        raise malformed("unusual", len(vote.unusual), f"at most {MOST_UNUSUAL} tensors")
    got = {(hop[0], hop[2], hop[3]) for hop in passed.received} if vote.unusual else set()
    found = []
    for each in vote.unusual:
        if not 0 < each.deviations <= MOST_DEVIATIONS:
            raise malformed("unusual.deviations", each.deviations, f"above 0, and at most {MOST_DEVIATIONS:g}")
        if each.kind not in _KINDS or (each.node, each.kind, each.index) not in got:
            wanted = "an activation, a gradient or an addend that the vote names as received"
            raise malformed("unusual", (each.node, each.kind, each.index), wanted)
        found.append(Alarm(node, each.node, Kind(each.kind), (each.index,)))
    return tuple(found)


def repeats(passed: Mapping[str, Passed]) -> Iterator[Alarm]:
    """An alarm for each node that sent the same bytes for two micro-batches, though what it got for them differs."""
    for node, its in sorted(passed.items()):
        came = {(hop[2], hop[3]): digest for hop, digest in its.received.items() if hop[2] in _KINDS[:2]}
        first: dict[tuple[int, bytes], int] = {}
        for (_, _, kind, index, _), digest in sorted(each for each in its.sent.items() if each[0][2] in _KINDS[:2]):
            earlier = first.setdefault((kind, digest), index)
            alike = [
                came[of, index] == came[of, earlier]
                for of in _KINDS[:2]
                if (of, index) in came and (of, earlier) in came
            ]
            if earlier != index and not any(alike):
                yield Alarm(NOBODY, node, Kind(kind), (earlier, index))
                break


def refilled(plan: Plan, rate: float, party: Callable[[str], str], allowances: Mapping[str, float]) -> dict[str, float]:
    """The allowances after a step, by party, in micro-batches: those of the plan's parties together grow by what the draw has
    done again. Those that are not named are whole."""
    each = rate * sum(load for stage in plan.stages for load in stage.loads) / len({*map(party, plan.nodes), NOBODY})
    return {who: left + each for who, left in allowances.items() if left + each < _whole(plan)}


def follow(
    plan: Plan,
    alarms: Sequence[Alarm],
    allowances: Mapping[str, float],
    random: Random,
    party: Callable[[str], str],
    kept: Collection[str],
    drawn: Sequence[Drawn],
) -> tuple[list[Followed], dict[str, float]]:
    """What is done again because of ``alarms``, beside what is ``drawn``, and the allowances that are left.

    ``kept``: the nodes that have what they sent; as with the draw, only these audit, and only micro-batches can be done again
    whose neighbours `must_have` what they sent. An auditor is a replica of the same stage and of another party, if possible not
    of the one that raised the alarm, and one that has little else to audit. Who has the most left of its allowance is heard
    first.
    """
    share_of, neighbours, has, left = micro_batches_of(plan), neighbours_of(plan), frozenset(kept), dict(allowances)
    whole = _whole(plan)
    busy = [each.by for each in drawn]
    found: list[Followed] = []
    order = random.sample(alarms, len(alarms))
    for alarm in sorted(order, key=lambda each: -left.get(_who(each, party), whole)):
        who, node = _who(alarm, party), alarm.of
        numbers = share_of[node] if alarm.kind is Kind.REDUCE else alarm.indices
        if len(found) == MOST_FOLLOWED or node in [each.alarm.of for each in found] or not numbers:
            continue
        if alarm.kind is not Kind.REDUCE and any(
            d.node == node and set(numbers) <= set(d.micro_batches) for d in drawn
        ):
            continue  # it is done again anyway
        stage = plan.stages[plan.stage_of(node) or 0]
        able = [
            by for by in random.sample(stage.replicas, len(stage.replicas)) if by in has and party(by) != party(node)
        ]
        if who == party(node) or not able:
            continue
        if not all(must_have(neighbours[node, number], node, party, has) for number in numbers):
            continue
        if left.get(who, whole) < len(numbers):
            continue
        left[who] = left.get(who, whole) - len(numbers)
        by = min(able, key=lambda each: (party(each) == who, busy.count(each)))
        busy.append(by)
        bucket = alarm.indices[0] if alarm.kind is Kind.REDUCE else None
        found.append(Followed(alarm, Drawn(node, by, tuple(numbers), numbers == share_of[node], bucket)))
    return found, left


def _whole(plan: Plan) -> float:
    return float(BURST * max((load for stage in plan.stages for load in stage.loads), default=0))


def _who(alarm: Alarm, party: Callable[[str], str]) -> str:
    return party(alarm.by) if alarm.by != NOBODY else NOBODY
