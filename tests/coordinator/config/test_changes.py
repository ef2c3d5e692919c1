"""What was edited in a run file while the run goes on: `config/changes.py`."""

from __future__ import annotations

from typing import Any

import pytest

from dtfm.coordinator.config.changes import WHILE_IT_RUNS, edits, with_change
from dtfm.protos.run_file.run_file import RunFile, parse_run


def run(**tables: dict[str, Any]) -> RunFile:
    return parse_run(tables, "the test")


def test_edits_are_the_keys_that_differ_each_as_set_takes_it() -> None:
    before = run(train={"steps": 300}, checkpoint={"every": 10}, trust={"audit_rate": 0.1})
    after = run(train={"steps": 400}, checkpoint={"every": 7, "uri": "s3://a/b"}, trust={"audit_rate": 0.2})
    changed = before
    for key, value in edits(before, after):
        changed = with_change(changed, key, value, 0)
    expected = {"train.steps": 400, "checkpoint.every": 7, "checkpoint.uri": "s3://a/b", "trust.audit_rate": 0.2}
    assert {key for key, _ in edits(before, after)} == expected.keys()
    assert changed.checkpoint == after.checkpoint
    assert (changed.train.steps, changed.trust.audit_rate) == (400, 0.2)
    assert changed.train.decay_steps == before.train.decay_steps, "which follows from the steps when a run starts"
    assert edits(after, after) == []


@pytest.mark.parametrize(
    ("key", "edited"),
    [
        ("train.learning_rate", {"train": {"learning_rate": 1e-5}}),
        ("cluster.stages", {"cluster": {"stages": 3}}),
        ("seed", {"seed": 7}),
    ],
)
def test_what_cannot_change_meanwhile_is_named_and_nothing_else_is_set(key: str, edited: dict[str, Any]) -> None:
    after = parse_run({**edited, "checkpoint": {"every": 7}}, "the test")
    with pytest.raises(ValueError, match=f"^{key}: start the coordinator again for this"):
        edits(run(), after)


def test_the_end_of_the_schedule_can_be_moved() -> None:
    before = run(train={"steps": 300, "schedule": "warmup-stable-decay", "decay_steps": 100})
    assert with_change(before, "train.decay_steps", "50", 210).train.decay_steps == 50
    assert "train.decay_steps" in WHILE_IT_RUNS


@pytest.mark.parametrize(("rate", "wanted"), [(0.0, "0.1"), (0.1, "0"), ("auto", "0.1")])
def test_audits_neither_begin_nor_end_meanwhile(rate: object, wanted: str) -> None:
    with pytest.raises(ValueError, match="begin and end with a start of the coordinator"):
        with_change(run(trust={"audit_rate": rate}), "trust.audit_rate", wanted, 0)
