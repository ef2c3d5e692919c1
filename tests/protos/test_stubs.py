"""The generated stubs in the repository match its .proto files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = sorted(path.name for path in (ROOT / "protos").glob("*.proto"))


@pytest.mark.parametrize("proto", PROTOS)
def test_the_stubs_are_current(proto: str, tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, f"dtfm/protos/{proto}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    for made in (tmp_path / "dtfm" / "protos").iterdir():
        kept = ROOT / "protos" / made.name
        assert kept.read_text() == made.read_text(), f"{made.name} is stale; run: make proto"
