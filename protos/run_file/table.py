"""A table of the run file: each key with its type, bounds, default and description.

``make docs`` writes docs/run-file.md from these descriptions. One that ends with "Default: ..." says how the default follows
from other keys.
"""

from __future__ import annotations

from typing import get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Table(BaseModel):
    """A table of the run file. Refuses unknown keys and wrong types, and validates defaults like given values."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


def table_of(field: FieldInfo) -> type[Table] | None:
    """The table that a key stands for, also one that may be left out. None: a plain key, or a list."""
    named = () if get_origin(field.annotation) is list else (field.annotation, *get_args(field.annotation))
    return next((each for each in named if isinstance(each, type) and issubclass(each, Table)), None)
