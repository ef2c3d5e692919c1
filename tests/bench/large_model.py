"""A Llama of 1.1 billion parameters on two nodes that may take 10.5 GiB of memory each: ``python -m tests.bench.large_model
[--gib 10.5] [--sequence 256] [--json]``.

It trains in bfloat16, writes a checkpoint after two steps (13 GB, and for a while as much again on the nodes' disks), takes one
more step, and is then interrupted. One process repeats the first two steps in float32, and needs 19 GiB. The nodes are in
memory groups of their own, so Linux ends a node that takes more (root; some minutes).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.bench.rows import Row, show
from tests.cluster.launch import Cluster
from tests.cluster.runs import losses_alone

NODES = ("a", "b")
CHECKPOINT = 2
"""The step of the checkpoint. It is written while the next step is trained."""
MINUTES = 25


def run_text(sequence: int) -> str:
    return f"""
name = "one-billion"
[model]
family = "llama"
[model.config]
hidden_size = 2048
intermediate_size = 5632
num_hidden_layers = 22
num_attention_heads = 32
num_key_value_heads = 4
vocab_size = 32000
max_position_embeddings = {sequence}
[data]
source = "corpus.txt"
sequence_length = {sequence}
[train]
steps = 1000
micro_batch = 1
global_batch = 2
learning_rate = 1e-4
warmup_steps = 0
precision = "bf16"
evaluation_samples = 1
[cluster]
nodes = {len(NODES)}
lease = 60.0
[checkpoint]
every = {CHECKPOINT}
"""


@contextmanager
def memory_group(name: str, limit: int) -> Iterator[Path]:
    """The folder of a control group (version 1 or 2) whose processes may take ``limit`` bytes together."""
    top = Path("/sys/fs/cgroup")
    group = (top / "memory" if (top / "memory").is_dir() else top) / f"dtfm-{name}"
    group.mkdir()
    try:
        for file in ("memory.limit_in_bytes", "memory.max"):
            if (group / file).exists():
                (group / file).write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def peak_bytes(pid: int) -> int:
    """The most memory that the process has had resident (proc(5), VmHWM)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def measure(limit: int, sequence: int) -> Iterator[Row]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        groups = {name: stack.enter_context(memory_group(name, limit)) for name in NODES}

        def confined(name: str, command: list[str]) -> list[str]:
            if name not in groups:
                return command
            return ["sh", "-c", f'echo $$ > {groups[name]}/cgroup.procs && exec "$@"', "sh", *command]

        with Cluster(folder, run_text(sequence), place=confined, nodes=NODES) as cluster:
            plan = cluster.wait_for("plan_adopted", timeout=60 * MINUTES)["plan"]
            cluster.wait_for("step_committed", where=lambda e: e["step"] == CHECKPOINT, timeout=60 * MINUTES)
            before = {name: peak_bytes(node.running.pid) for name, node in cluster.nodes.items()}
            began = time.monotonic()
            cluster.wait_for("checkpoint_written", timeout=60 * MINUTES)
            seconds = time.monotonic() - began
            cluster.wait_for("step_committed", where=lambda e: e["step"] > CHECKPOINT, timeout=60 * MINUTES)
            peaks = {name: peak_bytes(node.running.pid) for name, node in cluster.nodes.items()}
            losses = cluster.losses[:CHECKPOINT]
            written = sum(file.stat().st_size for file in folder.glob("checkpoints/step-*/bucket-*"))
            assert not cluster.of("node_left")
        for stage in plan["stages"]:
            for name, keeping in zip(stage["replicas"], stage.get("keeping") or ["as usual"], strict=False):
                measured = peaks[name]
                what = f"peak of {name}, layers {stage['layers']}, kept {keeping}"
                yield Row(what, measured / 2**30, "GiB", f"its limit of {limit / 2**30:.1f} GiB", measured / limit)
                grown = (measured - before[name]) / 2**20
                yield Row(f"its growth with the checkpoint, {name}", grown, "MiB", "", None)
        yield Row("checkpoint", written / 1e9 / seconds, "GB/s", f"{written / 1e9:.1f} GB in {seconds:.0f} s", None)
        alone = losses_alone(cluster.run_file, steps=CHECKPOINT)
        for step, (mine, plain) in enumerate(zip(losses, alone, strict=True), start=1):
            yield Row(f"loss of step {step}", mine, "nats", f"one process in float32: {plain:.4f}", mine / plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=10.5, help="memory of each node")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parser.parse_args()
    rows = list(measure(int(options.gib * 2**30), options.sequence))
    show("1.1 billion parameters on two nodes", rows, options.json)


if __name__ == "__main__":
    main()
