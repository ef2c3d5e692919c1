"""What Prometheus is told of a stored run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.store.store import Store, StoreError
from dtfm.coordinator.view import follower
from dtfm.coordinator.view.metrics import Figures
from dtfm.coordinator.view.so_far import STALL_LEASES, STALL_STEPS, SoFar
from dtfm.coordinator.view.story import Story
from tests.coordinator.every_event import DEVICE
from tests.coordinator.web.stored_run import stored_run

DOCS = Path(__file__).parents[3] / "docs"


def figures_of(records: list[Record], later: float = 0.0) -> Figures:
    """As they are ``later`` than the last record, in seconds."""
    so_far = SoFar()
    for record in records:
        so_far.add(record)
    return Figures(so_far, 1000, 400, 1, so_far.last + later)


def samples(figures: Figures) -> dict[str, float]:
    """By name with labels, as Prometheus reads the text."""
    read = text_string_to_metric_families(figures.text().decode())
    return {
        f"{sample.name}{''.join(f' {value}' for value in sample.labels.values())}": sample.value
        for family in read
        for sample in family.samples
    }


def test_a_run_and_its_members_are_told_in_figures() -> None:
    records = stored_run()
    told = samples(figures_of(records))
    assert told["dtfm_run_info stories-1b"] == 1
    assert [told[f"dtfm_run_state {state}"] for state in ("waiting", "training", "failed")] == [0, 1, 0]
    assert (told["dtfm_step"], told["dtfm_steps"], told["dtfm_generation"]) == (180, 240, 4)
    assert (told["dtfm_step_predicted_seconds"], told["dtfm_step_bound_seconds"]) == (8.8, 6.6)
    assert 9 < told["dtfm_step_seconds"] < 11
    assert told["dtfm_nodes computing"] == 4
    assert told["dtfm_events_total node_left"] == 2
    assert (told["dtfm_disk_bytes"], told["dtfm_disk_free_bytes"]) == (1000, 400)
    assert told["dtfm_reserves"] == 1
    assert told["dtfm_node_stage runpod-2"] == 2
    assert told["dtfm_node_memory_bytes lab-a100"] == 40 << 30
    assert told["dtfm_node_joins_total lab-a100"] == 1
    assert told["dtfm_node_micro_batches_total lab-a100"] > told["dtfm_node_micro_batches_total lab-3090"] > 0
    last = next(each.event for each in reversed(records) if isinstance(each.event, ev.StepCommitted))
    assert told["dtfm_node_busy_seconds lab-a100"] == last.compute_seconds["lab-a100"]
    assert told["dtfm_node_wait_seconds lab-a100"] == last.wait_seconds["lab-a100"]
    assert not any("vast-7" in name for name in told), "it has left"
    assert told["process_resident_memory_bytes"] > 1e6


def test_a_commit_is_overdue_after_so_many_leases_or_long_steps_and_not_in_a_pause() -> None:
    def stalled(records: list[Record], later: float) -> float:
        return samples(figures_of(records, later))["dtfm_run_stalled"]

    begun = [Record(1, 100.0, ev.RunStarted("id", {"name": "x", "cluster": {"lease": 2.0}}))]
    assert (stalled(begun, 2 * STALL_LEASES), stalled(begun, 2 * STALL_LEASES + 1)) == (0, 1)
    assert stalled([*begun, Record(2, 100.0, ev.RunPaused("bob"))], 1e6) == 0
    assert stalled([*begun, Record(2, 100.0, ev.RunFinished(3, "done"))], 1e6) == 0
    step = ev.StepCommitted(1, 1, 2.0, 5, 1.0, 60.0, 5, {}, {})
    trained = [*begun, Record(2, 200.0, step)]
    assert (stalled(trained, 60 * STALL_STEPS), stalled(trained, 60 * STALL_STEPS + 1)) == (0, 1)
    assert stalled([*trained, Record(3, 9e6, ev.RunResumed("why", begun[0].event.run, {}))], 1) == 0  # type: ignore[attr-defined]


async def test_the_number_of_reserves_is_left_out_while_the_database_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "FRESH_SECONDS", -1.0)

    def is_away() -> int:
        raise StoreError("the connection broke")

    with Store(f"sqlite:///{tmp_path / 'dtfm.db'}", write=True) as store:
        following = follower.Follower(store, Story())
        monkeypatch.setattr(store, "reserves", lambda: 0)
        assert b"\ndtfm_reserves 0.0\n" in await following.metrics()
        monkeypatch.setattr(store, "reserves", is_away)
        told = await following.metrics()
        assert b"\ndtfm_disk_bytes " in told
        assert b"\ndtfm_reserves " not in told
        await following.close()


def test_names_that_are_addresses_are_hidden_and_do_not_spoil_the_answer() -> None:
    names = ("203.0.113.7", "203.0.113.8", "a-1")
    joined = [Record(n, 1.0, ev.NodeJoined(name, "", "198.51.100.1:7", DEVICE)) for n, name in enumerate(names, 2)]
    text = figures_of([Record(1, 0.0, ev.RunStarted("id", {"name": "x"})), *joined]).text().decode()
    assert not re.search(r"\d+\.\d+\.\d+\.\d+", text)
    lines = re.findall(r"^[^#\s]\S* ", text, re.MULTILINE)
    assert len(lines) == len(set(lines)), "Prometheus refuses a sample that comes twice"


def test_the_document_names_each_metric_by_the_same_sentence() -> None:
    rows = re.findall(r"^\| `(dtfm_\w+)` \| (\w*) ?\| (.+) \|$", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    documented = [(name.removesuffix("_total"), label, text) for name, label, text in rows]
    collected = [each for each in figures_of(stored_run()).collect() if each.name.startswith("dtfm_")]
    labels = {each.name: next((" ".join(sample.labels) for sample in each.samples), "") for each in collected}
    assert documented == [(each.name, labels[each.name], each.documentation) for each in collected]
