"""The model that a run names."""

from __future__ import annotations

from collections.abc import Sequence

from dtfm.node.data.samples import Sample
from dtfm.node.data.text.tokenizer import Tokenizer
from dtfm.node.data.user_code import import_allowed
from dtfm.node.model.model import Model
from dtfm.protos.plan_pb2 import Run


def load_model(
    spec: Run.Model, sample: Sample, allowed_modules: Sequence[str] = (), tokenizer: Tokenizer | None = None
) -> Model:
    """The model that a run trains on samples like ``sample``, which ``tokenizer`` made if they are text.

    ``allowed_modules`` are the import paths ("package.module" or "package.module:function") that this node's operator lets a
    run name.

    Raises:
        ValueError: unknown family, a config that the family does not take, a model that cannot be cut into layers, or pretrained
            weights of another model or another vocabulary.
    """
    model: Model
    if spec.family == "module":
        from dtfm.node.model.sequential import load_sequential

        model = load_sequential(import_allowed(spec.module, allowed_modules, "model.module"), spec.module, sample)
    else:
        from dtfm.node.model.causal.language_model import load_causal_lm  # transformers takes seconds to import

        adapter = spec.adapter if spec.HasField("adapter") else None
        model = load_causal_lm(
            spec.family, spec.config_json, sample, spec.pretrained, tokenizer, adapter=adapter, weights=spec.weights
        )
        if adapter is not None:
            return model
    for name, parameter in model.module.named_parameters():
        if not parameter.requires_grad:
            raise ValueError(
                f"model: parameter {name} has requires_grad=False; freezing is not supported, use a buffer"
            )
    return model
