"""Carries out the core's commands about checkpoints: writes a manifest, and deletes what is old or unfinished."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.service.checkpoint.checkpoint_folder import write_manifest
from dtfm.coordinator.service.checkpoint.checkpoint_place import tidy
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError
from dtfm.coordinator.service.checkpoint.unfinished import clear, publish
from dtfm.coordinator.view.model_card import card_of

log = logging.getLogger(__name__)


class CheckpointCommands:
    """``state`` returns the run's state as of now. ``incoming`` is the thread that writes files from nodes to this disk.

    Manifests and deletions have a thread each, so that none waits for a storage that hangs, or for another.
    """

    def __init__(self, state: Callable[[], State], incoming: ThreadPoolExecutor) -> None:
        self._state = state
        self._incoming = incoming
        self._manifests, self._tidying = ThreadPoolExecutor(1, "manifest"), ThreadPoolExecutor(1, "tidy")

    def close(self) -> None:
        for threads in (self._manifests, self._tidying):
            threads.shutdown(wait=False, cancel_futures=True)

    async def write_manifest(self, command: t.WriteManifest) -> t.ManifestDone:
        """Makes a gathered checkpoint whole, and gives its folder its name. A problem is in the result."""
        ledger, problem, digest, bucket = self._state().ledger, "", "", None
        described = ledger.described
        assert described is not None
        try:
            digest = await asyncio.get_running_loop().run_in_executor(
                self._manifests,
                write_manifest,
                command.gathered,
                ledger.run,
                ledger.run_id,
                command.step,
                command.files,
                described.layout_of,
                ledger.copies.digests(command.step),
                command.step - ledger.training.trained(command.step),
                lambda digest: card_of(ledger, command.step, digest).text(),
                ledger.training.progress(command.step) - command.step,
            )
            await asyncio.to_thread(publish, command.gathered, command.folder, ledger.run_id)
        except CheckpointError as error:
            problem, bucket = str(error), error.bucket
        except Exception as error:
            log.exception("the manifest of step %d could not be written", command.step)
            problem = f"{type(error).__name__}: {error}"
        return t.ManifestDone(command.step, problem, digest, bucket)

    async def tidy(self, command: t.TidyCheckpoints) -> None:
        """Deletes older checkpoints, and what is left of those that were given up."""
        try:
            work = partial(tidy, under_way=command.under_way, given_up=command.given_up)
            in_thread = asyncio.get_running_loop().run_in_executor
            await in_thread(self._tidying, work, command.uri, command.run_id, command.newest, command.keep)
            await in_thread(self._tidying, clear, command.uri, command.run_id, command.under_way)
        except CheckpointError as error:
            log.warning("%s", error)
        except Exception:  # a storage's driver may raise anything
            log.exception("older checkpoints in %s could not be deleted", command.uri)

    async def clear_unfinished(self) -> None:
        """Deletes the files of unfinished checkpoints. No file from a node is being written during that."""
        state = self._state()
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._incoming, clear, state.run.checkpoints, state.ledger.run_id
            )
        except CheckpointError as error:
            log.warning("%s", error)
