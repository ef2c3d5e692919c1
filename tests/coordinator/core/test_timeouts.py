"""All time-outs follow from the lease, and are in order: `core/timeouts.py`."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.timeouts import HEARTBEAT_LEASES
from dtfm.protos.connection import channel_options
from tests.coordinator.script import fresh_state


@pytest.mark.parametrize("lease", [0.5, 10.0, 3600.0])
def test_a_dead_connection_is_noticed_after_a_lease_and_two_heartbeats_fit_into_half_of_one(lease: float) -> None:
    options = dict(channel_options(lease))
    noticed = (options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"]) / 1000
    assert noticed == pytest.approx(lease)
    state = fresh_state(cluster={"lease": lease})
    assert 2 * state.lease * HEARTBEAT_LEASES <= lease / 2
    assert state.patience > lease
