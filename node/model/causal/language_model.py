"""Any transformers causal language model, cut between its decoder layers.

Layer 0 is the embedding, layers 1 to N are the decoder layers, and layer N + 1 is the final norm and the head.
"""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from dtfm.node.data.problems import in_one_line
from dtfm.node.data.samples import Sample
from dtfm.node.data.text.tokenizer import Tokenizer, check_vocabulary
from dtfm.node.model.bucket import BucketSpec, views
from dtfm.node.model.causal.anatomy import Anatomy, NotSeparable, dissect
from dtfm.node.model.causal.config import build, configure, text_tower
from dtfm.node.model.causal.exported import generation_settings, save_config
from dtfm.node.model.causal.pretrained import Pretrained
from dtfm.node.model.causal.slice import ISOLATING, Slice, documents_not_looked_for, has_separate_head
from dtfm.node.model.causal.trial import SeesTheFuture, try_layers
from dtfm.node.model.causal.weight_files import WeightFiles
from dtfm.node.model.model import Model, Part
from dtfm.node.model.stage import install
from dtfm.protos.plan_pb2 import Run

log = logging.getLogger(__name__)

_MOST_TRIED = 1 << 20
"""Parameters of a layer whose initial values are made once to see that all are set."""


class CausalLM(Model):
    """A whole model that is trained, from its beginning or from published weights."""

    def __init__(self, module: PreTrainedModel, sample: Sample, anatomy: Anatomy, files: WeightFiles | None) -> None:
        super().__init__(module, sample, anatomy.layers)
        self._files, self._pretrained = files, Pretrained(files, module) if files is not None else None
        self._anatomy = anatomy

    def cut(self, module: nn.Module, first: int, past_last: int, checkpointed: bool = False) -> Part:
        assert isinstance(module, PreTrainedModel)
        return self._part(Slice(module, self._anatomy, first, past_last, checkpointed, self.compiles), past_last)

    def layerwise(self, module: nn.Module) -> Iterator[Part]:
        assert isinstance(module, PreTrainedModel)
        moving = Slice(module, self._anatomy, 0, 1)
        with documents_not_looked_for(self.sample.isolated):
            for number in range(len(self.layers)):
                moving.move(number, number + 1)
                yield self._part(moving, number + 1)

    def _part(self, slice_: Slice, past_last: int) -> Part:
        separate = self._anatomy.separate_head and past_last == len(self.layers)
        return Part(slice_.body, slice_.head if separate else None)

    def weights_fingerprint(self, seed: int) -> bytes:
        return b"" if self._files is None else self._files.digest + self._files.digest_of_values(seed)

    def buffer_dtype(self, computes_in: torch.dtype) -> torch.dtype:
        """Rotary frequencies stay in float32, as transformers keeps them."""
        return torch.promote_types(computes_in, torch.float32)

    def initial_parameters(self, bucket: BucketSpec, seed: int) -> dict[str, torch.Tensor]:
        if self._files is None or self._pretrained is None:
            return super().initial_parameters(bucket, seed)
        before = self._files.bytes_read
        values = self._pretrained.read(name for name, _ in bucket.parameters)
        read = self._files.bytes_read - before
        log.info("bucket %d: read %d bytes of %s", bucket.index, read, self._files.name)
        return {name: values[name] for name, _ in bucket.parameters}

    def initialise_module(self, module: nn.Module) -> None:
        assert isinstance(self.module, PreTrainedModel)
        self.module._init_weights(module)

    def save_config(self, folder: Path, dtype: torch.dtype, special_ids: Mapping[str, int]) -> None:
        assert isinstance(self.module, PreTrainedModel)
        save_config(
            self.module, folder, dtype, special_ids, self._files.generation if self._files is not None else None
        )

    def whole(
        self,
        trained: Mapping[int, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        special_ids: Mapping[str, int],
    ) -> PreTrainedModel:
        """The model of all layers, for writing text on ``device``. ``trained``: by bucket, the flat parameters there, in
        ``dtype``, without a copy. ``special_ids``: the tokenizer's, as for `save_config`."""
        module = copy.deepcopy(self.module)
        assert isinstance(module, PreTrainedModel)
        parameters = dict(self.frozen.into(module, 0, len(self.layers), device, dtype))
        for spec in self.buckets:
            for name, value in views(trained[spec.index], spec.parameters).items():
                parameters[name] = nn.Parameter(value, requires_grad=False)
        install(self, module, parameters, device, dtype)
        own = self._files.generation if self._files is not None else None
        how = generation_settings(module.config.to_dict(), special_ids, own)
        module.generation_config = GenerationConfig.from_dict(how)
        return module.eval()


def load_causal_lm(
    family: str,
    config_json: str,
    sample: Sample,
    pretrained: str = "",
    tokenizer: Tokenizer | None = None,
    *,
    adapter: Run.Adapter | None = None,
    weights: str = "bf16",
) -> CausalLM:
    """The causal LM of that transformers model_type and config, for samples of token ids (shape [sequence_length]).

    ``pretrained`` names the weights to begin with. They bring the family and the config themselves (see WeightFiles), and must
    fit ``tokenizer``. With an ``adapter`` they stay as they are, kept as ``weights`` says.

    Raises:
        ValueError: unknown family, a config that it does not take, layers that cannot be separated, or an adapter that does not
        fit.
    """
    files = WeightFiles(pretrained) if pretrained else None
    if files is not None and (tower := text_tower(files.config)) is not None:
        if adapter is not None:
            raise ValueError(
                f"adapter: {files.name} also reads images or sounds, and adapters for such models are not supported yet; name a "
                "model of text alone, or remove the table to train the language model in it"
            )
        log.info("of %s the language model alone is trained, without what reads images or sounds", files.name)
        family = "" if family == files.config["model_type"] else family
        files.keep_text_tower(tower)
    if files is not None and tokenizer is not None:
        _check_tokenizer_fits(files, tokenizer)
    config = configure(family, config_json, sample, files.config if files is not None else None)
    family = config.model_type
    if sample.isolated and family not in ISOLATING:
        raise ValueError(
            f"data.isolate_documents: of model.family {family!r} it is not known that attention can stop at the borders of "
            f"documents; leave it out, or choose one of {', '.join(sorted(ISOLATING))}"
        )
    if tokenizer is not None and files is not None:
        check_vocabulary(pretrained, config.vocab_size, tokenizer)
    module, anatomy = _dissected(config, sample)
    try:
        try_layers(module, anatomy)
    except SeesTheFuture as layer:
        fix = "set is_decoder = true in [model.config], or " if getattr(config, "is_decoder", None) is False else ""
        raise ValueError(
            f"model.family: {family!r} is not causal: {layer} sees the tokens that come after, so that the model would learn to "
            f"copy the next token instead of predicting it; {fix}choose another family"
        ) from None
    except Exception as problem:
        raise ValueError(
            f"model.family: {family!r} cannot be computed one layer at a time ({in_one_line(problem)}); choose another family"
        ) from problem
    if adapter is not None:
        from dtfm.node.model.causal.adapted_model import AdaptedLM  # peft takes seconds to import

        assert files is not None, "the run file sees to it"
        return AdaptedLM(module, sample, anatomy, files, adapter, weights)
    model = CausalLM(module, sample, anatomy, files)
    if files is None:
        _check_initial_values(model, family)
    return model


def _check_tokenizer_fits(files: WeightFiles, tokenizer: Tokenizer) -> None:
    """Raises ValueError if the tokenizer makes ids that the weights do not know."""
    known = files.config.get("vocab_size")
    if not isinstance(known, int) or tokenizer.size <= known:
        return
    if tokenizer.name == files.name:
        raise ValueError(
            f"model.pretrained: the tokenizer of {files.name!r} makes {tokenizer.size} different tokens, but the weights know "
            f"only {known} (vocab_size in its config.json); give data.tokenizer the name of one with at most {known}"
        )
    raise ValueError(
        f"data.tokenizer: {tokenizer.name!r} makes {tokenizer.size} different tokens, but model.pretrained {files.name!r} knows "
        f"only {known} (vocab_size in its config.json); leave data.tokenizer out, or name the one that it was trained with"
    )


def _dissected(config: PretrainedConfig, sample: Sample) -> tuple[PreTrainedModel, Anatomy]:
    family = config.model_type
    try:
        module = build(config)
        anatomy = dissect(module, sample)
        return module, replace(anatomy, separate_head=has_separate_head(module, anatomy, sample))
    except NotSeparable as problem:
        raise ValueError(
            f"model.family: {family!r} cannot be cut into layers: {problem}; choose another family"
        ) from None
    except DataDependentOutputException as problem:
        if "dynamic" in str(getattr(config, "rope_parameters", None)):
            raise ValueError(
                'model.config: rope_type "dynamic" changes with the length of each text, and stages cannot follow that; set '
                'rope_type to "linear" or "yarn". Up to max_position_embeddings, "default" computes the same'
            ) from None
        raise ValueError(
            f"model.family: {family!r} cannot be cut into layers: its forward pass looks at the values of its own tensors "
            f"({_place(problem)}), as with experts that get a varying number of tokens; choose another family"
        ) from None
    except Exception as problem:
        raise ValueError(f"model.config: {family!r} cannot be built from it: {in_one_line(problem)}") from problem


def _place(problem: Exception) -> str:
    """Where in the family's own code the problem arose."""
    frames = [each for each in traceback.extract_tb(problem.__traceback__) if "/models/" in each.filename]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else in_one_line(problem)


def _check_initial_values(model: CausalLM, family: str) -> None:
    """Raises ValueError if a family leaves parameters of a layer unset, unless its layers are so large that this takes long."""
    for bucket in model.buckets[1 : len(model.layers)]:
        if bucket.size <= _MOST_TRIED:
            try:
                model.initial_parameters(bucket, 1)
            except ValueError as problem:
                raise ValueError(f"model.family: {family!r}: {problem}") from None
