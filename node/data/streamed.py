"""Samples of a large source, which are there before all of it is read.

A thread reads chapter after chapter, in the order in which the first pass takes them, and keeps the tokens on the disk. A step
whose chapter is not read yet waits for it. All nodes read the same chapters, so that each sample is a function of the seed and of
its position.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from dtfm.node.data.chapters import Counts
from dtfm.node.data.dataset import Agreed, Batch, Data, Indices, TokenWindows, samples_of
from dtfm.node.data.reading.sources import Reading
from dtfm.node.data.samples import Sample, chapter_order, held_out_count
from dtfm.node.data.shared.published import TokenIndex
from dtfm.node.data.text.tokenizer import Tokenizer
from dtfm.node.host.work import WORK
from dtfm.protos.source_files import Files

log = logging.getLogger(__name__)

Read = Callable[[int, Reading], tuple[TokenIndex, NDArray[Any]]]
"""Reads a chapter: its tokens, and their index. Raises ValueError, and what `Reading` raises."""
AT_HAND = 3
"""Chapters whose samples are numbered in memory at a time."""
_CHAPTER = 40
"""A sample's number is its chapter's, shifted by so many bits, and its number in the chapter."""
_STOP_SECONDS = 3.0
_LOOK_SECONDS = 1.0
_NOT_NEEDED = Agreed(b"", 0.0)


class StreamedWindows(Data):
    """The samples of chapters. In each chapter a fraction of them is held out and not trained on; evaluations take those of the
    first chapter, since these are there from the beginning."""

    def __init__(
        self,
        sizes: Sequence[int],
        read: Read,
        files: Files,
        tokenizer: Tokenizer,
        seed: int,
        reading: Reading,
        *,
        sample: Sample,
        is_marked: bool,
    ) -> None:
        """Reads the first chapter, and has a thread ``read`` the others. ``sizes``: the bytes of each chapter. ``files``: as this
        machine has them; the fingerprint has their digests. ``reading`` hears of the first chapter alone. Raises ValueError."""
        self._read, self._seed, self._is_marked = read, seed, is_marked
        self.sample, self.tokenizer, self.files = sample, tokenizer, files
        self._known = Counts(seed, len(sizes))
        self._tokens: dict[int, tuple[TokenIndex, NDArray[Any]]] = {}
        self._at_hand: OrderedDict[int, TokenWindows] = OrderedDict()
        self._changed, self._problem, self._stopping = threading.Condition(), "", False
        self._pieces = 0  # that were read of chapters: how it goes on, for whoever waits
        index, tokens = self._take_in(0, reading)
        first = TokenWindows(index, lambda: [tokens], tokenizer, sample=sample, is_marked=is_marked)
        super().__init__(samples_of(index), index.evaluation_fraction)
        self.tokens_per_sample, self.unigram_entropy = index.sequence_length, first.unigram_entropy
        said = {"first": index.fingerprint.hex(), "files": [file.digest for file in files], "chapters": [*sizes]}
        self.fingerprint = blake3(json.dumps(said, sort_keys=True).encode()).digest()
        self._held_out = samples_of(index)[0] - self._known.known[0]
        self._about = round(self._known.known[0] * sum(sizes) / sizes[0])
        self._thread = threading.Thread(target=self._read_others, name="read chapters", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    @property
    def training_count(self) -> int:
        """As many as there are if all chapters are like the first one: the same on all nodes."""
        return self._about

    @property
    def evaluation_count(self) -> int:
        return self._held_out

    def training_samples(self, seed: int, number: int, micro_batch: int) -> Indices:
        assert seed == self._seed
        placed = self._placed(number * micro_batch, micro_batch)
        return np.concatenate([(chapter << _CHAPTER) + samples for chapter, samples in placed])

    def training_batch(self, indices: Indices) -> Batch:
        inputs, labels = (torch.empty((len(indices), self.tokens_per_sample), dtype=torch.int64) for _ in range(2))
        for rows, windows, samples in self._by_chapter(indices):
            inputs[rows], labels[rows] = windows.training_batch(samples)
        return inputs, labels

    def training_learnt(self, indices: Indices) -> int:
        return sum(windows.training_learnt(samples) for _, windows, samples in self._by_chapter(indices))

    def positions(self, inputs: torch.Tensor) -> torch.Tensor | None:
        return self._windows(0).positions(inputs)

    def reach(self, position: int) -> None:
        if len(self._known.known) < self._known.chapters:
            self._placed(position, 1)

    def stop(self) -> None:
        """Ends the reading."""
        atexit.unregister(self.stop)
        self._stopping = True
        self._thread.join(_STOP_SECONDS)

    def _take(self, numbers: Indices) -> Batch:
        return self._windows(0)._take(numbers)

    def _learnt(self, numbers: Indices) -> int:
        return self._windows(0)._learnt(numbers)

    def _by_chapter(self, indices: Indices) -> Iterator[tuple[torch.Tensor, TokenWindows, Indices]]:
        """The rows of each chapter's samples, the chapter, and the samples' numbers in it."""
        chapters = indices >> _CHAPTER
        for chapter in np.unique(chapters).tolist():
            rows = np.flatnonzero(chapters == chapter)
            yield torch.from_numpy(rows), self._windows(chapter), indices[rows] & ((1 << _CHAPTER) - 1)

    def _placed(self, position: int, number: int) -> list[tuple[int, Indices]]:
        """As `Counts.placed`, once the chapters are read. Raises ValueError if they cannot be."""
        with self._changed:
            while (placed := self._known.placed(position, number)) is None:
                if self._problem:
                    raise ValueError(self._problem)
                before = self._pieces
                with WORK.waiting():  # another process of this machine may be reading
                    self._changed.wait(_LOOK_SECONDS)
                if self._pieces != before:
                    WORK.did()
            return placed

    def _windows(self, chapter: int) -> TokenWindows:
        with self._changed:
            if chapter not in self._at_hand:
                index, tokens = self._tokens[chapter]
                assert self.tokenizer is not None
                self._at_hand[chapter] = TokenWindows(
                    index, lambda: [tokens], self.tokenizer, _NOT_NEEDED, sample=self.sample, is_marked=self._is_marked
                )
            self._at_hand.move_to_end(chapter)
            if len(self._at_hand) > AT_HAND:
                self._at_hand.popitem(last=False)
            return self._at_hand[chapter]

    def _take_in(self, chapter: int, reading: Reading) -> tuple[TokenIndex, NDArray[Any]]:
        index, tokens = self._read(chapter, reading)
        (samples,) = samples_of(index)
        trained = samples - held_out_count(samples, index.evaluation_fraction) if samples > 1 else 0
        with self._changed:
            self._tokens[chapter] = index, tokens
            self._known.known[chapter] = trained
            self._changed.notify_all()
        return index, tokens

    def _read_others(self) -> None:
        def reading(done: int, of: int) -> None:
            if self._stopping:
                raise _Stopped
            self._pieces += 1

        try:
            for chapter in chapter_order(self._seed, 0, self._known.chapters)[1:]:
                self._take_in(chapter, reading)
                log.info("chapter %d of %d of the data is read", len(self._known.known), self._known.chapters)
        except _Stopped:
            self._give_up("the node is stopping")
        except Exception as problem:  # whatever a file system raises
            log.error("%s", problem)
            self._give_up(str(problem))

    def _give_up(self, problem: str) -> None:
        with self._changed:
            self._problem = problem
            self._changed.notify_all()


class _Stopped(Exception):
    """The process is ending."""
