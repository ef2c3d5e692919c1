"""A cluster from words: ``--gpus "8x RTX 4090, 2x A100 80GB" --links 500Mbit/s,40ms --host-memory 32GiB``.

Every parser raises ValueError with the text that it read, and a text that it would understand.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

import numpy as np

from dtfm.coordinator.command.planning.gpus import GPUS, Gpu
from dtfm.coordinator.core.validation.admission import MAX_NODES
from dtfm.scheduler.model.cluster import Cluster, Line, Node

WITHIN_A_MACHINE = 1e9, 1e-4
"""Bytes per second and seconds of a link between two GPUs of a machine: a stream over loopback, about as measured."""
MOST_SECONDS, MOST_BANDWIDTH, MOST_BYTES = 10.0, 1e12, 2.0**50

_BITS = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}
_BANDWIDTHS = {unit: bits / 8 for unit, bits in _BITS.items()} | {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SIZES = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]*)\s*")
_MANY = re.compile(r"\s*([0-9]{1,6})\s*[xX*×]\s+(.+?)\s*|\s*([0-9]{1,6})[xX*×](.+?)\s*")
_BY_KEY = {re.sub(r"[^a-z0-9]", "", gpu.name.lower()): gpu for gpu in GPUS}


def parse_gpus(text: str) -> list[list[Gpu]]:
    """The GPUs of each machine that ``text`` names. For example "8x RTX 4090, 2x 4x A100 80GB": ten machines, two of them with
    four GPUs."""
    made: list[list[Gpu]] = []
    for part in text.split(","):
        if re.fullmatch(r"\s*([0-9]+\s*[xX*×])?\s*", part):
            raise ValueError(
                f"--gpus is {text!r:.80}: {part.strip()!r:.80} names no GPU; write it like 8x RTX 4090, H200"
            )
        found = _MANY.fullmatch(part)
        number, name = (found[1] or found[3], found[2] or found[4]) if found else ("1", part.strip())
        within = _MANY.fullmatch(name)
        each, name = (within[1] or within[3], within[2] or within[4]) if within else ("1", name)
        if not 1 <= sum(map(len, made)) + int(number) * int(each) <= MAX_NODES or 0 in {int(number), int(each)}:
            raise ValueError(
                f"--gpus names {int(number) * int(each)} of {name!r:.80}; it must be 1 to {MAX_NODES} in all"
            )
        made += [[parse_gpu(name, "--gpus")] * int(each)] * int(number)
    return made


def without_bf16(text: str) -> list[str]:
    """The GPUs that cannot compute in bf16, each name once."""
    return list(dict.fromkeys(gpu.name for gpus in parse_gpus(text) for gpu in gpus if gpu.bf16_tflops is None))


def parse_gpu(name: str, option: str) -> Gpu:
    """The GPU of that name. Errors name the ``option`` that gave the name."""
    key = re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", "").replace("geforce", ""))
    for tried in (key, f"rtx{key}", f"{key}gb"):
        if tried in _BY_KEY:
            return _BY_KEY[tried]
    of_a_kind = [gpu.name for known, gpu in _BY_KEY.items() if key and known.startswith(key)]
    near = of_a_kind or [_BY_KEY[match].name for match in difflib.get_close_matches(key, _BY_KEY, 3, 0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(gpu.name for gpu in GPUS)}."
    raise ValueError(f"{option}: {name!r:.80} is not in the table; {hint} For others, write a NETWORK.json (--network)")


def parse_links(text: str) -> tuple[float, float]:
    """Bytes per second and seconds of a text like "500Mbit/s,40ms"."""
    parts = text.split(",")
    if len(parts) != 2:
        raise ValueError(f"--links is {text!r:.80}; it must be a bandwidth and a latency, like 500Mbit/s,40ms")
    bandwidth = parse_quantity(parts[0], "--links: the bandwidth", _BANDWIDTHS, MOST_BANDWIDTH, "500Mbit/s")
    latency = parse_quantity(parts[1], "--links: the latency", _TIMES, MOST_SECONDS, "40ms")
    return bandwidth, latency


def parse_size(text: str) -> float:
    """Bytes of a text like "32GiB"."""
    return parse_quantity(text, "--host-memory", _SIZES, MOST_BYTES, "32GiB")


def parse_quantity(text: str, what: str, units: Mapping[str, float], most: float, like: str) -> float:
    found = _QUANTITY.fullmatch(text)
    if not found:
        raise ValueError(f"{what} is {text!r:.80}; it must be a number and a unit, like {like}")
    number, unit = float(found[1]), found[2]
    if unit not in units:
        meant = unit.replace("bps", "bit/s").replace("Bps", "B/s")
        near = [known for known in units if known.lower() == meant.lower()]
        near = near or difflib.get_close_matches(meant, units, 1, 0.5)
        hint = f"did you mean {near[0]}? Units" if near else "units"
        raise ValueError(f"{what} is {text!r:.80}, with the unit {unit!r:.20}; {hint} are {', '.join(units)}")
    if not 0 < number * units[unit] <= most:
        raise ValueError(f"{what} is {text!r:.80}; it must be above 0 and not beyond what exists")
    return number * units[unit]


def rented_cluster(
    machines: list[list[Gpu]], bandwidth: float, latency: float, host_memory: float, precision: str
) -> Cluster:
    """The GPUs of these machines. The GPUs of a machine share its memory and its line. A line carries as much up, and down, as
    any link to another machine; within a machine, links are WITHIN_A_MACHINE.

    Speeds are for a run that computes in ``precision``.
    """
    at = [(machine, gpu) for machine, gpus in enumerate(machines) for gpu in gpus]
    nodes = tuple(
        Node(
            f"{gpu.name.lower().replace(' ', '-')}-{number}",
            gpu.flops(precision),
            gpu.memory_bytes,
            up=bandwidth,
            down=bandwidth,
            host_memory_bytes=host_memory / len(machines[machine]),
            line=f"machine {machine}" if len(machines[machine]) > 1 else "",
        )
        for number, (machine, gpu) in enumerate(at)
    )
    lines = tuple(
        Line(f"machine {index}", bandwidth, bandwidth) for index, gpus in enumerate(machines) if len(gpus) > 1
    )
    machine = np.array([machine for machine, _ in at])
    is_within = machine[:, None] == machine
    rate, seconds = WITHIN_A_MACHINE
    return Cluster(nodes, np.where(is_within, seconds, latency), np.where(is_within, rate, bandwidth), lines)
