"""A coordinator and its nodes on this machine, from nothing to a sample of generated text."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dtfm.coordinator.command.child_processes import Child, Children
from dtfm.coordinator.command.exporting import export_checkpoint
from dtfm.coordinator.config.run_file import RunFile, parse_run, read_table
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.manifest import mark
from dtfm.coordinator.log.store import Record, Store
from dtfm.coordinator.service.authority_key import authority_file, authority_key
from dtfm.coordinator.service.first_access import node_invitation
from dtfm.coordinator.service.server import Server
from dtfm.coordinator.service.startup import open_run, serve_until_over
from dtfm.coordinator.view.progress import RunProgress

DEFAULT_STEPS = 100
"""Steps of a demo whose run file names no number: at most three minutes on two cores."""
SAMPLE_SECONDS = 120
"""Seconds after which a sample of generated text is given up."""


def demonstrate(
    run: Path | None, nodes: int, steps: int | None, parent: Path, threads: int, device: str, json_lines: bool
) -> int:
    """Trains in a new folder of ``parent``, and returns the exit code. ``threads``: per node; 0: an even share of the cores.
    Raises ValueError."""
    table = read_table(run) if run is not None else {}
    demo_run_file(table, nodes, steps, parent)  # refuses a bad run file before a folder is made
    folder = new_folder(parent)
    threads = threads or max(1, (os.cpu_count() or 1) // nodes)
    trained = demo_run_file(table, nodes, steps, folder)
    return asyncio.run(_train(Settings(trained, nodes, folder, threads, device, json_lines)))


@dataclass(frozen=True, slots=True)
class Settings:
    """What one demo does, its options resolved. ``threads`` is per node; ``folder`` is its own."""

    run: RunFile
    nodes: int
    folder: Path
    threads: int
    device: str
    json_lines: bool

    @property
    def store_url(self) -> str:
        return f"sqlite:///{self.folder / 'dtfm.db'}"


def demo_run_file(table: dict[str, Any], nodes: int, steps: int | None, folder: Path) -> RunFile:
    """The run file that a demo trains: ``table`` with the demo's own defaults filled in.

    The run waits for all ``nodes``. Unless ``table`` says otherwise, they form two stages and write checkpoints to ``folder``.
    ``steps`` overrides the table's number. Raises RunFileError.
    """
    cluster = dict(table.get("cluster", {}))
    cluster["nodes"] = nodes
    cluster.setdefault("stages", [-(-nodes // 2), nodes // 2] if nodes > 1 else [1])
    train = {"steps": DEFAULT_STEPS, **table.get("train", {})}
    if steps is not None:
        train["steps"] = steps
    checkpoint = {"uri": (folder / "checkpoints").resolve().as_uri(), **table.get("checkpoint", {})}
    return parse_run({**table, "cluster": cluster, "train": train, "checkpoint": checkpoint}, "the demo's run")


def new_folder(parent: Path) -> Path:
    """Makes the folder parent/N, N being one above the highest number there.

    Raises ValueError where it cannot be made.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(entry.name) for entry in parent.iterdir() if entry.name.isascii() and entry.name.isdigit()]
        folder = parent / str(max(taken, default=0) + 1)
        folder.mkdir()
    except OSError as error:
        raise ValueError(f"cannot write to {parent}: {error.strerror}; give another folder with --dir") from None
    return folder.resolve()


async def _train(demo: Settings) -> int:
    """Trains, shows progress, exports the model and samples from it. Returns the exit code."""
    console = Console(stderr=demo.json_lines, soft_wrap=True)
    with Store(demo.store_url, write=True) as store, RunProgress(console, demo.run.train.steps) as progress:
        state, events = open_run(store, demo.run)
        mark(state.run.checkpoints, state.ledger.run_id)
        server = Server(state, store, authority_key(authority_file(demo.store_url, "")))
        server.addresses = (f"127.0.0.1:{await server.bind('127.0.0.1', 0)}",)
        made, secret = node_invitation(time.time(), demo.nodes, "the demo's nodes")
        server.begin_with([made])
        await server.start()

        def show(record: Record) -> None:
            if demo.json_lines:
                print(json.dumps(record.to_json()), flush=True)
            else:
                progress.show(record.event)

        server.on_event(show)
        if not demo.json_lines:
            console.print(
                f"{demo.nodes} nodes on this machine, {demo.threads} threads each; everything goes to {demo.folder}"
            )
        async with Children(
            server.invitation(made.invitation, secret), demo.folder, demo.threads, demo.device
        ) as children:
            left = set(range(1, demo.nodes + 1))

            def when_gone(child: Child, code: int) -> None:
                left.discard(int(child.node.rpartition("-")[2]))
                if server.state.ledger.outcome is not None or server.exit_code is not None:
                    return
                console.print(f"{child.node} ended with exit code {code}; the end of {child.log}:", style="red")
                console.print(child.tail(), markup=False, highlight=False)
                if server.state.ledger.training.generation == 0 or not left:
                    server.ask_to_stop(f"{child.node} ended with exit code {code}")

            for number in range(1, demo.nodes + 1):
                await children.start(f"node-{number}", when_gone)
            code = await serve_until_over(server, [*events, made])
            if server.state.ledger.outcome is not None:  # otherwise they would wait for the next coordinator
                await children.finish(demo.run.cluster.lease)
    ledger = server.state.ledger
    if code == 0:
        await _conclude(demo, console, ledger.copies.checkpoints[ledger.training.step].folder, ledger.evaluated)
    elif ledger.outcome is not None:
        print(f"The run failed: {ledger.outcome.reason}. Logs: {demo.folder}", file=sys.stderr)
    else:
        print(f"Stopped after step {ledger.training.step}. Logs: {demo.folder}", file=sys.stderr)
    return code


async def _conclude(demo: Settings, console: Console, checkpoint: str, evaluated: ev.Evaluated | None) -> None:
    """Says where everything is, shows a sample of what the model writes, and names commands to try next."""
    model = demo.folder / "model"
    if demo.run.model.family == "module":
        sample = ""
    else:
        await asyncio.to_thread(export_checkpoint, checkpoint, model)
        sample = "" if demo.json_lines else await _sample(model)
    if demo.json_lines:
        return
    console.print()
    if evaluated is not None:
        console.print(
            f"Held-out loss: {evaluated.loss:.3f} nats per token (token frequencies alone: "
            f"{evaluated.unigram_entropy:.3f})."
        )
    if sample:
        console.print("What the model writes:")
        console.print("\n".join(f"    {line}" for line in sample.splitlines()), markup=False, highlight=False)
    console.print(f"Checkpoint: {checkpoint}")
    if model.exists():
        console.print(f"Folder for transformers' from_pretrained: {model}")
    console.print("Try next:")
    for command in (
        f"dtfm-coordinator events --store {demo.store_url}",
        f"dtfm-coordinator watch --store {demo.store_url}",
        "dtfm-coordinator demo --nodes 3 --steps 50",
        "dtfm-coordinator serve --listen 0.0.0.0:7400    # prints what to paste on other machines",
    ):
        console.print(f"    {command}", markup=False, highlight=False)


async def _sample(model: Path) -> str:
    """Text written by the exported model, or an empty text where that fails.

    A child process makes it: the coordinator needs no torch.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "dtfm.node.model.generate_text", str(model)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), SAMPLE_SECONDS)
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)[:2000]
