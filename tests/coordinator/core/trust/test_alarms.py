"""What is unusual is done again at once, at the cost of whoever says so."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dtfm.coordinator.core.trust.alarms import (
    BURST,
    MOST_FOLLOWED,
    MOST_UNUSUAL,
    NOBODY,
    Alarm,
    follow,
    read_alarms,
    refilled,
    repeats,
)
from dtfm.coordinator.core.trust.draw import Drawn
from dtfm.coordinator.core.trust.passed import read_passed
from dtfm.coordinator.core.validation.refusal import Refused
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from dtfm.scheduler.model.chains import chains, micro_batches_of
from dtfm.scheduler.model.plan import Plan
from tests.coordinator.core.trust.test_draw import PLANS, itself, plan_of
from tests.coordinator.honest_work import commitments

PLAN = plan_of([3, 3], 12)
FREE: dict[str, float] = {}


def unusual(node: str = "0a", kind: int = Kind.ACTIVATION, index: int = 0, deviations: float = 9.0) -> Any:
    return wire.StepReady.Unusual(node=node, kind=kind, index=index, deviations=deviations)


def read(*told: Any, by: str = "1a") -> tuple[Alarm, ...]:
    vote = wire.StepReady(**commitments(PLAN, by), unusual=told)
    return read_alarms(vote, by, read_passed(vote, PLAN, by, 2))


def test_a_neighbour_may_say_that_what_it_got_is_unusual_and_an_owner_what_others_added() -> None:
    assert read(unusual(), unusual("1b", Kind.REDUCE, 1)) == (
        Alarm("1a", "0a", Kind.ACTIVATION, (0,)),
        Alarm("1a", "1b", Kind.REDUCE, (1,)),
    )
    assert read(unusual("1a", Kind.GRADIENT, 0), by="0a") == (Alarm("0a", "1a", Kind.GRADIENT, (0,)),)


@pytest.mark.parametrize(
    "told",
    [
        unusual(index=1),  # which came from another
        unusual("0b"),
        unusual("1a"),
        unusual("nobody"),
        unusual(kind=Kind.GRADIENT),
        unusual("1b", Kind.GATHER, 1),
        unusual("1b", Kind.REDUCE, 0),  # of the other stage
        unusual(kind=99),
        unusual(deviations=0.0),
        unusual(deviations=float("nan")),
        unusual(deviations=float("inf")),
    ],
)
def test_what_it_did_not_get_or_cannot_mean_is_refused(told: Any) -> None:
    with pytest.raises(Refused):
        read(told)


def test_a_vote_has_a_handful_of_alarms_at_most() -> None:
    assert len(read(*[unusual()] * MOST_UNUSUAL)) == MOST_UNUSUAL
    with pytest.raises(Refused):
        read(*[unusual()] * (MOST_UNUSUAL + 1))


def test_the_same_bytes_for_two_micro_batches_raise_an_alarm_unless_what_came_in_is_the_same() -> None:
    told = {node: read_passed(wire.StepReady(**commitments(PLAN, node)), PLAN, node, 2) for node in PLAN.nodes}
    assert not list(repeats(told))
    sent, received = dict(told["1a"].sent), dict(told["1a"].received)
    one, two = micro_batches_of(PLAN)["1a"][:2]
    gradients = {hop[3]: hop for hop in sent if hop[2] == Kind.GRADIENT}
    sent[gradients[two]] = sent[gradients[one]]
    changed = {**told, "1a": type(told["1a"])(sent, received)}
    assert list(repeats(changed)) == [Alarm(NOBODY, "1a", Kind.GRADIENT, (one, two))]
    activations = {hop[3]: hop for hop in received if hop[2] == Kind.ACTIVATION}
    received[activations[two]] = received[activations[one]]
    assert not list(repeats({**told, "1a": type(told["1a"])(sent, received)}))


def run(alarms: list[Alarm], allowances: dict[str, float] = FREE, drawn: tuple[Drawn, ...] = (), **rest: Any) -> Any:
    arguments = {"plan": PLAN, "party": itself, "kept": PLAN.nodes, **rest}
    return follow(
        alarms=alarms,
        allowances=allowances,
        random=Random(0),
        drawn=drawn,
        **arguments,
    )


def test_the_micro_batch_or_the_whole_share_with_the_bucket_is_done_again_by_a_third() -> None:
    found, left = run([Alarm("1a", "0a", Kind.ACTIVATION, (0,)), Alarm("1a", "1b", Kind.REDUCE, (1,))])
    by_node = {each.drawn.node: each.drawn for each in found}
    assert (by_node["0a"].micro_batches, by_node["0a"].whole, by_node["0a"].bucket) == ((0,), False, None)
    assert by_node["0a"].by in ("0b", "0c")
    assert by_node["1b"] == Drawn("1b", "1c", micro_batches_of(PLAN)["1b"], True, 1), "not by who raised the alarm"
    assert left == {"1a": BURST * 4 - 1 - 4}


def test_where_there_is_no_third_the_one_that_raised_the_alarm_does_it_again() -> None:
    plan = plan_of([2], 4)
    found, _ = run([Alarm("0b", "0a", Kind.REDUCE, (0,))], plan=plan, kept=plan.nodes)
    assert [each.drawn.by for each in found] == ["0b"]


def test_three_whole_shares_at_once_and_then_as_much_as_the_draw_does_again() -> None:
    alarm, left, followed = Alarm("1a", "1b", Kind.REDUCE, (1,)), dict(FREE), 0
    for step in range(400):
        left = refilled(PLAN, 0.02, itself, left)
        found, left = run([alarm], left)
        followed += len(found)
        assert step != BURST - 1 or followed == BURST
    drawn = 400 * 0.02 * 24 / 7  # the share of one of six parties and nobody
    assert followed * 4 == pytest.approx(BURST * 4 + drawn, abs=4)


def test_who_has_raised_none_is_heard_before_who_has_raised_many() -> None:
    many = [Alarm("1a", of, Kind.REDUCE, (1,)) for of in ("1b", "1c")]
    found, _ = run([*many, Alarm("1b", "1c", Kind.REDUCE, (1,))], {"1a": 7.0})
    assert {(each.alarm.by, each.alarm.of) for each in found} == {("1b", "1c"), ("1a", "1b")}


@pytest.mark.parametrize(
    "rest",
    [
        {"kept": ["0a"]},
        {"kept": [node for node in PLAN.nodes if node != "1a"]},  # the neighbour has what it got no more
        {"party": lambda name: name[0]},
        {"party": lambda name: "one" if name in ("0a", "1a") else name},
        {"allowances": {"1a": 0.5}},
        {"drawn": (Drawn("0a", "0b", (0, 3), False),)},
    ],
)
def test_nothing_is_done_again_that_cannot_be_or_is_anyway(rest: Any) -> None:
    assert run([Alarm("1a", "0a", Kind.ACTIVATION, (0,))], **rest)[0] == []


def test_what_is_unusual_is_done_again_though_another_name_of_its_key_kept_nothing() -> None:
    kept = [node for node in PLAN.nodes if node != "1a"]
    alarm = Alarm("0b", "0a", Kind.REDUCE, (0,))
    bound = {"0a": "its key", "1a": "its key"}
    found, _ = run([alarm], kept=kept, party=lambda name: bound.get(name, name))
    assert [each.drawn.node for each in found] == ["0a"]
    assert run([alarm], kept=kept)[0] == []


@settings(max_examples=100, deadline=None)
@given(PLANS, st.data())
def test_whatever_is_raised_only_a_few_are_followed_and_all_as_the_draw_would(plan: Plan, data: st.DataObject) -> None:
    nodes, ways = st.sampled_from(plan.nodes), chains(plan)
    numbers = {node: [n for n, chain in enumerate(ways) if node in chain] for node in plan.nodes}
    alarms = []
    for _ in range(data.draw(st.integers(0, 12))):
        by, of = data.draw(nodes), data.draw(nodes)
        kind = data.draw(st.sampled_from([Kind.ACTIVATION, Kind.REDUCE]))
        if kind is Kind.REDUCE or numbers[of]:
            alarms.append(Alarm(by, of, kind, (0 if kind is Kind.REDUCE else data.draw(st.sampled_from(numbers[of])),)))
    random, kept = Random(data.draw(st.integers(0, 99))), data.draw(st.sets(nodes))
    found, left = follow(plan, alarms, FREE, random, itself, kept, ())
    assert len(found) <= MOST_FOLLOWED
    assert len({each.drawn.node for each in found}) == len(found)
    assert all(allowance >= 0 for allowance in left.values())
    for each in found:
        assert each.alarm in alarms
        assert plan.stage_of(each.drawn.by) == plan.stage_of(each.drawn.node)
        assert each.drawn.by in kept
        assert each.drawn.by != each.drawn.node
        assert set(each.drawn.micro_batches) <= set(numbers[each.drawn.node])
