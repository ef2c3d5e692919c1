"""Large sources are read chapter by chapter, and training begins with the first."""

from __future__ import annotations

import atexit
import gc
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtfm.node.data.allowed import EVERYTHING
from dtfm.node.data.chapters import Counts, cut
from dtfm.node.data.dataset import Data
from dtfm.node.data.load import load_data
from dtfm.node.data.reading.files import File, files_of
from dtfm.node.data.samples import chapter_order
from dtfm.node.data.shared.cache import MOST_UNUSED
from dtfm.node.data.streamed import StreamedWindows
from dtfm.node.data.tokens import chapter_tokens
from dtfm.protos import plan_pb2

LENGTH, MICRO_BATCH, SEED, CHAPTER = 16, 4, 3, 4000


def corpus(folder: Path, documents: int = 300) -> Path:
    file = folder / "corpus.jsonl"
    file.write_text("".join(f"{json.dumps({'text': f'document {n} {n * 7919}'})}\n" for n in range(documents)))
    return file


def load(place: Path, chapter_bytes: int = CHAPTER, cache: Path | None = None) -> Data:
    data = plan_pb2.Run.Data(
        source=str(place),
        tokenizer="bytes",
        sequence_length=LENGTH,
        text_field="text",
        evaluation_fraction=0.1,
        chapter_bytes=chapter_bytes,
    )
    return load_data(plan_pb2.Run(data=data, seed=SEED), cache=cache)


def read_whole(data: Data) -> int:
    """Waits until all chapters are read; returns the number of training samples of a pass."""
    assert isinstance(data, StreamedWindows)
    data._thread.join()
    return sum(data._known.known.values())


def windows(data: Data, numbers: range) -> list[bytes]:
    """The text of the training samples of these micro-batches, and of the next token of each."""
    found = list[bytes]()
    for number in numbers:
        inputs, labels = data.training_batch(data.training_samples(SEED, number, MICRO_BATCH))
        found += [bytes([*row.tolist(), last]) for row, last in zip(inputs, labels[:, -1].tolist(), strict=True)]
    return found


@given(
    lines=st.lists(st.integers(0, 300), min_size=1, max_size=60), most=st.integers(50, 2000), files=st.integers(1, 3)
)
def test_chapters_are_whole_lines_and_together_the_files(lines: list[int], most: int, files: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(files):
            Path(folder, f"{number}.jsonl").write_bytes(b"".join(b"x" * size + b"\n" for size in lines))
        whole = b"".join(file.read_bytes() for file in sorted(Path(folder).iterdir()))
        chapters = cut(files_of(f"{folder}/*.jsonl", "data.source", EVERYTHING), most)
        parts = [content(part) for chapter in chapters for part in chapter]
    assert b"".join(parts) == whole
    assert all(part.endswith(b"\n") for part in parts)
    assert all(sum(part.size for part in chapter) <= most + max(lines) + 1 for chapter in chapters)


def content(file: File) -> bytes:
    with file.opened() as (part, tell):
        found = part.read()
        assert tell() == len(found) == file.size
    return found


@given(
    counts=st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(lambda counts: counts[0] > 0),
    micro_batch=st.integers(1, 7),
    seed=st.integers(0, 5),
)
def test_each_sample_comes_once_in_each_pass_and_the_first_chapter_first(
    counts: list[int], micro_batch: int, seed: int
) -> None:
    whole = Counts(seed, len(counts), dict(enumerate(counts)))
    taken = list[tuple[int, int]]()
    for number in range(-(-3 * sum(counts) // micro_batch)):
        placed = whole.placed(number * micro_batch, micro_batch)
        assert placed is not None
        taken += [(chapter, int(sample)) for chapter, samples in placed for sample in samples]
    everything = {(chapter, sample) for chapter, count in enumerate(counts) for sample in range(count)}
    for passed in range(3):
        assert {*taken[passed * sum(counts) : (passed + 1) * sum(counts)]} == everything
    assert {chapter for chapter, _ in taken[: counts[0]]} == {0}
    # While less is known, what is known already does not change.
    known = Counts(seed, len(counts))
    for chapter in chapter_order(seed, 0, len(counts)):
        known.known[chapter] = counts[chapter]
        for position in range(sum(known.known.values())):
            placed = known.placed(position, 1)
            assert placed is not None
            assert [(where, sample.tolist()) for where, sample in placed] == [
                (taken[position][0], [taken[position][1]])
            ]
        if len(known.known) < len(counts):
            assert known.placed(sum(known.known.values()), 1) is None


def test_a_pass_has_each_window_of_the_text_once(tmp_path: Path) -> None:
    data = load(corpus(tmp_path))
    count = read_whole(data)
    taken = windows(data, range(count // MICRO_BATCH))
    assert isinstance(data, StreamedWindows)
    assert data._known.chapters > 2
    assert max(Counter(taken).values()) == 1
    held_out = data.evaluation_batch(np.arange(data.evaluation_count))[0]
    assert not {bytes(row.tolist()) for row in held_out} & {each[:-1] for each in taken}
    text = b"\n".join(f"document {n} {n * 7919}".encode() for n in range(300))
    assert all(each in text for each in taken)
    assert 0.8 < count * LENGTH / len(text) < 0.92
    assert abs(data.training_count - count) < 0.15 * count
    assert data.training_learnt(data.training_samples(SEED, 0, MICRO_BATCH)) == MICRO_BATCH * LENGTH


def test_the_samples_depend_on_the_files_and_the_seed_alone(tmp_path: Path) -> None:
    place, cache = corpus(tmp_path), tmp_path / "cache"
    cache.mkdir()
    one, other = load(place), load(place, cache=cache)
    assert (one.fingerprint, one.training_count, one.evaluation_count, one.unigram_entropy) == (
        other.fingerprint,
        other.training_count,
        other.evaluation_count,
        other.unigram_entropy,
    )
    count = read_whole(one)
    passes = range(2 * count // MICRO_BATCH)
    assert windows(one, passes) == windows(other, passes)
    place.write_text(place.read_text().replace("document 299", "document 2-9"))  # in its last chapter
    assert load(place).fingerprint != one.fingerprint


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Chapters after the first are read once it is set."""
    is_open = threading.Event()

    def waits(*args: Any, **keywords: Any) -> Any:
        if not str(args[2]).endswith(".0"):
            assert is_open.wait(60)
        return chapter_tokens(*args, **keywords)

    monkeypatch.setattr("dtfm.node.data.load.chapter_tokens", waits)
    yield is_open
    is_open.set()


def test_the_first_step_waits_for_the_first_chapter_alone(tmp_path: Path, gate: threading.Event) -> None:
    data = load(corpus(tmp_path))
    assert isinstance(data, StreamedWindows)
    assert len(windows(data, range(2))) == 2 * MICRO_BATCH
    assert len(data.evaluation_batch(np.arange(2))[0]) == 2
    data.reach(data._known.known[0] - 1)
    waits = threading.Thread(target=data.reach, args=(data._known.known[0],))
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    gate.set()
    waits.join(60)
    assert not waits.is_alive()


def test_a_file_that_changes_before_its_last_chapter_is_read_is_told(tmp_path: Path, gate: threading.Event) -> None:
    """Its digest, on which all have agreed, is another one then."""
    place = corpus(tmp_path)
    data = load(place)
    place.write_text(place.read_text().replace("document 299", "document 2-9"))
    gate.set()
    with pytest.raises(ValueError, match=r"data.source: .* has changed since the run began"):
        data.reach(10**6)


def test_one_chapter_is_read_as_ever(tmp_path: Path) -> None:
    place = corpus(tmp_path)
    streamed, whole = load(place, 1 << 20), load(place, 0)
    assert streamed.fingerprint == whole.fingerprint
    assert windows(streamed, range(9)) == windows(whole, range(9))


def test_a_later_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    place = corpus(tmp_path)
    place.write_text(place.read_text() + "no JSON\n")
    data = load(place)
    with pytest.raises(ValueError, match=r"corpus.jsonl from byte [\d,]+, line \d+ is not JSON"):
        data.reach(10**6)


def test_too_small_chapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.chapter_bytes: the first chapter, of 20 bytes, has \d+ tokens"):
        load(corpus(tmp_path), 20)
    place = corpus(tmp_path, 5000)
    size = place.stat().st_size
    with pytest.raises(ValueError, match=f"data.chapter_bytes: 1 bytes make {size} chapters; there may be 4096"):
        load(place, 1)


def test_the_cache_keeps_all_chapters_of_the_newest_texts(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    texts = MOST_UNUSED + 2
    for number in range(texts):
        folder = tmp_path / str(number)
        folder.mkdir()
        data = load(corpus(folder), cache=cache)
        read_whole(data)
        assert isinstance(data, StreamedWindows)
        chapters = len(data._known.known)
        atexit.unregister(data.stop)
        del data
        gc.collect()  # of the mapped files
    load(folder / "corpus.jsonl", cache=cache)
    assert len(list(cache.glob("*.tokens"))) == chapters * (MOST_UNUSED + 1)
