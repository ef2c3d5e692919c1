"""What a GPU makes of dtfm, in one file to send in: ``make gpu``, or ``python -m tests.bench.gpu [--device cuda:0] [--file
FILE]``.

It runs the tests that need a GPU, and measures the device, its codecs and its disk (machine.py). It compares the codecs with a
copy in the GPU's memory. It trains the same model in a plain loop, in one node, and in two nodes that share the GPU. It takes
about a quarter of an hour.

The file has one JSON object per line; the first one describes the machine. It holds no names, addresses or paths of the machine
except those in its driver's report. A failed part is in it with its last output, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

RUN = """
[model]
family = "llama"
[model.config]
hidden_size = 1024
num_hidden_layers = 16
num_attention_heads = 16
num_key_value_heads = 4
intermediate_size = 2816
[data]
sequence_length = 1024
[train]
global_batch = 64
micro_batch = 4
precision = "{precision}"
"""
"""On a GPU: 0.2 billion parameters."""

PART_SECONDS = 1200
LAST_LINES = 30
"""The lines of a failed part's output that the file keeps."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that runs by itself. ``rows``: it prints one JSON object per row."""

    name: str
    command: tuple[str, ...]
    rows: bool = True


def parts(device: torch.device, run_file: Path | None) -> Iterator[Part]:
    """All parts to try on the device. ``run_file`` None: they train the demo's model."""
    python = (sys.executable, "-m")
    on = ("--device", str(device))
    run = ("--run", str(run_file)) if run_file is not None else ("--steps", "4")
    yield Part("tests", (*python, "pytest", "-q", "-rf", "--no-header", "-m", "gpu", "tests"), rows=False)
    yield Part("device", (*python, "tests.bench.machine", *on, "--json"))
    yield Part("codecs", (*python, "tests.bench.kernels", *on, "--json"))
    yield Part("training", (*python, "tests.bench.overhead", *on, *run, "--nodes", "1", "2", "--json"))


def machine(device: torch.device) -> dict[str, object]:
    """The facts about the machine that a reader of the figures needs."""
    described: dict[str, object] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": subprocess.run(
            ("git", "describe", "--always", "--dirty"), capture_output=True, text=True
        ).stdout.strip(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": "CPU",
    }
    if device.type == "cuda":
        of_gpu = torch.cuda.get_device_properties(device)
        described |= {
            "device": of_gpu.name,
            "memory_bytes": of_gpu.total_memory,
            "capability": f"{of_gpu.major}.{of_gpu.minor}",
            "cuda": torch.version.cuda,
        }
    return described


def results(part: Part) -> Iterator[dict[str, object]]:
    """The part's results, and how it ended."""
    began = time.monotonic()
    try:
        done = subprocess.run(part.command, capture_output=True, text=True, timeout=PART_SECONDS)
        code, out, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        code, out, errors = -1, "", f"it did not end within {PART_SECONDS} s"
    lines = out.splitlines()
    if part.rows:
        yield from ({"part": part.name, **json.loads(line)} for line in lines if line.startswith("{"))
    else:
        yield {"part": part.name, "said": lines[-1] if lines else ""}
    ended: dict[str, object] = {"part": part.name, "seconds": round(time.monotonic() - began), "exit_code": code}
    yield ended if code == 0 else {**ended, "last": [*lines, *errors.splitlines()][-LAST_LINES:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"), help="cuda:N, or cpu to try it")
    parser.add_argument("--file", type=Path, help="default: gpu-DATE-DEVICE.jsonl here")
    arguments = parser.parse_args()
    device: torch.device = arguments.device
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"{device} is not there: torch {torch.__version__} finds no GPU; dtfm-node doctor says why")
    described = machine(device)
    name = str(described["device"]).replace(" ", "-")
    file: Path = arguments.file or Path(f"gpu-{described['date']}-{name}.jsonl")
    with tempfile.TemporaryDirectory() as folder, file.open("w") as written:
        run_file = None
        if device.type == "cuda":
            run_file = Path(folder) / "run.toml"
            run_file.write_text(RUN.format(precision="bf16" if torch.cuda.is_bf16_supported() else "fp32"))
        print(json.dumps(described), file=written, flush=True)
        failed = []
        for part in parts(device, run_file):
            print(f"{part.name} ...", flush=True)
            for result in results(part):
                print(json.dumps(result), file=written, flush=True)
                if result.get("exit_code", 0):
                    failed.append(part.name)
                    print(f"  failed: {result['last']}", flush=True)
    print(
        f"{file}: {'all parts ended well' if not failed else 'these failed: ' + ', '.join(failed)}. Please send it in."
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
