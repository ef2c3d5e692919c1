"""The run file: what is trained, on which data, and how. The files of tables beside this one describe its keys."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from dtfm.protos import plan_pb2
from dtfm.protos.places import ADAPTER, COORDINATOR, COORDINATORS_DISK, PRETRAINED
from dtfm.protos.run_file.cluster_tables import Cluster, Trust
from dtfm.protos.run_file.data_tables import Data
from dtfm.protos.run_file.errors import RunFileError, describe_errors
from dtfm.protos.run_file.model_tables import Adapter, Model
from dtfm.protos.run_file.network_table import Network
from dtfm.protos.run_file.result_tables import Checkpoint, Notify, Track
from dtfm.protos.run_file.table import Table
from dtfm.protos.run_file.train_table import Train

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

MAX_FILE_BYTES = 1 << 20
"""Largest run file."""
PRECISIONS = {"fp32": plan_pb2.FP32, "bf16": plan_pb2.BF16, "fp64": plan_pb2.FP64}
_SCHEDULES = {
    "constant": plan_pb2.CONSTANT,
    "cosine": plan_pb2.COSINE,
    "linear": plan_pb2.LINEAR,
    "warmup-stable-decay": plan_pb2.WARMUP_STABLE_DECAY,
}
_OPTIMIZERS = {"adamw": plan_pb2.ADAMW, "muon": plan_pb2.MUON}
_TRUST_MODES = {"trusted": plan_pb2.Run.Trust.TRUSTED, "open": plan_pb2.Run.Trust.OPEN}


class RunFile(Table):
    """Keys that stand above all tables."""

    name: Name = Field(default="demo", description="The run's name in logs and on pages.")
    seed: int = Field(
        default=1, ge=0, le=2**64 - 1, description="Seed of the initial weights and of the order of samples."
    )
    model: Model = Field(default_factory=Model)
    adapter: Adapter | None = None
    data: Data = Field(default_factory=Data)
    train: Train = Field(default_factory=Train)
    network: Network = Field(default_factory=Network)
    cluster: Cluster = Field(default_factory=Cluster)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    trust: Trust = Field(default_factory=Trust)
    notify: Notify = Field(default_factory=Notify, exclude=True, repr=False)
    track: Track = Field(default_factory=Track, exclude=True)

    @field_validator("train")
    @classmethod
    def _loss_per_is_known(cls, train: Train, info: ValidationInfo) -> Train:
        data = info.data.get("data")
        if train.loss_per != "auto" or data is None:
            return train
        return train.model_copy(update={"loss_per": "token" if data.talks else "sample"})

    @field_validator("adapter")
    @classmethod
    def _adapter_fits(cls, adapter: Adapter | None, info: ValidationInfo) -> Adapter | None:
        model = info.data.get("model")
        if model is not None and adapter is not None and not model.pretrained:
            raise ValueError(
                "an adapter needs weights to stand beside: set model.pretrained, or remove the table to train a whole model"
            )
        if model is not None and adapter is None and model.weights != "bf16":
            raise ValueError(
                f'model.weights = "{model.weights}" is for weights that stay as they are: add a table [adapter], or remove '
                "model.weights"
            )
        if model is not None and adapter is not None and adapter.dora and model.weights == "int8":
            raise ValueError(
                'dora = true does not go with model.weights = "int8": peft loses the scales of 8 bits on a CPU; set weights to '
                '"nf4" or "bf16", or remove dora'
            )
        return adapter

    @field_validator("data")
    @classmethod
    def _prompts_are_continued(cls, data: Data, info: ValidationInfo) -> Data:
        model = info.data.get("model")
        if data.prompts and model is not None and model.module:
            raise ValueError(
                "prompts are continued by transformers' language models alone, and model.module names another model; remove "
                "prompts"
            )
        return data

    @field_validator("cluster")
    @classmethod
    def _cluster_fits(cls, cluster: Cluster, info: ValidationInfo) -> Cluster:
        train = info.data.get("train")
        if train is not None and train.rounds not in (0, "auto") and cluster.pinned is not None:
            raise ValueError('stages must be "auto" with train.rounds: each island has stages of its own')
        return cluster

    @field_validator("trust")
    @classmethod
    def _trust_fits(cls, trust: Trust, info: ValidationInfo) -> Trust:
        train, network = info.data.get("train"), info.data.get("network")
        has_rounds = train is not None and train.rounds not in (0, "auto")
        if train is not None and train.optimizer == "muon" and (trust.mode == "open" or trust.audits):
            raise ValueError(
                'Muon\'s updates are not audited, and nobody bounds those that a stranger sends: set train.optimizer = "adamw", '
                'or mode = "trusted" without audits'
            )
        if has_rounds and network and network.exchanges_sparsely and (trust.mode == "open" or trust.audits):
            raise ValueError(
                f'exchanges cannot be audited with network.exchange = "{network.exchange}", as each island adds what it left out '
                'of others, nor bounded in mode "open": set another codec, like "i4b64"'
            )
        return trust

    @property
    def may_have_rounds(self) -> bool:
        """Whether it can have any: each island has stages of its own. Exchanges under a sparse codec cannot be audited or
        bounded."""
        is_known = self.trust.mode == "trusted" and not self.trust.audits
        return self.cluster.pinned is None and (is_known or not self.network.exchanges_sparsely)

    @property
    def checkpoints(self) -> str:
        """The URL of the folder for checkpoints, as the coordinator reaches it."""
        return self.own_folder if self.keeps_checkpoints_itself else self.checkpoint.uri

    @property
    def keeps_checkpoints_itself(self) -> bool:
        """Whether they are on the coordinator's own disk, and nodes reach them through it."""
        return self.checkpoint.uri == f"{COORDINATOR}:"

    @property
    def own_folder(self) -> str:
        """The URL of the folder for checkpoints on the coordinator's own disk, as fsspec reads it: nothing in it is encoded."""
        return f"file://{Path('dtfm-runs', self.name).resolve()}"

    @property
    def own_weights(self) -> Path | None:
        """The folder on the coordinator's own disk with the weights to begin with, if it has them."""
        return _on_own_disk(self.model.pretrained)

    @property
    def own_adapter(self) -> Path | None:
        """The folder on the coordinator's own disk with the adapter to begin with, if it has that."""
        return _on_own_disk(self.adapter.pretrained) if self.adapter is not None else None

    @property
    def copy_bytes_per_parameter_byte(self) -> float:
        """Those of the weights that a node computes with, where they are others."""
        return 0.5 if self.train.precision == "bf16" else 0.0

    def with_precision(self, *, bf16: bool) -> RunFile:
        """The same run, where "auto" as train.precision is "bf16" or "fp32"."""
        if self.train.precision != "auto":
            return self
        decided = {"precision": "bf16" if bf16 else "fp32"}
        return self.model_copy(update={"train": self.train.model_copy(update=decided)})

    def as_nodes_reach(self, place: str) -> str:
        """The URL by which nodes reach a folder of checkpoints. ``place``: its URL for the coordinator."""
        name = f"/dtfm-runs/{self.name}"
        # The coordinator may have been elsewhere when it wrote this one.
        has_moved = self.keeps_checkpoints_itself and f"{name}/" in place
        is_own = has_moved or f"{place}/".startswith(f"{self.own_folder}/")
        return COORDINATORS_DISK + place.rpartition(name)[2] if is_own else place

    def message(self, run_id: str) -> plan_pb2.Run:
        """The run as the coordinator sends it to nodes."""
        other_ways = {
            *(
                "precision",
                "rounds",
                "schedule",
                "optimizer",
                "activation_checkpointing",
                "optimizer_state",
                "loss_per",
            ),
            "batch_grows",
        }
        train, pretrained = self.train.model_dump(exclude=other_ways), self.model.pretrained
        if self.train.outer_rate == "auto":
            train["outer_rate"] = train["outer_momentum"] = 0.0
        if self.own_weights is not None:
            pretrained = f"{COORDINATORS_DISK}/{PRETRAINED}"
        return plan_pb2.Run(
            name=self.name,
            id=run_id,
            seed=self.seed,
            model=plan_pb2.Run.Model(
                family=self.model.family,
                config_json=json.dumps(self.model.config),
                module=self.model.module,
                pretrained=pretrained,
                weights=self.model.weights if self.adapter is not None else "",
                adapter=self._adapter_message(),
            ),
            data=plan_pb2.Run.Data(
                **self.data.model_dump(exclude={"tokenizer", "prompts"}),
                tokenizer=self.data.tokenizer or pretrained.partition("@")[0] or "bytes",
            ),
            train=plan_pb2.Run.Train(
                **train,
                precision=PRECISIONS[self.with_precision(bf16=False).train.precision],
                schedule=_SCHEDULES[self.train.schedule],
                loss_per_token=self.train.loss_per == "token",
                optimizer=_OPTIMIZERS[self.train.optimizer],
            ),
            network=plan_pb2.Run.Network(**self.network.model_dump(exclude={"compression"})),
            lease_seconds=self.cluster.lease,
            checkpoint=plan_pb2.Run.Checkpoint(
                uri=self.as_nodes_reach(self.checkpoints), weights=self.checkpoint.weights
            ),
            trust=plan_pb2.Run.Trust(mode=_TRUST_MODES[self.trust.mode], audit_rate=self.trust.audits),
        )

    def _adapter_message(self) -> plan_pb2.Run.Adapter | None:
        if self.adapter is None:
            return None
        named = [] if self.adapter.targets == "all-linear" else self.adapter.targets
        begun_from = self.adapter.pretrained if self.own_adapter is None else f"{COORDINATORS_DISK}/{ADAPTER}"
        return plan_pb2.Run.Adapter(
            rank=self.adapter.rank,
            alpha=self.adapter.alpha,
            targets=named,
            pretrained=begun_from,
            rs=self.adapter.rs,
            train_also=self.adapter.train_also,
            dropout=self.adapter.dropout,
            dora=self.adapter.dora,
        )


def _on_own_disk(place: str) -> Path | None:
    """The folder that a place of the coordinator's own disk names; None: it names another place."""
    path = place.removeprefix(f"{COORDINATOR}://")
    return Path(path) if path != place else None


def read_run_file(path: Path | None) -> RunFile:
    """Reads the run file at ``path``; None gives the defaults.

    A relative path of a local checkpoint folder becomes absolute. Raises RunFileError, whose message names every problem.
    """
    return parse_run(read_table(path), str(path)) if path is not None else RunFile()


def read_table(path: Path) -> dict[str, Any]:
    """The content of the TOML file at ``path``, keys unchecked. Raises RunFileError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RunFileError(f"cannot read {path}: {error.strerror}; give the path of a run file (TOML)") from None
    if len(raw) > MAX_FILE_BYTES:
        raise RunFileError(f"{path} has {len(raw)} bytes; a run file has at most {MAX_FILE_BYTES}")
    try:
        return tomllib.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise RunFileError(f"{path} is not UTF-8 text (line {line}); save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise RunFileError(f"{path} is not valid TOML: {error}") from None


def parse_run(table: Mapping[str, Any], source: str) -> RunFile:
    """Validates a run file's content, from TOML or from the event log.

    ``source`` is its name in messages. Raises RunFileError, whose message names every problem.
    """
    try:
        return RunFile.model_validate(dict(table))
    except ValidationError as error:
        raise RunFileError(f"{source} has {describe_errors(error, RunFile)}") from None
