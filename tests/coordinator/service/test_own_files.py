"""Which files of the data the coordinator has itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from dtfm.coordinator.service.own_files import own_files
from dtfm.protos.run_file.data_tables import Data, OneSource


@pytest.mark.parametrize("place", ["{}/*.txt", "file://{}/*.txt"])
def test_files_on_this_machine_are_described(tmp_path: Path, place: str) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (found,) = own_files(Data(source=place.format(tmp_path)))
    assert (found.key, found.name, found.digest) == ("data.source", "a.txt", blake3(b"some text").hexdigest())


def test_each_source_has_its_key_and_what_is_elsewhere_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    sources = [OneSource(source=place) for place in ("/nowhere/x.txt", str(tmp_path / "a.txt"), "s3://bucket/x.txt")]
    assert [file.key for file in own_files(Data(sources=sources))] == ["data.sources[1].source"]
    for place in ("python-stdlib", "hf:owner/name", "https://example.org/x.txt", "module:mine:data"):
        assert own_files(Data(source=place)) == ()
