"""Files for TensorBoard, read by TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.track.by_tensorboard import FILE, Writer, check
from dtfm.coordinator.track.tracker import TrackerError, put, tracked
from dtfm.coordinator.view.so_far import SoFar
from tests.coordinator.track.curves import Curves, curves_of, in_tensorboard
from tests.coordinator.web.stored_run import stored_run


def write(place: Path, records: list[Record], most: int | None = None) -> int:
    """Writes the first ``most`` of these records like a new process. Returns `Writer.has` from before."""
    so_far = SoFar()
    so_far.add(records[0])
    writer = Writer(str(place), tracked(so_far.ledger))
    had = writer.has
    for record in records[1:most]:
        so_far.add(record)
        put(writer, so_far, record)
    writer.flush()
    writer.close()
    return had


def rounded(curves: Curves) -> dict[str, object]:
    """As the files hold them, in 32 bits."""
    return {name: pytest.approx([value for _, value in points], rel=1e-6) for name, points in curves.items()}


def values(curves: Curves) -> dict[str, object]:
    return {name: [value for _, value in points] for name, points in curves.items()}


def steps(curves: Curves) -> dict[str, list[int]]:
    return {name: [step for step, _ in points] for name, points in curves.items()}


def test_tensorboard_shows_the_figures_of_the_page(tmp_path: Path) -> None:
    records = stored_run()
    assert write(tmp_path, records) == 0
    page, shown = curves_of(records), in_tensorboard(tmp_path)
    assert len(page) == 8
    assert steps(shown) == steps(page)
    assert values(shown) == rounded(page)


@pytest.mark.parametrize("lost", [0, 1, 30], ids=["closed", "killed", "an event was cut"])
def test_the_next_process_goes_on_where_the_file_ends(tmp_path: Path, lost: int) -> None:
    records = stored_run()
    write(tmp_path, records, 150)
    (file,) = tmp_path.rglob(FILE)
    file.write_bytes(file.read_bytes()[: -lost or None])
    assert write(tmp_path, records) == figured(records[:150])[-1 if not lost else -2].sequence
    assert steps(in_tensorboard(tmp_path)) == steps(curves_of(records)), "nothing twice, nothing left out"
    size = file.stat().st_size
    assert write(tmp_path, records) == figured(records)[-1].sequence
    assert file.stat().st_size == size


def figured(records: Iterable[Record]) -> list[Record]:
    return [each for each in records if isinstance(each.event, ev.StepCommitted | ev.Evaluated)]


def test_after_a_rollback_later_steps_are_forgotten_and_come_again(tmp_path: Path) -> None:
    records = stored_run()
    at = next(i for i, each in enumerate(records) if getattr(each.event, "step", 0) == 40)
    ends = next(i for i, each in enumerate(records) if getattr(each.event, "step", 0) == 48)
    story = [each.event for each in records[:ends]]
    story += [ev.RolledBack(40, 47, "nobody holds stage 1"), *(each.event for each in records[at + 1 : ends + 1])]
    told = [Record(n, float(n), event) for n, event in enumerate(story, start=1)]
    write(tmp_path, told)
    shown = in_tensorboard(tmp_path)
    assert steps(shown)["loss"] == list(range(1, 49))
    assert steps(curves_of(told))["loss"] == [*range(1, 48), *range(41, 49)]


def test_one_process_at_a_time_writes_a_run(tmp_path: Path) -> None:
    so_far = SoFar()
    so_far.add(stored_run()[0])
    run = tracked(so_far.ledger)
    writer = Writer(str(tmp_path), run)
    with pytest.raises(TrackerError, match="another process writes into"):
        Writer(str(tmp_path), run)
    writer.close()
    Writer(str(tmp_path), run).close()


def test_a_folder_that_cannot_be_written_is_named_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    fix = "make room, let this user write there, or name another folder"
    for place in (tmp_path / "taken", tmp_path / "taken" / "below", Path("/proc/curves")):
        with pytest.raises(TrackerError, match=rf"{place} cannot be written \(.+\); {fix}"):
            check(str(place))
