"""All time-outs follow from the lease, and are in order: `core/timeouts.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtfm.coordinator.config.run_file import RunFile
from dtfm.coordinator.core import timeouts
from dtfm.coordinator.core.timeouts import LADDER, Timeout, check_ladder
from dtfm.coordinator.log.store import Store
from dtfm.coordinator.service.startup import open_run
from dtfm.protos.connection import channel_options
from tests.coordinator.script import fresh_state
from tests.coordinator.stores import store_url


def test_the_timeouts_are_in_order() -> None:
    check_ladder()


def test_a_timeout_out_of_order_is_named_and_prevents_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = (Timeout("between two heartbeats", 2.0), *LADDER[LADDER.index(Timeout("the lease", 1.0)) :])
    with pytest.raises(ValueError, match="2 leases between two heartbeats are more than 1 the lease"):
        check_ladder(wrong)
    monkeypatch.setattr(timeouts.check_ladder, "__defaults__", (wrong,))
    with Store(store_url(tmp_path), write=True) as store, pytest.raises(ValueError, match="out of order"):
        open_run(store, RunFile())


@pytest.mark.parametrize("lease", [0.5, 10.0, 3600.0])
def test_a_dead_connection_is_noticed_after_a_lease_and_two_heartbeats_fit_into_half_of_one(lease: float) -> None:
    options = dict(channel_options(lease))
    noticed = (options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"]) / 1000
    assert noticed == pytest.approx(lease)
    state = fresh_state(cluster={"lease": lease})
    assert 2 * state.heartbeat <= lease / 2
    assert state.patience > lease
