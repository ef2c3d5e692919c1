"""Data sets of the Hugging Face hub, or folders of that form, read record by record."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from dtfm.installed import install_line
from dtfm.node.data.problems import in_one_line
from dtfm.node.data.reaching import hub_cache, hub_token, needs_leave
from dtfm.protos.places import hub_name


def hub_records(place: str, split: str, key: str) -> Iterator[tuple[Any, str]]:
    """The records of "hf:NAME[:CONFIG][@REVISION]", and each one's place. ``key``: the run file's. Raises ValueError."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{key}: {place!r} needs the package datasets; install it with: {install_line('hub')}"
        ) from None
    path, config, revision = hub_name(place)
    here = Path(path).expanduser().exists()
    if here:
        path = str(Path(path).expanduser().resolve())
    datasets.disable_progress_bars()
    token, cache = hub_token(path), None if here else hub_cache(path)
    try:
        builder: Any = datasets.load_dataset_builder(
            path, config or None, revision=revision or None, token=token, cache_dir=cache
        )
        # Its author can name any files of this machine, and URLs that this machine's token opens.
        own = f"{path}/" if here else f"hf://datasets/{path}@"
        for file in chain.from_iterable((builder.config.data_files or {}).values()):
            if not file.startswith(own) or "/../" in file or "::" in file:
                raise ValueError(f"it names {file}, which is not part of it")
        for number, record in enumerate(builder.as_streaming_dataset(split), start=1):
            yield record, f"{key}: {place}, record {number}"
    except Exception as problem:
        why = f"{in_one_line(problem)}){'' if here else needs_leave(path)}"
        raise ValueError(
            f"{key}: {place!r} cannot be loaded ({why}; give the name of a data set with a split "
            f"{split!r} on the Hugging Face hub, or hf:/path/to/a/folder"
        ) from problem
