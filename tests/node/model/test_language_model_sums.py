"""scheduler/formats/language_model.py agrees with what a node counts on the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtfm.node.command.workload_file import describe
from dtfm.protos.run_file.run_file import parse_run
from dtfm.scheduler.formats.language_model import FAMILIES, Beside, backward_per_forward, language_model_layers
from dtfm.scheduler.formats.workload import parse_workload
from tests.published import publish

ATTENTION = frozenset({"q_proj", "v_proj"})
SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 352}
WIDE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1408}


def both(
    family: str,
    config: dict[str, Any],
    vocabulary: int,
    length: int,
    micro_batch: int,
    bf16: bool,
    beside: Beside | None = None,
    folder: Path = Path(),
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """By field, the sums and what the node counts, layer by layer. ``folder``: of the model that an adapter is ``beside``."""
    precision = "bf16" if bf16 else "fp32"
    tables: dict[str, Any] = {
        "model": {"family": family, "config": config | {"vocab_size": vocabulary}},
        "data": {"sequence_length": length},
        "train": {"micro_batch": micro_batch, "global_batch": micro_batch, "precision": precision},
    }
    if beside is not None:
        tables["model"] = {"pretrained": str(folder), "weights": beside.weights}
        tables["adapter"] = {
            "rank": beside.rank,
            "targets": sorted(beside.targets),
            "train_also": sorted(beside.also),
            "dropout": 0.05 if beside.drops else 0.0,
        }
        tables["data"]["tokenizer"] = "bytes"
    workload = parse_workload(describe(parse_run(tables, "the test")))[0]
    counted = workload.layers
    summed = language_model_layers(family, config, vocabulary, length, micro_batch, bf16, beside)
    backward = backward_per_forward(summed, micro_batch * length) if beside is not None else 2
    assert workload.backward_per_forward == pytest.approx(backward)
    assert [layer.name for layer in summed] == [layer.name for layer in counted]
    fields = "forward_flops", "parameter_bytes", "activation_bytes", "kept", "working_bytes", "frozen_bytes"
    return tuple({f: [getattr(layer, f) for layer in layers] for f in fields} for layers in (summed, counted))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("config", "vocabulary", "length", "micro_batch", "bf16"),
    [
        pytest.param(SMALL, 300, 64, 1, False, marks=pytest.mark.soak),
        (WIDE, 50_304, 1024, 4, True),
        pytest.param(SMALL, 300, 64, 1, True, marks=pytest.mark.soak),
        pytest.param(SMALL, 32_000, 512, 2, True, marks=pytest.mark.soak),
        pytest.param(WIDE, 1000, 1024, 2, False, marks=pytest.mark.soak),
        pytest.param(WIDE, 50_304, 1024, 4, False, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_layers_are_as_the_node_counts_them(
    family: str, config: dict[str, Any], vocabulary: int, length: int, micro_batch: int, bf16: bool
) -> None:
    """With little text and much, a small vocabulary and a large one: different tensors take most."""
    settings = config | {"num_hidden_layers": 2}
    if family == "qwen3":
        settings["head_dim"] = 64
    summed, counted = both(family, settings, vocabulary, length, micro_batch, bf16)
    for field in summed:
        assert summed[field] == pytest.approx(counted[field], rel=0.01 if field == "working_bytes" else 0), field


@pytest.mark.parametrize(
    ("family", "config", "vocabulary", "length", "micro_batch", "bf16", "beside"),
    [
        ("llama", SMALL, 300, 64, 1, False, Beside(4, "bf16")),
        ("qwen3", SMALL, 300, 64, 1, True, Beside(16, "nf4")),
        ("llama", SMALL, 300, 64, 1, True, Beside(4, "bf16", frozenset({"embed_tokens", "lm_head"}))),
        pytest.param(
            "llama", SMALL, 1000, 1024, 64, True, Beside(16, "nf4", frozenset({"lm_head"})), marks=pytest.mark.soak
        ),
        pytest.param(
            "qwen3", WIDE, 300, 1024, 64, False, Beside(4, "nf4", frozenset({"embed_tokens"})), marks=pytest.mark.soak
        ),
        ("llama", SMALL, 300, 64, 1, False, Beside(4, "bf16", drops=True)),
        ("qwen3", SMALL, 300, 64, 1, True, Beside(4, "nf4", targets=ATTENTION)),
        *(
            pytest.param(
                family,
                SMALL,
                300,
                64,
                1,
                bf16,
                Beside(4, "bf16", drops=drops, targets=frozenset(targets)),
                marks=pytest.mark.soak,
            )
            for family, bf16, drops, targets in (
                ("qwen3", False, False, ["o_proj"]),
                ("qwen2", True, False, ["up_proj"]),
                ("llama", True, False, ["k_proj", "down_proj"]),
                ("llama", True, True, ["q_proj", "gate_proj"]),
                ("llama", False, True, ["down_proj"]),
            )
        ),
        pytest.param("llama", WIDE, 300, 1024, 4, True, Beside(16, "bf16", drops=True), marks=pytest.mark.soak),
        pytest.param(
            "llama", WIDE, 300, 1024, 4, True, Beside(16, "nf4", frozenset({"lm_head"})), marks=pytest.mark.soak
        ),
        pytest.param("qwen2", SMALL, 300, 64, 1, True, Beside(16, "int8"), marks=pytest.mark.soak),
        pytest.param("llama", SMALL, 1000, 1024, 64, True, Beside(16, "nf4"), marks=pytest.mark.soak),
        pytest.param("qwen3", WIDE, 300, 1024, 64, False, Beside(4, "nf4"), marks=pytest.mark.soak),
    ],
)
def test_so_are_those_beside_an_adapter(
    tmp_path: Path,
    family: str,
    config: dict[str, Any],
    vocabulary: int,
    length: int,
    micro_batch: int,
    bf16: bool,
    beside: Beside,
) -> None:
    settings = config | {"num_hidden_layers": 2} | ({"head_dim": 64} if family == "qwen3" else {})
    publish(tmp_path, family, vocab_size=vocabulary, **settings)
    summed, counted = both(family, settings, vocabulary, length, micro_batch, bf16, beside, tmp_path)
    for field in summed:
        assert summed[field] == pytest.approx(counted[field], rel=0.01 if field == "working_bytes" else 0), field
