"""Which file differs between two machines, and where."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, strategies as st

from dtfm.protos.source_files import LEAST_RANGE, MOST_FILES, MOST_RANGES, Files, described, difference, read_file

KEY = "data.source"


def files_in(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return sorted(folder / name for name in contents)


def of(folder: Path, contents: dict[str, bytes]) -> Files:
    return described([(KEY, files_in(folder, contents))])


def test_a_file_has_its_name_below_the_common_folder_its_size_and_its_blake3(tmp_path: Path) -> None:
    found = of(tmp_path, {"a/one.txt": b"one", "b/two.txt": b"two!"})
    assert [(file.key, file.name, file.size) for file in found] == [(KEY, "a/one.txt", 3), (KEY, "b/two.txt", 4)]
    assert found[1].digest == blake3(b"two!").hexdigest()
    assert tuple(read_file(file.message) for file in found) == found


@given(content=st.binary(min_size=1, max_size=40_000), at=st.floats(0, 1, exclude_max=True))
def test_the_first_byte_that_differs_is_in_the_range_that_is_named(content: bytes, at: float) -> None:
    byte = int(at * len(content))
    other = content[:byte] + bytes([content[byte] ^ 1]) + content[byte + 1 :]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        mine, theirs = of(Path(one), {"x.txt": content}), of(Path(two), {"x.txt": other})
    first = byte // LEAST_RANGE * LEAST_RANGE
    last = min(first + LEAST_RANGE, len(content)) - 1
    said = f"x.txt differs; the first byte that differs is from byte {first:,} to {last:,}"
    assert difference(mine, theirs, "the others") == f"{KEY}: {said}"
    assert difference(mine, mine, "the others") == ""


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ({"a.txt": b"a"}, {"a.txt": b"a", "b.txt": b"b"}, "b.txt is on the others, and not here"),
        ({"a.txt": b"a", "b.txt": b"b"}, {"a.txt": b"a"}, "b.txt is here, and not on the others"),
        (
            {"a.txt": bytes(9000)},
            {"a.txt": bytes(8999)},
            "a.txt has 9,000 bytes here, and 8,999 on the others; the first byte that differs is from byte 8,192 on",
        ),
        (
            {"a.txt": b"x" + bytes(9000)},
            {"a.txt": bytes(8999)},
            "a.txt has 9,001 bytes here, and 8,999 on the others; the first byte that differs is from byte 0 to 4,095",
        ),
    ],
)
def test_what_differs_is_said(tmp_path: Path, here: dict[str, bytes], there: dict[str, bytes], said: str) -> None:
    mine, theirs = of(tmp_path / "here", here), of(tmp_path / "there", there)
    assert difference(mine, theirs, "the others") == f"{KEY}: {said}"


def test_only_sources_that_both_sides_describe_are_compared(tmp_path: Path) -> None:
    mine = of(tmp_path / "here", {"a.txt": b"a"})
    theirs = described([("data.held_out", files_in(tmp_path / "there", {"b.txt": b"b"}))])
    assert difference(mine, theirs, "the others") == ""


def test_many_files_are_described_in_groups_and_large_ones_in_few_ranges(tmp_path: Path) -> None:
    many = {f"{number:04d}.txt": b"%d" % number for number in range(3 * MOST_FILES)}
    mine, theirs = of(tmp_path / "here", many), of(tmp_path / "there", {**many, "0700.txt": b"other"})
    assert len(mine) <= MOST_FILES
    assert "0699.txt to 0701.txt (3 files) has" in difference(mine, theirs, "the others")
    (large,) = of(tmp_path / "large", {"x.bin": bytes(MOST_RANGES * LEAST_RANGE + 1)})
    assert large.range_bytes == 2 * LEAST_RANGE
    assert len(large.ranges) // 16 == MOST_RANGES // 2 + 1


def test_a_source_is_described_alike_by_who_lacks_another(tmp_path: Path) -> None:
    """Otherwise a node would be refused for its groups, whose names the coordinator's own copies do not have."""
    mine = files_in(tmp_path / "mine", {f"{number:03d}.txt": b"%d" % number for number in range(100)})
    other = files_in(tmp_path / "other", {f"{number:03d}.txt": b"" for number in range(2 * MOST_FILES)})
    both, alone = described([(KEY, mine), ("data.held_out", other)], 2), described([(KEY, mine)], 2)
    assert len(alone) == 100
    assert both[:100] == alone
    assert len(both) <= MOST_FILES
    assert sum(len(file.ranges) for file in both) <= MOST_RANGES * 16


def test_long_and_unprintable_names_stay_apart(tmp_path: Path) -> None:
    found = of(tmp_path, {f"{'x' * 200}-{number}\n.txt": b"" for number in range(3)})
    assert len({file.name for file in found}) == 3
    assert all(file.name.isprintable() and len(file.name) <= 128 for file in found)
