"""The keys of a run that may change: while it runs, by ``dtfm-coordinator set``, and when its coordinator starts again with an
edited run file.

The run in force is the run file with the values that operators have set since. The ledger has both. From the next start on, a key
that was edited in the run file has its new value there. Other keys keep the values that operators have set.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from dtfm.protos.run_file.run_file import RunFile, parse_run

OF_THE_OPTIMIZER = ("train.learning_rate", "train.clip_norm", "train.weight_decay")
"""Each commit names the values that its step is applied with: a change holds from a step on, equally on all nodes."""

WHILE_IT_RUNS = (
    *OF_THE_OPTIMIZER,
    "train.steps",
    "train.decay_steps",
    "train.evaluate_every",
    "data.prompts",
    "checkpoint.uri",
    "checkpoint.every",
    "checkpoint.keep",
    "cluster.lease",
    "cluster.nodes",
    "cluster.prices",
    "cluster.currency",
    "cluster.when_state_is_lost",
    "trust.audit_rate",
    "trust.keys_per_address",
)
"""The coordinator alone uses these keys, or tells nodes immediately, and with each commit."""

FOUND_AT_THE_START = (
    "model.pretrained",
    "adapter.pretrained",
    "adapter.rank",
    "adapter.alpha",
    "adapter.targets",
    "adapter.rs",
    "adapter.dropout",
    "adapter.train_also",
    "data.tokenizer",
    "train.precision",
)
"""The values of these keys are resolved when a run starts or its first node joins, and stay."""

AT_A_START = (
    "cluster.",
    "network.",
    "checkpoint.",
    "trust.",
    "train.steps",
    "train.activation_checkpointing",
    "train.compile",
    "train.optimizer_state",
    "train.evaluate_every",
    "train.evaluation_samples",
    "train.rounds",
)
"""These keys do not change the training result. Two exceptions: the number of steps, which the learning rate's fall depends on,
and rounds, which plans change as well."""

_OF_STEPS = {"warmup_steps", "decay_steps"}
"""Their defaults follow from the number of steps that the run began with."""


def with_change(run: RunFile, key: str, text: str, step: int) -> RunFile:
    """The run after an operator has set ``key`` to ``text``, a value as in TOML; a string needs no quotes. ``step``: how
    many of the run file's steps are done. Raises ValueError."""
    if key not in WHILE_IT_RUNS:
        raise ValueError(
            f"{key[:100]!r} cannot be set while the run goes on. These can: {', '.join(WHILE_IT_RUNS)}. Some other keys can be "
            "changed in the run file, before the coordinator is started again with it"
        )
    table, name = key.split(".")
    fields = run.model_dump(mode="json")
    fields[table][name] = _value(text)
    changed = parse_run(fields, f"{key}={text[:100]}")
    _check_steps(run, changed, step)
    if key == "trust.audit_rate" and not (run.trust.audits and changed.trust.audits):
        raise ValueError(
            f"trust.audit_rate={text[:100]}: audits begin and end with a start of the coordinator, by the run file; `set` takes "
            "another rate above 0 where there are some"
        )
    return changed


def goes_on_with(file: RunFile, before: Mapping[str, Any], in_force: Mapping[str, Any], step: int) -> RunFile:
    """The run that goes on after ``step`` with this run file. ``before``: the run file of the last start. ``in_force``: that file
    with the values that operators have set. Raises ValueError if the run would train something else."""
    now, old = file.model_dump(mode="json"), parse_run(in_force, "the log")
    for key in (*WHILE_IT_RUNS, *FOUND_AT_THE_START):
        table, name = key.split(".")
        if now[table] is None or getattr(old, table) is None:
            continue
        if (before.get(table) or {}).get(name) == now[table][name]:
            now[table][name] = value_of(old, key)
    for name in (_OF_STEPS | {"rounds"}) - file.train.model_fields_set:
        now["train"][name] = getattr(old.train, name)
    run = parse_run(now, "the run file")
    check_same(old, run, step)
    return run


def check_same(before: RunFile, now: RunFile, step: int) -> None:
    """Raises ValueError if the run would train something else when it went on with ``now`` after ``step``."""
    old, new = (dict(_flat(run.model_dump(mode="json"))) for run in (before, now))
    free = (*AT_A_START, *WHILE_IT_RUNS)
    changed = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k) and not k.startswith(free))
    if changed:
        key = changed[0]
        raise ValueError(
            f"{key} is {new.get(key)!r} in the run file, and was {old.get(key)!r} when the run started; put it back, or "
            f"start a new run"
        )
    _check_steps(before, now, step)


def value_of(run: RunFile, key: str) -> Any:
    """The value of ``key``, which has one dot."""
    table, name = key.split(".")
    return getattr(getattr(run, table), name)


def _check_steps(before: RunFile, run: RunFile, step: int) -> None:
    if run.train.steps <= step and run.train.steps != before.train.steps:
        raise ValueError(f"train.steps = {run.train.steps}: must be at least {step + 1}, as {step} steps are trained")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
