"""The usual alternative: one rank of torch.distributed's pipeline, 1F1B in four stages of two replicas, over Gloo.

``python -m tests.bench.torch_pipeline RANK MASTER STEPS RUN.toml``, once for each rank from 0 to 7. Rank r holds stage r // 2.
The replicas of a stage average gradients in one all-reduce after the pipeline's step. Nothing is clipped, checked or voted on,
so it has less to do than ours. Rank 7 prints the seconds of each step, as a JSON list.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from dtfm.node.data.load import load_data
from dtfm.protos.run_file.run_file import read_run_file
from tests.cluster.plain import batch, whole_model

STAGES, REPLICAS = 4, 2
DEVICE = "wan0"


class Part(nn.Module):
    """One stage of a Llama: its decoder layers, in the first stage the embedding, in the last the head."""

    def __init__(self, whole: Any, stage: int) -> None:
        super().__init__()
        layers = whole.model.layers
        each = len(layers) // STAGES
        self.embed = whole.model.embed_tokens if stage == 0 else None
        self.layers = nn.ModuleList(layers[stage * each : (stage + 1) * each])
        self.rotary = whole.model.rotary_emb
        self.head = nn.Sequential(whole.model.norm, whole.lm_head) if stage == STAGES - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x if self.embed is None else self.embed(x)
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        turned = self.rotary(hidden, positions)
        for layer in self.layers:
            out = layer(hidden, position_embeddings=turned)
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden if self.head is None else self.head(hidden)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    rank, master, steps, path = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    stage, replica = divmod(rank, REPLICAS)
    run = read_run_file(path).message("any")
    data, train = load_data(run), run.train
    part = Part(whole_model(run, data, ()), stage)
    optimizer = torch.optim.AdamW(part.parameters(), lr=train.learning_rate)
    dist.init_process_group("gloo", init_method=f"tcp://{master}:7400", rank=rank, world_size=STAGES * REPLICAS)
    # torch.distributed requires that every rank creates every group, in the same order.
    pipelines = [dist.new_group([s * REPLICAS + r for s in range(STAGES)]) for r in range(REPLICAS)]
    replicas = [dist.new_group([s * REPLICAS + r for r in range(REPLICAS)]) for s in range(STAGES)]
    micro_batches = train.global_batch // train.micro_batch // REPLICAS
    pipe = PipelineStage(part, stage, STAGES, torch.device("cpu"), group=pipelines[replica])
    schedule = Schedule1F1B(pipe, micro_batches, loss_fn=loss_of)
    seconds = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        first = ((step - 1) * REPLICAS + replica) * micro_batches
        batches = [batch(run, data, number) for number in range(first, first + micro_batches)]
        if stage == 0:
            schedule.step(torch.cat([inputs for inputs, _ in batches]))
        elif stage == STAGES - 1:
            schedule.step(target=torch.cat([labels for _, labels in batches]))
        else:
            schedule.step()
        gradients = [parameter.grad for parameter in part.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / REPLICAS
        dist.all_reduce(flat, group=replicas[stage])
        for gradient, piece in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    if rank == STAGES * REPLICAS - 1:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
