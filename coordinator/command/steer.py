"""``dtfm-coordinator pause``, ``continue`` and ``stop``: the whole run."""

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


def _steer(where: str, wish: wire.SteerRequest.Wish, json_lines: bool) -> None:
    from dtfm.coordinator.command.client import ask

    reply: wire.SteerReply = asyncio.run(ask(where, lambda stub: stub.Steer, wire.SteerRequest(wish=wish)))
    name = wire.SteerRequest.Wish.Name(wish).lower()
    print(json.dumps({"asked": name, "sentence": reply.sentence}) if json_lines else f"{reply.sentence}.")
