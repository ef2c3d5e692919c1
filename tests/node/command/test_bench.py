"""`dtfm-node bench`: a row for each thing that a machine can do for a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dtfm.kernels.layout import Codec
from dtfm.node.cli import app
from dtfm.node.command import measuring


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "DEVICE_SECONDS", 0.01)
    monkeypatch.setattr(measuring, "CODEC_ELEMENTS", 1 << 14)
    monkeypatch.setattr(measuring, "UPDATED", 1 << 14)
    monkeypatch.setattr(measuring, "DISK_BYTES", 8 << 20)


def test_every_row_says_what_it_is_compared_with(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", "--snapshots", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.stderr
    rows = {row["measure"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert {*rows} == {
        "matrix product, fp32",
        "matrix product, bf16",
        "copy in memory",
        *(f"codec {c.name.lower()} {way}" for c in Codec if c is not Codec.OFF for way in ("encode", "decode")),
        "AdamW",
        "disk, write and fsync",
        "disk, read",
    }
    for row in rows.values():
        assert {*row} == {"measure", "value", "unit", "against", "ratio"}
        assert row["value"] > 0
        if row["against"]:
            assert row["ratio"] == pytest.approx(row["value"] / rows[row["against"]]["value"])
    assert "measuring the optimizer ..." in result.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", "--snapshots", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert f"{tmp_path / 'file'} cannot be written" in result.stderr
