"""`dtfm-node generate`: what a trained model writes, as transformers and peft have it write."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from typer.testing import CliRunner

from dtfm.node.cli import app
from dtfm.node.data.text.tokenizer_files import save_bytes
from tests.published import publish, publish_adapter
from tests.tokenizer import TURNS, make_metaspace_tokenizer

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def generate(*arguments: str | Path, code: int = 0, typed: str = "") -> str:
    result = CliRunner().invoke(app, ["generate", *map(str, arguments), "--device", "cpu"], input=typed)
    assert result.exit_code == code, result.output
    return result.stderr if code else result.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = publish(tmp_path_factory.mktemp("base"), "qwen3")
    save_bytes(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_adapter(tmp_path_factory.mktemp("adapter"), base)


def judged(base: Path, adapter: Path | None, prompt: str, tokens: int, **packing: Any) -> str:
    """The likeliest tokens after the prompt. ``packing``: as people have transformers and bitsandbytes pack the model."""
    how = {"quantization_config": BitsAndBytesConfig(**packing), "device_map": "cpu"} if packing else {}
    model: Any = AutoModelForCausalLM.from_pretrained(base, **how)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    ids = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(made[0, ids["input_ids"].shape[1] :]))


def test_a_whole_model_and_an_adapter_write_what_transformers_and_peft_write(base: Path, adapter: Path) -> None:
    for folder, beside in ((base, None), (adapter, adapter)):
        said = generate(folder, "--prompt", "def f", "--max-tokens", "12", "--temperature", "0", "--json")
        assert json.loads(said) == {
            "prompt": "def f",
            "text": judged(base, beside, "def f", 12),
            "tokens": 12,
            "end": "cut",
        }


@pytest.mark.parametrize(
    ("weights", "packing"),
    [
        ("nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}),
        pytest.param("int8", {"load_in_8bit": True}, marks=pytest.mark.soak),
    ],
)
def test_a_packed_model_writes_what_transformers_and_bitsandbytes_write(
    base: Path, adapter: Path, weights: str, packing: dict[str, Any]
) -> None:
    """Alone, and with an adapter beside it."""
    written = set[str]()
    for folder, beside in ((base, None), (adapter, adapter)):
        asked = (folder, "--prompt", "def f", "--max-tokens", "12", "--temperature", "0", "--json")
        said = json.loads(generate(*asked, "--weights", weights))
        assert said["text"] == judged(base, beside, "def f", 12, **packing)
        written.add(said["text"])
    assert len(written) == 2


def test_packing_needs_bitsandbytes_and_weights_to_pack(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = generate(base, "--prompt", "a", "--weights", "nf4", "--untrained", "1", code=2)
    assert told == "--untrained draws weights, and --weights nf4 packs those of files; leave one of them out\n"
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    told = generate(base, "--prompt", "a", "--weights", "nf4", code=2)
    assert told.startswith("--weights nf4 needs bitsandbytes, which cannot be imported here")
    assert len(told.strip().splitlines()) == 1


def test_a_model_that_does_not_fit_is_told_what_would(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    told = generate(base, "--prompt", "a", code=2)
    assert told == f"the model in {base} does not fit cpu; give --weights nf4, or --device cpu\n"


def test_the_terminal_shows_the_prompt_and_its_continuation_and_a_seed_repeats_it(base: Path) -> None:
    once, again, other = (
        generate(base, "--prompt", "def f", "--max-tokens", "20", "--seed", seed) for seed in ("1", "1", "2")
    )
    assert once == again != other
    assert once.startswith("def f")
    assert once.endswith("\n")


def test_a_text_ends_where_the_base_ends_one(base: Path, adapter: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(adapter, tmp_path / "adapter")
    ending = shutil.copytree(base, tmp_path / "base")
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model = PeftModel.from_pretrained(model, str(adapter))
    prompt = torch.tensor([list(b"def f")])
    made = model.generate(input_ids=prompt, max_new_tokens=9, do_sample=False, pad_token_id=0)[0, 5:].tolist()
    end = made.index(made[4])
    settings = json.loads((ending / "generation_config.json").read_text())
    (ending / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [255, made[4]]}))
    config = json.loads((copied / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(ending)}))
    said = generate(copied, "--prompt", "def f", "--max-tokens", "9", "--temperature", "0", "--json")
    assert (json.loads(said)["tokens"], json.loads(said)["end"]) == (end + 1, "whole")


def test_a_conversation_goes_on_line_by_line_as_the_template_has_it(tmp_path: Path) -> None:
    folder = publish(tmp_path / "chat", "qwen3", vocab_size=400)
    make_metaspace_tokenizer(folder, "hello there, how are you? " * 9, chat_template=CHAT)
    said = generate(
        folder, "--chat", "--max-tokens", "5", "--temperature", "0", "--json", typed="hello\n\nhow are you?\n"
    )
    first, second = map(json.loads, said.splitlines())
    assert (first["message"], second["message"]) == ("hello", "how are you?")
    start, stop = TURNS
    asked = f"{start}user hello{stop}{start}"
    longer = f"{start}user hello{stop}{start}assistant {first['text']}{stop}{start}user how are you?{stop}{start}"
    for prompt, told in ((asked, first), (longer, second)):
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        made = model.generate(**ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert told["text"] == text
    assert (
        json.loads(generate(folder, "--chat", "--prompt", "hello", "--max-tokens", "5", "--temperature", "0", "--json"))
        == first
    )


def test_a_run_here_is_named_by_its_name(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest whole checkpoint writes."""
    for step in (5, 10, 15):
        folder = shutil.copytree(base, tmp_path / f"dtfm-runs/mine/step-{step:08d}")
        if step != 15:
            (folder / "manifest.json").touch()
    (tmp_path / "dtfm-runs/mine/step-00000005/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    wanted = ("--prompt", "def f", "--max-tokens", "3", "--seed", "1")
    assert generate("mine", *wanted) == generate(base, *wanted)
    assert "no run of this name in dtfm-runs (mine)" in generate("other", *wanted, code=2)


def test_mistakes_are_told_in_a_line(base: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    copied = shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((copied / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/gone"}))
    pickled = shutil.copytree(adapter, tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").unlink()
    torch.save({}, pickled / "adapter_model.bin")
    whole = shutil.copytree(base, tmp_path / "whole")
    (whole / "model.safetensors").unlink()
    torch.save({}, whole / "pytorch_model.bin")
    for arguments, complaint in (
        ((pickled, "--prompt", "a"), "has no adapter_model.safetensors; copy it again"),
        ((whole, "--prompt", "a"), "holds no language model"),
        ((base,), "give --prompt TEXT to continue a text, or --chat to converse"),
        ((tmp_path / "empty", "--prompt", "a"), "has no config.json and no adapter_config.json: give a folder made by"),
        ((base, "--prompt", ""), "the prompt has 0 tokens; give at least one"),
        ((base, "--chat", "--prompt", "a"), "has no chat template"),
        (
            (copied, "--prompt", "a"),
            "stands beside '/gone', which cannot be loaded; copy it to where this names it, or",
        ),
    ):
        said = generate(*arguments, code=2)
        assert complaint in said
        assert len(said.strip().splitlines()) == 1
