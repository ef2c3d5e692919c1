"""A secret in the query of a database's URL is refused, since errors and logs would show it: `store/database.py`."""

from __future__ import annotations

import pytest

from dtfm.coordinator.store.database import open_engine
from dtfm.coordinator.store.record import StoreError


@pytest.mark.parametrize("key", ["password", "PASSWORD", "sslpassword", "oauth_client_secret", "scram_client_key"])
def test_a_secret_in_the_query_is_refused_with_the_fix_and_is_not_shown(key: str) -> None:
    url = f"postgresql+psycopg://me@127.0.0.1:1/runs?connect_timeout=3&{key}=hunter2"
    with pytest.raises(StoreError, match="USER:PASSWORD@HOST, in PGPASSWORD, or in a file") as refused:
        open_engine(url, write=False)
    assert key in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_password_at_its_place_and_a_file_with_it_are_taken() -> None:
    for url in ("postgresql://me:hunter2@127.0.0.1:1/runs", "postgresql://me@127.0.0.1:1/runs?passfile=/tmp/pass"):
        open_engine(url, write=False).dispose()
