"""Whether anybody honest is accused: ``python -m tests.bench.honest [--steps 10000] [--rate 0.1] [--seed 1] [--json]``.

Six nodes of six owners in two stages, in mode "open", as real processes on this machine, each an interpreter of its own. They
are unlike each other: they compute with one, two or four threads, and for CPUs of three kinds. So their results differ like the
results of different machines. In two legs some compile the layers. There is a run for each of LEGS, with a precision and codecs
of its own. While it trains, nodes are killed or leave in order, and come back; and the coordinator is killed and started again.
The seed decides the steps.

It exits with 1 if anybody was quarantined, an audit was not clean, a digest differed, or samples are missing.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.bench.older_cpus import AS_ON_AVX2, AS_ON_SSE4, TORCH_AS_ON_AVX2
from tests.bench.rows import Row, show
from tests.cluster.launch import Cluster, Event
from tests.cluster.runs import run_file

STAGES = [3, 3]
THREADS = {"n0": 1, "n1": 2, "n2": 4, "n3": 1, "n4": 2, "n5": 4}
CPUS = {"n1": AS_ON_AVX2, "n3": AS_ON_SSE4, "n4": TORCH_AS_ON_AVX2}
"""By node, the environment that makes it compute like an older CPU."""

WITHOUT_COMPILER = ("n2", "n3")
"""The nodes that do not compile layers where others compile them."""

MODEL = """
[model]
family = "llama"
config = { hidden_size = 64, num_hidden_layers = 4, num_attention_heads = 4, intermediate_size = 192 }
"""

SAMPLES = 24
"""The samples of a step, in micro-batches of 4: large enough that PyTorch shares one out among threads."""

EVALUATE_EVERY = 10
"""Steps from one evaluation to the next. Five times as often as by default, so that many are audited."""

BETWEEN = (30, 60)
"""Steps from one disturbance to the next."""

PATIENCE = 600.0
"""The longest wait, in seconds; other work may have the machine."""

SUSPICIOUS = ("gradients_clipped", "digest_mismatch", "suspected", "rolled_back")
"""Events that tell of a suspicion, or of its consequences."""


@dataclass(frozen=True, slots=True)
class Leg:
    precision: str
    codecs: Mapping[str, str]
    compiles: bool = False

    @property
    def name(self) -> str:
        codecs = ", ".join(f"{tensors} {codec}" for tensors, codec in self.codecs.items())
        return f"{self.precision}, {'compiled, ' * self.compiles}{codecs}"


def _codecs(activations: str, gradients: str, reduction: str) -> Mapping[str, str]:
    return {"activations": activations, "gradients": gradients, "reduction": reduction}


LEGS = [
    Leg(precision, codecs)
    for codecs in (
        _codecs("auto", "auto", "auto"),
        _codecs("off", "off", "off"),
        _codecs("i8b256", "raw16", "i4b64"),
        _codecs("raw16", "i4b64", "i8b256"),
    )
    for precision in ("fp32", "bf16")
]
LEGS += [replace(leg, compiles=True) for leg in LEGS[:2]]


@dataclass(slots=True)
class Findings:
    """The findings of one leg. ``errors`` are the largest, by the tensors that audits compared. ``unequal`` counts the audits
    whose results were not equal bit for bit."""

    steps: int = 0
    audits: int = 0
    clean: int = 0
    unequal: int = 0
    missing_samples: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    errors: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    suspicious: Counter[str] = field(default_factory=Counter)
    quarantined: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def fair(self) -> bool:
        wrong = self.quarantined or self.problems or self.missing_samples or self.suspicious["digest_mismatch"]
        return not wrong and self.clean == self.audits


def found_in(events: Iterable[Event]) -> Findings:
    found = Findings()
    for event in events:
        match event["event"]:
            case "step_committed":
                found.steps = max(found.steps, event["step"])
            case "work_audited":
                found.audits += 1
                found.clean += event["clean"]
                found.unequal += any(event["errors"].values())
                for kind, error in event["errors"].items():
                    found.errors[kind] = max(found.errors[kind], error)
            case "node_quarantined":
                found.quarantined.append(f"{event['node']} ({event['charge']}): {event['reason']}")
            case name if name in SUSPICIOUS:
                found.suspicious[name] += 1
            case "standing_changed" if event["standing"] == "suspected":
                found.suspicious["suspected"] += 1
    return found


def place(name: str, command: list[str]) -> list[str]:
    if name not in THREADS:
        return command
    at = command.index("dtfm.node.cli")
    return [*command[:at], "tests.bench.unlike", *command[at + 1 :]]


class PatientCluster(Cluster):
    def wait_for(
        self, event: str, *, where: Callable[[Event], bool] = lambda _: True, after: int = 0, timeout: float = PATIENCE
    ) -> Event:
        return super().wait_for(event, where=where, after=after, timeout=timeout)


class Run:
    """A leg, disturbed until its last step."""

    def __init__(self, cluster: Cluster, steps: int, chance: random.Random) -> None:
        self._cluster = cluster
        self._steps = steps
        self._chance = chance
        self.kills: Counter[str] = Counter()

    def begin(self) -> None:
        for name in THREADS:
            self._add(name)
        self._cluster.wait_for("step_committed")

    def disturb(self) -> None:
        """Disturbs the run until there are too few steps left for another node to come back."""
        step = self._chance.randint(*BETWEEN)
        while step + BETWEEN[1] < self._steps:
            self._until(step)
            what = self._chance.choices(("kill", "leave", "coordinator"), (4, 3, 2))[0]
            self.kills[what] += 1
            audits = len(self._cluster.of("work_audited"))
            print(f"step {self._newest}, {audits} audits: {what}", file=sys.stderr, flush=True)
            if what == "coordinator":
                self._kill_coordinator()
            else:
                self._lose(self._chance.choice(list(THREADS)), in_order=what == "leave")
            step = self._newest + self._chance.randint(*BETWEEN)

    def finish(self) -> int:
        self._until(self._steps)
        return self._cluster.finish(PATIENCE)

    def _lose(self, node: str, *, in_order: bool) -> None:
        """The node dies, or leaves, and comes back some steps later."""
        process = self._cluster.nodes[node]
        process.send(signal.SIGTERM if in_order else signal.SIGKILL)
        process.wait(PATIENCE)
        self._until(self._newest + self._chance.randint(1, 10))
        self._add(node)

    def _kill_coordinator(self) -> None:
        assert self._cluster.coordinator is not None
        self._cluster.coordinator.send(signal.SIGKILL)
        self._cluster.coordinator.wait(PATIENCE)
        self._cluster.start_coordinator()

    def _add(self, node: str) -> None:
        # Threads that spin while they wait would take the cores from the other nodes.
        waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
        environment = {"OMP_NUM_THREADS": str(THREADS[node]), **waiting, **CPUS.get(node, {})}
        if node in WITHOUT_COMPILER:  # nor what a compiler has left in the cache
            environment |= {"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(self._cluster.folder / node)}
        options = ("--threads", str(THREADS[node]), "--give-up-after", "300")
        self._cluster.add(node, *options, environment=environment)

    def _until(self, step: int) -> None:
        known = len(self._cluster.events)
        if self._newest < step:
            self._cluster.wait_for("step_committed", where=lambda event: event["step"] >= step, after=known)

    @property
    def _newest(self) -> int:
        return max((event["step"] for event in self._cluster.of("step_committed")[-1:]), default=0)


def run_leg(leg: Leg, steps: int, rate: float, seed: int, folder: Path) -> Findings:
    text = run_file(model=MODEL, stages=STAGES, steps=steps, precision=leg.precision, learning_rate=1e-3, lease=30.0)
    text = text.replace("sequence_length = 32", "sequence_length = 64")
    text = text.replace("global_batch = 20\nmicro_batch = 2", f"global_batch = {SAMPLES}\nmicro_batch = 4")
    codecs = "\n".join(f'{tensors} = "{codec}"' for tensors, codec in leg.codecs.items())
    text = text.replace('compression = "off"', codecs).replace("seed = 7", f"seed = {seed}")
    train = f"evaluate_every = {EVALUATE_EVERY}\ncompile = {str(leg.compiles).lower()}\n"
    text = text.replace("[train]\n", f"[train]\n{train}")
    text += f'[trust]\nmode = "open"\naudit_rate = {rate}\n'
    problems = []
    with PatientCluster(folder, text, place=place, fresh=True, invited=True, liars=True) as cluster:
        run = Run(cluster, steps, random.Random(f"{seed} {leg.name}"))
        try:
            run.begin()
            run.disturb()
            if (code := run.finish()) != 0:
                problems.append(f"the coordinator ended with {code}")
        except (AssertionError, subprocess.TimeoutExpired) as problem:
            problems.append(str(problem))
            print_complaints(cluster)
    found = found_in(cluster.log())
    audit = cluster.check()
    found.missing_samples = audit.steps * SAMPLES - audit.samples
    found.problems = [*problems, *(finding.sentence for finding in audit.findings)]
    found.kills = run.kills
    return found


def print_complaints(cluster: Cluster) -> None:
    for name, process in cluster._started:
        print(f"--- {name}\n{process.errors[-2000:]}", file=sys.stderr)


def rows(of: Sequence[tuple[Leg, Findings]]) -> list[Row]:
    found = [findings for _, findings in of]
    audits = sum(each.audits for each in found)
    result = [
        Row("honest steps", sum(each.steps for each in found), "steps"),
        Row("audits", audits, "audits"),
        Row("audits with the same result", sum(each.clean for each in found), "audits", "all"),
        Row("audits whose results were not equal bit for bit", sum(each.unequal for each in found), "audits", "all"),
    ]
    if audits:
        result = [*result[:2], *(Row(r.measure, r.value, r.unit, "all", r.value / audits) for r in result[2:])]
    for leg, findings in of:
        result += [
            Row(f"largest error, {kind}: {leg.name}", error, "relative")
            for kind, error in sorted(findings.errors.items())
        ]
    for title, counts in (("disturbances", [f.kills for f in found]), ("events", [f.suspicious for f in found])):
        total = sum(counts, Counter[str]())
        result += [Row(f"{title}: {name}", count, "times") for name, count in sorted(total.items())]
    quarantined = sum(len(each.quarantined) for each in found)
    missing = sum(abs(each.missing_samples) for each in found)
    return [*result, Row("samples missing", missing, ""), Row("nodes quarantined", quarantined, "nodes")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="of all legs together")
    parser.add_argument("--rate", type=float, default=0.1, help="[trust] audit_rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--legs", type=int, nargs="*", default=range(len(LEGS)), help="numbers; default: all")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    found = []
    for number in arguments.legs:
        began = time.monotonic()
        leg = LEGS[number]
        with tempfile.TemporaryDirectory() as folder:
            steps = arguments.steps // len(arguments.legs)
            findings = run_leg(leg, steps, arguments.rate, arguments.seed, Path(folder))
        found.append((leg, findings))
        print(f"{leg.name}: {findings}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    show(f"{arguments.steps} honest steps, audit rate {arguments.rate}", rows(found), arguments.json)
    sys.exit(0 if all(findings.fair for _, findings in found) else 1)


if __name__ == "__main__":
    main()
