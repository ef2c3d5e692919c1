"""The file that ``make gpu`` writes: tests/bench/gpu.py."""

from __future__ import annotations

import sys

from tests.bench.gpu import Part, results


def ends(code: str, *, rows: bool = True) -> list[dict[str, object]]:
    return [
        {key: value for key, value in each.items() if key != "seconds"}
        for each in results(Part("it", (sys.executable, "-c", code), rows))
    ]


def test_rows_of_a_part_are_kept_and_how_it_ended() -> None:
    assert ends("print('loading'); print('{\"measure\": \"copy\"}')") == [
        {"part": "it", "measure": "copy"},
        {"part": "it", "exit_code": 0},
    ]


def test_the_last_output_of_a_failed_part_is_kept() -> None:
    *_, ended = ends("print('half done'); raise SystemExit('out of memory')")
    assert ended == {"part": "it", "exit_code": 1, "last": ["half done", "out of memory"]}


def test_of_tests_the_summary_is_kept() -> None:
    assert ends("print('.....'); print('5 passed')", rows=False)[0] == {"part": "it", "said": "5 passed"}
