"""Texts for the run's prompts, written beside all other work: one thread, which gives way to training after each token."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from dtfm.node.data.problems import sentence_of
from dtfm.node.host.cuda_streams import after
from dtfm.node.host.device import free_memory
from dtfm.node.host.work import WORK
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.precision import compute_dtype
from dtfm.protos.control_pb2 import NodeMessage, Texts
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.run_file.records import MESSAGES
from dtfm.protos.texts import MOST_PROMPT_CHARACTERS, MOST_PROMPTS, MOST_TEXT_CHARACTERS, MOST_TOKENS

log = logging.getLogger(__name__)

SHARE = 0.05
"""The largest share of the time for writing while this node works on the run. It writes all the time while the node waits for
others."""
LOOK_SECONDS = 0.02
"""The time between two looks at whether the node waits for others."""
MEMORY_FRACTION = 0.5
"""The largest fraction of the device's free memory for a copy of the weights."""
TAKE_SECONDS = 10.0
"""The longest wait for weights that change too often to be copied."""

Weights = tuple[int, Mapping[int, torch.Tensor]]
"""The last step in the weights, and by bucket the flat parameters."""
Take = Callable[[torch.device, torch.dtype], Weights | None]
"""Copies all trained weights to a device. None: not now."""


class Writing:
    """Writes for one request at a time. For the training thread, except `call_off` and `close`."""

    def __init__(self, device: torch.device, report: Callable[[NodeMessage], None]) -> None:
        self._device, self._report = device, report
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def begin(
        self, loaded: LoadedRun, step: int, prompts: Sequence[str], weights: Mapping[int, torch.Tensor], copies: Take
    ) -> None:
        """Begins to write with the weights after ``step``, unless an earlier request is not done. ``weights``: those of this
        node's stage, which has all layers. Without such a stage they are empty, and ``copies`` makes copies of others."""
        if self._thread is not None and self._thread.is_alive():
            log.info("no texts after step %d: those of an earlier step are still being written", step)
            return
        dtype = compute_dtype(loaded.run)
        if short := no_room(loaded, self._device, dtype, frozen_are_there=bool(weights)):
            self._tell(Texts(step=step, problem=short))
            return
        try:
            taken = (step, {index: flat.clone() for index, flat in weights.items()}) if weights else None
        except Exception as problem:  # out of memory, for one: the training goes on
            self._tell(Texts(step=step, problem=sentence_of(problem)))
            return
        self._over = over = threading.Event()
        few = [prompt[:MOST_PROMPT_CHARACTERS] for prompt in prompts[:MOST_PROMPTS]]

        def write() -> None:
            try:
                found = taken or wait_for(lambda: copies(self._device, dtype), step, over)
                texts = written(loaded, found, few, self._device, over)
            except Exception as problem:  # whatever the device or transformers raises: the training goes on
                log.debug("texts after step %d cannot be written", step, exc_info=problem)
                texts = Texts(step=step, problem=sentence_of(problem))
            self._tell(texts)

        self._thread = threading.Thread(target=write, name="texts", daemon=True)
        self._thread.start()

    def call_off(self) -> None:
        """Ends the writing after the present token. From any thread."""
        self._over.set()

    def close(self, patience: float) -> None:
        """Calls the writing off, and waits for its end, at most ``patience`` seconds: Python must not end while it computes."""
        self.call_off()
        if self._thread is not None:
            self._thread.join(patience)

    def _tell(self, texts: Texts) -> None:
        if texts.problem:
            log.info("no texts after step %d: %s", texts.step, texts.problem)
        self._report(NodeMessage(texts=texts))


def no_room(loaded: LoadedRun, device: torch.device, dtype: torch.dtype, *, frozen_are_there: bool) -> str:
    """Why a copy of the weights has no room on ``device``; empty: it has."""
    model = loaded.model
    needed = sum(spec.size for spec in model.buckets) * dtype.itemsize
    needed += 0 if frozen_are_there else model.frozen.stage_bytes(0, len(model.layers), dtype)
    room = int(MEMORY_FRACTION * free_memory(device))
    return f"a copy of the weights takes {needed} bytes, and {room} may be used" if needed > room else ""


def wait_for(take: Callable[[], Weights | None], step: int, over: threading.Event) -> Weights:
    """The weights as of ``step`` or a later one, when they can be copied. Raises ValueError after TAKE_SECONDS."""
    until = time.monotonic() + TAKE_SECONDS
    while True:
        found = take()
        if found is not None and found[0] >= step:
            return found
        if over.wait(LOOK_SECONDS) or time.monotonic() > until:
            raise ValueError("this node's copy of the weights changes too often")


def written(
    loaded: LoadedRun, weights: Weights, prompts: Sequence[str], device: torch.device, over: threading.Event
) -> Texts:
    """The texts, in order of the prompts, with the likeliest token each time: nothing else may draw from the process's random
    numbers. Raises ValueError if the model cannot write them, or ``over`` is set."""
    from dtfm.node.model.causal.language_model import CausalLM  # transformers takes seconds to import
    from dtfm.node.model.generate_text import Writer, prompt_ids

    tokenizer, (step, trained) = loaded.data.tokenizer, weights
    if not isinstance(loaded.model, CausalLM) or tokenizer is None:
        raise ValueError("this model writes no text")
    module = loaded.model.whole(trained, device, compute_dtype(loaded.run), tokenizer.special_ids)
    writer, pace = Writer(module, tokenizer, device), Pace(over)
    texts, beside = Texts(step=step), after(device, apart=True)
    for prompt in prompts:
        is_message = answers(loaded.run)
        ids = writer.answer_ids([{"role": "user", "content": prompt}]) if is_message else prompt_ids(tokenizer, prompt)
        pace.begins()
        with beside():
            made = writer.write(ids, MOST_TOKENS, temperature=0, goes_on=pace.goes_on)
        if over.is_set():
            raise ValueError("the plan has changed meanwhile")
        fits = len(made.text) <= MOST_TEXT_CHARACTERS
        texts.texts.add(text=made.text[:MOST_TEXT_CHARACTERS], whole=made.is_whole and fits)
    return texts


def answers(run: Run) -> bool:
    """Whether the run trains on conversations, so that a prompt is a message to answer."""
    return MESSAGES in {run.data.text_field, *(source.text_field for source in run.data.sources)}


class Pace:
    """Gives way after each token: while the node works on the run, writing gets SHARE of the time."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over
        self._began = 0.0

    def begins(self) -> None:
        """A token begins."""
        self._began = time.monotonic()

    def goes_on(self) -> bool:
        """Returns when the next token may begin, or False if none should."""
        now = time.monotonic()
        until = now + (now - self._began) * (1 / SHARE - 1)
        while not self._over.is_set():
            _, waits = WORK.so_far
            if waits or time.monotonic() >= until:
                self.begins()
                return True
            self._over.wait(LOOK_SECONDS)
        return False
