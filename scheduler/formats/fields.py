"""Turns a JSON document into values, or raises a ValueError that names the wrong fields."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

Document = TypeVar("Document")

Whole = Annotated[int, Field(ge=0, lt=2**53)]
"""A count; 2**53 is the largest number that every reader of JSON keeps exactly."""
MOST_NAMED = 3
"""The most wrong fields that an error names: often all entries of a list are wrong in the same way."""


def read_document(adapter: TypeAdapter[Document], text: str) -> Document:
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise ValueError("; ".join(_sentence(problem) for problem in problems[:MOST_NAMED])) from None


def _sentence(problem: ErrorDetails) -> str:
    """For example "stages[0].layers is 3; it must be a valid tuple"."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    match problem["type"]:
        case "json_invalid":
            return f"not JSON: {problem['msg']}"
        case "value_error":
            return str(problem["ctx"]["error"])  # a dataclass's own words, which name the field
        case "missing":
            return f"{path} is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{path} is unknown"
        case _:
            wanted = problem["msg"].replace("Input should", "it must")
            return f"{path or 'the document'} is {problem['input']!r:.80}; {wanted}"
