"""The model card: what it says, and what it must not say."""

from __future__ import annotations

from typing import Any

import pytest

from dtfm.coordinator.view.model_card import Card

DIGEST = "ab" * 32


def card(**tables: Any) -> str:
    run = {"name": "my_run", "seed": 7, "train": {"steps": 300}} | tables
    return Card(run, "12ab", 200, DIGEST, 1234567, {"Held-out loss after step 200": 2.5}, command="dtfm export").text()


def test_it_says_where_the_weights_come_from_and_how_well_they_do() -> None:
    text = card(model={"pretrained": "Qwen/Qwen2-0.5B@main"}, data={"source": "hf:owner/corpus:en"})
    for line in (
        'base_model: "Qwen/Qwen2-0.5B"',
        'datasets: ["owner/corpus"]',
        "# my_run",
        "| Run | my_run (id 12ab) |",
        "| Base model | Qwen/Qwen2-0.5B |",
        "| Data | owner/corpus |",
        "| Steps | 200 of 300 |",
        "| Tokens | 1,234,567 |",
        "| Held-out loss after step 200 | 2.5000 nats per token |",
        f"| Checkpoint | manifest BLAKE3 `{DIGEST}` |",
        "| Written by | `dtfm export` |",
    ):
        assert line in text.splitlines()


PRIVATE = [
    "/home/jo/secret",
    "~/secret",
    "./secret",
    "a/b/secret",
    "file:///mnt/secret",
    "s3://secret-bucket/x",
    "https://user:secret@host/x?token=secret",
    "coordinator://dtfm-runs/secret",
    "secret/../../x",
    "module:secret.code",
    "secret/*.txt",
    "secret texts",
    "secret",
]


@pytest.mark.parametrize("place", PRIVATE)
def test_it_names_no_private_place(place: str) -> None:
    for source in (place, f"hf:{place}"):
        text = card(model={"pretrained": place}, data={"source": source})
        assert "secret" not in text
        assert "| Base model | weights of the run's owner |" in text
        assert "| Data | files of the run's owner |" in text


def test_a_folder_of_this_machine_is_not_taken_for_a_name_on_the_hub(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models/secret").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "secret" not in card(model={"pretrained": "models/secret"}, data={"source": "hf:models/secret"})


def test_a_name_cannot_break_out_of_its_place() -> None:
    text = card(
        name='x | <script> `\n---\nlicense: "evil"', model={"family": "llama"}, data={"source": "python-stdlib"}
    )
    assert "<script>" not in text
    assert 'x script --- license: "evil"' in text
    assert text.splitlines().count("---") == 2
    assert "none: llama with random weights, seed 7" in text
