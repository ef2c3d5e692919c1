"""The generated stubs in the repository match its .proto files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_stubs_are_current(tmp_path: Path) -> None:
    protos = [f"dtfm/protos/{path.name}" for path in (ROOT / "protos").glob("*.proto")]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *protos], cwd=ROOT, check=True, timeout=60
    )
    made = [*(tmp_path / "dtfm" / "protos").iterdir()]
    assert len(made) == 2 * len(protos)
    for stub in made:
        kept = ROOT / "protos" / stub.name
        assert kept.read_text() == stub.read_text(), f"{stub.name} is stale; run: make proto"
