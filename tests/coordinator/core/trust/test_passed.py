"""What votes say was passed on: bounded, as the plan has it, and the same at both ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.core.audits import Passed
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.trust.passed import differing, lacks, read_passed
from dtfm.coordinator.log.run import Described
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.workload import Layer, Workload
from tests.coordinator.core.trust.test_draw import PLANS, plan_of
from tests.coordinator.honest_work import commitments, hops, passed

PLAN = plan_of([2, 2], 4)


def described(plan: Plan, tied: int = 0) -> Described:
    """A model with a layer for each stage, and this number of buckets that are tied between layers."""
    layers = (Layer("x", 1e9, 4e6, 1e5),) * len(plan.stages)
    return Described(Workload(layers, 8), "ab12", 100, 10, 3.2, 256, len(layers) + tied)


TIED = described(PLAN, tied=1)


def vote(plan: Plan, node: str) -> wire.StepReady:
    return wire.StepReady(**commitments(plan, node))


@given(PLANS)
def test_what_honest_nodes_vote_is_whole_and_the_same_at_both_ends(plan: Plan) -> None:
    told = {node: read_passed(vote(plan, node), plan, node, described(plan)) for node in plan.nodes}
    assert not any(lacks(plan, node, told[node]) for node in plan.nodes)
    assert differing(told) == []


@given(PLANS, st.data())
def test_one_digest_that_differs_is_a_matter_of_its_two_ends(plan: Plan, data: st.DataObject) -> None:
    if not hops(plan):
        return
    hop = data.draw(st.sampled_from(hops(plan)))
    liar = data.draw(st.sampled_from(hop[:2]))
    told = {node: read_passed(vote(plan, node), plan, node, described(plan)) for node in plan.nodes}
    mine = told[liar].sent if liar == hop[0] else told[liar].received
    assert isinstance(mine, dict)
    if data.draw(st.booleans()):
        mine[hop] = bytes(16)
    else:
        del mine[hop]
    assert [pair[:2] for pair in differing(told)] == [hop[:2]]


@pytest.mark.parametrize("kind", [Kind.ACTIVATION, Kind.GRADIENT])
@pytest.mark.parametrize("field", ["sent", "received"])
def test_who_says_nothing_of_a_tensor_that_the_plan_has_between_stages_lacks_it(field: str, kind: Kind) -> None:
    node = "0a" if (kind == Kind.ACTIVATION) == (field == "sent") else "1a"
    said = vote(PLAN, node)
    kept = [each for each in getattr(said, field) if each.kind != kind]
    said.ClearField(field)
    getattr(said, field).extend(kept)
    assert kind.name in lacks(PLAN, node, read_passed(said, PLAN, node, TIED))


def without(node: str, omitted: Callable[[tuple[str, str, int, int, int]], bool], plan: Plan = PLAN) -> Passed:
    told = read_passed(vote(plan, node), plan, node, described(plan, tied=1))
    sent, received = ({hop: its for hop, its in of.items() if not omitted(hop)} for of in (told.sent, told.received))
    return Passed(sent, received)


@pytest.mark.parametrize("kind", [Kind.REDUCE, Kind.GATHER])
@pytest.mark.parametrize("node", ["0a", "0b"])
def test_who_names_a_piece_names_all_that_is_passed_of_it(node: str, kind: Kind) -> None:
    """Piece 0 is 0a's to sum, piece 1 is 0b's."""
    said = without(node, lambda hop: hop[2:] == (kind, 0, 0))
    assert f"{kind.name} 0, which goes between it and {'0b' if node == '0a' else '0a'}" in lacks(PLAN, node, said)


def test_two_nodes_that_name_nothing_between_them_each_lack_something() -> None:
    """Else what each of them added up could not be done again: an addend would be missing."""
    plan = plan_of([4], 4)
    for node in ("0b", "0c"):
        assert lacks(plan, node, without(node, lambda hop: {*hop[:2]} == {"0b", "0c"}, plan))


def test_a_piece_that_two_have_invented_is_one_of_which_the_others_name_nothing() -> None:
    plan, told = plan_of([4], 4), {}
    for node in plan.nodes:
        told[node] = read_passed(vote(plan, node), plan, node, described(plan, tied=1))
    invented = ("0b", "0c", Kind.REDUCE, 0, 4002)
    assert isinstance(told["0b"].sent, dict)
    assert isinstance(told["0c"].received, dict)
    told["0b"].sent[invented] = told["0c"].received[invented] = bytes(16)
    assert [node for node in plan.nodes if lacks(plan, node, told[node])] == ["0b", "0c"]


def one(**changes: object) -> Callable[[wire.StepReady], None]:
    """A vote that names one more tensor."""

    def change(vote: wire.StepReady) -> None:
        fields = {"peer": "0b", "kind": Kind.REDUCE, "indices": [2], "parts": [5], "digests": bytes(16)}
        vote.sent.add(**{**fields, **changes})

    return change


def twice(vote: wire.StepReady) -> None:
    vote.sent.append(vote.sent[0])


@pytest.mark.parametrize(
    "change",
    [
        one(peer="0a"),
        one(peer="x"),
        one(peer="1b", kind=Kind.ACTIVATION, indices=[0], parts=[0]),  # that goes to 1a
        one(peer="1b", kind=Kind.ACTIVATION, indices=[77], parts=[0]),
        one(peer="1a", kind=Kind.ACTIVATION, indices=[0], parts=[1]),
        one(peer="1a", kind=Kind.EVALUATION, indices=[0], parts=[0]),
        one(indices=[3]),
        one(indices=[1]),  # another stage's
        one(indices=[0], parts=[2]),  # piece 2 is its own to sum
        one(parts=[1 << 20]),
        one(indices=[0], parts=[1001]),  # a bucket of 4 MB has no piece of this number
        one(parts=[]),
        one(digests=bytes(15)),
        twice,
    ],
)
def test_a_tensor_that_the_plan_does_not_have_is_refused(change: Callable[[wire.StepReady], None]) -> None:
    said = vote(PLAN, "0a")
    change(said)
    with pytest.raises(Refused):
        read_passed(said, PLAN, "0a", TIED)


def test_pieces_of_a_tied_bucket_may_go_to_other_stages() -> None:
    said = vote(PLAN, "0a")
    one(peer="1b")(said)
    assert ("0a", "1b", Kind.REDUCE, 2, 5) in read_passed(said, PLAN, "0a", TIED).sent


def test_a_vote_that_names_more_than_there_can_be_is_refused() -> None:
    said = wire.StepReady(sent=passed([("0a", "0b", Kind.REDUCE, 2, part) for part in range(100_001)], at=1))
    with pytest.raises(Refused, match="at most"):
        read_passed(said, PLAN, "0a", TIED)
