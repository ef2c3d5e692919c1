"""The predictions for unequal nodes, and their actual steps: ``python -m tests.bench.unequal_run [--plans N | --networks N]``.

Eight nodes train over emulated links, with devices 10 times apart (tests/wan/unequal.py): first under the scheduler's plan,
then under random ones. All of it takes ten minutes. The scheduler knows the nodes' own measurements. There are two demands. A
step takes at most 1.25 times as long as predicted, or as much less. The scheduler's plan is faster than each random one by as
much as predicted, within 20 %.

With --networks, the scheduler's own plan is measured on that many networks, drawn by number, in bf16 and with codecs by "auto".
The demand: within 10 % of the prediction. Each takes about a minute.

With --shared-lines, a home's line limits all its links together. Copies of state then take long on it. So more steps go by
before the measured ones, and all of it takes 15 minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.bench.rows import Row, show
from tests.wan.unequal import Measured, against_random_plans, on_drawn_networks
from tests.wan.wan import WanUnavailable


def rows_of(name: str, measured: Measured, searched: Measured) -> list[Row]:
    rows = [Row(f"{name}: a step", measured.seconds, "s", f"{measured.predicted:.3g} s predicted", measured.ratio)]
    if measured is not searched:
        predicted, gain = measured.predicted / searched.predicted, measured.seconds / searched.seconds
        against = f"{predicted:.3g} times predicted"
        rows.append(Row(f"{name}: slower than the scheduler's", gain, "times", against, searched.gain(measured)))
    return rows


def networks(options: argparse.Namespace) -> int:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(1, options.networks + 1)
        for seed, each in zip(
            seeds,
            on_drawn_networks(Path(folder), seeds, options.steps, micro_batches=options.micro_batches),
            strict=True,
        ):
            print(f"network {seed}: {each}", file=sys.stderr, flush=True)
            rows += rows_of(f"network {seed}", each, each)
    show("Steps on drawn networks, as measured and as predicted", rows, options.json)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=10, help="random plans")
    parser.add_argument("--networks", type=int, default=0, help="drawn networks, instead of random plans")
    parser.add_argument("--steps", type=int, default=3, help="steps of each plan that are measured")
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--shared-lines", action="store_true", help="the links of a home share its line")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args()
    measured: list[tuple[str, Measured]] = []
    try:
        if options.networks:
            return networks(options)
        with tempfile.TemporaryDirectory() as folder:
            for each in against_random_plans(
                Path(folder),
                range(1, options.plans + 1),
                options.steps,
                micro_batches=options.micro_batches,
                shared_lines=options.shared_lines,
            ):
                measured.append((f"random plan {len(measured)}" if measured else "the scheduler's plan", each))
                print(f"{measured[-1][0]}: {each}", file=sys.stderr, flush=True)
    except WanUnavailable as reason:
        print(f"No network can be emulated here: {reason}", file=sys.stderr)
        return 2
    searched = measured[0][1]
    rows = [row for name, each in measured for row in rows_of(name, each, searched)]
    show("Steps of eight unequal nodes, as measured and as predicted", rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
