"""How soon a newcomer has the data: ``python -m tests.bench.newcomer_data [--megabytes 1000] [--tokenizer bytes|bpe]
[--json]``.

The text is Python's standard library, again and again. Each measurement is a new process with an empty cache. "reads" is a node
on a host of its own that finds nothing published. "looks" is a node whose stage is neither first nor last. "fetches" is a node
whose stage is first or last.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from dtfm.node.data.load import load_data
from dtfm.node.data.reading.sources import standard_library
from dtfm.protos import plan_pb2
from tests.bench.rows import Row, show
from tests.tokenizer import make_tokenizer

NODE = """
import sys, time
from pathlib import Path
import numpy as np
from dtfm.node.data.dataset import Agreed
from dtfm.node.data.load import load_data
from dtfm.protos import plan_pb2
run = plan_pb2.Run.FromString(bytes.fromhex(sys.argv[1]))
agreed = Agreed(bytes.fromhex(sys.argv[3]), 1.0) if sys.argv[3] else None
began = time.perf_counter()
data = load_data(run, cache=Path(sys.argv[2]), agreed=agreed)
if sys.argv[4]:
    data.training_batch(np.arange(8))
print(time.perf_counter() - began)
"""


def measure(megabytes: int, tokenizer: str, folder: Path) -> list[Row]:
    library = "".join(piece for document in standard_library() for piece in document)
    text = folder / "corpus.txt"
    with text.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1_000_000:
            file.write(library)
    name = make_tokenizer(folder / "tokenizer", library[:1_000_000]) if tokenizer == "bpe" else "bytes"
    data = plan_pb2.Run.Data(source=str(text), tokenizer=name, sequence_length=1024, evaluation_fraction=0.01)
    run = plan_pb2.Run(data=data, checkpoint=plan_pb2.Run.Checkpoint(uri=(folder / "checkpoints").as_uri()))

    def seconds(cache: str, agreed: str, samples: bool) -> float:
        line = [sys.executable, "-c", NODE, run.SerializeToString().hex(), str(folder / cache), agreed, "1" * samples]
        return float(subprocess.run(line, check=True, capture_output=True, text=True).stdout)

    reads = seconds("founder", "", samples=True)
    founder = load_data(run, cache=folder / "founder")
    founder.publish(run.checkpoint.uri)
    fingerprint = founder.fingerprint.hex()
    looks, fetches = seconds("between", fingerprint, samples=False), seconds("last", fingerprint, samples=True)
    what = f"{megabytes} MB of text, tokenizer {tokenizer}"
    return [
        Row(f"{what}: a node reads", reads, "s"),
        Row(f"{what}: a newcomer between the stages looks", looks, "s", "reading", looks / reads),
        Row(f"{what}: a newcomer at either end fetches", fetches, "s", "reading", fetches / reads),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--tokenizer", choices=["bytes", "bpe"], default="bpe")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dtfm-bench-") as folder:
        show("A newcomer's data", measure(options.megabytes, options.tokenizer, Path(folder)), options.json)


if __name__ == "__main__":
    main()
