"""The memory of a node beyond what it needs: ``python -m tests.bench.memory [--steps 3] [--json]``.

A coordinator and two nodes on this machine train a Llama of 227 million parameters, first as two stages, then as two replicas.
A node needs the weights, gradients and AdamW's moments of its layers, and the tensors that autograd keeps of the micro-batches
in flight (counted here, with the same stage, storage by storage). This is compared with the peak of the node's process, minus
the size that the process had before it had a stage (the interpreter, its libraries, the data). With free memory a node also
keeps data for its own and others' safety, within bounds. So the same is measured with ``--memory`` 15 % above the need.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from dtfm.node.data.load import load_data
from dtfm.node.model.load import load_model
from dtfm.node.model.stage import build_stage
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.model.memory import in_flight
from tests.bench.rows import Row, show
from tests.cluster.launch import Cluster, Event
from tests.cluster.leaks import peak_bytes, resident_bytes
from tests.cluster.runs import write_corpus

LIMIT = 1.15
STATE_TENSORS = 4
"""For each parameter: itself, its gradient and two moments."""
MODEL = """[model]
family = "llama"
config = { hidden_size = 1536, num_hidden_layers = 8, num_attention_heads = 12, intermediate_size = 4096 }"""


def run_text(stages: list[int], steps: int) -> str:
    return f"""
name = "memory"
{MODEL}
[data]
source = "corpus.txt"
sequence_length = 64
[train]
steps = {steps}
global_batch = 8
micro_batch = 1
evaluate_every = 0
evaluation_samples = 1
[network]
compression = "auto"
[cluster]
nodes = 2
stages = {stages}
lease = 30.0
[checkpoint]
every = 0
"""


def kept_bytes(run: Run, first: int, past_last: int) -> int:
    """The bytes that autograd holds after the forward of one micro-batch through layers [first, past_last), without parameters.
    (These are zero here, which does not matter.)"""
    data = load_data(run)
    model = load_model(run.model, data.sample)
    stage = build_stage(model, first, past_last, torch.device("cpu"), torch.float32)
    held = {bucket.parameters.untyped_storage().data_ptr() for bucket in stage.buckets.values()}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = (
        torch.zeros(model.activation_shape(first - 1, run.train.micro_batch), requires_grad=True)
        if first
        else data.training_batch(np.arange(run.train.micro_batch))[0]
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        graph = stage.forward(x)
    assert graph.requires_grad
    return sum(storages.values())


def needed_bytes(run: Run, first: int, past_last: int, in_flight: int) -> tuple[int, int]:
    """For layers [first, past_last): the bytes of the state alone, and with ``in_flight`` micro-batches."""
    model = load_model(run.model, load_data(run).sample)
    parameters = sum(b.size for b in model.buckets if any(first <= layer < past_last for layer in b.layers))
    state = 4 * STATE_TENSORS * parameters
    return state, state + in_flight * kept_bytes(run, first, past_last)


def peaks(folder: Path, stages: list[int], steps: int, memory: int | None) -> tuple[dict[str, int], Event]:
    """By node, its peak in bytes minus its size before it had a stage; and the plan."""
    options = [] if memory is None else ["--memory", str(memory)]
    with Cluster(folder, run_text(stages, steps), fresh=True) as cluster:
        cluster.add("a", *options)
        cluster.wait_for("node_ready")
        idle = resident_bytes(cluster.nodes["a"].running.pid)
        cluster.add("b", *options)
        cluster.wait_for("step_committed", where=lambda e: e["step"] == steps - 1, timeout=600)
        taken = {node: peak_bytes(process.running.pid) - idle for node, process in cluster.nodes.items()}
        plan = cluster.of("plan_adopted")[-1]["plan"]
        cluster.finish()
    return taken, plan


def measure(stages: list[int], steps: int) -> list[Row]:
    """Measures with all the machine's memory, then with LIMIT times the need."""
    rows: list[Row] = []
    memory = None
    for attempt in ("free", "limited"):
        with tempfile.TemporaryDirectory() as folder:
            taken, plan = peaks(Path(folder), stages, steps, memory)
            write_corpus(Path(folder))
            run = read_run_file(Path(folder, "run.toml")).message("memory")
            run.data.source = str(Path(folder, "corpus.txt"))
            micro_batches = run.train.global_batch // run.train.micro_batch
            most = 0
            for number, stage in enumerate(plan["stages"]):
                first, past_last = stage["layers"]
                flying = min(micro_batches, max(stage["in_flight"], default=in_flight(number, len(stages))))
                state, needed = needed_bytes(run, first, past_last, flying)
                most = max(most, needed)
                what = f"{len(stages)} x {max(stages)}, stage {number}"
                if memory is None:
                    rows.append(Row(f"{what}: state", state / 2**20, "MiB"))
                    rows.append(Row(f"{what}: state and {flying} in flight", needed / 2**20, "MiB"))
                for node in stage["replicas"]:
                    peak = taken[node]
                    rows.append(Row(f"{what}: peak, memory {attempt}", peak / 2**20, "MiB", "needed", peak / needed))
            memory = int(LIMIT * most)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    if arguments.steps < 3:
        parser.error("at least 3 steps: the first ones are not yet at the peak")
    rows = [row for stages in ([1, 1], [2]) for row in measure(stages, arguments.steps)]
    show("Peak memory of a node, minus its size before it has a stage", rows, arguments.json)


if __name__ == "__main__":
    main()
