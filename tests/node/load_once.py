"""Models of tests, each loaded once in a process."""

from __future__ import annotations

from collections.abc import Sequence

from dtfm.node.data.samples import Sample
from dtfm.node.data.text.tokenizer import Tokenizer
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.protos.plan_pb2 import ADAMW, Run

_known: dict[tuple[bytes, Sample], Model] = {}
"""The models of most tests, by their sources. To cut one into layers and to see what these keep takes a node half a
second of processor time."""


def load_once(
    spec: Run.Model, sample: Sample, allowed_modules: Sequence[str] = (), tokenizer: Tokenizer | None = None
) -> Model:
    """As `load_model`, for whoever changes nothing of the module. What is the same is loaded once in a process."""
    key = _key(spec, sample)
    if key not in _known:
        _known[key] = load_model(spec, sample, allowed_modules, tokenizer)
    model = _known[key]
    model.set_momentum(False)
    model.set_optimizer(ADAMW)
    model.compiles = False
    return model


def _key(spec: Run.Model, sample: Sample) -> tuple[bytes, Sample]:
    return spec.SerializeToString(deterministic=True), sample
