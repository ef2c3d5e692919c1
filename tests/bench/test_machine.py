"""A row for each thing that a machine can do for a run: `tests/bench/machine.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtfm.kernels.layout import Codec
from tests.bench import machine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DEVICE_SECONDS", 0.01)
    monkeypatch.setattr(machine, "CODEC_ELEMENTS", 1 << 14)
    monkeypatch.setattr(machine, "UPDATED", 1 << 14)
    monkeypatch.setattr(machine, "DISK_BYTES", 8 << 20)


def test_every_row_says_what_it_is_compared_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine.main(["--device", "cpu", "--snapshots", str(tmp_path), "--json"])
    printed = capsys.readouterr()
    rows = {row["measure"]: row for row in map(json.loads, printed.out.splitlines())}
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
    assert "measuring the optimizer ..." in printed.err
