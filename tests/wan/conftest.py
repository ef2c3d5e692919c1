"""What these tests need from the machine."""

from __future__ import annotations

import numpy as np
import pytest

from dtfm.scheduler.model.cluster import Cluster, Node
from tests.cluster.conftest import nothing_left_running
from tests.wan.internet import Internet, InternetUnavailable
from tests.wan.wan import Wan, WanUnavailable

__all__ = ["nothing_left_running"]


@pytest.fixture(scope="session")
def emulation() -> None:
    """Skips the test where no network can be emulated."""
    try:
        with Wan(Cluster((Node("n0", 1e9, 1e9),), np.zeros((1, 1)), np.zeros((1, 1)))):
            pass
    except WanUnavailable as reason:
        pytest.skip(f"no emulated network here: {reason}")


@pytest.fixture(scope="session")
def internet() -> None:
    """Skips the test where no NAT can be had."""
    try:
        with Internet() as net:
            net.router("home")
    except InternetUnavailable as reason:
        pytest.skip(f"no network with NAT here: {reason}")
