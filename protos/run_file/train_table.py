"""The table of the run file that says how the model is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from dtfm.protos.run_file.table import Table

MOST_HELD_OUT = 1 << 18
"""Held-out micro-batches in an evaluation: a node reports the loss of each in one message."""


def _auto_or_number(value: object, bounds: str, fits: Callable[[float], bool]) -> object:
    """The value, a whole number as a float. Raises ValueError unless it is "auto", or a number that ``fits`` the ``bounds``."""
    if value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise ValueError(f'must be "auto", or a number {bounds}')
    return float(value)


class Train(Table):
    """The training itself: batches, the optimizer, the learning rate's schedule, precision and evaluation.

    The learning rate rises linearly during the warm-up, then follows `schedule`. Without compression and `rounds` every step
    has the loss of a single process, for any number of nodes and through joins and failures.
    """

    steps: int = Field(
        default=200, ge=1, le=100_000_000, description="Updates of the whole model and, with `rounds`, exchanges."
    )
    micro_batch: int = Field(default=4, ge=1, le=65536, description="Samples that go through the pipeline at once.")
    global_batch: int = Field(
        default=32, ge=1, le=1 << 24, description="Samples per step, a multiple of `micro_batch`."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description='What updates the weights. "muon": Muon updates the matrices of all layers but the first and the last (so '
        "neither embeddings nor the head), and AdamW the rest, with the same `learning_rate` and `weight_decay`. Muon keeps one "
        "moment of a matrix instead of two, its momentum is 0.95, and `clip_norm` does not apply to its matrices, as their "
        "updates have one size. One replica finds the update of a matrix and sends it to the others, in 16 bits. Without a codec "
        'replicas exchange a quarter more by this. It needs torch 2.9, `trust.mode` "trusted" and no audits.',
    )
    learning_rate: float = Field(default=3e-3, gt=0, le=100, description="The learning rate after the warm-up.")
    warmup_steps: int = Field(
        default_factory=lambda known: min(20, known.get("steps", 0) // 10),
        ge=0,
        description="Steps during which the learning rate rises from 0. Default: 20, or a tenth of `steps` if this is less.",
    )
    schedule: Literal["constant", "cosine", "linear", "warmup-stable-decay"] = Field(
        default="cosine",
        description="What the learning rate does after the warm-up. It stays, or falls along a cosine or a line until the last "
        "step, or stays and then falls along a line in the last `decay_steps`.",
    )
    decay_steps: int = Field(
        default_factory=lambda known: (
            min(known.get("steps", 0) // 5, known.get("steps", 0) - known.get("warmup_steps", 0))
            if known.get("schedule") == "warmup-stable-decay"
            else 0
        ),
        ge=0,
        description="For warmup-stable-decay: the number of last steps in which the learning rate falls. Default: a fifth of "
        "`steps`, or the steps after the warm-up if these are fewer.",
    )
    final_learning_rate_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="The learning rate at the last step, as a fraction of `learning_rate`, if the schedule falls.",
    )
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="The weight decay, applied to matrices alone.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay rate of the gradient's running mean.")
    beta2: float = Field(
        default=0.95, ge=0, lt=1, description="AdamW's decay rate of the squared gradient's running mean."
    )
    epsilon: float = Field(default=1e-8, gt=0, le=1, description="AdamW's term that prevents a division by zero.")
    loss_per: Literal["auto", "token", "sample"] = Field(
        default="auto",
        description='What counts alike in the loss of a step. "token": each learnt token of the step, on whatever node, as with '
        'other trainers. "sample": each sample, so that the learnt tokens of a sample with few of them count more. With `rounds` '
        'and "token", each island trains the mean over its own learnt tokens. "auto": "token" for conversations, and otherwise '
        '"sample", which is the same where all tokens are learnt.',
    )
    clip_norm: float = Field(
        default=1.0,
        ge=0,
        le=1e9,
        description="Norm to which the whole model's gradient is clipped, except matrices that Muon updates. 0 disables "
        "clipping.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp64"] = Field(
        default="auto",
        description='"bf16" computes in bfloat16, with weights in 32 bits. The run refuses GPUs that cannot compute in bfloat16 '
        '(compute capability below 8.0). "auto": the nodes of the first plan decide. It is "bf16" if some of them are GPUs and '
        'all these GPUs can, otherwise "fp32". The log says which. Until the first step is trained, another plan may decide '
        "otherwise.",
    )
    activation_checkpointing: Literal["auto", "none", "layer"] = Field(
        default="auto",
        description='What a node keeps of a micro-batch until its backward pass. "none": everything that the pass needs. '
        '"layer": the input of each layer, which is much less. The node then computes the layer again, a third more work. '
        '"auto": the planner chooses for each node, and takes "none" if there is room.',
    )
    optimizer_state: Literal["auto", "device", "host"] = Field(
        default="auto",
        description='Where a node keeps the weights in full precision and AdamW\'s moments: on its "device", or in the memory of '
        'its "host", which then computes AdamW. "auto": the planner chooses for each node. It takes "device" if there is room.',
    )
    compile: bool = Field(
        default=False,
        description="Whether nodes compile the model's layers with torch.compile while they join. That takes some seconds, or "
        "half a minute on a machine's first start, and each step is then faster. A node without a compiler says so, and computes "
        "the layers without compiling them.",
    )
    rounds: Literal["auto"] | int = Field(
        default="auto",
        description="0: all nodes exchange gradients in every step. 2 to 10,000, for slow lines: the planner divides the nodes "
        "into islands by their links. Each island trains a copy of the model on its share of the samples. After about this many "
        "steps the islands exchange what they have learnt, in a separate step that trains nothing. `steps` counts both kinds. "
        'Evaluations, checkpoints, pauses and changes of plan wait for an exchange. "auto": with each plan the planner chooses '
        "10, 30 or 100 steps, or 0, whichever brings the present nodes to the same loss soonest. It is 0 while the loss of a "
        "model without published weights falls by more than 5 % in 32 steps. Where work is audited, moments "
        'begin at zero in each round. There a round has at most 100 steps, and "auto" chooses 100 or 0. "auto" is 0 if '
        "`cluster.stages` is given.",
    )
    batch_grows: bool = Field(
        default=False,
        description="With `rounds`: whether a step has as many times `global_batch` samples as the plan has islands, so that an "
        "island trains as many samples as one alone would. The learning rate is multiplied by the root of that number. "
        "The run keeps its samples, and so takes fewer steps: `steps` and all other numbers of steps in this file, except the "
        "length of a round, count steps of `global_batch` samples. The number of batches changes with the plan, between two "
        "rounds alone. The last step may train more samples than are left. Whether such a run needs more tokens is not measured.",
    )
    outer_rate: Literal["auto"] | float = Field(
        default=1.0,
        description="With `rounds`: the rate, above 0 and at most 10, at which the sum of the islands' changes is applied. "
        '"auto": before an exchange each island tries the last rate and momentum, 1 without momentum, 0.7 with 0.9, and 1 with '
        "0.65. It tries each on up to four held-out micro-batches. The exchange applies the pair that brings the least loss, by "
        "the median over islands, and the log names each choice. Until the warm-up is over, the pair is 1 without momentum. If "
        "trying takes more than 2 % of a round, only some exchanges try. A node needs its host's memory for another copy of the "
        "weights of its layers.",
    )
    outer_momentum: Literal["auto"] | float = Field(
        default_factory=lambda known: "auto" if known.get("outer_rate") == "auto" else 0.0,
        description="With `rounds`: Nesterov's momentum of the exchanges, at least 0 and below 1. Others published 0.9 with a "
        "rate of 0.7 for hundreds of exchanges. With few exchanges the model learns less with these. Rate and momentum are "
        'chosen together: this is "auto" if `outer_rate` is, and otherwise a number. Default: "auto" with that, otherwise 0.',
    )
    evaluate_every: int = Field(
        default=50,
        ge=0,
        description="Steps between evaluations on held-out samples. 0: none but the last. The last step is always evaluated.",
    )
    evaluation_samples: int = Field(
        default_factory=lambda known: -(-64 // known.get("micro_batch", 64)) * known.get("micro_batch", 64),
        ge=1,
        le=1 << 24,
        description="Held-out samples per evaluation, a multiple of `micro_batch`, in at most 262,144 micro-batches. Evaluations "
        "of more than 16,384 micro-batches are not audited. Default: 64, rounded up to a multiple.",
    )

    @field_validator("rounds", mode="plain")
    @classmethod
    def _rounds_fit(cls, rounds: object) -> object:
        if rounds == "auto":
            return rounds
        if type(rounds) is not int or not 0 <= rounds <= 10_000 or rounds == 1:
            raise ValueError(
                'must be "auto", 0, or 2 to 10,000: with an exchange after each step, exchanging gradients is as cheap'
            )
        return rounds

    @field_validator("outer_rate", mode="plain")
    @classmethod
    def _outer_rate_fits(cls, rate: object) -> object:
        return _auto_or_number(rate, "above 0 and at most 10", lambda number: 0 < number <= 10)

    @field_validator("outer_momentum", mode="plain")
    @classmethod
    def _outer_momentum_fits(cls, momentum: object, info: ValidationInfo) -> object:
        read = _auto_or_number(momentum, "at least 0 and below 1", lambda number: 0 <= number < 1)
        rate = info.data.get("outer_rate")
        if rate is not None and (rate == "auto") != (read == "auto"):
            raise ValueError(
                f'must be "auto" with train.outer_rate = "auto", and a number with a number ({rate!r}): an exchange chooses the '
                "two together; set both, or neither"
            )
        return read

    @property
    def has_momentum(self) -> bool:
        """Whether exchanges keep momentum."""
        return self.outer_momentum == "auto" or self.outer_momentum > 0

    @property
    def micro_batches(self) -> int:
        """Those of a step."""
        return self.global_batch // self.micro_batch

    @field_validator("global_batch", "evaluation_samples")
    @classmethod
    def _whole_micro_batches(cls, samples: int, info: ValidationInfo) -> int:
        micro = info.data.get("micro_batch", 1)
        if samples % micro:
            below, above = samples // micro * micro, -(-samples // micro) * micro
            raise ValueError(
                f"must be a multiple of train.micro_batch ({micro}), like {f'{below} or ' if below else ''}{above}"
            )
        return samples

    @field_validator("evaluation_samples")
    @classmethod
    def _one_report(cls, samples: int, info: ValidationInfo) -> int:
        if samples > (most := MOST_HELD_OUT * info.data.get("micro_batch", 1)):
            raise ValueError(f"must be at most {most}, {MOST_HELD_OUT} micro-batches")
        return samples

    @field_validator("decay_steps")
    @classmethod
    def _decay_fits(cls, decay: int, info: ValidationInfo) -> int:
        if info.data.get("schedule", "warmup-stable-decay") != "warmup-stable-decay":
            if decay:
                raise ValueError('needs train.schedule = "warmup-stable-decay"; set that, or remove decay_steps')
        elif "steps" in info.data and "warmup_steps" in info.data:
            left = info.data["steps"] - info.data["warmup_steps"]
            if not min(left, 1) <= decay <= left:
                raise ValueError(f"must be 1 to {left}, the steps that the warm-up leaves")
        return decay

    @field_validator("warmup_steps")
    @classmethod
    def _warm_up_fits(cls, warmup: int, info: ValidationInfo) -> int:
        if warmup > (steps := info.data.get("steps", warmup)):
            raise ValueError(f"must be at most train.steps ({steps})")
        return warmup
