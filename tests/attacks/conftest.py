"""As in tests/cluster."""

from tests.cluster.conftest import nothing_left_running

__all__ = ["nothing_left_running"]
