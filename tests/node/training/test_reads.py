"""The places where a step reads a number from the device: each read waits for all earlier work of the device."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dtfm.kernels import transfer
from dtfm.node.training.step import pipeline
from tests.cluster.runs import run_file
from tests.node.in_process import nodes_of

READS = Counter(
    {
        "pipeline.py, _read": 2,
        "optimizer.py, squared_norms": 4,
        **dict.fromkeys(("reducer.py, _make_final", "reducer.py, _use", "bucket_sum.py, _finite"), 12),
    }
)
"""Of a step of two stages of two replicas that hold three buckets each. A node reads the losses of its micro-batches, and its
gradients' norm. The reducing thread reads whether sent and added pieces are finite."""


def place_of_read() -> str | None:
    """The file and the function of the node's code that reads; None where others do."""
    ours = [frame for frame in traceback.extract_stack() if "/dtfm/node/" in frame.filename]
    return f"{Path(ours[-1].filename).name}, {ours[-1].name}" if ours else None


def test_a_step_reads_numbers_only_where_nothing_is_left_to_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = run_file(stages=[2, 2], steps=4, precision="bf16", compression="i8b256")
    reads, lock, within = Counter[str](), threading.Lock(), threading.local()

    def arriving(tensor: torch.Tensor) -> Callable[[], list[int]]:
        """What has arrived is read without waiting."""
        arrived = transfer.arriving(tensor)
        return lambda: [1] if real["__bool__"](arrived()) else []

    def noted(name: str) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *arguments: Any) -> Any:
            if not getattr(within, "read", False) and (place := place_of_read()) is not None:
                with lock:
                    reads[place] += 1
            within.read = True
            try:
                return real[name](tensor, *arguments)
            finally:
                within.read = False

        return read

    real = {name: getattr(torch.Tensor, name) for name in ("__bool__", "__float__", "__int__", "item", "tolist", "cpu")}
    with nodes_of(text) as nodes:
        nodes.train()
        monkeypatch.setattr(pipeline, "arriving", arriving)
        for name in real:
            monkeypatch.setattr(torch.Tensor, name, noted(name))
        nodes.train()
        monkeypatch.undo()
    assert reads == READS
