"""The model card, README.md, of weights that a run has trained: what they are, where they come from, how to load them.

The card goes with the weights, perhaps to strangers. So it names only public things, and no path or address of the run's owner.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtfm import __version__
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos.places import is_local_name

CARD = "README.md"
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Card:
    """The facts of a model card."""

    run: Mapping[str, Any]
    """The run file as JSON."""
    run_id: str
    step: int
    digest: str
    """The BLAKE3 (hex) of the checkpoint's manifest."""
    tokens: int | None = None
    """The tokens trained up to ``step``. None: not known."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """The losses at ``step``, by name. Empty: not known."""
    files: Mapping[str, str] = field(default_factory=dict)
    """By name, the BLAKE3 (hex) of each file of weights."""
    command: str = ""
    """The command that has written the weights."""
    merged: bool = False
    """The adapter that the run has trained is merged with its model."""

    def text(self) -> str:
        model, data, train = (self.run.get(table) or {} for table in ("model", "data", "train"))
        base = _on_hub(str(model.get("pretrained", "")))
        places = [str(each.get("source", "")) for each in data.get("sources") or [data]]
        sources = [name for name in map(_data_on_hub, places) if name]
        is_adapter = bool(self.run.get("adapter")) and not self.merged
        library = "peft" if is_adapter else "transformers"
        tags = {"library_name": library, "tags": ["dtfm"], "base_model": base, "datasets": sources}
        rows = {
            "Run": f"{_plain(self.run.get('name', ''))} (id {self.run_id})",
            "Base model": base or _base(model, self.run.get("seed")),
            "Data": ", ".join(dict.fromkeys(_data_on_hub(place) or _data(place) for place in places)),
            "Steps": f"{self.step:,} of {train['steps']:,}"
            if isinstance(train.get("steps"), int)
            else f"{self.step:,}",
            "Tokens": f"{self.tokens:,}" if self.tokens else "",
            **{name: f"{loss:.4f} nats per token" for name, loss in self.losses.items()},
            "Checkpoint": f"manifest BLAKE3 `{self.digest}`",
            "Written by": f"`{self.command}`" if self.command else "",
            **{name: f"BLAKE3 `{digest}`" for name, digest in self.files.items()},
        }
        lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in tags.items() if value), "---", ""]
        lines += [f"# {_plain(self.run.get('name', '')) or 'A model'}", ""]
        lines += [f"Trained by several machines together, with dtfm {__version__}.", "", "| | |", "|---|---|"]
        lines += [f"| {_plain(key)} | {value} |" for key, value in rows.items() if value]
        if is_adapter:
            lines += [
                "",
                "```python",
                "from peft import AutoPeftModelForCausalLM",
                "from transformers import AutoTokenizer",
                "",
            ]
            lines += ["model = AutoPeftModelForCausalLM.from_pretrained(FOLDER)"]
            lines += ["tokenizer = AutoTokenizer.from_pretrained(FOLDER)", "```"]
        elif model.get("family") != "module":
            lines += ["", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
            lines += [f"{name} = Auto{kind}.from_pretrained(FOLDER)" for name, kind in _LOADED.items()] + ["```"]
        return "\n".join(lines) + "\n"


_LOADED = {"model": "ModelForCausalLM", "tokenizer": "Tokenizer"}


def card_of(ledger: Ledger, step: int, digest: str) -> Card:
    """The log's facts about the checkpoint of ``step``."""
    described, last, held_out = ledger.described, ledger.training.last, ledger.evaluated
    batch = (ledger.run.get("train") or {}).get("global_batch")
    batches = ledger.training.batches(step)
    tokens = described.tokens_per_sample * batch * batches if described is not None and isinstance(batch, int) else None
    losses = {}
    if held_out is not None and held_out.step <= step:
        losses[f"Held-out loss after step {held_out.step:,}"] = held_out.loss
    if last is not None and last.step == step:
        losses[f"Training loss of step {step:,}"] = last.loss
    return Card(ledger.run, ledger.run_id, step, digest, tokens, losses)


def _on_hub(name: str) -> str:
    """The name of a repository on the Hugging Face hub, without its revision. Empty: ``name`` may be elsewhere."""
    name = name.partition("@")[0]
    return name if _ON_HUB.fullmatch(name) and not is_local_name(name) else ""


def _data_on_hub(source: str) -> str:
    return _on_hub(source.removeprefix("hf:").partition(":")[0]) if source.startswith("hf:") else ""


def _base(model: Mapping[str, Any], seed: Any) -> str:
    if model.get("pretrained"):
        return "weights of the run's owner"
    return f"none: {_plain(model.get('family', ''))} with random weights, seed {_plain(seed)}"


def _data(source: str) -> str:
    return "the source text of Python's standard library" if source == "python-stdlib" else "files of the run's owner"


def _plain(text: object) -> str:
    """The text as one line of a table. Characters with a meaning in Markdown or HTML are changed."""
    return re.sub(r"[\s|`<>\[\]\\]+", " ", str(text)).strip()
