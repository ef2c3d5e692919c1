"""What the web page is told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.store import Record
from dtfm.coordinator.view.page import MOST_IN_MAP, MOST_NODES, page_text
from dtfm.coordinator.view.published import MOST_CHARACTERS
from dtfm.coordinator.view.story import Story
from tests.coordinator.every_event import EVERY_EVENT
from tests.coordinator.script import LONG, training
from tests.coordinator.web.stored_run import MARKUP, stored_run


def page(records: list[Record], at: int | None = None) -> dict[str, Any]:
    story = Story()
    for record in records:
        story.add(record)
    then = story.at(at or len(records), lambda after: iter(records[after:]))
    found: dict[str, Any] = json.loads(page_text(then, story.history, len(records), then.last))
    return found


def test_the_page_can_be_shown_before_anything_has_happened() -> None:
    empty = page([])
    assert (empty["head"]["state"], empty["plan"], empty["nodes"]) == ("waiting", None, [])


def test_the_head_says_how_far_the_run_is_and_how_long_it_takes() -> None:
    head = page(stored_run())["head"]
    assert (head["step"], head["steps"], head["state"], head["members"]) == (180, 240, "training", 4)
    assert 8 * 60 < head["left"] < 11 * 60
    assert 2.0 < head["node_hours"] < 2.6


def test_the_head_has_what_the_run_has_cost_by_the_run_files_prices() -> None:
    records = [*stored_run()]
    joined = [record.sequence for record in records if isinstance(record.event, ev.NodeJoined)]
    assert page(records, joined[0])["head"]["cost"] == 0
    first, second = page(records, joined[0])["head"], page(records, joined[1] - 1)["head"]
    assert first["hourly_price"] == 1.2, "lab-a100's"
    assert second["cost"] == pytest.approx(1.2 * (second["node_hours"] - first["node_hours"]), rel=1e-3)
    assert second["cost"] > 0
    assert page(records)["head"]["hourly_price"] == pytest.approx(1.2 + 0.35 + 0.35), "runpod-2's L4 has no price"
    without = [replace(records[0], event=ev.RunStarted("id", {})), *records[1:]]
    assert page(without)["head"]["cost"] == 0


def test_the_plan_has_its_flows_with_codec_and_load_and_the_seats_of_those_that_were_lost() -> None:
    records = stored_run()
    second = next(
        each.sequence for each in records if isinstance(each.event, ev.PlanStarted) and each.event.generation == 2
    )
    plan = page(records, second)["plan"]
    assert plan["stages"][1] == {
        "name": "stage 1", "column": 1, "layers": [12, 24], "replicas": [["home-4090", 32]],
        "lost": [["vast-7", [["home-4090", 11]]]]
    }  # fmt: skip
    flow = plan["flows"][0]
    assert (flow["sender"], flow["receiver"], flow["codec"]) == ("lab-a100", "home-4090", "activations i8b256")
    assert (flow["micro_batches"], flow["megabytes"], flow["megabits"]) == (16, 256.0, 112.0)


def test_each_island_has_a_row_of_stages_and_its_number() -> None:
    world = training("a", "b")
    (plan,) = (record.event.plan for record in world.records if isinstance(record.event, ev.PlanAdopted))
    first, second = (replace(stage, layers=(0, 4)) for stage in plan.stages)
    islands = replace(plan, generation=2, stages=(first, replace(second, island=3)), flows=((),))
    world.log.append(ev.PlanAdopted(2, islands, "slow links", 0))
    seen = page(world.records)
    assert [(stage["name"], stage["column"]) for stage in seen["plan"]["stages"]] == [
        ("island 0, stage 0", 0),
        ("island 3, stage 0", 0),
    ]
    assert [node["place"] for node in seen["nodes"]] == ["island 0, stage 0", "island 3, stage 0"]


def test_an_earlier_page_has_nothing_of_what_came_later() -> None:
    records = stored_run()
    for at in range(1, len(records), 7):
        then = page(records, at)
        now = page(records[:at])
        assert then.pop("last") == len(records)
        assert now.pop("last") == at
        assert then == now


def test_contributions_count_micro_batches_of_committed_steps_also_of_those_that_left() -> None:
    given = {each["node"]: each for each in page(stored_run())["contributions"]}
    assert sum(each["micro_batches"] for each in given.values()) == 60 * 64 + 30 * 64 + 60 * 96 + 30 * 96
    assert given["vast-7"]["micro_batches"] == 60 * 11
    assert not given["vast-7"]["present"]


def test_no_page_has_addresses_or_more_text_than_fits_and_all_of_it_is_json() -> None:
    text = json.dumps(page(stored_run()), ensure_ascii=False)
    assert MARKUP in text, "it is text; the page makes no markup of it"
    assert "203.0.113.7" not in text
    assert max(len(each) for each in strings(json.loads(text))) <= MOST_CHARACTERS
    joined = ev.NodeJoined("a", "first contact", "10.0.0.1:7000", ev.DeviceSeen("cpu", "\x1b[31mred\u202e", 1, 1.0))
    odd = page(
        [Record(1, 0.0, EVERY_EVENT[0]), Record(2, 1.0, joined), Record(3, 2.0, ev.Evaluated(1, float("inf"), 1, 1.0))]
    )
    assert odd["nodes"][0]["device"]["name"] == "�[31mred�"
    assert odd["head"]["held_out"] is None


def test_the_page_of_a_thousand_nodes_is_bounded_and_says_what_it_leaves_out() -> None:
    world = training("a", "b", **LONG)
    joined = world.events(ev.NodeJoined)[0]
    world.log += [replace(joined, node=f"n{number}") for number in range(998)]
    found = page(world.records)
    assert (len(found["nodes"]), found["left_out"]) == (MOST_NODES, 1000 - MOST_NODES)
    assert len({span["node"] for span in found["spans"]}) == MOST_NODES
    assert (len(found["links"]["nodes"]), found["links"]["left_out"]) == (MOST_IN_MAP, 1000 - MOST_IN_MAP)
    assert len(json.dumps(found)) < 300_000


def strings(document: Any) -> list[str]:
    match document:
        case dict():
            return [text for value in document.values() for text in strings(value)]
        case list():
            return [text for value in document for text in strings(value)]
    return [document] if isinstance(document, str) else []


def test_the_texts_name_their_writers_and_are_plain_lines_without_addresses() -> None:
    records = [*stored_run()]
    long = "word " * MOST_CHARACTERS
    for step, text in ((1, "an older one"), (2, f"{MARKUP} at 203.0.113.7:7000"), (3, long)):
        prompt = "short" if step < 3 else "long"
        written = ev.TextWritten(step, "attic", prompt, text, whole=False)
        records.append(Record(len(records) + 1, records[-1].time, written))
    short, longer = page(records)["texts"]
    assert (short["step"], short["node"], short["prompt"]) == (2, "attic", "short")
    assert short["text"].startswith(MARKUP), "the page makes it a text node"
    assert "203.0.113.7" not in short["text"]
    assert len(longer["text"]) == MOST_CHARACTERS
