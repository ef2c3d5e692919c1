"""What may change of a run while it goes on: `config/changes.py`."""

from __future__ import annotations

from typing import Any

import pytest

from dtfm.coordinator.config.changes import WHILE_IT_RUNS, with_change
from dtfm.protos.run_file.run_file import RunFile, parse_run


def run(**tables: dict[str, Any]) -> RunFile:
    return parse_run(tables, "the test")


def test_the_end_of_the_schedule_can_be_moved() -> None:
    before = run(train={"steps": 300, "schedule": "warmup-stable-decay", "decay_steps": 100})
    assert with_change(before, "train.decay_steps", "50", 210).train.decay_steps == 50
    assert "train.decay_steps" in WHILE_IT_RUNS


@pytest.mark.parametrize(("rate", "wanted"), [(0.0, "0.1"), (0.1, "0"), ("auto", "0.1")])
def test_audits_neither_begin_nor_end_meanwhile(rate: object, wanted: str) -> None:
    with pytest.raises(ValueError, match="begin and end with a start of the coordinator"):
        with_change(run(trust={"audit_rate": rate}), "trust.audit_rate", wanted, 0)
