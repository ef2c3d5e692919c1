"""``dtfm-coordinator pause``, ``continue``, ``stop``, ``set`` and ``rollback``: the whole run."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtfm.coordinator.command.options import Json, Where

if TYPE_CHECKING:  # the commands that read a log start faster without it
    from dtfm.protos import control_pb2 as wire


def pause(where: Where = "", json_lines: Json = False) -> None:
    """Pauses the run: after the current step, or with rounds the next exchange, no other step begins until `continue`. Nodes
    stay.

    A checkpoint is written during the pause. The pause outlives a restart of the coordinator.
    """
    _steer(where, "PAUSE", json_lines)


def go_on(
    where: Where = "",
    lost: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="weights|start",
            help="Where to go on once the run's state is lost. weights: from the newest weights on the coordinator's disk or in "
            "[checkpoint] uri; AdamW's moments begin at zero. start: from step 1, on the same samples.",
        ),
    ] = "",
    json_lines: Json = False,
) -> None:
    """Goes on with a run that is paused, or that is about to stop.

    With --from, goes on with a run whose state is lost: no node that is here has it. Such a run waits. `watch`, `members` and the
    page say which nodes have the state and are away, what else there is, and how many steps and minutes each way loses. The run
    goes on by itself once those nodes are back. While a run has its state, --from is refused. The run file can answer
    beforehand: [cluster] when_state_is_lost.
    """
    if lost not in ("", "weights", "start"):
        raise ValueError(f"--from {lost} is neither weights nor start; leave it out to go on with a run that is paused")
    _steer(where, f"FROM_{lost.upper()}" if lost else "CONTINUE", json_lines)


def stop(
    where: Where = "",
    now: Annotated[
        bool,
        typer.Option("--now", help="Do not wait for the current step and the checkpoint: the next start goes back."),
    ] = False,
    json_lines: Json = False,
) -> None:
    """Stops the run: once its last step is in a checkpoint, nodes go home and the coordinator ends, all with exit code 0.

    The run is not over: `serve` goes on with it.
    """
    _steer(where, "STOP_NOW" if now else "STOP", json_lines)


def set_key(
    change: Annotated[
        str,
        typer.Argument(metavar="KEY=VALUE", help='Of the run file, like train.steps=400 or checkpoint.uri="s3://..."'),
    ],
    where: Where = "",
    json_lines: Json = False,
) -> None:
    """Changes a key of the run file while the run goes on. More train.steps also continue a run that is over.

    The log keeps the change, so that it outlives a restart. If a key cannot change, the refusal lists the keys that can.
    """
    key, equals, value = change.partition("=")
    if not equals:
        raise ValueError(f"{change!r} is not KEY=VALUE; for example: dtfm-coordinator set train.steps=400")
    _steer(where, "SET", json_lines, key.strip(), value.strip())


def rollback(
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, max=(1 << 32) - 1, help="0 is the start of the run.")],
    where: Where = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether this is meant.")] = False,
    json_lines: Json = False,
) -> None:
    """Goes back to an earlier step, while the run goes on or is paused: to a snapshot on the nodes' disks, or to a checkpoint.

    Later steps and their checkpoints are lost. If only the weights are left, AdamW's moments begin at zero. An unknown step is
    refused with a list of the steps there are.
    """
    if not yes:
        if not sys.stdin.isatty():
            raise ValueError("a rollback loses steps, and nobody can be asked here: say --yes")
        from dtfm.coordinator.command.client import ask

        would: wire.Done = asyncio.run(ask(where, "Steer", wish="ROLLBACK", step=step, only_say=True))
        print(f"{would.sentence}. Go back? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("Nothing has changed.", file=sys.stderr)
            raise typer.Exit(1)
    tell(where, "Steer", json_lines, {"asked": "rollback"}, wish="ROLLBACK", step=step)


def _steer(where: str, wish: str, json_lines: bool, key: str = "", value: str = "") -> None:
    tell(where, "Steer", json_lines, {"asked": wish.lower()}, wish=wish, key=key, value=value)


def tell(where: str, call: str, json_lines: bool, asked: Mapping[str, str], **fields: Any) -> None:
    """Makes this call, with these fields of its request, and prints the coordinator's sentence. ``asked``: the name of the
    request, for scripts."""
    from dtfm.coordinator.command.client import ask

    reply: wire.Done = asyncio.run(ask(where, call, **fields))
    said = {**asked, "sentence": reply.sentence, "run": reply.run}
    print(json.dumps(said) if json_lines else f"{reply.run}: {reply.sentence}." if reply.run else f"{reply.sentence}.")
