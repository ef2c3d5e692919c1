"""From a run's description to a node that can be planned with: its data, its model, and how fast the device is with it."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from dtfm.compiled_code import compile_apart
from dtfm.kernels.with_cupy import prepare
from dtfm.node.data.allowed import Allowed, check_places
from dtfm.node.data.dataset import Agreed, Data
from dtfm.node.data.load import is_text, load_data, text_sample
from dtfm.node.data.problems import sentence_of, told_together
from dtfm.node.data.reaching import give_leave
from dtfm.node.data.reading.sources import named
from dtfm.node.data.shared.storage import check_place
from dtfm.node.host.device import check_bf16, why_slow_in_fp32
from dtfm.node.host.long_parts import long_part
from dtfm.node.host.other_work import OtherWork
from dtfm.node.model.compiled_layer import can_compile
from dtfm.node.model.cost.layer_costs import layer_costs, layer_flops
from dtfm.node.model.load import load_model
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.model import Model
from dtfm.node.model.optimizer.muon import check_muon
from dtfm.node.model.precision import compute_dtype, run_dtype
from dtfm.node.network.dialling import Dialler
from dtfm.node.state.snapshot_files import file_layout
from dtfm.node.training.equipment import Equipment
from dtfm.node.training.failure import may_pass
from dtfm.node.training.preparing.timing import Timing
from dtfm.node.transport.receiver import Closed
from dtfm.protos.control_pb2 import Prepared, Preparing as Doing, Timed
from dtfm.protos.outer import has_momentum
from dtfm.protos.plan_pb2 import MUON, Run

log = logging.getLogger(__name__)

Does = Callable[[Doing, int, int], None]
"""See PreparationProgress.does."""

PAUSES = (5.0, 15.0, 45.0, 120.0, 300.0)
"""Seconds between attempts to load the run where what failed may pass."""

OF_HOST = "dtfm.kernels.adamw"
"""The module that imports all kernels of the CPU."""


class Preparation:
    """For the training thread, except `cancel`; any thread may read the attributes.

    ``loaded`` is the run that this node has loaded. ``flops`` is the speed of the device on its layers, if these were
    timed, and ``timing`` the time of that.
    """

    def __init__(self, equipment: Equipment, loop: asyncio.AbstractEventLoop) -> None:
        """``loop`` runs what compiles beside the loading."""
        self.loaded: LoadedRun | None = None
        self.flops: float | None = None
        self.timing: Timing | None = None
        self._equipment = equipment
        self._loop = loop
        self._compiling: Future[None] | None = None
        self._stopping = threading.Event()

    def load_when_it_can_be(self, run: Run, dialler: Dialler, allowed: Allowed, agreed: Agreed | None) -> bool:
        """As `load`. Trouble that may pass, as of the hub, is waited for."""
        for pause in PAUSES:
            try:
                return self.load(run, dialler, allowed, agreed)
            except Exception as error:
                if not may_pass(error):
                    raise
                log.warning("%s; trying again in %.0f s", sentence_of(error), pause)
                if self._stopping.wait(pause):
                    raise Closed("the node is stopping") from None
        return self.load(run, dialler, allowed, agreed)

    def load(self, run: Run, dialler: Dialler, allowed: Allowed, agreed: Agreed | None) -> bool:
        """Loads the run's data, on which its members may have ``agreed``, and its model. ``allowed``: what the run may name
        here. Returns whether it is another run than before, or in another precision.

        Raises:
            ValueError: a user's mistake in the run, a source that is not allowed, or a device that cannot take part in it.
            Closed: called off.
        """
        device = self._equipment.device
        check_run(run, device, allowed)
        if compute_dtype(run) is torch.float32 and self.loaded is None and (slow := why_slow_in_fp32(device)):
            log.warning("%s", slow)
        check_place(run.checkpoint.uri, run.id, self._equipment.node)  # it writes there: only now that all is allowed
        is_new = self.loaded is None or self.loaded.run.id != run.id
        before = None if self.loaded is None or is_new else self.loaded.run.train
        timed_with = None if before is None else (before.compile, before.precision)
        if self.loaded is not None and not is_new:
            # A resumed run may differ in settings that do not change the training.
            self.loaded = replace(self.loaded, run=run, allowed=allowed)
        else:
            self._compiling = asyncio.run_coroutine_threadsafe(compile_kernels(device), self._loop)
            its = run.model.pretrained or run.model.module or run.model.family
            log.info("run %r: loading its data (%s) and its model (%s)", run.name, named(run.data), its)
            does = self._equipment.progress.does
            model, data = read_run(run, allowed, self._equipment.tokens, agreed, does)
            model.keep_frozen_in(self._equipment.frozen, run.seed, dialler.identity.authority)
            self._equipment.store.frozen = model.frozen
            does(Doing.COMPILING)
            try:  # nothing is left to compile then that a plan may need; the device is timed after that, undisturbed
                with long_part("compiling the kernels, which are kept for the next start"):
                    self._compiling.result()
            except CancelledError:
                raise Closed("the node is stopping") from None
            if self.loaded is not None:
                self.loaded.data.stop()  # of the run before
            self.loaded = LoadedRun(run, model, data, dialler, allowed)
        model = self.loaded.model
        model.set_momentum(has_momentum(run.train))
        model.set_optimizer(run.train.optimizer)
        if timed_with != (run.train.compile, run.train.precision):
            model.compiles = run.train.compile and can_compile(device)
            self._equipment.progress.does(Doing.COMPILING if model.compiles else Doing.TIMING_DEVICE)
            with long_part("compiling the layers and timing the device" if model.compiles else "timing the device"):
                self._time(model, run)
            self._equipment.progress.does(Doing.NOTHING_TO_SAY)
        return before is None or before.precision != run.train.precision

    def message(self) -> Prepared:
        """The message to the coordinator about the loaded run, which this node can now take part in."""
        assert self.loaded is not None
        said = description(self.loaded.run, self.loaded.model, self.loaded.data)
        said.on_disk.extend(self._equipment.snapshots.open(self.loaded))
        said.disk_bytes = self._equipment.snapshots.free_bytes
        said.flops = self.flops or 0.0
        said.timed_beside = self.timing is not None and self.timing.beside
        return said

    def time_again(self) -> Timed | None:
        """Times the device again, while it computes nothing else. None: that cannot be done."""
        if self.loaded is None or self.flops is None:
            return None
        before = self.flops
        self._time(self.loaded.model, self.loaded.run)
        assert self.timing is not None
        if self.flops is None:
            self.flops = before
            return None
        return Timed(flops=self.flops, beside=self.timing.beside)

    def compute_a_sample(self) -> Timed:
        """Has the device compute a sample of the run's layers, or, where there is no room for that, a product. Raises what the
        device raises."""
        if (timed := self.time_again()) is not None:
            return timed
        ones = torch.ones(64, 64, device=self._equipment.device)
        assert torch.mm(ones, ones).sum().item() == 64**3
        return Timed(flops=self.flops or self._equipment.hardware.flops)

    def _time(self, model: Model, run: Run) -> None:
        others = OtherWork()
        self.flops = layer_flops(model, run, self._equipment.device, self._equipment.hardware)
        before = self.timing or Timing(0.0, beside=False)
        self.timing = before.again(time.monotonic(), others.share())

    def cancel(self) -> None:
        """Calls off what loading waits for."""
        self._stopping.set()
        if self._compiling is not None:
            self._compiling.cancel()


def check_run(run: Run, device: torch.device, allowed: Allowed) -> None:
    """Raises ValueError if this machine's operator does not allow something that the run names, or if its device cannot compute
    it. The message has a line for each. From now on the run may use everything in ``allowed``."""
    give_leave(allowed.places)
    checks: list[Callable[[], None]] = [partial(check_places, run, allowed.places)]
    if compute_dtype(run) is torch.bfloat16:
        checks.append(partial(check_bf16, device))
    if run.train.optimizer == MUON:
        checks.append(partial(check_muon))
    told_together(checks)


def read_run(run: Run, allowed: Allowed, tokens: Path, agreed: Agreed | None, does: Does) -> tuple[Model, Data]:
    """The run's model and its data, on which its members may have ``agreed``. ``tokens``: the folder where this machine's nodes
    share tokens. ``does`` hears of each task and its progress. Raises ValueError for a user's mistake."""
    model = None
    if is_text(run.data):  # errors in the model are reported before much is read
        does(Doing.LOADING_MODEL, 0, 0)
        with long_part("loading the model"):
            sample, tokenizer = text_sample(run.data)
            model = load_model(run.model, sample, allowed.modules, tokenizer)
    does(Doing.READING_DATA, 0, 0)
    with long_part("reading the data"):
        reading = partial(does, Doing.READING_DATA)
        data = load_data(run, allowed.modules, tokens, agreed, allowed.places, reading)
    return model or load_model(run.model, data.sample, allowed.modules), data


def description(run: Run, model: Model, data: Data) -> Prepared:
    """Describes the model and the data to the coordinator. The device and the disk are left out."""
    return Prepared(
        layers=layer_costs(model, run),
        data_fingerprint=data.fingerprint,
        weights_fingerprint=model.weights_fingerprint(run.seed),
        data_read=data.was_read,
        training_samples=data.training_count,
        evaluation_samples=data.evaluation_count,
        unigram_entropy=data.unigram_entropy,
        tokens_per_sample=data.tokens_per_sample,
        buckets=len(model.buckets),
        layouts=b"".join(file_layout(spec, run_dtype(run)) for spec in model.buckets),
        precision=run.train.precision,
        files=[file.message for file in data.files],
    )


async def compile_kernels(device: torch.device) -> None:
    """Returns when nothing is left to compile, for ``device`` or for state in the host's memory: nobody is to wait for it in the
    first step. That takes half a second, or some seconds on a machine's first start."""
    if OF_HOST not in sys.modules:
        await compile_apart(OF_HOST)
    await asyncio.to_thread(importlib.import_module, OF_HOST)
    await asyncio.to_thread(prepare, device)
