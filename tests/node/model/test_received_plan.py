"""The plan from the wire: read as it was written, and refused by name when it cannot be."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dtfm.node.model.placement import MOST_TAKEOVERS, read_plan
from dtfm.scheduler.formats.plan import MOST_BYTES, pack_plan, plan_document
from dtfm.scheduler.model.owed import Owed
from dtfm.scheduler.model.plan import Plan, Stage, from_routes, joined
from dtfm.scheduler.model.rounds import Rounds
from tests.coordinator.every_event import CARRIED_ON, PLAN

ISLANDS = joined(
    [from_routes(1, [Stage((0, 3), (name,), (), island=n)], [((name,), 4)]) for n, name in enumerate("ab")], 1
)


def test_a_plan_is_read_as_it_was_sent() -> None:
    freeing = replace(PLAN, frees_first=PLAN.nodes[:1])
    for sent in (PLAN, CARRIED_ON, freeing, replace(ISLANDS, rounds=Rounds(8, 100, 9, 2))):
        assert read_plan(pack_plan(sent), 3, 8, 8) == sent


Document = dict[str, Any]


def add_takeovers(plan: Document) -> None:
    heirless = {"stage": 0, "place": 0, "heirs": []}
    plan["takeovers"] += [{"node": str(n), **heirless} for n in range(MOST_TAKEOVERS + 1)]


def move_takeover(plan: Document) -> None:
    plan["takeovers"][0]["stage"] = 7


def misplace(plan: Document) -> None:
    plan["takeovers"][0]["place"] = 1 << 31


def rename_heir(plan: Document) -> None:
    plan["takeovers"][0]["heirs"][0][0] = "c"


def rename_receiver(plan: Document) -> None:
    plan["flows"][0][0]["receiver"] = "e"


def drop_flows(plan: Document) -> None:
    plan["flows"] = []


def drop_loads(plan: Document) -> None:
    plan["stages"][1]["loads"] = []


def hold_one_more(plan: Document) -> None:
    plan["stages"][0]["in_flight"].append(4)


def hold_nothing(plan: Document) -> None:
    plan["stages"][0]["in_flight"][0] = 0


def inflate(plan: Document) -> None:
    plan["stages"][0]["loads"][0] = (1 << 32) - 1


def keep_in_one_way_more(plan: Document) -> None:
    plan["stages"][0]["keeping"] = [{"checkpointing": "none", "optimizer_state": "device"}] * 2


def clear(plan: Document) -> None:
    plan["stages"] = []


def exchange_in_every_step(plan: Document) -> None:
    plan["rounds"] = {"since": 0, "steps": 10, "count": 10, "before": 0}


def misspell(plan: Document) -> None:
    plan["stagse"] = plan.pop("stages")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (add_takeovers, "the plan has 1002 takeovers; it may have 1000"),
        (hold_one_more, "stage 0 has 2 numbers in flight; it has 1 replicas"),
        (hold_nothing, "stage 0 has 0 in flight; it must be 1 or above"),
        (move_takeover, "the takeover of 'b' names stage 7; there are 2"),
        (misplace, "the takeover of 'b' in stage 0 has place 2147483648"),
        (rename_heir, "gives 5 micro-batches to 'c', which then had 0"),
        (rename_receiver, "the flow from 'a' to 'e' after stage 0 is not between replicas of stages 0 and 1"),
        (drop_flows, "there are flows for 0 boundaries; 2 stages have one fewer"),
        (drop_loads, "stage 1 has 0 loads; it has 1 replicas"),
        (inflate, "stage 0's loads add up to 4294967295; a step has 8 micro-batches"),
        (keep_in_one_way_more, "stage 0 says of 2 .* how they keep"),
        (clear, "the plan has no stages"),
        (exchange_in_every_step, "10 of 10 steps are exchanges; at most half of them may be"),
        (misspell, "stages is missing; stagse is unknown"),
    ],
)
def test_an_impossible_plan_is_refused_by_name(spoil: Callable[[Document], None], problem: str) -> None:
    plan = plan_document(CARRIED_ON)
    spoil(plan)
    with pytest.raises(ValueError, match=problem):
        read_plan(zlib.compress(json.dumps(plan).encode()), 3, 8, 0)


def packed(plan: Plan) -> bytes:
    return zlib.compress(json.dumps(plan_document(plan)).encode())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not JSON: "),
        (b"no zlib", "the plan is not compressed by zlib: "),
        (packed(PLAN)[:40], "not JSON: "),
        (zlib.compress(b" " * (MOST_BYTES + 1)), "not JSON: "),
        (packed(ISLANDS), "there are 2 islands, and no rounds after which they exchange what they learn"),
    ],
)
def test_what_is_no_plan_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_plan(data, 3, 8, 0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rounds": Rounds(since=8)}, "begin after step 7"),
        ({"rounds": Rounds(since=4, before=9)}, "begin after step 7"),
        ({"owed": Owed(since=8)}, "begin after step 7"),
        ({"owed": Owed(since=1, new=9)}, "the next new micro-batch is 9; it may be 8 at most"),
    ],
)
def test_a_plan_that_counts_steps_which_are_not_there_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_plan(packed(replace(PLAN, **changes)), 3, 8, 7)
