"""The cost of a run: hours by its steps, and money by ``--price "RTX 4090=0.35 EUR"``, per GPU and hour in any currency."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dtfm.coordinator.command.planning.gpus import Gpu
from dtfm.coordinator.command.planning.rented import parse_gpu
from dtfm.coordinator.log.wording import money_in_words

SOME_STEPS = 1000
"""Steps to price if no run file says how many there are."""


@dataclass(frozen=True, slots=True)
class Bill:
    """Time and money of a run. Without prices the money is 0."""

    steps: int
    hours: float
    per_hour: float
    """The price of all GPUs per hour."""
    cost: float
    """The price of all GPUs for all ``hours``."""
    cost_without_idle: float
    """The price without the GPUs that the plan does not use."""
    currency: str = ""
    """The currency of the prices. Empty: not given."""

    def __str__(self) -> str:
        told = f"{self.steps:,} steps take {hours_in_words(self.hours)}"
        if self.per_hour:
            told += f" and cost {self._money(self.cost)}, at {self._money(self.per_hour)} an hour"
        without = f" Without idle GPUs: {self._money(self.cost_without_idle)}."
        return f"{told}." + (without if self.cost_without_idle < self.cost else "")

    def _money(self, value: float) -> str:
        return money_in_words(value, self.currency)


def bill(
    steps: int, seconds: float, prices: Sequence[float] = (), idle: Sequence[int] = (), currency: str = ""
) -> Bill:
    """The bill for ``steps`` that take ``seconds`` each. ``prices``: of each GPU per hour; ``idle``: the numbers of those without
    work."""
    hours, busy = steps * seconds / 3600, [price for number, price in enumerate(prices) if number not in idle]
    return Bill(steps, hours, sum(prices), sum(prices) * hours, sum(busy) * hours, currency)


def hours_in_words(hours: float) -> str:
    """Like "12 minutes", "5.3 hours", "117 hours (4.9 days)"."""
    if hours < 1 / 60:
        return "less than a minute"
    if hours < 1:
        return f"{hours * 60:.3g} minutes"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours:,.0f} hours ({hours / 24:,.1f} days)"


_PRICE = re.compile(r"\s*([^\d\s.+-]{0,8})\s*(\d+(?:\.\d*)?|\.\d+)\s*([^\d\s.+-]{0,8})\s*")
"""A number with a currency before or after it."""


def parse_prices(texts: Sequence[str], gpus: Sequence[Gpu]) -> tuple[list[float], str]:
    """The price of each of ``gpus``, from texts like "RTX 4090=0.35 EUR", and their currency. Empty without texts. Raises
    ValueError."""
    prices, names = dict[str, float](), list(dict.fromkeys(gpu.name for gpu in gpus))
    currencies = dict[str, str]()
    for text in texts:
        name, _, price = text.rpartition("=")
        found = _PRICE.fullmatch(price)
        if not name.strip() or found is None or (found[1] and found[3]):
            raise ValueError(
                f'--price is {text!r:.80}; it must be a GPU and its price per hour, like "{names[0]}=0.35" or '
                f'"{names[0]}=0.35 EUR"'
            )
        if (known := parse_gpu(name, "--price").name) not in names:
            raise ValueError(f"--price names {known}, which is not in --gpus; there are {', '.join(names)}")
        if known in prices:
            raise ValueError(f"--price names {known} twice; give each GPU one price")
        prices[known] = float(found[2])
        if currency := found[1] or found[3]:
            currencies.setdefault(currency, known)
    if missing := [name for name in names if prices and name not in prices]:
        raise ValueError(f'--price does not name {missing[0]}, which is in --gpus; add --price "{missing[0]}=0.35"')
    if len(currencies) > 1:
        one, other = list(currencies.items())[:2]
        raise ValueError(
            f"--price is in {one[0]} for {one[1]} and in {other[0]} for {other[1]}; give all in one currency"
        )
    return [prices[gpu.name] for gpu in gpus] if prices else [], next(iter(currencies), "")
