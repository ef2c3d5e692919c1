"""No message of a member or a stranger, in any phase, makes a tick raise. All logged events can be read again. The run does not
fail, unless only this member is left in a run of people who know each other."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Gathering, Pausing, Stepping, Switching
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.audit_scripts import replicas
from tests.coordinator.hostile import fill, hostile
from tests.coordinator.script import LEASE, World, fresh_state

HONEST = ("a", "b", "c")
HOSTILE = "d"


def attacked(seed: int, messages: int, *, burst: int = 1) -> World:
    """A run of three honest nodes and a node that sends harmful messages, this number of times, this many in a row."""
    random = Random(seed)
    stages = random.choice(("auto", 1, 2))
    train, trust = {"steps": random.choice((2, 6, 1000))}, {"audit_rate": random.choice((0.0, 0.3, 1.0))}
    world = World(fresh_state(cluster={"nodes": 2, "stages": stages}, train=train, trust=trust))
    world.automatic_audits = False
    if random.random() < 0.5:
        world.planner = replicas
    first = [*HONEST, HOSTILE]
    random.shuffle(first)
    for node in first:
        world.join(node)
    for number in range(messages):
        assert world.exit_code != 1 or world.state.ledger.is_alone, world.log[-1]
        if world.exit_code is not None:
            break
        if number % burst == 0:
            _one_of_the_others_acts(world, random)
        logged = len(world.log)
        _attack(world, random)
        for event in world.log[logged:]:
            assert ev.from_json(json.loads(json.dumps(ev.to_json(event), allow_nan=False))) == event
    return world


def _attack(world: World, random: Random) -> None:
    ledger = world.state.ledger
    message = hostile(random, ledger.training.generation, ledger.training.step + 1)
    session = world.state.members.sessions.get(HOSTILE)
    chance = random.random()
    if chance < 0.05:
        world.feed(t.Greeted(10**6 + random.randrange(10**6), message, random.choice(("d", "e", "x y"))))
    elif chance < 0.1:
        enrolment, invitation = wire.EnrolRequest(), wire.InviteRequest()
        fill(enrolment, random)
        fill(invitation, random)
        world.feed(t.Asked(1, enrolment, "", 0.0))
        world.feed(t.Asked(2, invitation, "d", 0.0, ("0" * 12, "ab")))
    elif session is None:
        world.prepare(HOSTILE, message if random.random() < 0.2 else None, incarnation=random.randrange(2**64))
    else:
        world.hear(HOSTILE, message)


def _one_of_the_others_acts(world: World, random: Random) -> None:
    """The honest ones do what they would, HOSTILE sometimes does too, and time passes."""
    acting = [node for node in (*HONEST, *(HOSTILE,) * random.randrange(2)) if node in world.state.members.sessions]
    chance = random.random()
    if chance < 0.05 or not acting:
        world.join(random.choice(HONEST))
    elif chance < 0.08:
        world.lose(random.choice(acting))
    elif chance < 0.2:
        world.wait(random.choice((1.0, LEASE * 0.6, LEASE * 7)), beating=acting)
    elif chance < 0.6 and world.state.ledger.training.plan is not None:
        for node in set(acting) & set(world.plan_in_force.nodes):
            match world.state.phase:
                case Switching():
                    world.plan_ready(node)
                case Stepping(audits=audits) if audits:
                    for audit in audits:
                        if node in audit.awaited:
                            world.audit(node)
                            break
                case Stepping():
                    world.vote(node)
                case Pausing():
                    applied = wire.Applied(
                        generation=world.plan_in_force.generation, step=world.state.ledger.training.step
                    )
                    applied.state_digest = b"state at some step"
                    world.hear(node, applied=applied)
                case Gathering():
                    world.feed(t.TimePassed())
            if world.state.ledger.training.plan is None:
                break


@given(st.integers(0, 2**32))
def test_no_message_raises_or_ends_the_run(seed: int) -> None:
    attacked(seed, 40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=10_000)
@given(st.integers(0, 2**32))
def test_no_message_of_a_million_raises_or_ends_the_run(seed: int) -> None:
    attacked(seed, 100, burst=4)
