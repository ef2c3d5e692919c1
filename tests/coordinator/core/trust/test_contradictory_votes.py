"""Votes that contradict each other or the plan are settled against a member, and the run goes on."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dtfm.coordinator.core.trust.disputes import kept_apart
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from tests.coordinator.accused import LIE, goes_on_without, of_strangers, verdicts
from tests.coordinator.answers import DIGEST
from tests.coordinator.islands import exchange, islands
from tests.coordinator.script import LONG, World, refusal_of, training, two_stages


def test_a_quarantined_node_is_told_why_and_who_can_let_it_come_back() -> None:
    world = training("a", "b", "c", **LONG)
    world.vote("c", samples=7)
    refusal = refusal_of(world, world.streams["c"])
    assert refusal.reason == wire.QUARANTINED
    assert "SAMPLE_COUNT: in step 1 it counted 7 samples; its part in plan 1 is 8" in refusal.sentence
    assert "dtfm-coordinator forgive c" in refusal.sentence


@pytest.mark.parametrize(("node", "samples"), [("c", 0), ("c", 7), ("c", 2**32 - 1), ("a", 8)])
def test_who_counts_other_samples_than_its_own_is_quarantined(node: str, samples: int) -> None:
    """c alone is on the last stage."""
    world = training("a", "b", "c", **LONG)
    world.vote(node, samples=samples)
    assert verdicts(world) == [(node, Charge.SAMPLE_COUNT, False)]
    goes_on_without(world, node)


def of_three_replicas(**changes: dict[str, object]) -> World:
    """a, b and c train the first stage, d and e the second."""
    return training(*"abcde", **{**LONG, **changes})


def test_the_replica_whose_state_differs_from_two_others_is_quarantined() -> None:
    world = of_three_replicas()
    world.step()
    for node in "abcde":
        world.vote(node, **({"state_digest": LIE} if node == "b" else {}))
    mismatch = world.events(ev.DigestMismatch)[-1]
    assert (mismatch.step, mismatch.stage, set(mismatch.digests)) == (2, 0, set("abc"))
    assert verdicts(world) == [("b", Charge.DIGEST, True)]
    assert world.events(ev.NodeQuarantined)[-1].against == ("a", "c"), "one of them may have sent it another result"
    assert world.events(ev.RolledBack) == []
    goes_on_without(world, "b")


def shared_by(world: World, node: str, layers: Iterable[int] = (), shared: bytes = DIGEST) -> list[wire.BucketState]:
    """The node's report about its stage's layers. For these ``layers`` it gives this digest of the state that islands share."""
    own = [layer for stage in world.plan_in_force.stages if node in stage.replicas for layer in range(*stage.layers)]
    lies = dict.fromkeys(layers, shared)
    return [wire.BucketState(bucket=n, digest=DIGEST, shared=lies.get(n, DIGEST)) for n in sorted({*own, *lies})]


@pytest.mark.parametrize("shared", [LIE, b""])
def test_the_island_that_has_another_state_after_an_exchange_than_two_others_is_quarantined(shared: bytes) -> None:
    world = islands("a", "b", "c", "d")  # a and b are one
    exchange(world)
    for node in "abcd":
        world.vote(node, states=shared_by(world, node, [1] if node == "d" else [], shared))
    mismatch = world.events(ev.DigestMismatch)[-1]
    assert (mismatch.step, set(mismatch.digests)) == (4, set("acd"))
    assert verdicts(world) == [("d", Charge.DIGEST, True)]


def test_a_node_without_a_digest_of_shared_state_differs_from_nodes_with_one() -> None:
    world = islands("a", "b", "c", "d")
    exchange(world)
    for node in "abcd":
        world.vote(node, states=shared_by(world, node) if node != "d" else [])
    assert verdicts(world) == [("d", Charge.DIGEST, True)]


def test_what_somebody_says_of_layers_that_it_does_not_train_does_not_count() -> None:
    world = training("a", "b", "c", **LONG)  # c alone has the last stage
    world.step()
    last = range(*world.plan_in_force.stages[-1].layers)
    for node in "abc":
        world.vote(node, states=shared_by(world, node, last if node in "ab" else [], LIE))
    assert world.state.ledger.training.step == 2
    assert verdicts(world) == []


def test_islands_are_compared_after_the_last_exchange_too() -> None:
    world = islands("a", "b", "c", "d", checkpoint={"every": 0})
    while world.state.ledger.training.step < 12:
        exchange(world)
    world.evaluate()
    world.save()
    for node in "abcd":
        states = shared_by(world, node, [1] if node == "d" else [], LIE)
        world.hear(node, applied=wire.Applied(generation=1, step=12, state_digest=DIGEST, states=states))
    assert verdicts(world) == [("d", Charge.DIGEST, True)]


def test_two_strangers_who_agree_do_not_throw_out_a_third_but_are_kept_apart_from_it() -> None:
    world = of_strangers(*"abcde")
    world.step()
    for node in "abcde":
        world.vote(node, **({"state_digest": LIE} if node in "bc" else {}))
    assert verdicts(world) == []
    assert kept_apart(world.state.ledger) == {("a", "b"), ("a", "c")}
    assert world.events(ev.RolledBack)[-1].step == 0, "nobody knows whose state is right"


def test_the_names_of_one_key_have_one_voice() -> None:
    world = of_three_replicas()
    world.belong_together("b", "c")
    world.step()
    for node in "abcde":
        world.vote(node, **({"state_digest": LIE} if node in "bc" else {}))
    assert verdicts(world) == []
    assert len(kept_apart(world.state.ledger)) >= 1


def test_two_replicas_that_differ_are_kept_apart_and_all_go_back_to_the_state_both_agreed_on() -> None:
    world = training("a", "b", "c", train=LONG["train"], checkpoint={"every": 2})
    for _ in range(4):
        world.step()
        if world.state.ledger.training.step % 2 == 0:
            world.save()
    for node in "abc":
        world.vote(node, **({"state_digest": LIE} if node == "a" else {}))
    assert verdicts(world) == []
    assert kept_apart(world.state.ledger) == {("a", "b")}
    back = world.events(ev.RolledBack)[-1]
    assert (back.from_step, back.step) == (4, 2), "the snapshot of step 4 has the state that they disagree about"
    assert world.state.ledger.copies.checkpoints.keys() == {2}


def test_where_no_plan_does_without_the_two_the_one_of_less_standing_goes() -> None:
    world = training("a", "b", "c", train=LONG["train"])
    world.planner = lambda ids: "two of them do not reach each other" if {"a", "b"} <= set(ids) else two_stages(ids)
    world.step()
    for node in "abc":
        world.vote(node, **({"state_digest": LIE} if node == "a" else {}))
    assert verdicts(world) == [("b", Charge.DIGEST, True)]  # it came after a
    assert "it may not be at fault: `dtfm-coordinator forgive b`" in world.events(ev.NodeQuarantined)[-1].reason
    goes_on_without(world, "b")


def test_a_different_gradient_is_settled_too_and_nobody_goes_back() -> None:
    world = of_three_replicas()
    for node in "abcde":
        world.vote(node, squared_gradient_norm=2.1 if node == "c" else 2.0)
    assert verdicts(world) == [("c", Charge.GRADIENT_NORM, True)]
    goes_on_without(world, "c")


def test_gradients_of_other_kinds_of_devices_may_differ_in_the_last_digits() -> None:
    world = of_three_replicas()
    for node in "abcde":
        world.vote(node, squared_gradient_norm=2.0001 if node == "c" else 2.0)
    assert world.state.ledger.training.step == 1


def test_a_digest_after_the_last_step_is_settled_too() -> None:
    world = of_three_replicas(train={"steps": 1}, checkpoint={"every": 0})
    world.step()
    world.evaluate()
    world.save()
    for node in "abcde":
        digest = LIE if node == "b" else DIGEST
        world.hear(node, applied=wire.Applied(generation=1, step=1, state_digest=digest))
    assert verdicts(world) == [("b", Charge.DIGEST, True)]
    assert world.exit_code == 0  # its checkpoint is whole


def test_an_evaluation_of_other_micro_batches_than_its_own_is_refused() -> None:
    world = training("a", "b", train={"steps": 10, "evaluate_every": 1})
    world.step()
    world.hear("b", evaluated=wire.Evaluated(generation=1, step=1, losses=[1.0] * 3))
    assert refusal_of(world, world.streams["b"]).reason == wire.MALFORMED
