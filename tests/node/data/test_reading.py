"""While sources are read, the node says how much of them is."""

from __future__ import annotations

from pathlib import Path

from dtfm.node.data.sources import READING, conversations, documents
from dtfm.node.host.long_parts import doing, long_part


def test_how_much_is_read_grows_with_the_files_to_the_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one line of text\n" * 40_000)
    (tmp_path / "b.jsonl").write_text('{"text": "one line of text"}\n' * 40_000)
    seen = list[float]()
    with long_part(READING, long_seconds=600):
        for document in documents(f"{tmp_path}/*", "text"):
            for _ in document:
                if (done := doing()[1]) is not None and (not seen or done != seen[-1]):
                    seen.append(done)
    assert seen == sorted(seen)
    assert len(seen) > 5
    assert 0 < seen[0] < 0.3
    assert 0.9 < seen[-1] <= 1.0


def test_conversations_are_counted_too(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text('{"messages": [{"role": "assistant", "content": "hello"}]}\n' * 3_000)
    with long_part(READING, long_seconds=600):
        assert len(list(conversations(f"{tmp_path}/*.jsonl"))) == 3_000
        assert 0.6 < (doing()[1] or 0) < 0.8, "as of line 2,001"
