"""The tables of the run file about the nodes: how many they are, and how far they are trusted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from dtfm.protos.run_file.table import Table


def _least_nodes(stages: Literal["auto"] | int | list[int]) -> int:
    if stages == "auto":
        return 1
    return sum(stages) if isinstance(stages, list) else stages


class Cluster(Table):
    """The nodes: how many the run waits for, how they divide the model, and when a node counts as gone."""

    stages: Literal["auto"] | int | list[int] = Field(
        default="auto",
        description='"auto" lets the scheduler choose. A number fixes the number of stages. A list, like [2, 1, 1], fixes the '
        "number of replicas of each stage.",
    )
    nodes: int = Field(
        default_factory=lambda known: _least_nodes(known.get("stages", "auto")),
        ge=1,
        le=1000,
        description="Number of nodes that must be ready before training starts. Default: as many as `stages` needs.",
    )
    lease: float = Field(
        default=10.0,
        ge=0.5,
        le=3600,
        description="Seconds without a heartbeat after which a node counts as gone. The run's other time-outs derive from it. "
        "If you set it while the run goes on, connections that already exist keep the old lease.",
    )
    wait_for_coordinator: float = Field(
        default=3600.0,
        ge=1,
        le=30 * 86400,
        description="Seconds for which members keep the run's state and look for the coordinator when it is gone.",
    )
    when_state_is_lost: Literal["ask", "weights", "start"] = Field(
        default="ask",
        description="What happens when no node that is here has the run's state any more, and to go on would lose more than ten "
        'minutes of work, or would begin again though weights are at home. "ask": the run waits until the nodes that have the '
        "state are back, or until an operator says `dtfm-coordinator continue --from weights` or `--from start`. "
        '"weights": it goes on from the newest weights at home, without AdamW\'s moments, and asks if there are none. "start": '
        "it goes on from the newest whole snapshot that is here, or from the start.",
    )
    prices: dict[str, Annotated[float, Field(ge=0, le=1e6)]] = Field(
        default={},
        max_length=100,
        description='What a device costs an hour, by a part of its name, like {"RTX 4090" = 0.35}. The page shows the '
        "run's cost so far and in all.",
    )
    currency: Annotated[str, Field(max_length=8)] = Field(
        default="", description='The currency of `prices`, like "EUR" or "$". Empty: the page names no currency.'
    )

    @field_validator("stages", mode="plain")
    @classmethod
    def _stages_fit(cls, stages: object) -> object:
        counts = stages if isinstance(stages, list) else [stages]
        if stages == "auto" or (1 <= len(counts) <= 1000 and all(type(n) is int and 1 <= n <= 1000 for n in counts)):
            return stages
        raise ValueError(
            'must be "auto", a number of stages (1 to 1000), or the replicas of each stage, like [2, 1, 1]'
        )

    @field_validator("nodes")
    @classmethod
    def _nodes_suffice(cls, nodes: int, info: ValidationInfo) -> int:
        if nodes < (least := _least_nodes(info.data.get("stages", "auto"))):
            raise ValueError(f"must be at least {least}, the number that cluster.stages = {info.data['stages']} needs")
        return nodes

    @property
    def pinned(self) -> int | tuple[int, ...] | None:
        """``stages`` as the scheduler takes it: a number, replicas per stage, or None to let it choose."""
        if self.stages == "auto":
            return None
        return tuple(self.stages) if isinstance(self.stages, list) else self.stages


USUAL_AUDIT_RATE = 0.02
"""In mode "open"."""


class Trust(Table):
    """Who defines the model and the data, and whether the run believes its members.

    The run file names the model and the data, but nodes read them. The first member to join defines them, and the coordinator
    refuses members that read something else. The coordinator prints the digests: pin them here to define them yourself.
    """

    mode: Literal["trusted", "open"] = Field(
        default="trusted",
        description='"trusted": members know each other, and the first one defines the model and the data. '
        '"open": members are strangers. Two members with different keys have to name the same model and data before the run '
        "begins. Each replica clips other replicas' gradients that are many times too large, and the log says when.",
    )
    data: str = Field(
        default="",
        pattern=r"^([0-9a-f]{64})?$",
        description="Digest of the data to train on, 64 hex digits. Empty: the first members define it.",
    )
    workload: str = Field(
        default="",
        pattern=r"^([0-9a-f]{64})?$",
        description="Digest of the model's layers and their sizes, 64 hex digits. Empty: the first members define it.",
    )
    audit_rate: Literal["auto"] | float = Field(
        default="auto",
        description='Share of the work, 0 to 1, that another replica repeats and compares. "auto": '
        f'{USUAL_AUDIT_RATE} in mode "open", otherwise 0. A stage with a single replica cannot be audited.',
    )

    keys_per_address: int = Field(
        default=8,
        ge=1,
        le=1_000_000,
        description='In mode "open": the most keys from one address that may be members at a time. For IPv6 it counts a /64 as '
        "one address, since a household has many addresses in it. A machine has one key, however many devices it has. Nodes on "
        "the coordinator's own machine do not count. Nodes behind one NAT or proxy count together.",
    )

    @field_validator("audit_rate")
    @classmethod
    def _is_share(cls, rate: Literal["auto"] | float) -> Literal["auto"] | float:
        if rate == "auto" or 0 <= rate <= 1:
            return rate
        raise ValueError('must be "auto", or between 0 and 1')

    @property
    def audits(self) -> float:
        """The share of the work that is audited."""
        if self.audit_rate == "auto":
            return USUAL_AUDIT_RATE if self.mode == "open" else 0.0
        return self.audit_rate
