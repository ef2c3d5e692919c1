"""A coordinator and its nodes on this machine, from nothing to a sample of generated text."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtfm.coordinator.command.demonstration.child_processes import GIVE_UP_SECONDS, Child, Children
from dtfm.coordinator.command.options import print_record
from dtfm.coordinator.command.weights.exporting import export_checkpoint
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.service.authority_key import authority_file, authority_key
from dtfm.coordinator.service.checkpoint.checkpoint_place import mark
from dtfm.coordinator.service.first_access import node_invitation
from dtfm.coordinator.service.server import Server
from dtfm.coordinator.service.startup import open_run, serve_until_over
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.store.store import Store
from dtfm.coordinator.view.so_far import SoFar
from dtfm.coordinator.view.watch import live_view
from dtfm.coordinator.web.app import make_app
from dtfm.coordinator.web.serving import bind_page, link_to, page_served
from dtfm.installed import program
from dtfm.protos.printable import printable_lines
from dtfm.protos.run_file.run_file import RunFile, parse_run, read_table

DEFAULT_STEPS = 100
"""Steps of a demo if its run file names no number."""
OWN: dict[str, dict[str, Any]] = {
    "data": {"sequence_length": 128},
    "train": {"global_batch": 8, "learning_rate": 0.006, "evaluate_every": 100},
    "checkpoint": {"every": 0},
}
"""The demo's run without a run file: many small steps, after which a small model writes words."""
OWN_STEPS = 400
OWN_SECONDS, OWN_STEP_SECONDS = 40, 0.2
"""How long that takes on two free cores: everything except the steps, and a step."""
CHILD_SECONDS = 120
"""Seconds after which the demo gives up waiting for the tokenizer, or for a sample of generated text."""


def demonstrate(
    run: Path | None,
    nodes: int,
    steps: int | None,
    parent: Path,
    threads: int,
    device: str,
    json_lines: bool,
    *,
    page: bool,
) -> int:
    """Trains in a new folder of ``parent``, and returns the exit code. ``threads``: per node; 0: an even share of the cores.
    Raises ValueError."""
    table = read_table(run) if run is not None else OWN
    demo_run_file(table, nodes, steps, parent, str(run))  # a bad run file is refused before a folder is made
    folder = new_folder(parent)
    threads = threads or max(1, (os.cpu_count() or 1) // nodes)
    if run is None:
        steps = steps or OWN_STEPS
        table = {**OWN, "data": {**OWN["data"], "tokenizer": str(folder / "tokenizer")}}
    trained = demo_run_file(table, nodes, steps, folder)
    return asyncio.run(
        _train(Settings(trained, nodes, folder, threads, device, json_lines, own=run is None, page=page))
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved options of one demo. ``threads`` is per node; ``folder`` is its own. ``own``: there is no run file, so that
    the demo makes its own tokenizer."""

    run: RunFile
    nodes: int
    folder: Path
    threads: int
    device: str
    json_lines: bool
    own: bool
    page: bool

    @property
    def store_url(self) -> str:
        return f"sqlite:///{self.folder / 'dtfm.db'}"


def demo_run_file(
    table: dict[str, Any], nodes: int, steps: int | None, folder: Path, source: str = "the demo's run"
) -> RunFile:
    """The run file that a demo trains: ``table`` with the demo's own defaults filled in.

    The run waits for all ``nodes``. Unless ``table`` says otherwise, they form two stages, or with rounds the islands that the
    planner draws, and write checkpoints to ``folder``. ``steps`` overrides the table's number. Raises RunFileError.
    """
    cluster = dict(table.get("cluster", {}))
    cluster["nodes"] = nodes
    cluster.setdefault("wait_for_coordinator", GIVE_UP_SECONDS)  # nobody starts it again
    train = {"steps": DEFAULT_STEPS, **table.get("train", {})}
    if not train.get("rounds"):
        cluster.setdefault("stages", [-(-nodes // 2), nodes // 2] if nodes > 1 else [1])
    if steps is not None:
        train["steps"] = steps
    checkpoint = {"uri": f"file://{(folder / 'checkpoints').resolve()}", **table.get("checkpoint", {})}
    return parse_run({**table, "cluster": cluster, "train": train, "checkpoint": checkpoint}, source)


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
    if not demo.json_lines:
        _introduce(demo, console)
    if demo.own:
        await _child("dtfm.node.data.make_tokenizer", demo.run.data.tokenizer)
    page = bind_page("") if demo.page else None
    if page is not None:
        console.print(f"To see it: {link_to(page)}")
    so_far, on_terminal = SoFar(), console.is_terminal and not demo.json_lines
    with Store(demo.store_url, write=True) as store, live_view(so_far, console) if on_terminal else nullcontext():
        state, story, events = open_run(store, demo.run)
        mark(state.run.checkpoints, state.ledger.run_id)
        server = Server(state, store, story, authority_key(authority_file(demo.store_url, "")))
        server.addresses = (f"127.0.0.1:{await server.bind('127.0.0.1', 0)}",)
        made, secret = node_invitation(time.time(), demo.nodes, "the demo's nodes")
        server.begin_with([made])
        await server.start()

        def show(record: Record) -> None:
            so_far.add(record)
            if not on_terminal:
                print_record(record, json_lines=demo.json_lines, all_events=False)

        server.log.on_event(show)
        async with (
            Children(server.invitation(made.invitation, secret), demo.folder, demo.threads, demo.device) as children,
            page_served(page, make_app(server.follower, lambda: server.ledger, server.ask)),
        ):
            left = set(range(1, demo.nodes + 1))

            def when_gone(child: Child, code: int) -> None:
                left.discard(int(child.node.rpartition("-")[2]))
                if server.state.ledger.outcome is not None or server.state.stopped:
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


def _introduce(demo: Settings, console: Console) -> None:
    """Says what the demo is about to do, and how long it takes."""
    threads = "one thread" if demo.threads == 1 else f"{demo.threads} threads"
    what = "a small Llama on the source text of Python's library" if demo.own else demo.run.name
    console.print(f"Trains {what}: a coordinator and {demo.nodes} nodes of {threads} each, on this machine alone.")
    if demo.own:
        minutes = math.ceil((OWN_SECONDS + OWN_STEP_SECONDS * demo.run.train.steps) / 60)
        long = f"{minutes} minutes" if minutes > 1 else "a minute"
        console.print(f"This takes about {long} on two free cores. Ctrl-C ends it, and leaves nothing running.")
    console.print(f"Everything is written to {_short(demo.folder)}.")


async def _conclude(demo: Settings, console: Console, checkpoint: str, evaluated: ev.Evaluated | None) -> None:
    """Says where everything is, shows a text of the model, and names commands to try next."""
    model = demo.folder / "model"
    if demo.run.model.family != "module":
        await asyncio.to_thread(export_checkpoint, checkpoint, model)
    if demo.json_lines:
        return
    console.print()
    if evaluated is not None:
        console.print(
            f"Held-out loss: {evaluated.loss:.3f} nats per token (token frequencies alone: "
            f"{evaluated.unigram_entropy:.3f})."
        )
    coordinator, store = program("dtfm-coordinator"), shlex.quote(_short(demo.folder / "dtfm.db"))
    next_ = [
        ("Who trained what at the end:", f"{coordinator} watch --store {store}"),
        ("All that happened:", f"{coordinator} events --store {store}"),
        ("Train on your own machines:", f"{coordinator} serve --listen 0.0.0.0:7400"),
    ]
    if model.exists():
        await _show_samples(demo, console, model)
        console.print(f"The model, for transformers' from_pretrained: {_short(model)}")
        again = f"{program('dtfm-node')} generate {shlex.quote(_short(model))} --prompt class"
        next_.insert(0, ("Let it write more:", again))
    console.print("Try next:")
    for why, command in next_:
        console.print(f"  {why}\n    {command}", markup=False, highlight=False)


async def _show_samples(demo: Settings, console: Console, model: Path) -> None:
    """Prints a text of the model. If its first weights followed from the seed, also prints a text of the untrained model."""
    program = "dtfm.node.cli", "generate", str(model), "--prompt", "def", "--seed", "1", "--device", "cpu"
    wanted = {"After training": _child(*program)}
    if not demo.run.model.pretrained:
        wanted = {"Before training": _child(*program, "--untrained", str(demo.run.seed)), **wanted}
    samples = dict(zip(wanted, await asyncio.gather(*wanted.values()), strict=True))
    if not all(samples.values()):
        return
    table = Table(*samples, box=box.SIMPLE_HEAD, width=min(console.width, 120), padding=(0, 1))
    table.add_row(*(Text(printable_lines(s)) for s in samples.values()))
    console.print(table)


async def _child(*program: str) -> str:
    """The output of a module of the node's, with its arguments: the coordinator needs no torch. Empty if it fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", *program),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), CHILD_SECONDS)
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode(errors="replace")[:2000]


def _short(path: Path) -> str:
    """The path from the working folder on, if it is below that."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
