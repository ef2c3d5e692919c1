"""The nodes of a machine read the data once."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dtfm.node.data import tokens
from dtfm.node.data.dataset import Data
from dtfm.node.data.load import load_data
from dtfm.node.data.reading import sources
from dtfm.node.data.shared import cache as cache_module
from dtfm.node.data.shared.cache import MOST_UNUSED
from dtfm.protos import plan_pb2

TEXT = "the quick brown fox jumps over the lazy dog\n" * 40

PROGRAM = """
import sys
from pathlib import Path
from dtfm.node.data import tokens
from tests.node.data.shared.test_cache import load
write = tokens.write
def counted(*args, **keywords):
    print("reads", flush=True)
    return write(*args, **keywords)
tokens.write = counted
data = load(sys.argv[1], Path(sys.argv[2]))
print(data.fingerprint.hex(), flush=True)
sys.stdin.read()
"""


def load(source: str, cache: Path | None) -> Data:
    data = plan_pb2.Run.Data(source=source, tokenizer="bytes", sequence_length=16, evaluation_fraction=0.1)
    return load_data(plan_pb2.Run(data=data), cache=cache)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that this process reads the data."""
    counted: list[int] = []
    write = tokens.write

    def count(*arguments: Any, **keywords: Any) -> Any:
        counted.append(1)
        return write(*arguments, **keywords)

    monkeypatch.setattr(tokens, "write", count)
    return counted


@contextmanager
def processes(source: object, cache: Path, number: int = 1) -> Iterator[list[str]]:
    """They have loaded the data, and use it; what they have printed."""
    line = [sys.executable, "-c", PROGRAM, str(source), str(cache)]
    running = [subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(number)]
    try:
        yield [line for each in running for line in _until_fingerprint(each)]
    finally:
        for each in running:
            each.kill()
            each.communicate()


def _until_fingerprint(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line.strip()
        if line.strip() != "reads":
            return


@pytest.mark.soak
def test_of_two_processes_one_reads_and_both_have_the_same(corpus: Path, cache: Path) -> None:
    with processes(corpus, cache, 2) as printed:
        assert printed.count("reads") == 1
        (fingerprint,) = set(printed) - {"reads"}
        assert fingerprint == load(str(corpus), None).fingerprint.hex()


def test_a_node_that_is_started_again_does_not_read_again(corpus: Path, cache: Path, readings: list[int]) -> None:
    first, again = load(str(corpus), cache), load(str(corpus), cache)
    assert len(readings) == 1
    assert again.fingerprint == first.fingerprint == load(str(corpus), None).fingerprint


@pytest.mark.parametrize("change", ["longer", "touched", "another file"])
def test_what_has_changed_is_read_again(corpus: Path, cache: Path, readings: list[int], change: str) -> None:
    pattern = str(corpus.parent / "*.txt")
    load(pattern, cache)
    if change == "longer":
        corpus.write_text(TEXT + "more\n")
    elif change == "touched":
        os.utime(corpus, (1, 1))
    else:
        (corpus.parent / "more.txt").write_text(TEXT)
    assert load(pattern, cache).fingerprint == load(pattern, None).fingerprint
    assert len(readings) == 3


def test_a_damaged_file_is_made_again(corpus: Path, cache: Path, readings: list[int]) -> None:
    good = load(str(corpus), cache).fingerprint
    (path,) = cache.glob("*.tokens")
    for damaged in (path.read_bytes()[:-1], b"", b"X" + path.read_bytes()[1:]):
        path.write_bytes(damaged)
        assert load(str(corpus), cache).fingerprint == good
    assert len(readings) == 4


def test_what_nothing_here_tells_the_state_of_is_shared_only_while_it_is_used(
    corpus: Path, cache: Path, readings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a data set on the hub, which may change."""
    monkeypatch.setattr(tokens, "state_of", lambda source, allowed: "")
    first = load(str(corpus), cache)
    again = load(str(corpus), cache)
    assert len(readings) == 1
    del first, again
    load(str(corpus), cache)
    assert len(readings) == 2


def test_data_that_changes_while_it_is_read_is_refused(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["before", "after"])
    monkeypatch.setattr(tokens, "state_of", lambda source, allowed: next(states))
    with pytest.raises(ValueError, match="changed while it was read"):
        load(str(corpus), cache)
    assert not list(cache.glob("*.tokens")) + list(cache.glob("*.part"))


def test_few_unused_files_are_kept_and_none_for_long(corpus: Path, cache: Path) -> None:
    others = [corpus.with_name(f"{number}.txt") for number in range(MOST_UNUSED + 2)]
    with processes(corpus, cache) as _:
        for number, other in enumerate(others):
            other.write_text(TEXT + str(number))
            load(str(other), cache)
        assert len(list(cache.glob("*.tokens"))) == 2 + MOST_UNUSED  # in use, just loaded, and unused
    for path in cache.glob("*.tokens"):
        os.utime(path, (time.time() - 8 * 86_400,) * 2)
    load(str(corpus), cache)
    assert len(list(cache.glob("*.tokens"))) == 1


def test_without_a_folder_to_share_each_reads_for_itself(corpus: Path, cache: Path, readings: list[int]) -> None:
    cache.write_text("a file")
    for _ in range(2):
        load(str(corpus), cache)
    assert len(readings) == 2


def test_the_state_of_files_is_what_says_that_they_changed(corpus: Path) -> None:
    before = sources.state_of(sources.Source(str(corpus)))
    assert before.startswith(f"{corpus} {len(TEXT)} ")
    corpus.write_text(TEXT[:-1])
    assert sources.state_of(sources.Source(str(corpus))) != before
    assert sources.state_of(sources.Source("hf:anything")) == ""
    assert len(sources.state_of(sources.Source("python-stdlib")).splitlines()) > 100


def test_what_one_that_was_killed_has_left_is_removed_by_the_next_that_reads(corpus: Path, cache: Path) -> None:
    load(str(corpus), cache)
    (path,) = cache.glob("*.tokens")
    path.unlink()
    (cache / f"{path.stem}-left.part").write_bytes(b"half")
    (other := cache / "other-busy.part").write_bytes(b"half")
    load(str(corpus), cache)
    assert list(cache.glob("*.part")) == [other]


def test_a_file_at_which_another_process_looks_is_waited_for(
    corpus: Path, cache: Path, readings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(str(corpus), cache)
    (path,) = cache.glob("*.tokens")
    looking = os.open(path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN))  # it has looked
    load(str(corpus), cache)
    os.close(looking)
    assert len(readings) == 1


def test_one_that_cannot_be_read_back_is_named(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_mapped", lambda path, dtype: None)
    with pytest.raises(ValueError, match=r"just written there is damaged.*\.tokens"):
        load(str(corpus), cache)
