"""The weights and the adapter that a new run begins with, where this disk has them: of another run, or of a folder of peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from pydantic import ValidationError

from dtfm.coordinator.service.checkpoint.adapter_file import has_adapter
from dtfm.coordinator.service.checkpoint.checkpoint_place import newest
from dtfm.coordinator.service.checkpoint.manifest import read_manifest
from dtfm.protos.checkpoint_names import MANIFEST
from dtfm.protos.places import COORDINATOR
from dtfm.protos.published_files import ADAPTER, ADAPTER_CONFIG
from dtfm.protos.run_file.model_tables import Adapter
from dtfm.protos.run_file.published_adapter import PublishedAdapter, published_adapter
from dtfm.protos.run_file.run_file import RunFile, parse_run

MOST_CONFIG_BYTES = 1 << 20


def begun_from(run: RunFile) -> dict[str, Any]:
    """The tables of the run file if it names another run's folder on this disk, one of its checkpoints, or the folder of an
    adapter. They name what nodes read from here, and that run's tokenizer; and they have the adapter's rank, factor and targets.
    Raises ValueError if a run cannot begin with it."""
    tables: dict[str, Any] = {}
    named = _folder(run.model.pretrained, "model.pretrained")
    adapter = _folder(run.adapter.pretrained, "adapter.pretrained") if run.adapter is not None else None
    if named is not None and (named / ADAPTER_CONFIG).is_file():
        if run.adapter is None:
            raise ValueError(
                f"model.pretrained: {named} is an adapter; add a table [adapter] to train it further, or begin with the whole "
                "model, which dtfm-coordinator export --merged DIR writes"
            )
        if run.adapter.pretrained:
            raise ValueError(
                f"model.pretrained: {named} is an adapter, and adapter.pretrained names another; leave one of them out"
            )
        adapter, named = named, None
        tables = _base_of(adapter, run)
    elif named is not None and (named / MANIFEST).is_file():
        tables = _own_weights(named, run)
    if adapter is not None:
        if not (adapter / ADAPTER_CONFIG).is_file():
            raise ValueError(f"adapter.pretrained: {adapter} has no {ADAPTER_CONFIG}; name a folder that peft wrote")
        tables |= _going_on(adapter, run)
    return tables


def _folder(place: str, key: str) -> Path | None:
    """The folder on this disk that the run file's ``key`` names, or the newest checkpoint in it. None: another place."""
    if not place:
        return None
    named = Path(place).expanduser().resolve()
    if place.startswith("dtfm-runs/") and not named.is_dir():  # it would pass for a name on the hub
        there = ", ".join(sorted(each.name for each in Path("dtfm-runs").glob("*"))) or "no run"
        raise ValueError(f"{key}: there is no folder {named}; dtfm-runs has: {there}")
    if not named.is_dir():
        return None
    checkpoint = newest(f"file://{named}")
    return Path(url_to_fs(checkpoint)[1]) if checkpoint is not None else named


def _own_weights(folder: Path, run: RunFile) -> dict[str, Any]:
    """The tables for the weights in a checkpoint on this disk."""
    manifest = read_manifest(f"file://{folder}")
    if not manifest.weights:
        raise ValueError(
            f"model.pretrained: file://{folder} has all of the state, not the weights alone; export these, copy them to each "
            f"node, and name that folder: dtfm-coordinator export DIR --checkpoint file://{folder}"
        )
    before = parse_run(manifest.run, f"{folder}/{MANIFEST}").message("").data.tokenizer
    model = {**run.model.model_dump(mode="json"), "pretrained": f"{COORDINATOR}://{folder}"}
    data = {**run.data.model_dump(mode="json"), "tokenizer": run.data.tokenizer or before}
    return {"model": model, "data": data}


def _base_of(adapter: Path, run: RunFile) -> dict[str, Any]:
    """The tables for the model beside which the adapter stands."""
    base, tokenizer = _read(adapter).base, run.data.tokenizer
    _check_is_a_model(adapter, base)
    if (adapter / MANIFEST).is_file() and has_adapter(before := read_manifest(f"file://{adapter}").run):
        name = str(before["model"]["pretrained"])
        _check_is_a_model(adapter, name)
        base = (
            name if name.startswith(f"{COORDINATOR}:") else base
        )  # others do not find a model on this disk by its name
        tokenizer = tokenizer or parse_run(before, f"{adapter}/{MANIFEST}").message("").data.tokenizer
    if not base:
        raise ValueError(
            f"model.pretrained: {adapter} does not say beside which model it stands; name that as model.pretrained, and the "
            "folder as adapter.pretrained"
        )
    model = {**run.model.model_dump(mode="json"), "pretrained": base}
    return {"model": model, "data": {**run.data.model_dump(mode="json"), "tokenizer": tokenizer}}


def _check_is_a_model(adapter: Path, base: str) -> None:
    """Raises ValueError if an adapter's folder, which others may have written, would have nodes read a folder of this disk that
    is no checkpoint."""
    folder = Path(base.removeprefix(f"{COORDINATOR}://"))
    if base.startswith(f"{COORDINATOR}:") and folder.exists() and not (folder / MANIFEST).is_file():
        raise ValueError(
            f"model.pretrained: {adapter} names {base!r:.200} as its model, a folder on this disk that is no checkpoint; name "
            "the model as model.pretrained, and the folder as adapter.pretrained"
        )


def _going_on(folder: Path, run: RunFile) -> dict[str, Any]:
    """The table of the adapter in a folder on this disk. Raises ValueError if the run file says other things about it."""
    assert run.adapter is not None
    found, given = _read(folder), run.adapter.model_fields_set
    if not (folder / f"{ADAPTER}.safetensors").is_file():
        raise ValueError(
            f"adapter.pretrained: {folder} has no {ADAPTER}.safetensors; copy it again, or if it is a checkpoint of all of the "
            f"state, export it: dtfm-coordinator export DIR --checkpoint file://{folder}"
        )
    theirs = list(found.targets) if isinstance(found.targets, tuple) else found.targets
    table = run.adapter.model_dump(mode="json")
    also = list(found.train_also)
    for key, value in (
        ("rank", found.rank),
        ("alpha", found.alpha),
        ("targets", theirs),
        ("rs", found.rs),
        ("dora", found.dora),
        ("train_also", also),
        ("dropout", found.dropout),
    ):
        mine = sorted(table[key]) if isinstance(table[key], list) else table[key]
        # Whether these are all matrices, nodes find out.
        if key in given and mine != value and mine != "all-linear" and key != "dropout":
            raise ValueError(
                f"adapter.{key} = {json.dumps(mine)}, but the adapter in {folder} has {json.dumps(value)}; leave {key} out, or "
                "begin a new adapter"
            )
        if key not in given:
            table[key] = value
    table |= {"pretrained": f"{COORDINATOR}://{folder}"}
    try:
        Adapter(**table)
    except ValidationError as problem:
        first, *_ = problem.errors()
        name = str(first["loc"][0])
        raise ValueError(
            f"adapter.pretrained: the adapter in {folder} has {name} = {table[name]!r:.100} ({first['msg']}), which no run can "
            "train; begin with another adapter"
        ) from None
    return {"adapter": table}


def _read(folder: Path) -> PublishedAdapter:
    file = folder / ADAPTER_CONFIG
    try:
        with file.open("rb") as content:
            config = json.loads(content.read(MOST_CONFIG_BYTES))
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as problem:
        raise ValueError(f"adapter.pretrained: {file} cannot be read ({problem}); copy the folder again") from None
    try:
        return published_adapter(config, str(folder))
    except ValueError as problem:
        raise ValueError(f"adapter.pretrained: {problem}") from None
