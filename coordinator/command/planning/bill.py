"""What a run takes: hours by its steps, and money by ``--price "RTX 4090=0.35"``, per GPU and hour in any currency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dtfm.coordinator.command.planning.gpus import Gpu
from dtfm.coordinator.command.planning.rented import parse_gpu

SOME_STEPS = 1000
"""Steps that are priced where no run file says how many there are."""


@dataclass(frozen=True, slots=True)
class Bill:
    """``per_hour`` is the price of all GPUs, ``cost`` that of all for all ``hours``. ``cost_without_idle`` leaves out
    those that the plan does not use. All three are 0 without prices."""

    steps: int
    hours: float
    per_hour: float
    cost: float
    cost_without_idle: float

    def __str__(self) -> str:
        told = f"{self.steps:,} steps take {hours_in_words(self.hours)}"
        if self.per_hour:
            told += f" and cost {self.cost:,.2f}, at {self.per_hour:,.2f} an hour"
        return f"{told}." + (
            f" Without idle GPUs: {self.cost_without_idle:,.2f}." if self.cost_without_idle < self.cost else ""
        )


def bill(steps: int, seconds: float, prices: Sequence[float] = (), idle: Sequence[int] = ()) -> Bill:
    """The bill for ``steps`` that take ``seconds`` each. ``prices``: of each GPU per hour; ``idle``: the numbers of those without
    work."""
    hours, busy = steps * seconds / 3600, [price for number, price in enumerate(prices) if number not in idle]
    return Bill(steps, hours, sum(prices), sum(prices) * hours, sum(busy) * hours)


def hours_in_words(hours: float) -> str:
    """Like "12 minutes", "5.3 hours", "117 hours (4.9 days)"."""
    if hours < 1 / 60:
        return "less than a minute"
    if hours < 1:
        return f"{hours * 60:.3g} minutes"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours:,.0f} hours ({hours / 24:,.1f} days)"


def parse_prices(texts: Sequence[str], gpus: Sequence[Gpu]) -> list[float]:
    """The price of each of ``gpus``, of texts like "RTX 4090=0.35". Empty without texts. Raises ValueError."""
    prices, names = dict[str, float](), list(dict.fromkeys(gpu.name for gpu in gpus))
    for text in texts:
        name, _, price = text.rpartition("=")
        try:
            value = float(price)
        except ValueError:
            value = math.nan
        if not name.strip() or not 0 <= value < math.inf:
            raise ValueError(
                f'--price is {text!r:.80}; it must be a GPU and its price per hour, like "{names[0]}=0.35"'
            )
        if (known := parse_gpu(name, "--price").name) not in names:
            raise ValueError(f"--price names {known}, which is not in --gpus; there are {', '.join(names)}")
        if known in prices:
            raise ValueError(f"--price names {known} twice; give each GPU one price")
        prices[known] = value
    if missing := [name for name in names if prices and name not in prices]:
        raise ValueError(f'--price does not name {missing[0]}, which is in --gpus; add --price "{missing[0]}=0.35"')
    return [prices[gpu.name] for gpu in gpus] if prices else []
