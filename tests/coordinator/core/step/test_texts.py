"""Texts after evaluations, for the prompts of the run file: `core/step/texts.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.step.texts import PATIENCE
from dtfm.coordinator.core.tick import tick
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.run_file.errors import RunFileError
from dtfm.protos.run_file.run_file import parse_run
from dtfm.protos.texts import MOST_PROMPTS, MOST_TEXT_CHARACTERS
from dtfm.scheduler.model.plan import Plan, Stage
from tests.coordinator.script import LAYERS, World, fresh_state, training

PROMPTS = ["def f", "Once upon\na time"]
EVERY_OTHER = {"steps": 100, "evaluate_every": 2}


def one_stage(nodes: Iterable[str]) -> Plan:
    """All nodes but "idle" are replicas of the whole model."""
    names = tuple(sorted(set(nodes) - {"idle"}))
    loads = tuple(4 // len(names) + (place < 4 % len(names)) for place in range(len(names)))
    return Plan(0, (Stage((0, LAYERS), names, loads),), (), tuple(set(nodes) & {"idle"}))


def world_of(*nodes: str, prompts: list[str] = PROMPTS, **train: Any) -> World:
    cluster = {"nodes": len(nodes), "stages": "auto"}
    world = World(
        fresh_state(
            train={**EVERY_OTHER, **train}, cluster=cluster, data={"prompts": prompts}, checkpoint={"every": 0}
        ),
        one_stage,
    )
    world.join(*nodes)
    world.settle()
    return world


def asked(world: World) -> list[tuple[str, int]]:
    """Who was asked for texts, after which step."""
    said = {node: world.said[stream] for node, stream in world.streams.items()}
    return [
        (node, message.write_texts.step)
        for node, messages in sorted(said.items())
        for message in messages
        if message.WhichOneof("message") == "write_texts"
    ]


def texts(*written: str, step: int = 2, whole: bool = False, problem: str = "") -> wire.Texts:
    return wire.Texts(step=step, texts=[wire.Texts.Text(text=each, whole=whole) for each in written], problem=problem)


def test_after_an_evaluation_the_replica_that_waits_longest_is_asked_and_its_texts_are_in_the_log() -> None:
    world = world_of("a", "b")
    world.step()
    assert asked(world) == []
    world.step()
    ((node, step),) = asked(world)
    (sent,) = (m.write_texts for m in world.said[world.streams[node]] if m.WhichOneof("message") == "write_texts")
    assert (step, list(sent.prompts)) == (2, PROMPTS)
    world.evaluate()
    world.step()
    world.hear(node, texts=texts("(x):\n\x1b[31m    return x", " there\u202e was"))
    assert world.events(ev.TextWritten) == [
        ev.TextWritten(2, node, PROMPTS[0], "(x):\\n\\x1b[31m    return x", False),
        ev.TextWritten(2, node, PROMPTS[1], " there\\u202e was", False),
    ]
    assert world.events(ev.TextWritten)[1].narrate() == (
        f'after step 2 {node} continues "Once upon\\na time" with " there\\u202e was ..."'
    )
    assert [*world.state.ledger.texts] == PROMPTS
    world.step()
    world.evaluate()
    world.hear(node, texts=texts("other", "words", step=4, whole=True))
    assert [told.text for told in world.state.ledger.texts.values()] == ["other", "words"]


def test_without_prompts_nobody_is_asked() -> None:
    world = world_of("a", prompts=[])
    world.step()
    world.step()
    assert asked(world) == []


def test_an_idle_node_with_a_copy_of_the_model_is_asked_first() -> None:
    world = world_of("a", "b", "idle")
    world.step()
    world.step()
    assert world.state.members.sessions["idle"].standby is not None
    assert asked(world) == [("idle", 2)]
    world.evaluate()
    world.step()
    world.hear("idle", texts=texts("one", "two", step=3))
    assert [told.step for told in world.events(ev.TextWritten)] == [3, 3], "its copy was a step further by then"


def test_where_no_node_has_the_whole_model_the_log_says_so_once() -> None:
    world = training("a", "b", train=EVERY_OTHER, data={"prompts": PROMPTS})
    said = list[str]()
    for _ in range(6):
        for node in world.plan_in_force.nodes:
            said += logged(world, node)
    assert len([line for line in said if "no texts are written" in line]) == 1
    assert asked(world) == []


def logged(world: World, voter: str) -> list[str]:
    """The log lines of the tick in which this node votes."""
    seen = list[str]()
    feed = world.feed

    def listening(event: t.Input) -> None:
        _, ready = tick(world.state, event, world.now)
        seen.extend(command.sentence for command in ready.commands if isinstance(command, t.Log))
        feed(event)

    world.feed = listening  # type: ignore[method-assign]
    world.vote(voter)
    world.feed = feed  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    "told",
    [
        texts("one"),
        texts("one", "two", "three"),
        texts("one", "x" * (MOST_TEXT_CHARACTERS + 1)),
    ],
)
def test_texts_of_another_number_or_length_are_refused(told: wire.Texts) -> None:
    world = world_of("a", "b")
    world.step()
    world.step()
    ((node, _),) = asked(world)
    world.hear(node, texts=told)
    assert node not in world.state.members.sessions
    assert world.events(ev.TextWritten) == []


def test_a_node_that_still_writes_is_asked_no_second_time_but_not_awaited_for_ever() -> None:
    world = world_of("a")
    while world.state.ledger.training.step < 2 * (PATIENCE + 1):
        world.step()
        if world.state.ledger.training.step % 2 == 0:
            world.evaluate()
    assert asked(world) == [("a", 2), ("a", 2 * (PATIENCE + 1))]
    world.hear("a", texts=texts("one", "two", step=2 * (PATIENCE + 1)))
    assert len(world.events(ev.TextWritten)) == 2


def test_texts_that_nobody_asked_for_are_ignored() -> None:
    world = world_of("a", "b")
    world.step()
    world.hear("a", texts=texts("one", "two", step=1))
    world.step()
    ((node, _),) = asked(world)
    (other,) = {"a", "b"} - {node}
    world.hear(other, texts=texts("one", "two"))
    for step in (0, 1, 3):
        world.hear(node, texts=texts("one", "two", step=step))
    assert world.events(ev.TextWritten) == []
    for _ in range(3):
        world.hear(node, texts=texts("one", "two"))
    assert len(world.events(ev.TextWritten)) == 2, "once for each prompt"
    assert world.state.members.sessions.keys() == {"a", "b"}


def test_a_node_that_cannot_write_says_why_and_the_run_goes_on() -> None:
    world = world_of("a")
    world.step()
    world.step()
    world.hear("a", texts=texts(problem="no room"))
    assert world.events(ev.TextWritten) == []
    world.evaluate()
    world.step()
    world.step()
    assert asked(world) == [("a", 2), ("a", 4)]


def test_escape_sequences_do_not_make_a_text_longer_than_others() -> None:
    world = world_of("a")
    world.step()
    world.step()
    world.hear("a", texts=texts("\x00" * MOST_TEXT_CHARACTERS, "short", whole=True))
    first, second = world.events(ev.TextWritten)
    assert (len(first.text), first.whole) == (MOST_TEXT_CHARACTERS, False)
    assert (second.text, second.whole) == ("short", True)


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"data": {"prompts": ["x"] * (MOST_PROMPTS + 1)}}, "data.prompts"),
        ({"data": {"prompts": [""]}}, "data.prompts"),
        ({"data": {"prompts": ["x" * 501]}}, "data.prompts"),
        (
            {"model": {"family": "module", "module": "here:model"}, "data": {"prompts": ["x"]}},
            "transformers' language models alone",
        ),
    ],
)
def test_prompts_are_few_and_short_and_for_language_models(table: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RunFileError, match=complaint):
        parse_run(table, "run.toml")
