"""When an idle node times its device again, and how it knows that its machine is quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtfm.node.host.other_work import OtherWork, cores_used
from dtfm.node.training.preparing.timing import AGAIN_SECONDS, QUIET, SOON_SECONDS, Timing

BUSY = 0.9


def test_a_device_timed_on_a_quiet_machine_is_timed_again_every_hour() -> None:
    timing = Timing(100.0, beside=False)
    assert not timing.is_due(100.0 + AGAIN_SECONDS - 1, 0.0)
    assert timing.is_due(100.0 + AGAIN_SECONDS, BUSY)


def test_a_device_timed_beside_others_is_timed_again_once_its_machine_is_quiet() -> None:
    timing = Timing(0.0, beside=True, tries=9)
    assert not timing.is_due(SOON_SECONDS - 1, 0.0)
    assert timing.is_due(SOON_SECONDS, 0.0)
    assert not timing.is_due(SOON_SECONDS, BUSY)
    assert timing.is_due(AGAIN_SECONDS, BUSY)


def test_on_a_machine_that_is_never_quiet_it_is_tried_at_growing_intervals() -> None:
    timing, now, pauses = Timing(0.0, beside=False).again(0.0, BUSY), 0.0, []
    for _ in range(9):
        since = now
        while not timing.is_due(now, BUSY):
            now += SOON_SECONDS
        pauses.append(now - since)
        timing = timing.again(now, BUSY)
    assert pauses == [min(SOON_SECONDS * 2**tries, AGAIN_SECONDS) for tries in range(9)]
    assert sum(pauses[:3]) < 600  # three times within ten minutes
    assert not timing.again(now, QUIET / 2).beside


def read_from(pairs: list[tuple[float, float]]) -> Callable[[], tuple[float, float]]:
    each: Iterator[tuple[float, float]] = iter(pairs)
    return lambda: next(each)


def test_the_share_of_others_leaves_out_what_this_process_used() -> None:
    work = OtherWork(read_from([(100.0, 1000.0), (103.0, 1010.0), (103.0, 1020.0)]))
    assert work.share() == pytest.approx(0.3, abs=0.05)
    assert work.share() == 0.0


def test_the_kernel_says_how_long_cores_were_busy(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 50 30 800 10 1 2 7 40 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    busy, whole = cores_used(stat) or (0.0, 0.0)
    assert busy / whole == pytest.approx(190 / 1000)
    stat.write_text("nothing")
    assert cores_used(stat) is None
    assert cores_used(tmp_path / "none") is None


def test_where_the_kernel_does_not_say_it_the_load_counts() -> None:
    assert 0.0 <= OtherWork(lambda: None).share() <= 1.0
