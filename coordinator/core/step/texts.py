"""Texts after an evaluation, for the prompts of the run file.

One node that has the whole model writes them beside its other work. Nobody waits for them.
"""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.refusal import require, shorten
from dtfm.coordinator.core.state.state import State, Texts
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.printable import escaped
from dtfm.protos.texts import MOST_TEXT_CHARACTERS
from dtfm.scheduler.model.plan import Plan

PATIENCE = 20
"""Evaluations after which texts that have not come are asked for again, maybe from another node."""


def ask(transition: Transition, step: int, plan: Plan) -> None:
    """Asks a node for the texts after ``step``, if the run has prompts, and no node writes others still."""
    state = transition.state
    prompts, before = tuple(state.run.data.prompts), state.texts
    if not prompts:
        return
    awaited = before.node in state.members.sessions and before.prompts == prompts
    if awaited and step - before.step < PATIENCE * state.run.train.evaluate_every:
        return
    node = writer(state, plan)
    if node is None:
        if before.said_of != plan.generation:
            transition.log(
                f"no texts are written for data.prompts under plan {plan.generation}: it has several stages, so that no node "
                "has the whole model"
            )
        transition.state = replace(state, texts=Texts(said_of=plan.generation))
        return
    transition.state = replace(state, texts=Texts(node, step, prompts))
    transition.send([node], wire.CoordinatorMessage(write_texts=wire.WriteTexts(step=step, prompts=prompts)))


def writer(state: State, plan: Plan) -> str | None:
    """The node that should write: an idle one that keeps a copy of the whole model, or else the replica that waited longest in
    the last timed step. None: no node has the whole model."""
    whole = (0, plan.stages[-1].layers[1])
    sessions = state.members.sessions
    idle = [
        node
        for node, session in sessions.items()
        if (copies := session.standby) is not None
        and (copies.layers, copies.ended) == (whole, False)
        and copies.caught_up is not None
        and node not in plan.nodes
    ]
    if idle:
        return min(idle)
    timed = state.ledger.training.timed
    waited = timed.wait_seconds if timed is not None else {}
    replicas = [node for stage in plan.stages if stage.layers == whole for node in stage.replicas if node in sessions]
    return min(replicas, key=lambda node: (-waited.get(node, 0.0), node), default=None)


def heard(transition: Transition, node: str, told: wire.Texts) -> None:
    """A node's texts, or why it has none."""
    state, asked = transition.state, transition.state.texts
    if node != asked.node or not asked.step <= told.step <= state.ledger.training.step:
        transition.log(f"ignored texts of {node} after step {told.step}: none are awaited")
        return
    transition.state = replace(state, texts=Texts())
    if told.problem:
        transition.log(f"{node} has written no texts after step {told.step}: {shorten(told.problem)}")
        return
    require(
        len(told.texts) == len(asked.prompts), "texts", len(told.texts), f"{len(asked.prompts)}, one for each prompt"
    )
    longest = max(len(each.text) for each in told.texts)
    require(longest <= MOST_TEXT_CHARACTERS, "texts", longest, f"at most {MOST_TEXT_CHARACTERS} characters each")
    for prompt, each in zip(asked.prompts, told.texts, strict=True):
        text = escaped(each.text)
        cut = text[:MOST_TEXT_CHARACTERS]
        transition.emit(ev.TextWritten(told.step, node, prompt, cut, each.whole and cut == text))
