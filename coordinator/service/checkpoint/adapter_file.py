"""A trained adapter under peft's names: adapter_model.safetensors, beside the adapter_config.json that a node has written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dtfm.protos.bucket_layout import LENGTH_BYTES, further_names
from dtfm.protos.places import COORDINATOR
from dtfm.protos.published_files import ADAPTER, ADAPTER_CONFIG, in_peft


def has_adapter(run: Mapping[str, Any]) -> bool:
    """Whether the run, a run file as JSON, trains an adapter."""
    return bool(run.get("adapter"))


def checked_config(text: bytes, run: Mapping[str, Any]) -> bytes:
    """The content of adapter_config.json as a node has written it, with the run file's model, rank and factor: otherwise a member
    could have others load another model. Raises ValueError if it is no JSON object."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{ADAPTER_CONFIG} is not a JSON object")
    name, _, revision = str(run["model"]["pretrained"]).removeprefix(f"{COORDINATOR}://").partition("@")
    commit = str(found.get("revision"))
    known = {
        "peft_type": "LORA",
        "auto_mapping": None,
        "base_model_name_or_path": name,
        "revision": commit if re.fullmatch(r"[0-9a-f]{40}", commit) else revision or None,
        "r": run["adapter"].get("rank"),
        "lora_alpha": run["adapter"].get("alpha"),
        "use_rslora": bool(run["adapter"].get("rs")),
        "use_dora": bool(run["adapter"].get("dora")),
        "lora_dropout": run["adapter"].get("dropout") or 0.0,
    }
    return (json.dumps(found | known, indent=2, sort_keys=True) + "\n").encode()


def write_adapter(filesystem: Any, path: str, files: Sequence[tuple[str, bytes]], piece_bytes: int) -> None:
    """Writes the adapter of a checkpoint with the weights alone into its folder at ``path``. ``files``: the name of each bucket's
    file, and the text of its header."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for _, header in files:
        named = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        for name, entry in sorted(named.items(), key=lambda item: item[1]["data_offsets"]):
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            for each in (name, *further_names(header)):
                entries[in_peft(each)] = entry | {"data_offsets": (begin, begin + size)}
                begin += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with filesystem.open(f"{path}/{ADAPTER}.safetensors", "wb") as out:
        out.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name, header in files:
            with filesystem.open(f"{path}/{name}", "rb") as bucket:
                for _ in (name, *further_names(header)):
                    bucket.seek(LENGTH_BYTES + len(header))
                    while piece := bucket.read(piece_bytes):
                        out.write(piece)
