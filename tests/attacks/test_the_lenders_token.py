"""A run names a private repository of a lender: the node does not read it with the lender's token, unless the lender says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.cluster.launch import ROOT
from tests.hub import REPOSITORY, TOKEN, Hub, hub
from tests.tokenizer import make_tokenizer

TEXT = "A word that nobody else may learn.\n" * 100


@pytest.fixture
def private(tmp_path: Path) -> dict[str, bytes]:
    """The files of a repository that is a model, its tokenizer, and a data set."""
    folder = Path(make_tokenizer(tmp_path / "repository", TEXT))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=300, **sizes))
    model.save_pretrained(folder)
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()))
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def read(folder: Path, at: Hub, leave: str) -> list[str]:
    """What went wrong with a run that names the private tokenizer, one that names the data set, and one that names the model."""
    tiny = {
        "family": "llama",
        "configJson": json.dumps({"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}),
    }
    source = {"source": "python-stdlib", "tokenizer": "bytes", "sequenceLength": 16, "textField": "text"}
    text = folder / "text.txt"
    text.write_text(TEXT)
    here = {**source, "source": str(text)}
    runs = [
        {"data": {**here, "tokenizer": REPOSITORY}, "model": tiny},
        {"data": {**source, "source": f"hf:{REPOSITORY}"}, "model": tiny},
        {"data": here, "model": {"pretrained": REPOSITORY}},
    ]
    environment = {
        **os.environ,
        **{"HF_ENDPOINT": at.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"},
        **{"HF_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)},
    }
    found = subprocess.run(
        [sys.executable, "-m", "tests.attacks.reads_run", f"{text} {leave}"],
        input="".join(json.dumps({**run, "checkpoint": {"uri": "coordinator:"}}) + "\n" for run in runs),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


@pytest.mark.soak
@pytest.mark.parametrize("leave", ["", "hf:another/private"])
def test_a_private_repository_is_not_read_for_a_run(tmp_path: Path, private: dict[str, bytes], leave: str) -> None:
    with hub(private) as at:
        problems = read(tmp_path, at, leave)
    assert len(problems) == 3
    assert all(f"--allow-data 'hf:{REPOSITORY}'" in problem for problem in problems)
    assert at.asked
    assert at.tokens == {""}


@pytest.mark.soak
@pytest.mark.parametrize("leave", [f"hf:{REPOSITORY}", "hf:lender/*"])
def test_whoever_lends_a_machine_may_let_the_run_read_it(tmp_path: Path, private: dict[str, bytes], leave: str) -> None:
    with hub(private) as at:
        *read_as_asked, model = read(tmp_path, at, leave)
    assert read_as_asked == ["", ""]
    assert f"is not that of model.pretrained {REPOSITORY!r}" in model, "the node knows its vocabulary"
    assert TOKEN in at.tokens
