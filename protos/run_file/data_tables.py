"""The tables of the run file that say what text is trained on."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationInfo, field_validator

from dtfm.protos.places import check_url, is_remote_url, is_url
from dtfm.protos.run_file.records import HUB, MESSAGES, STANDARD_LIBRARY
from dtfm.protos.run_file.table import Table
from dtfm.protos.texts import MOST_PROMPT_CHARACTERS, MOST_PROMPTS, MOST_TOKENS

MOST_SOURCES = 64
LEAST_WEIGHT = 1e-6

Prompt = Annotated[str, StringConstraints(min_length=1, max_length=MOST_PROMPT_CHARACTERS)]


def _usable(source: str) -> str:
    if is_url(source) and not source.startswith((HUB, "module:")):
        check_url(source)
    return source


def _names_fields(template: str, text_field: str) -> str:
    if template and not re.search(r"\{[^{}]+\}", template):
        raise ValueError('must name a field in braces, like "{question} {answer}"')
    if template and text_field == MESSAGES:
        raise ValueError(f'cannot be used with text_field = "{MESSAGES}", whose template is the tokenizer\'s')
    return template


class OneSource(Table):
    """One of several sources, in place of `data.source`, each in a table of its own. Samples of all sources are mixed by weight.
    A source begins again when it ends, and each of its samples comes once before any comes again.
    """

    source: str = Field(min_length=1, max_length=4096, description="As in `[data]`.")
    weight: float = Field(
        default=1.0,
        description="The part of all samples that come from this source is its weight, divided by the sum of all weights.",
    )
    text_field: str = Field(default="text", min_length=1, max_length=256, description="As in `[data]`.")
    template: str = Field(default="", max_length=65536, description="As in `[data]`.")
    split: str = Field(default="train", min_length=1, max_length=256, description="As in `[data]`.")
    limit: int = Field(default=0, ge=0, le=2**53, description="As in `[data]`.")

    @field_validator("source")
    @classmethod
    def _source_usable(cls, source: str) -> str:
        if source.startswith("module:"):
            raise ValueError(
                "a function makes its samples itself, which cannot be mixed with others; name it in data.source"
            )
        return _usable(source)

    @field_validator("weight")
    @classmethod
    def _weight_counts(cls, weight: float, info: ValidationInfo) -> float:
        if not LEAST_WEIGHT <= weight <= 1 / LEAST_WEIGHT:
            raise ValueError(
                f"of the source {info.data.get('source')!r} must be a number from {LEAST_WEIGHT:g} to {1 / LEAST_WEIGHT:g}; to "
                "do without the source, remove its table"
            )
        return weight

    @field_validator("template")
    @classmethod
    def _template_names_fields(cls, template: str, info: ValidationInfo) -> str:
        return _names_fields(template, info.data.get("text_field", ""))


class Data(Table):
    """The text to train on. Every node reads it for itself, so every node must be able to reach it."""

    source: str = Field(
        default=STANDARD_LIBRARY,
        min_length=1,
        max_length=4096,
        description='"python-stdlib" (the source text of the installed Python), a path or a glob of .txt, .jsonl, .csv or '
        ".parquet files, also as .gz or .zst, a URL of such files (its kinds are those of `checkpoint.uri`), or "
        '"hf:NAME[:CONFIG][@REVISION]", a data set on the Hugging Face hub.',
    )
    split: str = Field(
        default="train",
        min_length=1,
        max_length=256,
        description="For data sets of the hub: the split that is trained on.",
    )
    limit: int = Field(
        default=0, ge=0, le=2**53, description="The number of documents, from the first on, that are read. 0: all."
    )
    tokenizer: str = Field(
        default="",
        max_length=4096,
        description='"bytes" (one token per byte), or a tokenizer\'s folder or its name on the Hugging Face hub. Default: '
        "the tokenizer of `model.pretrained`, or bytes if there is no such model.",
    )
    sequence_length: int = Field(default=256, ge=2, le=1 << 20, description="Tokens per sample.")
    text_field: str = Field(
        default="text",
        min_length=1,
        max_length=256,
        description='For records, as of .jsonl files and data sets of the hub: the field that holds the text. "messages" '
        'holds conversations (messages with "role" and "content"). The tokenizer\'s chat template renders them, and the run '
        "learns only the assistant's words.",
    )
    evaluation_fraction: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="Fraction of the samples that the run holds out for evaluation and never trains on, unless these have a "
        "source or a split of their own.",
    )
    template: str = Field(
        default="",
        max_length=65536,
        description='A text with names of fields in braces, like "Question: {question} Answer: {answer}". It makes the text of '
        "each record, in place of `text_field`.",
    )
    sources: list[OneSource] = Field(
        default=[],
        max_length=MOST_SOURCES,
        description="Several sources in place of `source`, see `[[data.sources]]`. `held_out` is then read as the first of them.",
    )
    held_out: str = Field(
        default="",
        max_length=4096,
        description="A source of held-out samples alone, as in `source`. Then all samples of `source` are trained on.",
    )
    held_out_split: str = Field(
        default="",
        max_length=256,
        description="For data sets of the hub: the split of held-out samples, of `held_out` or, without it, of `source`.",
    )
    isolate_documents: bool = Field(
        default=False,
        description="Whether attention stops at the borders of documents that share a sample. Positions begin again there. "
        "It needs a model family that is known to support this, and a tokenizer with an end-of-text token. It is not for "
        "conversations. With it every node keeps the tokens; without it, only nodes of the first and the last stage do.",
    )
    chapter_bytes: int = Field(
        default=0,
        ge=0,
        le=2**50,
        description="For one large source of files on the nodes' disks: training begins when the first chapter of about this "
        "many bytes is read (64 MiB are 67108864), and the others are read meanwhile. 0: all is read first.",
    )

    prompts: list[Prompt] = Field(
        default=[],
        max_length=MOST_PROMPTS,
        description="Beginnings of texts, of at most 500 characters each. After each evaluation a node that has the whole model "
        f"continues them by at most {MOST_TOKENS} tokens, beside its other work. With conversations each is a message, which the "
        "model answers. `dtfm-coordinator events` and the page show the texts.",
    )

    @property
    def places(self) -> list[tuple[str, str]]:
        """The key and the place of each source."""
        several = [(f"data.sources[{number}].source", each.source) for number, each in enumerate(self.sources)]
        held_out = [("data.held_out", self.held_out)] if self.held_out else []
        return [*(several or [("data.source", self.source)]), *held_out]

    @property
    def talks(self) -> bool:
        """Whether some source has conversations."""
        return MESSAGES in {self.text_field, *(each.text_field for each in self.sources)}

    @field_validator("source", "held_out")
    @classmethod
    def _source_usable(cls, source: str) -> str:
        return _usable(source)

    @field_validator("template")
    @classmethod
    def _template_names_fields(cls, template: str, info: ValidationInfo) -> str:
        return _names_fields(template, info.data.get("text_field", ""))

    @field_validator("sources")
    @classmethod
    def _in_place_of_source(cls, sources: list[OneSource], info: ValidationInfo) -> list[OneSource]:
        for name in ("source", "split", "limit", "text_field", "template") if sources else ():
            if info.data.get(name) != cls.model_fields[name].default:
                raise ValueError(f"each source has a table with its own keys; move data.{name} into one")
        return sources

    @field_validator("held_out_split")
    @classmethod
    def _split_of_a_data_set(cls, split: str, info: ValidationInfo) -> str:
        of = next((each.source for each in info.data.get("sources", ())), info.data.get("source", HUB))
        if split and not (info.data.get("held_out") or of).startswith(HUB):
            raise ValueError(f'is for data sets of the hub ("{HUB}NAME"); leave it out, or name files in data.held_out')
        return split

    @field_validator("isolate_documents")
    @classmethod
    def _isolation_fits(cls, isolated: bool, info: ValidationInfo) -> bool:
        fields = {info.data.get("text_field"), *(each.text_field for each in info.data.get("sources", ()))}
        if isolated and MESSAGES in fields:
            raise ValueError(
                "is for text: turns of conversations often end with the token that ends a document; leave it out"
            )
        return isolated

    @field_validator("chapter_bytes")
    @classmethod
    def _one_source_of_files(cls, size: int, info: ValidationInfo) -> int:
        source = info.data.get("source", "")
        elsewhere = source == STANDARD_LIBRARY or source.startswith((HUB, "module:")) or is_remote_url(source)
        if not size:
            return size
        for key in ("sources", "held_out", "held_out_split", "limit"):
            if info.data.get(key):
                raise ValueError(f"cannot be used with data.{key}; leave one of them out")
        if elsewhere:
            raise ValueError(f"is for files on the nodes' disks, and {source!r} names none; leave it out")
        return size
