"""``dtfm-coordinator demo``: a coordinator and its nodes on this machine, from nothing to a sample of generated text."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dtfm.coordinator.command.child_processes import Child, Children
from dtfm.coordinator.command.export import export
from dtfm.coordinator.config.run_file import RunFile, parse_run
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.store import Record, Store
from dtfm.coordinator.service.server import Server
from dtfm.coordinator.service.startup import open_run, serve_until_over
from dtfm.coordinator.view.progress import RunProgress

DEFAULT_STEPS = 100
"""Of a demo whose run file does not say: within three minutes on two cores."""

SAMPLE_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Demo:
    """``run``: as read from a file; ``pinned``: whether its stages come from there."""

    run: RunFile
    nodes: int
    folder: Path
    threads: int
    json_lines: bool


def demo_run(table: dict[str, Any], nodes: int, steps: int | None, folder: Path) -> RunFile:
    """A run file's content as the demo runs it: so many nodes, by default in two stages, checkpoints in ``folder``. Raises
    RunFileError."""
    cluster = dict(table.get("cluster", {}))
    cluster["nodes"] = nodes
    cluster.setdefault("stages", [-(-nodes // 2), nodes // 2] if nodes > 1 else [1])
    train = {"steps": DEFAULT_STEPS, **table.get("train", {})}
    if steps is not None:
        train["steps"] = steps
    checkpoint = {"uri": (folder / "checkpoints").resolve().as_uri(), **table.get("checkpoint", {})}
    return parse_run({**table, "cluster": cluster, "train": train, "checkpoint": checkpoint}, "the demo's run")


def new_folder(parent: Path) -> Path:
    """The first of parent/1, parent/2, ... that is free, made. Raises ValueError."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(entry.name) for entry in parent.iterdir() if entry.name.isascii() and entry.name.isdigit()]
        folder = parent / str(max(taken, default=0) + 1)
        folder.mkdir()
    except OSError as error:
        raise ValueError(f"cannot write to {parent}: {error.strerror}; give another folder with --dir") from None
    return folder.resolve()


async def run_demo(demo: Demo) -> int:
    """Trains, shows progress, exports, samples. Returns the exit code."""
    console = Console(stderr=demo.json_lines, soft_wrap=True)
    store_url = f"sqlite:///{demo.folder / 'dtfm.db'}"
    with Store(store_url, write=True) as store, RunProgress(console, demo.run.train.steps) as progress:
        state, events = open_run(store, demo.run, resume=False)
        token = secrets.token_urlsafe(24)
        server = Server(state, store, token)
        port = await server.listen("127.0.0.1", 0)

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
        async with Children(f"127.0.0.1:{port}", token, demo.folder, demo.threads) as children:
            left = set(range(1, demo.nodes + 1))

            def when_gone(child: Child, code: int) -> None:
                left.discard(int(child.node.rpartition("-")[2]))
                if server.state.ledger.outcome is not None or server.exit_code is not None:
                    return
                console.print(f"{child.node} ended with exit code {code}; the end of {child.log}:", style="red")
                console.print(child.tail(), markup=False, highlight=False)
                if server.state.ledger.generation == 0 or not left:
                    server.ask_to_stop(f"{child.node} ended with exit code {code}", dismiss=True)

            for number in range(1, demo.nodes + 1):
                await children.start(f"node-{number}", when_gone)
            code = await serve_until_over(server, events)
            await children.finish(demo.run.cluster.lease)
    ledger = server.state.ledger
    if code == 0:
        await _conclude(demo, console, ledger.checkpoints[ledger.step], ledger.evaluated)
    elif ledger.outcome is not None:
        print(f"The run failed: {ledger.outcome.reason}. Logs: {demo.folder}", file=sys.stderr)
    else:
        print(f"Stopped after step {ledger.step}. Logs: {demo.folder}", file=sys.stderr)
    return code


async def _conclude(demo: Demo, console: Console, checkpoint: str, evaluated: ev.Evaluated | None) -> None:
    """Where everything is, a sample of what the model writes, and what to try next."""
    model = demo.folder / "model"
    if demo.run.model.family == "module":
        sample = ""
    else:
        await asyncio.to_thread(export, checkpoint, model)
        sample = "" if demo.json_lines else await _sample(model)
    if demo.json_lines:
        return
    console.print()
    if evaluated is not None:
        console.print(
            f"Held-out loss: {evaluated.loss:.3f} nats per token. Knowing frequencies alone: "
            f"{evaluated.unigram_entropy:.3f}."
        )
    if sample:
        console.print("What the model writes:")
        console.print("\n".join(f"    {line}" for line in sample.splitlines()), markup=False, highlight=False)
    console.print(f"Checkpoint: {checkpoint}")
    if model.exists():
        console.print(f"The same for transformers' from_pretrained: {model}")
    store = f"sqlite:///{demo.folder / 'dtfm.db'}"
    console.print("Try next:")
    for command in (
        f"dtfm-coordinator events --store {store}",
        f"dtfm-coordinator watch --store {store}",
        "dtfm-coordinator demo --nodes 3 --steps 50",
        "dtfm-coordinator serve --listen 0.0.0.0:7400    # then, on each machine: dtfm-node join THIS_MACHINE:7400",
    ):
        console.print(f"    {command}", markup=False, highlight=False)


async def _sample(model: Path) -> str:
    """Text from the exported model, made by a child process, for this one has no torch; empty where that fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dtfm.node.model.generate", str(model)),
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
