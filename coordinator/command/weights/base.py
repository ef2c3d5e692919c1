"""The published model of a run with an adapter: where this machine finds its files, and whether the nodes have read the same
ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec

from dtfm.coordinator.command.weights.stored import Stored, look_at
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError
from dtfm.protos.places import COORDINATORS_DISK, PRETRAINED, is_local_name, told_by
from dtfm.protos.published_files import (
    CONFIG,
    GENERATION,
    INDEX,
    MOST_HEADER_BYTES,
    MOST_JSON_BYTES,
    READERS,
    SINGLE,
)
from dtfm.protos.run_file.run_file import RunFile
from dtfm.protos.weights_fingerprint import Described, digest_of_files, digest_of_pieces, picked_pieces


@dataclass(frozen=True, slots=True)
class Base:
    """The model's files. ``names``: by file of weights, the tensors that the model has of it."""

    name: str
    filesystem: Any
    path: str
    config: dict[str, Any]
    files: tuple[Stored, ...]
    names: tuple[frozenset[str], ...]
    described: Described

    def fingerprint(self, seed: int) -> str:
        """The fingerprint (hex) that nodes of a run with this ``seed`` say, see protos/weights_fingerprint.py. Reads some bytes
        of each tensor."""
        where = {
            tensor.name: (file, tensor)
            for file, names in zip(self.files, self.names, strict=True)
            for tensor in file.tensors
            if tensor.name in names
        }

        def content(piece: tuple[str, int, int]) -> tuple[str, bytes]:
            name, begin, end = piece
            file, tensor = where[name]
            start = file.data_begin + tensor.begin
            if begin == end:
                return name, b""
            return name, self.filesystem.cat_file(file.path, start=start + begin, end=start + end)

        sizes = {name: tensor.end - tensor.begin for name, (_, tensor) in where.items()}
        with ThreadPoolExecutor(READERS, "base") as readers:
            pieces = readers.map(content, picked_pieces(sizes, seed))
            return (digest_of_files(self.described) + digest_of_pieces(pieces)).hex()

    def text_files(self) -> Iterator[tuple[str, bytes]]:
        """The names and the contents of its settings."""
        yield CONFIG, json.dumps(self.config, indent=2, sort_keys=True).encode() + b"\n"
        with suppress(FileNotFoundError):
            yield GENERATION, self.filesystem.cat_file(f"{self.path}/{GENERATION}", start=0, end=MOST_JSON_BYTES)


def open_base(run: RunFile, commit: str) -> Base:
    """The model that the run names as `model.pretrained`. ``commit``: the revision on the hub that nodes have read; empty: not
    known. Raises CheckpointError if this machine cannot read it."""
    name = run.model.pretrained
    try:
        filesystem, path = _found(run, commit)
        return _read(name, filesystem, path)
    except CheckpointError:
        raise
    except Exception as problem:  # whatever the file system raises
        missing = problem if isinstance(problem, FileNotFoundError) else None
        why = told_by(name, problem) if missing is None else f"there is no {missing.filename or missing}"
        raise CheckpointError(
            f"model.pretrained is {name!r:.200}, which this machine cannot read ({why}). Run the command where the model is, as "
            "on a node's machine: dtfm-coordinator export --merged DIR INVITATION"
        ) from None


def _found(run: RunFile, commit: str) -> tuple[Any, str]:
    """The file system and the path of the model's folder. Raises whatever the file system raises."""
    name, own = run.model.pretrained, run.own_weights
    if own is not None:
        return _place(str(own) if own.is_dir() else f"{COORDINATORS_DISK}/{PRETRAINED}")
    if Path(name).expanduser().is_dir():
        return _place(str(Path(name).expanduser()))
    if "://" in name:
        return _place(name)
    repository, _, revision = name.partition("@")
    if is_local_name(name) or repository.count("/") > 1:
        raise FileNotFoundError(2, "no such folder", name)
    return _on_hub(repository, commit or revision)


def _place(name: str) -> tuple[Any, str]:
    filesystem, path = fsspec.url_to_fs(name)
    return filesystem, str(path).rstrip("/")


def _on_hub(repository: str, revision: str) -> tuple[Any, str]:
    """The repository in the hub's cache on this machine if all of it is there, otherwise on the hub."""
    if find_spec("huggingface_hub") is None:
        raise ModuleNotFoundError("to read from the hub needs huggingface_hub: pip install huggingface_hub")
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(repository, revision=revision or None, local_files_only=True)
        filesystem, path = _place(folder)
        _read(repository, filesystem, path)
    except Exception:  # the cache lacks it, or a part
        return huggingface_hub.HfFileSystem(), f"{repository}@{revision}" if revision else repository
    return filesystem, path


def _read(name: str, filesystem: Any, path: str) -> Base:
    """The model in a folder, by its settings and the headers of its files."""
    described: Described = []

    def json_file(file: str) -> dict[str, Any]:
        content = filesystem.cat_file(f"{path}/{file}", start=0, end=MOST_JSON_BYTES)
        described.append((file, len(content), content))
        found = json.loads(content)
        if not isinstance(found, dict):
            raise CheckpointError(f"{path}/{file} is not a JSON object; copy the model again")
        return found

    config = json_file(CONFIG)
    index = json_file(INDEX).get("weight_map") if filesystem.exists(f"{path}/{INDEX}") else None
    beside = sorted(set(map(str, index.values()))) if isinstance(index, dict) else [SINGLE]
    if (index is not None and not isinstance(index, dict)) or any(Path(file).name != file for file in beside):
        raise CheckpointError(f"{path}/{INDEX} does not name files beside it; copy the model again")
    files, names = list[Stored](), list[frozenset[str]]()
    for file in beside:
        size = filesystem.size(f"{path}/{file}")
        stored = look_at(filesystem, f"{path}/{file}", size, MOST_HEADER_BYTES)
        described.append((file, size, stored.header))
        files.append(stored)
        names.append(frozenset(each.name for each in stored.tensors if index is None or index.get(each.name) == file))
    return Base(name, filesystem, path, config, tuple(files), tuple(names), described)
