"""Hours and money: `command/planning/bill.py`, and `plan --price --run`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dtfm.coordinator.command.planning.bill import bill, hours_in_words, parse_prices
from dtfm.coordinator.command.planning.rented import parse_gpus
from tests.coordinator.command.typed import Typed
from tests.scheduler.clusters import even_workload
from tests.scheduler.dumps import dump_workload
from tests.scheduler.llama import TOKENS, llama


def test_each_gpu_has_the_price_of_its_kind() -> None:
    gpus = [gpu for machine in parse_gpus("2x RTX 4090, L4") for gpu in machine]
    assert parse_prices(["4090=0.35", " l4 = 0.5"], gpus) == ([0.35, 0.35, 0.5], "")
    assert parse_prices(["4090=0.35 EUR", "l4=0.5EUR"], gpus) == ([0.35, 0.35, 0.5], "EUR")
    assert parse_prices(["4090=$0.35", "l4=.5"], gpus) == ([0.35, 0.35, 0.5], "$")
    assert parse_prices([], gpus) == ([], "")


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["RTX 4090"], "--price is 'RTX 4090'; it must be a GPU and its price per hour, like \"RTX 4090=0.35\""),
        (["RTX 4090=cheap"], "--price is 'RTX 4090=cheap'; it must be"),
        (["RTX 4090=-1"], "it must be a GPU and its price"),
        (["RTX 4090=nan"], "it must be a GPU and its price"),
        (["RTX 4090=$0.35 EUR", "L4=1"], "it must be a GPU and its price"),
        (["RTX 4090=$1", "L4=1 EUR"], "--price is in $ for RTX 4090 and in EUR for L4; give all in one currency"),
        (["=0.35"], "it must be a GPU and its price"),
        (["RTX 4900=0.35"], "--price: 'RTX 4900' is not in the table; did you mean RTX 4090"),
        (["RTX 3090=0.35"], "--price names RTX 3090, which is not in --gpus; there are RTX 4090, L4"),
        (["L4=1", "L4=2"], "--price names L4 twice; give each GPU one price"),
        (["RTX 4090=0.35"], '--price does not name L4, which is in --gpus; add --price "L4=0.35"'),
    ],
)
def test_a_bad_price_is_named_with_a_good_one(texts: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_prices(texts, [gpu for machine in parse_gpus("2x RTX 4090, L4") for gpu in machine])


def test_idle_gpus_cost_as_much_and_are_named_apart() -> None:
    costs = bill(1000, 36.0, [0.5, 0.5, 1.0], idle=[2])
    assert (costs.hours, costs.per_hour, costs.cost, costs.cost_without_idle) == (10.0, 2.0, 20.0, 10.0)
    assert str(costs) == "1,000 steps take 10.0 hours and cost 20.00, at 2.00 an hour. Without idle GPUs: 10.00."
    dollars, euros = (str(bill(1000, 36.0, [0.5], currency=each)) for each in ("$", "EUR"))
    assert dollars == "1,000 steps take 10.0 hours and cost $5.00, at $0.50 an hour."
    assert euros == "1,000 steps take 10.0 hours and cost 5.00 EUR, at 0.50 EUR an hour."
    assert "Without" not in str(bill(1000, 36.0, [0.5]))
    assert str(bill(1000, 36.0)) == "1,000 steps take 10.0 hours."


@pytest.mark.parametrize(
    ("hours", "words"),
    [(0.01, "less than a minute"), (0.2, "12 minutes"), (5.26, "5.3 hours"), (117, "117 hours (4.9 days)")],
)
def test_hours_are_said_as_people_say_them(hours: float, words: str) -> None:
    assert hours_in_words(hours) == words


def test_plan_prices_the_steps_of_the_run_file(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "w.json").write_text(dump_workload(llama("7B"), TOKENS))
    (tmp_path / "run.toml").write_text(
        "[train]\nsteps = 5000\nmicro_batch = 1\nglobal_batch = 64\n[cluster]\nstages = 4\n"
    )
    arguments = (
        *("plan", "--gpus", "6x RTX 4090", "--links", "1Gbit/s,20ms", "--workload", str(tmp_path / "w.json")),
        *("--run", str(tmp_path / "run.toml"), "--price", "RTX 4090=0.35", "--deadline", "0.2"),
    )
    document = json.loads(typed(*arguments, "--json"))
    assert len(document["plan"]["stages"]) == 4
    hours = 5000 * document["predicted"]["iteration_seconds"] / 3600
    priced = document["bill"]
    assert (priced["steps"], priced["hours"]) == (5000, pytest.approx(hours))
    assert (priced["per_hour"], priced["cost"]) == (pytest.approx(2.1), pytest.approx(2.1 * hours))
    assert re.search(r"^5,000 steps take .* and cost [\d,.]+, at 2\.10 an hour\.", typed(*arguments), re.M)


def test_without_a_run_file_a_thousand_steps_are_priced(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "w.json").write_text(dump_workload(even_workload()))
    arguments = "plan", "--gpus", "L4", "--links", "1Gbit/s,20ms", "--workload", str(tmp_path / "w.json")
    assert "\n1,000 steps take " in typed(*arguments, "--price", "L4=0.5")
    assert "steps take" not in typed(*arguments)


def test_prices_are_for_gpus_in_words(typed: Typed) -> None:
    assert "--price goes with --gpus" in typed(
        "plan", "--network", "n.json", "--workload", "w.json", "--price", "L4=1", code=2
    )
