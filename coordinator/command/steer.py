"""``dtfm-coordinator pause``, ``continue``, ``stop`` and ``set``: the whole run."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from dtfm.coordinator.command.options import Json, Where
from dtfm.protos import control_pb2 as wire


def pause(where: Where = "", json_lines: Json = False) -> None:
    """Pauses the run: once the step in hand is committed, no other begins until `continue`. Nodes stay.

    A checkpoint is written meanwhile. The pause outlives a restart of the coordinator.
    """
    _steer(where, wire.SteerRequest.PAUSE, json_lines)


def go_on(where: Where = "", json_lines: Json = False) -> None:
    """Goes on with a run that is paused, or that is about to stop."""
    _steer(where, wire.SteerRequest.CONTINUE, json_lines)


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
    _steer(where, wire.SteerRequest.STOP_NOW if now else wire.SteerRequest.STOP, json_lines)


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
    _steer(where, wire.SteerRequest.SET, json_lines, key.strip(), value.strip())


def _steer(where: str, wish: wire.SteerRequest.Wish, json_lines: bool, key: str = "", value: str = "") -> None:
    request = wire.SteerRequest(wish=wish, key=key, value=value)
    tell(where, "Steer", request, json_lines, asked=wire.SteerRequest.Wish.Name(wish).lower())


def tell(where: str, method: str, request: object, json_lines: bool, **what: str) -> None:
    """Asks the coordinator by this method, and prints its sentence; ``what`` was asked, for scripts."""
    from dtfm.coordinator.command.client import ask

    reply: wire.Done = asyncio.run(ask(where, lambda stub: getattr(stub, method), request))
    print(json.dumps({**what, "sentence": reply.sentence}) if json_lines else f"{reply.sentence}.")
