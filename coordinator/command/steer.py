"""``dtfm-coordinator pause``, ``continue``, ``stop`` and ``set``: the whole run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtfm.coordinator.command.options import Json, Where

if TYPE_CHECKING:  # the commands that read a log start faster without it
    from dtfm.protos import control_pb2 as wire


def pause(where: Where = "", json_lines: Json = False) -> None:
    """Pauses the run: after the step in hand, or with rounds the next exchange, no other begins until `continue`. Nodes stay.

    A checkpoint is written meanwhile. The pause outlives a restart of the coordinator.
    """
    _steer(where, "PAUSE", json_lines)


def go_on(where: Where = "", json_lines: Json = False) -> None:
    """Goes on with a run that is paused, or that is about to stop."""
    _steer(where, "CONTINUE", json_lines)


def stop(
    where: Where = "",
    now: Annotated[
        bool,
        typer.Option("--now", help="Do not wait for the step in hand and the checkpoint: the next start goes back."),
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

    The log keeps the change, so that it outlives a restart. A key that cannot change is refused by a list of those that can.
    """
    key, equals, value = change.partition("=")
    if not equals:
        raise ValueError(f"{change!r} is not KEY=VALUE; for example: dtfm-coordinator set train.steps=400")
    _steer(where, "SET", json_lines, key.strip(), value.strip())


def _steer(where: str, wish: str, json_lines: bool, key: str = "", value: str = "") -> None:
    tell(where, "Steer", json_lines, {"asked": wish.lower()}, wish=wish, key=key, value=value)


def tell(where: str, call: str, json_lines: bool, asked: Mapping[str, str], **fields: Any) -> None:
    """Makes this call, with these fields of its request, and prints the coordinator's sentence; ``asked``: what, for scripts."""
    from dtfm.coordinator.command.client import ask

    reply: wire.Done = asyncio.run(ask(where, call, **fields))
    said = {**asked, "sentence": reply.sentence, "run": reply.run}
    print(json.dumps(said) if json_lines else f"{reply.run}: {reply.sentence}.")
