"""The event loop of a node answers peers and beats: the device's work never runs there."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import torch

from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, run_file
from tests.cluster.watched_loop import REPORT, SMALL, Watch


def watched(_name: str, command: list[str]) -> list[str]:
    return ["tests.cluster.watched_loop" if word == "dtfm.node.cli" else word for word in command]


@pytest.mark.soak
def test_no_tensor_is_handled_on_the_event_loop_through_joins_kills_and_checkpoints(tmp_path: Path) -> None:
    """Compressed streams, a reduction, evaluations, a newcomer that copies its state, a standby, a checkpoint."""
    text = run_file(model=GPT2, stages=[2], steps=60, checkpoint_every=10, compression="i8b256")
    with Cluster(tmp_path, text, place=watched, nodes=("stays", "dies")) as cluster:
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        cluster.nodes["dies"].send(signal.SIGKILL)
        cluster.add("newcomer")
        cluster.wait_for("plan_started", where=lambda e: e["generation"] == 3)
        assert cluster.finish() == 0
        for node in cluster.nodes.values():
            assert REPORT not in node.errors


def test_the_watch_sees_work_on_a_loop_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    large = torch.zeros(SMALL)

    async def work() -> None:
        large.view(2, -1)
        torch.zeros(2).add_(1)
        await asyncio.to_thread(large.add_, 1)
        assert REPORT not in capfd.readouterr().err
        large.add_(1)

    with Watch():  # type: ignore[no-untyped-call]
        large.add_(1)
        asyncio.run(work())
    assert capfd.readouterr().err.count(REPORT) == 1
