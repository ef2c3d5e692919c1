"""A run's tokens lie beside its checkpoints: who joins later fetches them, and believes nothing that is not what all agree on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from dtfm.node.data import load, tokens
from dtfm.node.data.dataset import Agreed, Data
from dtfm.node.data.load import load_data
from dtfm.node.data.shared import published
from dtfm.node.data.shared.published import TokenIndex, find, index_of, publish
from dtfm.node.data.shared.storage import write
from dtfm.protos import plan_pb2

TEXT = "the quick brown fox jumps over the lazy dog\n" * 40
PLACE = "memory://run/checkpoints"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[plan_pb2.Run]:
    """Its tokens make several shards."""
    monkeypatch.setattr(published, "SHARD_BYTES", 500)
    (tmp_path / "corpus.txt").write_text(TEXT)
    data = plan_pb2.Run.Data(
        source=str(tmp_path / "corpus.txt"), tokenizer="bytes", sequence_length=16, evaluation_fraction=0.1
    )
    yield plan_pb2.Run(data=data, checkpoint=plan_pb2.Run.Checkpoint(uri=PLACE))
    if files():
        fsspec.filesystem("memory").rm("/run", recursive=True)


@pytest.fixture
def founder(run: plan_pb2.Run) -> Data:
    """The data of a node that has read it, and published its tokens."""
    data = load_data(run)
    data.publish(PLACE)
    return data


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that text is tokenized."""
    counted: list[int] = []
    write = tokens.write

    def count(*arguments: Any, **keywords: Any) -> Any:
        counted.append(1)
        return write(*arguments, **keywords)

    monkeypatch.setattr(tokens, "write", count)
    return counted


def files() -> list[str]:
    return sorted(fsspec.filesystem("memory").find("/run"))


def newcomer(run: plan_pb2.Run, founder: Data, cache: Path | None = None) -> Data:
    return load_data(run, cache=cache, agreed=Agreed(founder.fingerprint, founder.unigram_entropy))


def assert_equal(one: Data, other: Data) -> None:
    assert (one.fingerprint, one.unigram_entropy) == (other.fingerprint, other.unigram_entropy)
    assert (one.training_count, one.evaluation_count) == (other.training_count, other.evaluation_count)
    rows = np.arange(one.training_count)
    assert all(map(torch.equal, one.training_batch(rows), other.training_batch(rows)))


@pytest.mark.parametrize("cached", [True, False])
def test_a_newcomer_tokenizes_nothing(
    run: plan_pb2.Run, founder: Data, readings: list[int], tmp_path: Path, cached: bool
) -> None:
    Path(run.data.source).unlink()  # nor does it need the source
    data = newcomer(run, founder, tmp_path / "cache" if cached else None)
    assert len(files()) == 5
    assert not data.was_read
    assert founder.was_read
    assert_equal(data, founder)
    assert not readings


def test_nothing_is_fetched_before_a_sample_is_needed(
    run: plan_pb2.Run, founder: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that is neither first nor last needs only to know what samples look like, and how many there are."""
    fetched: list[int] = []

    def fail(*_: object) -> None:
        fetched.append(1)
        raise OSError("gone")

    monkeypatch.setattr(load, "fetch", fail)
    data = newcomer(run, founder)
    assert (data.sample, data.tokens_per_sample, data.training_count) == (founder.sample, 16, founder.training_count)
    assert not fetched
    data.hold()
    assert fetched


def test_it_is_written_once(founder: Data) -> None:
    before = {name: fsspec.filesystem("memory").modified(name) for name in files()}
    founder.publish(PLACE)
    assert {name: fsspec.filesystem("memory").modified(name) for name in files()} == before


@pytest.mark.parametrize("number", range(5))
def test_a_file_of_another_size_is_written_again(run: plan_pb2.Run, founder: Data, number: int) -> None:
    fs = fsspec.filesystem("memory")
    good = {name: fs.cat_file(name) for name in files()}
    damaged = files()[number]
    fs.pipe_file(damaged, good[damaged][:-1])
    founder.publish(PLACE)
    assert {name: fs.cat_file(name) for name in files()} == good


def test_two_that_write_the_same_file_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = fsspec.filesystem("file")
    move, other = fs.mv, [b"the same"]

    def meanwhile(*arguments: Any) -> None:
        if other:
            write(str(tmp_path), "name", other.pop())
        move(*arguments)

    monkeypatch.setattr(type(fs), "mv", lambda _, *arguments: meanwhile(*arguments))
    write(str(tmp_path), "name", b"the same")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("name", b"the same")]


def test_of_a_file_that_cannot_be_written_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(type(fsspec.filesystem("file")), "mv", fail)
    with pytest.raises(OSError, match="gone"):
        write(str(tmp_path), "name", b"content")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lie", ["other bytes", "cut off", "longer", "missing"])
def test_a_shard_that_lies_is_not_believed(run: plan_pb2.Run, founder: Data, readings: list[int], lie: str) -> None:
    fs = fsspec.filesystem("memory")
    shard = files()[2]
    content = fs.cat_file(shard)
    if lie == "missing":
        fs.rm(shard)
    else:
        fs.pipe_file(shard, {"other bytes": b"X" + content[1:], "cut off": content[:-1], "longer": content + b"X"}[lie])
    data = newcomer(run, founder)
    assert_equal(data, founder)
    assert len(readings) == (0 if lie == "longer" else 1)  # what is beyond its end is not read


@pytest.mark.parametrize("change", [{"tokens": 1600}, {"shards": []}, {"left_out": [3]}, {"sequence_length": 15}, None])
def test_an_index_that_lies_is_not_believed(
    run: plan_pb2.Run, founder: Data, readings: list[int], change: dict[str, Any] | None
) -> None:
    fs = fsspec.filesystem("memory")
    (index,) = [name for name in files() if name.endswith("index.json")]
    fs.pipe_file(index, b"{" if change is None else json.dumps(json.loads(fs.cat_file(index)) | change).encode())
    assert find(PLACE, founder.fingerprint, 16, 0.1) is None
    assert_equal(newcomer(run, founder), founder)
    assert readings == [1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sequence_length": 15}, "it is of sequence_length 15"),
        ({"evaluation_fraction": 0.2}, "evaluation_fraction 0.2"),
        ({"tokens": 0}, "tokens is 0"),
        ({"tokens": 1e99}, "tokens is 1e"),
        ({"tokens": 1 << 60}, "shards has 4 entries"),
        ({"shards": ("00",) * 5}, "shards has 5 entries"),
        ({"shards": (1, 2, 3, 4)}, "shards has 4 entries"),
        ({"left_out": (3, 110)}, "left_out has entries"),
        ({"left_out": (-1,)}, "left_out has entries"),
        ({"left_out": ("3",)}, "left_out has entries"),
        ({"left_out": (3, 3)}, "left_out is not in ascending order"),
    ],
)
def test_an_index_that_agrees_with_its_fingerprint_and_not_with_the_run_is_not_used(
    run: plan_pb2.Run, caplog: pytest.LogCaptureFixture, change: dict[str, Any], named: str
) -> None:
    good = index_of([np.frombuffer(TEXT.encode(), dtype=np.uint8)], 16, 0.1)
    bad = replace(good, **change)
    write(f"{PLACE}/data-{bad.fingerprint.hex()[:32]}", "index.json", bad.content)
    assert find(PLACE, bad.fingerprint, 16, 0.1) is None
    assert named in caplog.text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parts": (900, 859)}, "parts do not make its 1760 tokens"),
        ({"parts": (0, 1760)}, "parts do not make"),
        ({"parts": (900.0, 860)}, "parts do not make"),
        ({"parts": (1760,)}, "parts has 1 entries"),
        ({"parts": ()}, "parts has 0 entries"),
        ({"held_out_apart": True}, "held_out_apart is True; the run has 2 sources, none of them for held-out samples"),
        ({"left_out": (109,)}, "left_out has entries"),
    ],
)
def test_an_index_of_several_sources_must_fit_them(
    run: plan_pb2.Run, caplog: pytest.LogCaptureFixture, change: dict[str, Any], named: str
) -> None:
    tokens = np.frombuffer(TEXT.encode(), dtype=np.uint8)
    good = index_of([tokens[:900], tokens[900:]], 16, 0.1)
    assert good.windows == 109, "no window has tokens of both"
    bad = replace(good, **change)
    for index in (good, bad):
        write(f"{PLACE}/data-{index.fingerprint.hex()[:32]}", "index.json", index.content)
    assert find(PLACE, good.fingerprint, 16, 0.1, 2) == good
    assert find(PLACE, bad.fingerprint, 16, 0.1, 2) is None
    assert named in caplog.text


def test_an_index_that_others_would_not_read_is_not_published(
    run: plan_pb2.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "_MOST_INDEX_BYTES", 200)
    with pytest.raises(ValueError, match="others read at most 200"):
        load_data(run).publish(PLACE)
    assert not files()


def test_what_was_published_and_is_wrong_does_not_make_up_for_another_source(run: plan_pb2.Run, founder: Data) -> None:
    fsspec.filesystem("memory").rm(files()[2])
    Path(run.data.source).write_text(TEXT + "more\n")
    with pytest.raises(ValueError, match="has other text here than where the run began"):
        newcomer(run, founder).hold()


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4"])
def test_tokens_of_every_width_come_back(run: plan_pb2.Run, dtype: str) -> None:
    tokens = np.arange(700).astype(dtype)
    index = index_of([tokens], 10, 0.1)
    publish(PLACE, index, [tokens])
    assert find(PLACE, index.fingerprint, 10, 0.1) == index
    with fsspec.open("memory://run/whole", "wb") as file:
        published.fetch(PLACE, index, file)
    assert np.array_equal(np.frombuffer(fsspec.filesystem("memory").cat_file("/run/whole"), dtype), tokens)


def test_the_fingerprint_is_of_all_that_decides_the_samples() -> None:
    tokens = np.arange(100, dtype=np.uint8)
    different: list[TokenIndex] = [
        index_of([tokens], 10, 0.1),
        index_of([tokens], 11, 0.1),
        index_of([tokens], 10, 0.2),
        index_of([tokens[:-1]], 10, 0.1),
        index_of([tokens[::-1].copy()], 10, 0.1),
        index_of([tokens.astype(np.uint16)], 10, 0.1),
        index_of([tokens[:50], tokens[50:]], 10, 0.1),
        index_of([tokens[:60], tokens[60:]], 10, 0.1),
        index_of([tokens[:60], tokens[60:]], 10, 0.1, held_out_apart=True),
    ]
    assert len({index.fingerprint for index in different}) == len(different)
