"""The place of a run's checkpoints: whose it is, which checkpoint is the newest, and which ones are deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import fsspec

from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError, read_manifest
from dtfm.protos import control_pb2 as wire
from dtfm.protos.checkpoint_names import bucket_of, marker_file, step_folder, step_of
from dtfm.protos.places import told_by


def mark(uri: str, run_id: str) -> None:
    """Marks the folder for checkpoints as the run's, so that nodes see whether they reach the same one. Raises CheckpointError if
    it cannot be written."""
    try:
        filesystem, path = fsspec.url_to_fs(uri)
        filesystem.makedirs(path, exist_ok=True)
        filesystem.pipe_file(f"{path.rstrip('/')}/{marker_file(run_id)}", b"")
    except Exception as error:  # a storage's driver may raise anything
        raise CheckpointError(
            f"checkpoints cannot be written to {uri}: {told_by(uri, error)}; make that possible, or name another place with "
            "checkpoint.uri"
        ) from None


def tidy(
    uri: str, run_id: str, newest: int, keep: int, *, under_way: Collection[int] = (), given_up: Collection[int] = ()
) -> None:
    """Deletes the run's old checkpoints: all before its ``keep`` last whole ones up to step ``newest``. Also deletes the
    remains of the ones ``given_up``, except the steps ``under_way``. In the newest checkpoint's folder it deletes the files of
    earlier attempts.

    Other runs may share the folder: a whole checkpoint is this run's if its manifest says so, and a checkpoint without a
    manifest goes only if it was given up. Raises CheckpointError if something cannot be deleted; the rest is.
    """
    problems: list[str] = []
    try:
        filesystem, path = fsspec.url_to_fs(uri)
        steps = [step for step in _steps(filesystem, path) if step <= newest or step in given_up]
        whole = {step for step in steps if filesystem.exists(f"{path}/step-{step:08d}/manifest.json")}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot look into {uri} for older checkpoints: {error}") from None
    mine = []
    for step in steps:
        try:
            if step in whole and read_manifest(step_folder(uri, step)).run_id == run_id:
                mine.append(step)
        except CheckpointError as error:
            problems.append(f"it is not known whose checkpoint this is: {error}")
    kept = {newest, *[step for step in mine if step not in given_up][:keep], *under_way}
    for step in sorted({*mine, *(set(given_up).intersection(steps) - whole)} - kept, reverse=True):
        folder = f"{path}/step-{step:08d}"
        try:
            if step in whole:
                filesystem.rm_file(f"{folder}/manifest.json")  # first: without it, it is no checkpoint
            filesystem.rm(folder, recursive=True)
        except (OSError, ValueError) as error:
            problems.append(f"{folder} could not be deleted: {error}")
    if newest in mine and newest not in under_way:
        named = {bucket.file for bucket in read_manifest(step_folder(uri, newest)).buckets}
        for name in _names(filesystem, f"{path}/step-{newest:08d}"):
            if bucket_of(name) is not None and name not in named:
                try:
                    filesystem.rm_file(f"{path}/step-{newest:08d}/{name}")
                except (OSError, ValueError) as error:
                    problems.append(f"{name} of step {newest} could not be deleted: {error}")
    if problems:
        raise CheckpointError("; ".join(problems))


def newest(uri: str) -> str | None:
    """Folder of the newest whole checkpoint under ``uri``, or None. Raises CheckpointError."""
    try:
        filesystem, path = fsspec.url_to_fs(uri)
        return next(
            (
                step_folder(uri, step)
                for step in _steps(filesystem, path)
                if filesystem.exists(f"{path}/step-{step:08d}/manifest.json")
            ),
            None,
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot look into {uri}: {told_by(uri, error)}; make that possible, or name another place with checkpoint.uri"
        ) from None


def _steps(filesystem: Any, path: str) -> list[int]:
    """The steps that have a folder, the newest first."""
    steps = (step_of(name) for name in _names(filesystem, path))
    return sorted((step for step in steps if step is not None), reverse=True)


def _names(filesystem: Any, path: str) -> list[str]:
    """The names in a folder."""
    filesystem.invalidate_cache()
    return [str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in filesystem.ls(path, detail=False)]


async def claim(place: str, run_id: str, seconds: float) -> None:
    """Marks the place as the run's: an operator names it while the run goes on. Raises Refused if that is not possible within
    ``seconds``, or if another run's checkpoints are there."""
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
