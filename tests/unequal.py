"""A run of conversations whose answers are of very different lengths, as people have them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.runs import GPT2, run_file
from tests.tokenizer import change_config, make_tokenizer

TALK = "{% for m in messages %}<{{m.role}}>{{m.content}}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
SHORT = [
    {"role": "user", "content": "why is it so short, and what does it say? " * 2},
    {"role": "assistant", "content": "Yes"},
]
LONG = [{"role": "user", "content": "Long?"}, {"role": "assistant", "content": "word and other " * 60}]


def unequal_run(folder: Path, *, stages: list[int], steps: int, loss_per: str = "", model: str = GPT2) -> str:
    """Writes the data and the tokenizer into ``folder``. Returns a run file in fp64, with samples of one learnt token, and others
    of learnt tokens alone. ``loss_per``: empty, or a value of the key of that name."""
    make_tokenizer(folder / "tokenizer", "why is it so short, and what does it say? Yes, a word and other words")
    tokenizer = change_config(folder / "tokenizer", chat_template=TALK)
    records = [{"messages": talk} for talk in [*[SHORT] * 10, LONG] * 8]
    (folder / "talks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = run_file(model=model, stages=stages, steps=steps, source=str(folder / "talks.jsonl"))
    text = text.replace("[data]\n", f'[data]\ntokenizer = "{tokenizer}"\ntext_field = "messages"\n')
    return text.replace("[train]\n", f'[train]\nloss_per = "{loss_per}"\n') if loss_per else text
