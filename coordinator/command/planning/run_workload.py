"""The workload of a run file, without torch and without the model: the published settings say how large that is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec

from dtfm.coordinator.core.validation.description import workload_of
from dtfm.coordinator.service.begun_from import begun_from
from dtfm.protos.places import is_on_hub
from dtfm.protos.published_files import ADAPTER_CONFIG, CONFIG
from dtfm.protos.run_file.model_tables import Adapter
from dtfm.protos.run_file.published_adapter import PublishedAdapter, check_base, check_same, published_adapter
from dtfm.protos.run_file.run_file import RunFile, parse_run
from dtfm.scheduler.formats.language_model import (
    KNOWN,
    MATRICES,
    TRAINED_ALSO,
    Beside,
    backward_per_forward,
    language_model_layers,
)
from dtfm.scheduler.formats.model_config import NoSuchModel
from dtfm.scheduler.model.workload import Workload

BYTES = 256
"""The number of tokens of the tokenizer "bytes"."""


def as_begun(run: RunFile) -> RunFile:
    """The run as `serve` begins it: folders on this disk say what its model and its adapter are. Raises ValueError if no run can
    begin with them."""
    tables = begun_from(run)
    return parse_run(run.model_dump(mode="json") | tables, "the run") if tables else run


def workload_of_run(run: RunFile) -> Workload:
    """The workload as `dtfm-node workload` counts it. Raises ValueError if only that command can count it, and NoSuchModel if
    that command cannot either."""
    model, data, train = run.model, run.data, run.train
    family, config, bf16 = model.family, model.config, train.precision == "bf16"
    if model.pretrained:
        found = _settings(run)
        family, config = str(found.get("model_type")), {key: found[key] for key in KNOWN if key in found}
    vocabulary = config.get("vocab_size") or (BYTES if data.tokenizer in ("", "bytes") else None)
    if type(vocabulary) is not int or vocabulary < 1:
        raise ValueError(f"the vocabulary of {data.tokenizer!r:.80} is not known; add vocab_size to model.config")
    if train.precision == "fp64" or data.isolate_documents:
        raise ValueError("memory in fp64, or with data.isolate_documents, is not known without the model")
    beside = None
    if (adapter := run.adapter) is not None:
        targets = MATRICES if adapter.targets == "all-linear" else frozenset(adapter.targets)
        if wrong := sorted(name for name in targets if name.rpartition(".")[2] not in MATRICES):
            raise NoSuchModel(
                f"adapter.targets: the decoder layers have no matrix {wrong[0]!r:.80}; they have {', '.join(sorted(MATRICES))}"
            )
        if not targets <= MATRICES:
            raise ValueError(
                f"memory with adapter.targets = {adapter.targets!r:.200} is not known without the model; known are "
                f"{', '.join(sorted(MATRICES))}, each in every layer"
            )
        if adapter.pretrained:
            _check_begun_from(adapter, model.pretrained, targets, bool(config.get("tie_word_embeddings")))
        if adapter.dora:
            raise ValueError("memory with adapter.dora is not known without the model")
        also = frozenset(adapter.train_also)
        if not also <= TRAINED_ALSO:
            raise ValueError(
                f"memory with adapter.train_also = {adapter.train_also!r:.200} is not known without the model; known are "
                f"{', '.join(sorted(TRAINED_ALSO))}"
            )
        both = TRAINED_ALSO if also and config.get("tie_word_embeddings") else also
        beside = Beside(adapter.rank, model.weights, both, adapter.dropout > 0, targets)
    layers = language_model_layers(family, config, vocabulary, data.sequence_length, train.micro_batch, bf16, beside)
    if beside is None:
        return workload_of(layers, run)
    return workload_of(layers, run, backward_per_forward(layers, train.micro_batch * data.sequence_length))


def _settings(run: RunFile) -> Mapping[str, Any]:
    """The content of the model's config.json."""
    name = run.model.pretrained
    if (found := _json(name, CONFIG, run.own_weights)) is not None:
        return found
    if (config := _json(name, ADAPTER_CONFIG, run.own_weights)) is not None:
        adapter = _adapter(config, "model.pretrained", name)
        keys = {"rank": adapter.rank, "alpha": adapter.alpha, "rs": adapter.rs, "dora": adapter.dora}
        given: dict[str, object] = {key: value for key, value in keys.items() if value is not False}
        given["targets"] = [*adapter.targets] if isinstance(adapter.targets, tuple) else adapter.targets
        if adapter.train_also:
            given["train_also"] = [*adapter.train_also]
        raise NoSuchModel(
            f"model.pretrained is {name!r:.80}, an adapter: name its model as model.pretrained ({adapter.base!r:.200}), and in "
            f"[adapter] set pretrained = {json.dumps(name)}, "
            + ", ".join(f"{key} = {json.dumps(value)}" for key, value in given.items())
        )
    raise ValueError(
        f"model.pretrained is {name!r:.80}, not a folder with a config.json, nor read from here on the hub"
    )


def _check_begun_from(adapter: Adapter, base: str, targets: frozenset[str], is_tied: bool) -> None:
    """Raises ValueError if the adapter on the hub that the run begins with differs from the run file: nodes would refuse it.
    What is not read from here, nodes check. ``base``: the model. ``is_tied``: its head is its embedding, and both are
    trained as one."""
    name = adapter.pretrained
    if not is_on_hub(name):  # a folder on this disk has been read, and other places only nodes read
        return
    if (config := _json(name, ADAPTER_CONFIG)) is None:
        return
    found = _adapter(config, "adapter.pretrained", name)
    try:
        check_base(found, base, name)
        check_same(found, adapter, name)
    except ValueError as problem:
        raise NoSuchModel(str(problem)) from None
    theirs = MATRICES if found.targets == "all-linear" else frozenset(found.targets)
    for key, mine, others in (
        ("targets", targets, theirs),
        ("train_also", frozenset(adapter.train_also), frozenset(found.train_also)),
    ):
        if mine != others and not (is_tied and key == "train_also" and mine and others):
            raise NoSuchModel(
                f"adapter.{key} = {json.dumps(sorted(mine))}, but the adapter in {name} has {json.dumps(sorted(others))}; set "
                f"{key} = {json.dumps(sorted(others))} in [adapter]"
            )


def _adapter(config: Mapping[str, Any], key: str, name: str) -> PublishedAdapter:
    """The adapter that an adapter_config.json describes. Raises NoSuchModel if no run can train it further."""
    try:
        return published_adapter(config, name)
    except ValueError as problem:
        raise NoSuchModel(f"{key}: {problem}") from None


def _json(name: str, file: str, own: Path | None = None) -> dict[str, Any] | None:
    """The content of a file of the published model or adapter: in a folder, or on the Hugging Face hub, if its library is
    installed. ``own``: the folder on this disk, if the name is a URL of that. None if it cannot be read."""
    repository, _, revision = name.partition("@")
    try:
        folder = own or Path(name).expanduser()
        if folder.is_dir() or not is_on_hub(name):
            content = (folder / file).read_bytes()
        else:
            place = f"{repository}@{revision}" if revision else repository
            content = fsspec.filesystem("hf").cat_file(f"{place}/{file}")
        found = json.loads(content)
    except Exception:  # whatever the hub's library raises
        return None
    return found if isinstance(found, dict) else None
