"""Starts a coordinator: a new run, or a run that goes on from its log or its newest checkpoint."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fsspec.core import url_to_fs

from dtfm.coordinator.config.changes import check_same, goes_on_with
from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.state.copies import Safekeeping
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.validation.description import differs_from_pins
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import fold
from dtfm.coordinator.log.run import as_it_trained
from dtfm.coordinator.service.begun_from import begun_from
from dtfm.coordinator.service.checkpoint.checkpoint_place import newest
from dtfm.coordinator.service.checkpoint.manifest import manifest_and_digest
from dtfm.coordinator.service.server import Deaf, Server
from dtfm.coordinator.store.record import AnotherWriter
from dtfm.coordinator.store.store import Store, free_name
from dtfm.coordinator.view.story import Story
from dtfm.coordinator.view.story_snapshot import story_of
from dtfm.programs import heeding
from dtfm.protos.run_file.run_file import RunFile, parse_run

REASONS = {
    signal.SIGINT: "it was interrupted (Ctrl-C)",
    signal.SIGTERM: "it was terminated (SIGTERM)",
    signal.SIGHUP: "its terminal was closed (SIGHUP)",
}
"""By signal, why the coordinator stops."""


def open_run(store: Store, run: RunFile | None) -> tuple[State, Story, list[ev.Event]]:
    """The state to start with, the story of the log, and the events that start the run. The caller writes these when it
    listens.

    A run in the store goes on. With an empty store, the run goes on from its newest checkpoint, or starts. ``run`` None: the
    earlier run file, or the defaults. Raises ValueError.
    """
    story = story_of(store.snapshots(store.last), store.read)
    ledger = story.now.ledger
    if not ledger.run_id:
        run = run or RunFile()
        folder = newest(run.checkpoints)
        events = _start(run) if folder is None else _from_checkpoint(folder, run)
    elif run is not None and run.name != ledger.run.get("name"):
        raise ValueError(
            f"the store {store.url} holds run {ledger.run.get('name')!r} (step {ledger.training.step}), and the run file is of "
            f"run {run.name!r}. Give {run.name!r} a store of its own with --store, or put the other one aside with --new"
        )
    else:
        step, file = ledger.training.step, dict(ledger.file)
        now = parse_run(ledger.run, store.url)
        if run is not None:
            now, file = goes_on_with(run, file, ledger.run, ledger.training.progress(step)), run.model_dump(mode="json")
        for what, said, pinned in (
            differs_from_pins(ledger.described, now.trust) if ledger.described is not None else ()
        ):
            raise ValueError(
                f"trust.{what} pins {pinned}, and this run has trained on {said}, as {ledger.described_by or 'a node'} said; "
                "correct the run file, or start a new run"
            )
        events = [ev.RunResumed(f"from the log, after step {step}", now.model_dump(mode="json"), file)]
    ledger = fold(events, ledger)
    current = parse_run(ledger.run, store.url)
    state = State(
        run=current,
        message=current.message(ledger.run_id),
        ledger=ledger,
        phase=Gathering(time.monotonic(), ""),
        secret=secrets.token_bytes(32),
        # The process before may have been sending one of these when it ended.
        safekeeping=Safekeeping(unfinished=frozenset(ledger.copies.agreed) - frozenset(ledger.copies.checkpoints)),
        disk_bytes=_free(Path(url_to_fs(current.own_folder)[1])),
        exit_code=0 if ledger.outcome is not None else None,
    )
    return state, story, events


def start_over(store_url: str, run: RunFile) -> list[str]:
    """Puts aside the log in the store, and the run's checkpoints on this machine's disk. Returns their new places. Raises
    ValueError."""
    aside = []
    if newest(run.checkpoints) is not None:
        if not run.keeps_checkpoints_itself:
            raise ValueError(
                f"{run.checkpoints} holds checkpoints already; --new needs another name, or another checkpoint.uri"
            )
        folder = url_to_fs(run.checkpoints)[1]
        aside.append(free_name(folder))
        os.rename(folder, aside[0])
    with Store(store_url, write=True) as store:
        return [*aside, store.put_aside()] if store.last else aside


async def serve_until_over(server: Server, events: Sequence[ev.Event], *, stays: bool = False) -> int:
    """Runs a server that listens until its run is over or a signal comes; returns the exit code. A second signal ends the
    process immediately: the log is whole at every moment. ``events`` go into the log first. ``stays``: a complete run is served
    until a signal comes."""
    asked = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal asked
        if asked:
            os._exit(130)
        asked = True
        server.ask_to_stop(REASONS[number])

    try:
        with heeding(on_signal):
            return await server.run(events, stays=stays)
    except Deaf as died:
        print(f"dtfm-coordinator: {died}; a new process goes on with the run (the same command)", file=sys.stderr)
        return 1
    except AnotherWriter as replaced:
        print(f"dtfm-coordinator: {replaced}", file=sys.stderr)
        return 1


def _free(folder: Path) -> int:
    """Free bytes on the disk of ``folder``, which need not exist yet."""
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


def _start(run: RunFile) -> list[ev.Event]:
    file = run.model_dump(mode="json")
    return [ev.RunStarted(secrets.token_hex(8), {**file, **begun_from(run)}, file)]


def _from_checkpoint(folder: str, run: RunFile) -> list[ev.Event]:
    manifest, digest = manifest_and_digest(folder)
    before, step = parse_run(as_it_trained(manifest.run), f"{folder}/manifest.json"), manifest.step
    if run.name != before.name:
        raise ValueError(
            f"{run.checkpoints} holds the checkpoints of run {before.name!r} (step {step}); give run {run.name!r} another "
            f"checkpoint.uri"
        )
    if manifest.weights:
        raise ValueError(
            f"{folder} holds the weights of run {before.name!r} (step {step}) without the optimizer's state, and the store does "
            "not hold that run's log. Name its log with --store to go on with it, or start over with --new, which puts the "
            "weights aside"
        )
    now = run.with_precision(bf16=before.train.precision == "bf16")
    check_same(before, parse_run(now.model_dump(mode="json"), "the run file"), step + manifest.ahead)
    return [
        ev.RunStarted(manifest.run_id, now.model_dump(mode="json"), run.model_dump(mode="json")),
        ev.CheckpointWritten(step, folder, digest),
        ev.RolledBack(
            step,
            step,
            f"this log begins with the checkpoint of step {step}",
            manifest.exchanges,
            ahead=manifest.ahead,
        ),
    ]
