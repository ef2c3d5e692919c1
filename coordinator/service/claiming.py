"""A place for checkpoints that an operator names while the run goes on is tried before the run has it."""

from __future__ import annotations

import asyncio

from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.service.checkpoint_folder import CheckpointError, mark, newest, read_manifest
from dtfm.protos import control_pb2 as wire


async def claim(place: str, run_id: str, seconds: float) -> None:
    """Marks the place as the run's. Raises Refused if that is not possible within ``seconds``, or another run's checkpoints are
    there."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.to_thread(_claim, place, run_id)
    except TimeoutError:
        raise Refused(
            wire.MALFORMED, f"{place} has not answered within {seconds:g} seconds; name another place"
        ) from None
    except CheckpointError as problem:
        raise Refused(wire.MALFORMED, str(problem)) from None


def _claim(place: str, run_id: str) -> None:
    mark(place, run_id)
    folder = newest(place)
    if folder is not None and (other := read_manifest(folder)).run_id != run_id:
        raise CheckpointError(
            f"{place} holds checkpoints of another run, {other.run.get('name')!r}; name another place"
        )
