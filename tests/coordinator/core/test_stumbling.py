"""What follows when a tick raises: `core/stumbling.py`, and the server that calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtfm.coordinator.core import tick as core, transition as t
from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.stumbling import SENTENCE, after_an_error
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.service import server
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import START, World, refusal_of, training
from tests.coordinator.serving import serving, train

A_VOTE = wire.NodeMessage(step_ready=wire.StepReady())


def stumble(world: World, event: t.Input) -> tuple[t.Command, ...]:
    """The tick with this input raises. Returns the commands of the tick that replaces it."""
    world.state, ready = after_an_error(world.state, event, world.now)
    world.log += ready.entries
    for command in ready.commands:
        match command:
            case t.Send():
                world.said.setdefault(command.stream, []).append(command.message)
            case t.HangUp():
                world.hung_up.add(command.stream)
            case t.PlanWanted():
                world.wanted.append(command)
    while world.wanted:
        world.plan()
    return ready.commands


def test_whoever_sent_it_is_refused_and_the_others_go_on() -> None:
    world = training("a", "b", "c")
    stream = world.streams["b"]
    stumble(world, t.Heard(stream, A_VOTE))
    assert refusal_of(world, stream) == wire.Refusal(reason=wire.MALFORMED, sentence=SENTENCE)
    assert set(world.state.members.sessions) == {"a", "c"}
    assert world.refolded() == world.state.ledger
    world.settle()
    world.step()
    assert world.state.ledger.training.step == 1


def test_a_stranger_is_refused_and_nothing_is_logged() -> None:
    world = training()
    before = world.state
    stumble(world, t.Greeted(99, wire.NodeMessage(), "x"))
    assert 99 in world.hung_up
    assert world.state == before


def test_who_asks_gets_a_refusal_for_an_answer() -> None:
    world = training()
    commands = stumble(world, t.Asked(5, wire.EnrolRequest(), "", 0.0))
    assert [command.ticket for command in commands if isinstance(command, t.Answer)] == [5]
    commands = stumble(world, t.Asked(6, wire.PlanNowRequest(), "operator", 0.0))
    assert [command.ticket for command in commands if isinstance(command, t.Answer)] == [6]


def test_without_a_sender_this_process_forgets_what_only_it_knows_and_training_goes_on() -> None:
    world = training()
    world.automatic_planning = False
    world.vote("a")
    world.feed(t.Asked(7, wire.PlanNowRequest(), "operator", 0.0))
    commands = stumble(world, t.TimePassed())
    assert [command.ticket for command in commands if isinstance(command, t.Answer)] == [7]
    world.feed(t.TimePassed())
    assert not isinstance(world.state.phase, Gathering)  # the same plan is carried on
    assert world.state.ledger.training.generation == 2


def test_even_if_the_parting_stumbles_the_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise AssertionError

    world = training()
    monkeypatch.setattr("dtfm.coordinator.core.stumbling.tick", raises)
    before = world.state
    stumble(world, t.Heard(world.streams["b"], A_VOTE))
    assert world.streams["b"] in world.hung_up
    assert world.state == before
    stumble(world, t.TimePassed())
    assert world.state.phase == Gathering(START, SENTENCE)


async def test_a_message_that_the_core_stumbles_over_does_not_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[State, t.Input, float], Any] = core.tick

    def tick(state: State, event: t.Input, now: float) -> Any:
        if isinstance(event, t.Heard) and event.message.leaving.reason == "odd":
            raise OverflowError
        return real(state, event, now)

    monkeypatch.setattr(server, "tick", tick)
    async with serving(tmp_path) as served, served.node("odd") as odd:
        await served.until(lambda: "odd" in served.ledger.members)
        odd.say(leaving=wire.Leaving(reason="odd"))
        await served.until(lambda: any(isinstance(event, ev.NodeLeft) for event in served.events))
        assert await train(served, served.node("a"), served.node("b")) == 0


async def test_what_the_core_stumbles_over_again_and_again_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real: Callable[[State, t.Input, float], Any] = core.tick

    def tick(state: State, event: t.Input, now: float) -> Any:
        if isinstance(event, t.Asked):
            raise OverflowError
        return real(state, event, now)

    monkeypatch.setattr(server, "tick", tick)
    async with serving(tmp_path) as served:
        for _ in range(10):
            with pytest.raises(Refused, match=SENTENCE):
                await served.server.ask(wire.PlanNowRequest(), "operator")
    said = [record.getMessage() for record in caplog.records if "stumbled" in record.getMessage()]
    assert said == ["a bug in dtfm: the coordinator stumbled over Asked, and goes on without it"]
