"""What a month of steps takes in the log: ``python -m tests.bench.month [--nodes 64] [--steps 518400] [--json]``.

Steps, one every five seconds, are written to a store as the coordinator writes them; none is audited. Then ``dtfm-coordinator
check`` reads the log, and the run's story is read as the page tells it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dtfm.coordinator.core.step.commits import TIMED_EVERY, TIMED_STEPS
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.store import Store
from dtfm.coordinator.view.story import Story
from dtfm.coordinator.view.story_snapshot import EVERY, story_of, take
from dtfm.protos.run_file.run_file import RunFile
from dtfm.scheduler.model.plan import Stage, from_routes
from tests.bench.rows import Row, show

TOGETHER = 500
"""The number of events that are written together; the coordinator writes each by itself."""


def steps(nodes: int, number: int) -> Iterator[ev.Event]:
    """A run of this number of ``nodes`` and steps."""
    names = [f"node-{n:02d}" for n in range(nodes)]
    run = RunFile.model_validate({"train": {"steps": number, "global_batch": 512, "micro_batch": 8}})
    yield ev.RunStarted("run-id", run.model_dump(mode="json"))
    for name in names:
        gpu = ev.DeviceSeen("cuda", "NVIDIA GeForce RTX 4090", 24 << 30, 1e14, 64 << 30)
        yield ev.NodeJoined(name, "first contact", "192.0.2.7:7000", gpu, "0.1", f"{name}-1")
    yield ev.PlanAdopted(1, from_routes(1, [Stage((0, 4), tuple(names), ())], [(names[:1], 64)]), "first", 0)
    chance = random.Random(0)
    for step in range(1, number + 1):
        timed = names if step <= TIMED_STEPS or step % TIMED_EVERY == 0 else ()
        compute = {name: round(chance.uniform(2, 4), 3) for name in timed}
        wait = {name: round(5 - seconds, 3) for name, seconds in compute.items()}
        loss, norm = chance.gauss(3, 0.1), chance.gauss(1, 0.1)
        yield ev.StepCommitted(
            step, 1, loss, 1 << 19, norm, 5.123456, 512, compute, wait, learning_rate=chance.random()
        )


def write(store: Store, events: Iterator[ev.Event]) -> None:
    """Writes the log."""
    while together := list(itertools.islice(events, TOGETHER)):
        store.append(together)


def keep_a_snapshot(store: Store) -> None:
    """Keeps a snapshot that is as old as a snapshot can be."""
    story = Story()
    for record in store.read():
        story.add(record)
        if record.sequence == max(store.last - EVERY, 1):
            store.keep(take(story))


def telling(path: Path) -> tuple[float, float]:
    """Seconds until the run's story is known, as the page, `watch` and a restart need it: from the whole log, and from a
    snapshot."""
    began = time.monotonic()
    with Store(f"sqlite:///{path}", write=True) as store:
        keep_a_snapshot(store)
        whole = time.monotonic() - began
        began = time.monotonic()
        story_of(store.snapshots(store.last), store.read)
        return whole, time.monotonic() - began


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30 * 86400 // 5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dtfm.db"
        with Store(f"sqlite:///{path}", write=True) as store:
            write(store, steps(arguments.nodes, arguments.steps))
        size = sum(each.stat().st_size for each in path.parent.iterdir())
        program = [sys.executable, "-m", "dtfm.coordinator.cli", "check", "--store", str(path)]
        began = time.monotonic()
        print(subprocess.run(program, check=True, capture_output=True, text=True).stdout, file=sys.stderr)
        took = time.monotonic() - began
        whole, from_snapshot = telling(path)
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    show(
        f"{arguments.steps} steps of {arguments.nodes} nodes",
        [
            Row("a step, with all that is beside it", size / arguments.steps, "bytes"),
            Row("the store", size / 1e6, "MB"),
            Row("check", took, "s"),
            Row("the story, from the whole log", whole, "s"),
            Row("the story, from the last snapshot", from_snapshot, "s", "from the whole log", from_snapshot / whole),
            Row("check: memory", memory / 1e6, "MB"),
        ],
        arguments.json,
    )


if __name__ == "__main__":
    main()
