"""Unfinished checkpoints. Their files are gathered in a folder with a name of its own, which is renamed or deleted.

So each folder that has the name of a checkpoint is one, if folders can be renamed at all (protos/checkpoint_names.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from fsspec.core import url_to_fs

from dtfm.coordinator.service.checkpoint.manifest import CheckpointError, read_manifest
from dtfm.protos.checkpoint_names import MANIFEST, gathering_of
from dtfm.protos.places import is_local_url


def publish(gathered: str, folder: str, run_id: str) -> None:
    """Gives the whole checkpoint in the folder ``gathered`` its name, in one step. Deletes the run's earlier files of this
    name. Raises CheckpointError."""
    if gathered == folder:
        return
    source, target = (Path(url_to_fs(each)[1]) for each in (gathered, folder))
    if (target / MANIFEST).exists() and (other := read_manifest(folder)).run_id != run_id:
        raise CheckpointError(
            f"{folder} is a checkpoint of another run, {other.run.get('name')!r}; name another place with checkpoint.uri"
        )
    try:
        if target.exists():  # of a step that was undone, or of a coordinator that ended before it could log it
            shutil.rmtree(target)
        os.rename(source, target)
    except OSError as error:
        raise CheckpointError(f"{gathered} is whole, and could not be renamed to {folder}: {error}") from None


def clear(uri: str, run_id: str, under_way: Collection[int] = ()) -> None:
    """Deletes all files under ``uri`` that the run has gathered for checkpoints that are not ``under_way``. Raises
    CheckpointError if something cannot be deleted; the rest is."""
    if not is_local_url(uri):
        return
    problems = []
    place = Path(url_to_fs(uri)[1])
    try:
        named = {folder: gathering_of(folder.name) for folder in place.iterdir()}
    except OSError:
        return  # nothing was gathered there
    for folder, gathering in named.items():
        if gathering is None or gathering[1] != run_id or gathering[0] in under_way:
            continue
        try:
            shutil.rmtree(folder)
        except OSError as error:
            problems.append(f"{folder} could not be deleted: {error}")
    if problems:
        raise CheckpointError("; ".join(problems))
