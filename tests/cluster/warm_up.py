"""What each process would load and compute alike after it has begun: the nursery does it once, before it forks."""

from __future__ import annotations

import torch

from dtfm.node.data.samples import Sample
from dtfm.node.model.load import load_model
from dtfm.node.model.workload import workload
from dtfm.protos.plan_pb2 import FP64, Run
from dtfm.scheduler import warm_up as scheduler


def warm_up() -> None:
    """Loads the scheduler's compiled code, if there is any, and fills torch's caches for the models of most tests. No thread is
    left."""
    if scheduler.is_compiled():
        scheduler.warm_up()
    if torch.cuda.is_available():
        return  # autograd would start a thread for each GPU
    for family in ("llama", "gpt2"):
        train = Run.Train(global_batch=2, micro_batch=2, precision=FP64)
        run = Run(model=Run.Model(family=family, config_json=_SMALL[family]), train=train)
        workload(load_model(run.model, Sample((32,), torch.int64, 256)), run)


_SMALL = {
    "llama": '{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}',
    "gpt2": '{"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}',
}
