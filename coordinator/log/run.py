"""Events about the run itself: its beginning, its description, its waits, and its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from blake3 import blake3

from dtfm.coordinator.log.wording import Remark
from dtfm.protos.bucket_layout import LAYOUT_BYTES
from dtfm.protos.source_files import Files
from dtfm.scheduler.model.workload import Workload

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Described:
    """The model and the data, as the first node prepared them. All other nodes must agree."""

    workload: Workload
    """The model as the scheduler sees it."""
    data_fingerprint: str
    """Hex."""
    training_samples: int
    """The number of samples for training."""
    evaluation_samples: int
    """The number of held-out samples."""
    unigram_entropy: float
    """The loss, in nats per token, of a model that knows only token frequencies."""
    tokens_per_sample: int
    """The number of tokens in each sample."""
    buckets: int
    """The number of buckets: one per layer, and one per parameter that layers share."""
    weights_fingerprint: str = ""
    """Hex; empty unless the run begins with pretrained weights."""
    layouts: str = ""
    """The digests of the layouts of the buckets' files, in a row (hex, see protos/bucket_layout.py)."""
    files: Files = ()
    """The files that the node has read, for others to compare. No part of any digest: files may differ and hold the same text."""

    def layout_of(self, bucket: int) -> str:
        """The layout digest of the bucket's file (hex); empty: not known."""
        return self.layouts[2 * LAYOUT_BYTES * bucket :][: 2 * LAYOUT_BYTES]

    @property
    def is_tied(self) -> bool:
        """Whether layers share parameters."""
        return self.buckets > len(self.workload.layers)

    @property
    def data_digest(self) -> str:
        """The digest that the run file pins as trust.data (hex)."""
        return _digest(self.data_fingerprint, self.training_samples, self.evaluation_samples, self.tokens_per_sample)

    @property
    def workload_digest(self) -> str:
        """The digest that the run file pins as trust.workload (hex): of all values that members must agree on exactly."""
        workload = self.workload
        layers = [[x.name, x.forward_flops, x.parameter_bytes, x.activation_bytes] for x in workload.layers]
        optimizer, copy = workload.optimizer_bytes_per_parameter_byte, workload.copy_bytes_per_parameter_byte
        more: list[object] = [self.layouts] if self.layouts else []
        frozen = [x.frozen_bytes for x in workload.layers]
        if any(frozen):  # so that earlier pins stay valid
            more += [frozen, workload.backward_per_forward]
        orthogonal = [x.orthogonal_bytes for x in workload.layers]
        if any(orthogonal):
            more.append(orthogonal)
        return _digest(layers, optimizer, copy, self.buckets, self.weights_fingerprint, *more)


def as_it_trained(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run file in an event. A key that came later gets the value by which the run has trained, if its default is another."""
    train = run.get("train")
    return {**run, "train": {"loss_per": "sample", **train}} if train else {**run}


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The first event of every log. ``run``: the run file as JSON. ``run_id``: tells runs of the same name apart. ``file``: the
    original run file, if a name in it was resolved in ``run``."""

    run_id: str
    run: dict[str, Any]
    file: dict[str, Any] = field(default_factory=dict)
    event: Literal["run_started"] = "run_started"

    def apply(self, ledger: Ledger) -> Ledger:
        run = as_it_trained(self.run)
        return type(ledger)(run_id=self.run_id, run=run, file=self.file or run)

    def narrate(self) -> str:
        return f"run {self.run.get('name')} started (id {self.run_id})"


@dataclass(frozen=True, slots=True)
class RunResumed:
    """A coordinator process continues the log, and nodes have to join again. ``run`` is in force from now on: the run ``file``
    with the changes of operators."""

    reason: str
    run: dict[str, Any]
    file: dict[str, Any]
    event: Literal["run_resumed"] = "run_resumed"

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(ledger.with_run(as_it_trained(self.run)), file=self.file).without_members()

    def narrate(self) -> str:
        return f"run resumed: {self.reason}"


@dataclass(frozen=True, slots=True)
class Listens:
    """Where the coordinator listens (HOST:PORT), and the addresses that its operator advertised. A later process uses both
    again."""

    address: str
    advertised: tuple[str, ...]
    event: Literal["listens"] = "listens"

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(ledger, listens=self)

    def narrate(self) -> str:
        return f"the coordinator listens on {self.address}"


@dataclass(frozen=True, slots=True)
class RunDescribed:
    """``node``: the node that described the run."""

    described: Described
    node: str = ""
    event: Literal["run_described"] = "run_described"

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(ledger, described=self.described, described_by=self.node)

    def narrate(self) -> str:
        described, workload = self.described, self.described.workload
        size, frozen = (
            sum(getattr(layer, name) for layer in workload.layers) for name in ("parameter_bytes", "frozen_bytes")
        )
        beside = f" beside {frozen / 2**20:.1f} MiB that stay as they are" if frozen else ""
        return (
            f"the model has {len(workload.layers)} layers (embedding and head among them), {size / 2**20:.1f} MiB of "
            f"parameters{beside}; the data has {described.training_samples} samples (to pin both in the run file: [trust] data = "
            f'"{described.data_digest}", workload = "{described.workload_digest}")'
        )


@dataclass(frozen=True, slots=True)
class DescriptionDropped:
    """The run's description by ``node`` is dropped. Either the node was quarantined before the first plan, and no other member
    had confirmed the description; or the run has changed; or, as ``reason`` says, others have other data."""

    node: str
    reason: str = ""
    event: Literal["description_dropped"] = "description_dropped"

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(ledger, described=None, described_by="", data_confirmed=False)

    def narrate(self) -> str:
        because = f", as {self.reason}" if self.reason else "; the next members describe them again"
        return f"{self.node}'s description of the model and the data is dropped{because}"


@dataclass(frozen=True, slots=True)
class DataConfirmed:
    """A second node, of another party, has read the same data. Nodes that join later may believe its fingerprint."""

    node: str
    event: Literal["data_confirmed"] = "data_confirmed"

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(ledger, data_confirmed=True)

    def narrate(self) -> str:
        return f"{self.node} has read the same data; nodes that join later may fetch its tokens from beside the checkpoints"


@dataclass(frozen=True, slots=True)
class Waiting(Remark):
    """Nothing trains, for this reason. ``asks``: an operator has to decide how to go on, and the reason names the commands."""

    reason: str
    asks: bool = False
    event: Literal["waiting"] = "waiting"

    def narrate(self) -> str:
        return f"waiting: {self.reason}"


@dataclass(frozen=True, slots=True)
class RunPaused:
    """``by`` an operator. No step begins after the current one. ``ends``: the run stops when that step is in a checkpoint."""

    by: str
    ends: bool = False
    event: Literal["run_paused"] = "run_paused"

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(ledger, hold=self)

    def narrate(self) -> str:
        if self.ends:
            return f"{self.by} stops the run: it ends once its last step is in a checkpoint"
        return f"{self.by} paused the run: no step begins until `dtfm-coordinator continue`"


@dataclass(frozen=True, slots=True)
class RunContinued:
    by: str
    event: Literal["run_continued"] = "run_continued"

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(ledger, hold=None)

    def narrate(self) -> str:
        return f"{self.by} goes on with the run"


@dataclass(frozen=True, slots=True)
class RunChanged:
    """``by`` an operator or the first node to join: ``key`` of the run file, like "train.steps", is ``value`` from now on. It was
    ``before``. ``step``: the first step that is applied with the value; 0: steps do not depend on it."""

    by: str
    key: str
    value: Any
    before: Any
    step: int = 0
    event: Literal["run_changed"] = "run_changed"

    def apply(self, ledger: Ledger) -> Ledger:
        table, name = self.key.split(".")
        return ledger.with_run({**ledger.run, table: {**ledger.run.get(table, {}), name: self.value}})

    def narrate(self) -> str:
        since = f", from step {self.step} on" if self.step else ""
        return f"{self.by} set {self.key} to {self.value}{since}; it was {self.before}"


@dataclass(frozen=True, slots=True)
class RunStopped:
    """An operator stopped the run after ``step``. The run is not over."""

    step: int
    reason: str
    event: Literal["run_stopped"] = "run_stopped"

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(ledger, hold=None).without_members()

    def narrate(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class RunFinished:
    completed: ClassVar = True
    step: int
    reason: str
    event: Literal["run_finished"] = "run_finished"

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(ledger, outcome=self)

    def narrate(self) -> str:
        return f"run finished: {self.reason}"


@dataclass(frozen=True, slots=True)
class RunFailed:
    completed: ClassVar = False
    step: int
    reason: str
    event: Literal["run_failed"] = "run_failed"

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(ledger, outcome=self)

    def narrate(self) -> str:
        return f"run failed: {self.reason}"


@dataclass(frozen=True, slots=True)
class CoordinatorStopped:
    """The process stopped on request. The run can be resumed."""

    reason: str
    event: Literal["coordinator_stopped"] = "coordinator_stopped"

    def apply(self, ledger: Ledger) -> Ledger:
        return ledger.without_members()

    def narrate(self) -> str:
        return f"coordinator stopped: {self.reason}"


def _digest(*values: object) -> str:
    return blake3(json.dumps(values).encode()).hexdigest()
