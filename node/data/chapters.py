"""Cuts the files of a large source into chapters, and says which chapter a training sample is in.

The samples of a pass follow chapter after chapter. Within each chapter they are in an order of their own. Which chapters there
are follows from the files' sizes and line ends. How many samples each has is known only once it is read: so a position's chapter
is known once the chapters before it are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dtfm.node.data.reading.files import File
from dtfm.node.data.samples import chapter_order, chapter_samples

MOST_CHAPTERS = 4096
Chapter = tuple[File, ...]
"""Files, or parts of files, that are read together."""


def cut(files: Sequence[File], chapter_bytes: int) -> list[Chapter]:
    """The chapters of these files, in order, each of about ``chapter_bytes`` or less. Only .jsonl files that are not compressed
    are cut; other files are whole. Raises ValueError if there are too many, and OSError."""
    _check_number(
        max((file.most_parts(chapter_bytes) for file in files), default=0), chapter_bytes
    )  # cutting reads each
    chapters, chapter, size = list[Chapter](), list[File](), 0
    for part in (part for file in files for part in file.cut_at_lines(chapter_bytes)):
        if chapter and size + part.size > chapter_bytes:
            chapters.append(tuple(chapter))
            chapter, size = [], 0
        chapter.append(part)
        size += part.size
    chapters.append(tuple(chapter))
    _check_number(len(chapters), chapter_bytes)
    return chapters


def _check_number(number: int, chapter_bytes: int) -> None:
    if number > MOST_CHAPTERS:
        raise ValueError(
            f"data.chapter_bytes: {chapter_bytes} bytes make {number} chapters; there may be {MOST_CHAPTERS}. Give more"
        )


@dataclass
class Counts:
    """How many samples each chapter has, as far as it is read. The first chapter has some."""

    seed: int
    chapters: int
    known: dict[int, int] = field(default_factory=dict)
    """By chapter, its training samples."""

    def placed(self, start: int, number: int) -> list[tuple[int, NDArray[np.int64]]] | None:
        """The chapters of the run's training samples from position ``start`` on, and which samples of each: ``number`` in all.
        None: the chapters before are not all read."""
        found, passes, whole = list[tuple[int, NDArray[np.int64]]](), 0, len(self.known) == self.chapters
        if whole:
            passes, start = divmod(start, sum(self.known.values()))
        while number:
            for chapter in chapter_order(self.seed, passes, self.chapters):
                if chapter not in self.known:
                    return None
                count = self.known[chapter]
                if start >= count:
                    start -= count
                    continue
                order = chapter_samples(self.seed, chapter, passes, count)[start : start + number]
                found.append((chapter, order))
                number -= len(order)
                start = 0
                if not number:
                    break
            passes += 1
        return found
