"""How soon a large file gives its first samples, and in how much memory: ``python -m tests.bench.large_data [--megabytes 1000]
[--chapter-megabytes 64] [--tokenizer bytes|bpe] [--json]``.

The file is .jsonl, made of Python's standard library, again and again. Each measurement is a new process with an empty cache,
which reads the whole file, in one go or in chapters. Memory is the process's own, without the pages of mapped files, beyond what
it had before it read.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from dtfm.node.data.reading.sources import standard_library
from dtfm.protos import plan_pb2
from tests.bench.rows import Row, show
from tests.tokenizer import make_tokenizer

NODE = """
import sys, threading, time
from pathlib import Path
from dtfm.node.data.load import load_data
from dtfm.protos import plan_pb2

def own():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024

run = plan_pb2.Run.FromString(bytes.fromhex(sys.argv[1]))
load_data(plan_pb2.Run(data=plan_pb2.Run.Data(
    source=sys.argv[3], tokenizer=run.data.tokenizer, text_field="text", sequence_length=16, evaluation_fraction=0.1)))
before, peak, over = own(), 0.0, threading.Event()

def watch():
    global peak
    while not over.wait(0.05):
        peak = max(peak, own())

watching = threading.Thread(target=watch)
watching.start()
began = time.perf_counter()
data = load_data(run, cache=Path(sys.argv[2]))
data.training_batch(data.training_samples(run.seed, 0, 8))
first = time.perf_counter() - began
if run.data.chapter_bytes:
    data.reach(1 << 40)
print(first, time.perf_counter() - began, peak - before)
over.set()
watching.join()
"""


def measure(megabytes: int, chapter: int, tokenizer: str, folder: Path) -> list[Row]:
    library = ["".join(pieces) for pieces in standard_library()]
    lines = "".join(f"{json.dumps({'text': text})}\n" for text in library)
    source, small = folder / "corpus.jsonl", folder / "small.jsonl"
    small.write_text(lines[: lines.index("\n", 100_000) + 1])
    with source.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1_000_000:
            file.write(lines)
    name = make_tokenizer(folder / "tokenizer", "".join(library)[:1_000_000]) if tokenizer == "bpe" else "bytes"

    def read(cache: str, chapter_bytes: int) -> list[float]:
        data = plan_pb2.Run.Data(
            source=str(source),
            tokenizer=name,
            sequence_length=1024,
            evaluation_fraction=0.01,
            text_field="text",
            chapter_bytes=chapter_bytes,
        )
        (folder / cache).mkdir()
        run = plan_pb2.Run(data=data)
        line = [sys.executable, "-c", NODE, run.SerializeToString().hex(), str(folder / cache), str(small)]
        return [float(each) for each in subprocess.run(line, check=True, capture_output=True, text=True).stdout.split()]

    what = f"{megabytes} MB of .jsonl, tokenizer {tokenizer}"
    whole, parts = read("whole", 0), read("parts", chapter * 1_000_000)
    in_parts = f"{what}, chapters of {chapter} MB"
    return [
        Row(f"{what}: to the first sample", whole[0], "s"),
        Row(f"{in_parts}: to the first sample", parts[0], "s", "in one go", parts[0] / whole[0]),
        Row(f"{in_parts}: to the last", parts[1], "s", "in one go", parts[1] / whole[1]),
        Row(f"{what}: most memory", whole[2], "MiB"),
        Row(f"{in_parts}: most memory", parts[2], "MiB", "in one go", parts[2] / whole[2]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--chapter-megabytes", type=int, default=64)
    parser.add_argument("--tokenizer", choices=["bytes", "bpe"], default="bpe")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dtfm-bench-") as folder:
        rows = measure(options.megabytes, options.chapter_megabytes, options.tokenizer, Path(folder))
        show("A large file", rows, options.json)


if __name__ == "__main__":
    main()
