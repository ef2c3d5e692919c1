"""The layers of a language model from its transformers config, without the model: one that is trained, or one that stays as it is
beside an adapter.

A node counts them on the model itself, whatever its family (node/model/cost/layer_costs.py). The sums here agree with that:
exactly, except ``working_bytes``, which are within 1 %, with dropout within 3 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from dtfm.scheduler.formats.model_config import NoSuchModel, check_model
from dtfm.scheduler.model.workload import Layer

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "head_dim",
)
FAMILIES: dict[str, tuple[int | None, ...]] = {
    "llama": (4096, 32, 32, None, 11008, None),
    "mistral": (4096, 32, 32, 8, 14336, None),
    "qwen2": (4096, 32, 32, 32, 22016, None),
    "qwen3": (4096, 32, 32, 32, 22016, 128),
}
"""The families whose sums are known, with transformers' defaults for _SIZES. None: the default follows from other sizes."""
_USUAL = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
"""Settings that change a layer, each with the value that the sums assume."""
_NEUTRAL = ("attention_dropout", "initializer_range", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
KNOWN = {
    *_SIZES,
    *_USUAL,
    *_NEUTRAL,
    "rope_theta",
    "rope_scaling",
    "sliding_window",
    "tie_word_embeddings",
    "vocab_size",
}
"""Settings that may be given; others may change a layer in unknown ways."""


MATRICES = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""The matrices of a decoder layer of these families. An adapter may stand beside each of them."""

TRAINED_ALSO = frozenset({"embed_tokens", "lm_head"})
"""The modules outside the decoder layers that may be trained beside an adapter."""


@dataclass(frozen=True, slots=True)
class Beside:
    """An adapter of this ``rank`` beside each of ``targets``, which are some of MATRICES. ``weights``: how nodes keep MATRICES,
    as the run file says. ``also``: of TRAINED_ALSO, the modules that are trained whole; tied ones both. ``drops``: the adapter
    has dropout."""

    rank: int
    weights: str
    also: frozenset[str] = frozenset()
    drops: bool = False
    targets: frozenset[str] = MATRICES

    def packed(self, matrix: Sequence[int], byte: int) -> int:
        """The bytes of a frozen matrix of a decoder layer, as node/model/causal/quantised.py counts them. ``byte``: those of a
        number that is computed with."""
        count = prod(matrix)
        if self.weights == "int8":
            return count + 4 * matrix[0]
        if self.weights == "nf4":
            scales = -(-count // 64)
            return -(-count // 2) + scales + 4 * -(-scales // 256) + 4 * 273
        return byte * count


def language_model_layers(
    family: str,
    config: Mapping[str, Any],
    vocabulary: int,
    length: int,
    micro_batch: int,
    bf16: bool,
    beside: Beside | None = None,
) -> tuple[Layer, ...]:
    """Embedding, decoder layers and head, for samples of ``length`` tokens. Weights are in fp32. With ``beside`` they are
    frozen, and the adapter beside them is trained.

    Raises ValueError for a model that is not known well enough, and NoSuchModel for one that transformers does not build, or
    beside which no such adapter fits.
    """
    if family not in FAMILIES:
        raise ValueError(f"model.family is {family!r}; known without the model are {', '.join(FAMILIES)}")
    for key, value in config.items():
        if key not in KNOWN or _USUAL.get(key, value) != value:
            raise ValueError(f"model.config.{key} is {value!r:.80}; what that changes is not known without the model")
    if (window := config.get("sliding_window", 4096 if family == "mistral" else None)) and window < length:
        raise ValueError(f"model.config.sliding_window is {window}, less than the {length} tokens of a sample")
    sizes = [
        usual if (given := config.get(key)) is None else given
        for key, usual in zip(_SIZES, FAMILIES[family], strict=True)
    ]
    if wrong := [
        key for key, size in zip(_SIZES, sizes, strict=True) if size is not None and (type(size) is not int or size < 1)
    ]:
        raise ValueError(f"model.config.{wrong[0]} is {config[wrong[0]]!r:.80}; it must be a whole number above 0")
    hidden, count, heads, key_heads, inner, head = (size or 0 for size in sizes)
    key_heads, head = key_heads or heads, head or hidden // heads
    check_model(family, config, hidden, heads, key_heads, head)
    queries, keys, tokens, byte = heads * head, key_heads * head, micro_batch * length, 2 if bf16 else 4

    # Bytes per token. A norm keeps its input in fp32, a root, and two values in the precision that is computed in.
    output = byte * hidden
    norm = 4 * hidden + 4 + 2 * output
    inputs = output if bf16 else 0  # in fp32 the first norm keeps the same tensor
    kept = inputs + 2 * norm + byte * (2 * queries + 2 * keys + 4 * inner) + 4 * heads
    matrices = 2 * hidden * (queries + keys) + 3 * hidden * inner
    parameters = matrices + 2 * hidden
    if family == "qwen2":
        parameters += queries + 2 * keys
    elif family == "qwen3":
        parameters += 2 * head
        kept += (4 + byte) * (queries + keys) + 4 * (heads + key_heads)
    shapes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    vectors = parameters - matrices
    trained, frozen, products = parameters, 0, matrices
    feeding = byte * max(2 * tokens * inner, hidden * inner + tokens * inner) + tokens * output
    unpacked = 0
    if beside is not None:
        adapted = [shapes[name] for name in sorted(beside.targets)]
        if beside.rank > min(map(min, adapted)):
            rows, columns = min(adapted, key=min)
            raise NoSuchModel(
                f"adapter.rank = {beside.rank}: the decoder layers have a matrix of {rows} times {columns}; the rank must be at "
                f"most {min(rows, columns)}"
            )
        trained = beside.rank * sum(map(sum, adapted))
        products += trained
        frozen = sum(beside.packed(shape, byte) for shape in shapes.values()) + byte * vectors
        has_last = "down_proj" in beside.targets
        # Frozen norms do not keep what they multiply with their weights, and frozen matrices do not keep their inputs.
        kept -= 4 * output + byte * inner + (byte * (queries + keys) if family == "qwen3" else 0)
        # Each adapter keeps its input, and the product of its first matrix.
        kept += byte * beside.rank * len(adapted)
        if beside.drops:  # without what it drops, and a byte per number that says which these are
            kept += (byte + 1) * sum(columns for _, columns in adapted)
        else:
            kept += output * (not beside.targets.isdisjoint(("q_proj", "k_proj", "v_proj")))
            kept += output * (not beside.targets.isdisjoint(("gate_proj", "up_proj"))) + byte * inner * has_last
        # The last matrix's adapter makes room for a gradient: it frees its input, and its first product.
        feeding = byte * tokens * (3 * inner - has_last * (inner + beside.rank)) + tokens * output
        if beside.drops and has_last:  # its mask is made, or its gradient goes back through it
            masking = tokens * (7 * inner + (8 if bf16 else 12) * hidden + 4) + 4 * inner
            feeding = max(feeding, masking, byte * (3 * tokens * inner + beside.rank * (inner + hidden)))
        unpacked = byte * max(map(prod, shapes.values())) if beside.weights != "bf16" else 0
    decoder = (
        2 * tokens * products + 4 * tokens * length * queries,
        4 * trained,
        tokens * output,
        tokens * kept + 2 * length * head * byte,
        max(feeding, tokens * hidden * (10 if bf16 else 12)) + unpacked,
        frozen,
    )
    table, angles = vocabulary * hidden, length * (18 * head + 8)
    also = TRAINED_ALSO if beside is None else beside.also
    has_table, has_head = "embed_tokens" in also, "lm_head" in also
    of_norm = hidden if beside is None else 0  # trained
    if beside is not None:
        norm -= output if has_head else 2 * output
    working = tokens * output + max(byte * table * has_table, angles)
    kept, worked = _head_memory(tokens, hidden, vocabulary, byte, inputs + norm, byte * table * has_head, not of_norm)
    return (
        Layer(
            "embedding", 0, 4 * table * has_table, tokens * output, 8 * tokens, working, byte * table * (not has_table)
        ),
        *(Layer(f"layer {number}", *decoder) for number in range(1, count + 1)),
        Layer(
            "head",
            2 * tokens * table,
            4 * (table * has_head + of_norm),
            tokens * vocabulary * byte,
            kept,
            worked,
            byte * (table * (not has_head) + hidden - of_norm),
        ),
    )


def backward_per_forward(layers: Sequence[Layer], tokens: int) -> float:
    """Workload.backward_per_forward of layers with an adapter, for micro-batches of this number of tokens."""
    forward = sum(layer.forward_flops for layer in layers)
    return 1 + sum(min(layer.forward_flops, tokens * layer.parameter_bytes / 2) for layer in layers) / forward


def _head_memory(
    tokens: int, hidden: int, vocabulary: int, byte: int, normed: int, gradient: int, norm_is_frozen: bool
) -> tuple[int, int]:
    """The bytes that the head keeps, and the bytes that it works with. ``normed`` are the bytes that it keeps per token without
    logits, and ``gradient`` those of its matrix's gradient.

    Logits are made for some tokens at a time, as node/model/loss.py says (chunk_tokens).
    """
    of_norm = tokens * hidden * (16 if byte == 2 else 12)
    chunk = -(-tokens // -(-tokens // max(256, (64 << 20) // (4 * vocabulary))))
    if chunk == tokens:
        if norm_is_frozen:  # what trained weights keep
            of_norm += tokens * (byte * hidden * (1 if gradient else 2) - 4)
        of_loss = max(8 * tokens * vocabulary, gradient + tokens * byte * hidden)
        return tokens * (4 * vocabulary + normed + 12) + 4, max(
            of_loss, of_norm - 4 * tokens * vocabulary
        ) - 12 * tokens
    if not gradient:  # the gradient of the hidden states is there, in place of what trained weights keep
        normed += byte * hidden
        of_norm += tokens * (byte * hidden - 4) + 4
    logits, labels = chunk * vocabulary, tokens * (byte * hidden + 12)
    of_loss = max(12 * logits - gradient, byte * (logits + chunk * hidden)) + labels
    return tokens * normed + gradient, max(of_loss, of_norm - gradient)
