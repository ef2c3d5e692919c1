"""A run's figures by step."""

from __future__ import annotations

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.curves import Reading, reading
from dtfm.coordinator.view.so_far import SoFar
from tests.coordinator.web.stored_run import stored_run


def readings(records: list[Record]) -> list[Reading]:
    so_far, found = SoFar(), []
    for record in records:
        so_far.add(record)
        if (read := reading(so_far, record)) is not None:
            found.append(read)
    return found


def test_each_step_and_each_evaluation_has_its_figures() -> None:
    found = readings(stored_run())
    steps = [each for each in found if each.loss is not None]
    assert [each.step for each in steps] == list(range(1, 181))
    assert [each.step for each in found if each.held_out_loss is not None] == [50, 100, 150]
    last = steps[-1]
    assert last.tokens_per_second == pytest.approx(65_536 / (last.seconds or 0))
    assert last.predicted_over_measured == pytest.approx(8.8 / (last.seconds or 0))
    assert last.busy is not None
    assert 0.5 < last.busy < 0.8
    costs = [each.cost or 0.0 for each in found]
    assert costs == sorted(costs)
    assert costs[0] > 0
    assert set(last.values) == {
        "loss", "gradient_norm", "learning_rate", "tokens_per_second", "busy", "predicted_over_measured", "cost"
    }  # fmt: skip


def test_what_is_not_known_is_left_out_and_an_exchange_has_no_figures() -> None:
    start = Record(1, 0.0, ev.RunStarted("id", {"name": "r"}))
    resumed = Record(2, 1.0, ev.StepCommitted(1, 1, 2.0, 64, 0.5, 3.0, 8, {}, {}, resumed=True))
    exchange = Record(3, 2.0, ev.StepCommitted(2, 1, 2.0, 64, 0.5, 3.0, 8, {}, {}, exchange=True))
    (read,) = readings([start, resumed, exchange])
    assert read.values == {"loss": 2.0, "gradient_norm": 0.5}
