"""The memory of a stage against the plan's estimate of it: ``python -m tests.bench.stage_memory [--sequence 512] [--device
cuda] [--json]``.

Layers of 1.1 billion parameters' width. Every way to keep memory, at every place in the pipeline. Measured is the most that
torch's allocator has given out (its profiler's record), from nothing to the end of a step: state, gradients, and the memory of
both passes. The memory that libraries take within one operation, and the process itself, are not in it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json

import torch

from dtfm.node.data.samples import Sample
from dtfm.node.model.load import load_model
from dtfm.protos import plan_pb2
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from tests.bench.rows import Row, show
from tests.node.stage_memory import measured_bytes, planned_bytes

CONFIG = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
}
VOCABULARY = 32000
STAGES = {"first": (0, 3), "middle": (3, 5), "last": (5, 8)}
IN_FLIGHT = {"first": 3, "middle": 2, "last": 1}
PRECISIONS = {"bf16": plan_pb2.BF16, "fp32": plan_pb2.FP32}


def measure(sequence: int, precision: str, device: torch.device) -> list[Row]:
    config = json.dumps(CONFIG | {"max_position_embeddings": sequence})
    model = load_model(
        plan_pb2.Run.Model(family="llama", config_json=config), Sample((sequence,), torch.int64, VOCABULARY)
    )
    rows = []
    for micro_batch in (1, 4):
        train = plan_pb2.Run.Train(
            micro_batch=micro_batch,
            global_batch=8 * micro_batch,
            precision=PRECISIONS[precision],
            learning_rate=1e-4,
            steps=2,
            beta1=0.9,
            beta2=0.95,
            epsilon=1e-8,
        )
        run = plan_pb2.Run(train=train)
        for (number, (place, layers)), checkpointing, state in itertools.product(
            enumerate(STAGES.items()), Checkpointing, OptimizerState
        ):
            keeping, flying = Keeping(checkpointing, state), IN_FLIGHT[place]
            planned = planned_bytes(model, run, layers, keeping, flying)
            measured = measured_bytes(model, run, number, layers, keeping, flying, device)
            gc.collect()
            name = f"{place} stage, micro-batch {micro_batch}, {checkpointing}, {state}: peak"
            rows.append(Row(name, measured / 2**20, "MiB", "planned", measured / planned))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    rows = measure(arguments.sequence, arguments.precision, arguments.device)
    show(f"Memory of a stage, sequence {arguments.sequence}, {arguments.precision}", rows, arguments.json)


if __name__ == "__main__":
    main()
