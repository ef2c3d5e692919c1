"""What torch.compile brings a model's layers: ``python -m tests.bench.compiled_layers [--device cuda] [--json]``.

A stage of six Llama layers and the same stage with [train] compile do forward and backward passes by turns. The ratio is
between the medians. The default sizes suit a CPU; on a GPU take wider layers, like ``--hidden 2048``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time

import torch

from dtfm.node.data.samples import Sample
from dtfm.node.host.cuda_streams import wait_until_computed
from dtfm.node.model.compiled_layer import can_compile
from dtfm.node.model.load import load_model
from dtfm.node.model.stage import Stage, build_stage, initialise
from dtfm.protos import plan_pb2
from dtfm.scheduler.model.memory import Checkpointing, Keeping
from tests.bench.rows import Row, show

LAYERS, TOKENS, SAMPLES, WARM_UP = 6, 256, 4, 3


def stage_of(hidden: int, device: torch.device, dtype: torch.dtype, checkpointing: Checkpointing, made: bool) -> Stage:
    config = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_hidden_layers": LAYERS}
    config |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "vocab_size": 256}
    spec = plan_pb2.Run.Model(family="llama", config_json=json.dumps(config))
    model = load_model(spec, Sample((TOKENS,), torch.int64, 256))
    model.compiles = made
    keeping = Keeping(checkpointing)
    stage = build_stage(model, 1, LAYERS + 1, device, torch.float32, computes_in=dtype, keeping=keeping)
    for index, bucket in stage.buckets.items():
        initialise(model, bucket, seed=1)
        stage.refresh(index)
    return stage


def pass_seconds(stage: Stage, hidden: int) -> float:
    x = torch.randn(SAMPLES, TOKENS, hidden, device=stage.device).to(stage.dtype).requires_grad_()
    wait_until_computed(stage.device)
    began = time.perf_counter()
    y = stage.forward(x)
    torch.autograd.backward(y, torch.ones_like(y))
    wait_until_computed(stage.device)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda or cuda:N")
    parser.add_argument("--hidden", type=int, default=512, help="the width, a multiple of 128")
    parser.add_argument("--passes", type=int, default=30, help="passes of each stage that are timed")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args()
    if not can_compile(options.device):
        return 1
    rows = []
    for dtype, checkpointing in itertools.product((torch.float32, torch.bfloat16), Checkpointing):
        stages = [stage_of(options.hidden, options.device, dtype, checkpointing, made) for made in (False, True)]
        turns = [[pass_seconds(stage, options.hidden) for stage in stages] for _ in range(WARM_UP + options.passes)]
        plain, made = (statistics.median(seconds) for seconds in zip(*turns[WARM_UP:], strict=True))
        name = f"{str(dtype).removeprefix('torch.')}, checkpointing {checkpointing.value}"
        rows.append(Row(name, 1e3 * made, "ms", f"{1e3 * plain:.3g} ms not compiled", made / plain))
    show("A pass through six layers that torch.compile has made", rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
