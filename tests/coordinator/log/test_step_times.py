"""Each node's time in old steps is kept in all: `log/step_times.py`, `Store.append`."""

from __future__ import annotations

from dtfm.coordinator.log import events as ev, step_times
from dtfm.coordinator.log.store import Store


def step(number: int) -> ev.StepCommitted:
    return ev.StepCommitted(number, 1, 2.5, 8192, 0.5, 1.25, 32, {"a": 1.0, "b": 0.5}, {"a": 0.25, "b": 0.75})


def test_the_steps_stay_without_each_nodes_time_and_the_sums_are_exact(store_url: str) -> None:
    with Store(store_url, write=True) as store:
        store.append([step(number) for number in range(1, 11)])
        summed = store.step_times(2, 8)
        assert (summed.steps, summed.compute_seconds, summed.wait_seconds) == (
            6,
            {"a": 6, "b": 3},
            {"a": 1.5, "b": 4.5},
        )
        store.append([summed])
        *steps, last = [record.event for record in store.read()]
        assert last == summed
        assert steps == [step(n) if n in (1, 2, 9, 10) else step_times.without_times(step(n)) for n in range(1, 11)]
        assert store.step_times(2, 8).digest == summed.digest


def test_they_are_summed_up_once_enough_later_events_have_come() -> None:
    first = step_times.KEPT + step_times.EVERY
    assert not step_times.due(first - 1, 0)
    assert step_times.due(first, 0)
    assert not step_times.due(first, step_times.EVERY)


def test_a_step_of_64_nodes_takes_at_most_300_bytes_in_the_end() -> None:
    nodes = [f"node-{n:02d}" for n in range(64)]
    fields = (123_456, 12, 2.345678901234567, 1 << 20, 0.123456789012345678, 4.987654, 512)
    event = ev.StepCommitted(
        *fields, dict.fromkeys(nodes, 1.234), dict.fromkeys(nodes, 0.123), learning_rate=2.9e-4 / 7
    )
    assert len(ev.to_text(step_times.without_times(event)) + step_times.times_to_text(event)) < 2000
    assert len(ev.to_text(step_times.without_times(event))) < 300
