"""While sources are read, it is told how much of them is."""

from __future__ import annotations

from pathlib import Path

from dtfm.node.data.reading.sources import Source, conversations, documents


def test_how_much_is_read_grows_with_the_files_to_the_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one line of text\n" * 40_000)
    (tmp_path / "b.jsonl").write_text('{"text": "one line of text"}\n' * 40_000)
    whole = sum(file.stat().st_size for file in tmp_path.iterdir())
    told: list[int] = []

    def reading(done: int, of: int) -> None:
        assert of == whole
        told.append(done)

    for document in documents(Source(f"{tmp_path}/*"), reading=reading):
        for _ in document:
            pass
    assert told == sorted(told)
    assert len(told) > 5
    assert 0 < told[0] < 0.3 * whole
    assert 0.9 * whole < told[-1] <= whole


def test_conversations_are_counted_too(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text('{"messages": [{"role": "assistant", "content": "hello"}]}\n' * 3_000)
    told: list[float] = []
    read = conversations(Source(f"{tmp_path}/*.jsonl", "messages"), reading=lambda done, of: told.append(done / of))
    assert len(list(read)) == 3_000
    assert 0.9 < told[-1] <= 1
