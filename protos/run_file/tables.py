"""The tables of the run file: each key with its type, bounds, default and description.

``make docs`` writes docs/run-file.md from these descriptions. One that ends with "Default: ..." says how the default follows
from other keys.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, get_args, get_origin

import fsspec
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from dtfm.installed import install_line
from dtfm.protos.places import COORDINATOR, KNOWN, check_url, expanded
from dtfm.protos.run_file.trackers import MOST_TRACKERS, Destination, read_destination

Codec = Literal["auto", "off", "raw16", "i8b256", "i4b64"]
ExchangeCodec = Literal["auto", "off", "raw16", "i8b256", "i4b64", "topk"]

MOST_HELD_OUT = 1 << 18
"""Held-out micro-batches in an evaluation: a node reports the loss of each in one message."""

DEFAULT_LLAMA = {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 384}


class Table(BaseModel):
    """A table of the run file. Refuses unknown keys and wrong types, and validates defaults like given values."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


def table_of(field: FieldInfo) -> type[Table] | None:
    """The table that a key stands for, also one that may be left out. None: a plain key, or a list."""
    named = () if get_origin(field.annotation) is list else (field.annotation, *get_args(field.annotation))
    return next((each for each in named if isinstance(each, type) and issubclass(each, Table)), None)


class Model(Table):
    """The model: the transformers library builds it from a configuration, or it is your own `torch.nn.Sequential`."""

    pretrained: str = Field(
        default="",
        max_length=4096,
        description="The weights to begin with, as transformers' save_pretrained writes them (config.json and safetensors): a "
        'folder, a URL (its kinds are those of `checkpoint.uri`), or a name on the Hugging Face hub, like "NAME" or '
        '"NAME@REVISION". Each node reads only its own layers. The folder of another run on the coordinator\'s disk '
        "(dtfm-runs/NAME, or one of its steps) needs no copies: nodes read the newest weights there from the coordinator. "
        "Without this key, the weights follow from `seed`.",
    )
    family: str = Field(
        default_factory=lambda known: "" if known.get("pretrained") else "llama",
        max_length=64,
        description='The model_type of a causal language model in transformers, like "llama" or "gpt2"; or "module". Default: '
        "llama, or the family of `pretrained`.",
    )
    config: dict[str, Any] = Field(
        default_factory=lambda known: dict(DEFAULT_LLAMA) if known.get("family") == "llama" else {},
        description="Keyword arguments of the transformers configuration. Default: for llama the demo's small model ("
        + ", ".join(f"{key} {value}" for key, value in DEFAULT_LLAMA.items())
        + "), otherwise the configuration's own defaults, or those of `pretrained`.",
    )
    module: str = Field(
        default="",
        max_length=256,
        description='With family "module": "package.module:function", a function that returns a torch.nn.Sequential. '
        "Every node must be able to import it.",
    )
    weights: Literal["bf16", "int8", "nf4"] = Field(
        default="bf16",
        description='How nodes keep the frozen weights of a run with `[adapter]`. "bf16": as published, in the precision that '
        'the run computes in. "int8" and "nf4": the matrices of the decoder layers in 8 or 4 bits, by bitsandbytes. They '
        "need a half or a quarter of the memory of 16 bits.",
    )

    @field_validator("pretrained")
    @classmethod
    def _pretrained_usable(cls, pretrained: str) -> str:
        if "://" in pretrained or "::" in pretrained:
            check_url(pretrained)
        return pretrained

    @field_validator("family")
    @classmethod
    def _family_fits(cls, family: str, info: ValidationInfo) -> str:
        pretrained = info.data.get("pretrained", "")
        if not family and not pretrained:
            raise ValueError('must be a model_type of transformers, like "llama", or "module"')
        if family == "module" and pretrained:
            raise ValueError(
                "cannot begin with model.pretrained, which is for models of transformers; remove one of them"
            )
        return family

    @field_validator("config")
    @classmethod
    def _config_fits(cls, config: dict[str, Any]) -> dict[str, Any]:
        try:
            text = json.dumps(config, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"must hold only numbers, strings, booleans, lists and tables ({error})") from None
        if len(text) > 65536:
            raise ValueError(f"must be at most 65536 characters as JSON, not {len(text)}")
        return config

    @field_validator("module")
    @classmethod
    def _module_fits(cls, module: str, info: ValidationInfo) -> str:
        if info.data.get("family") != "module":
            if module:
                raise ValueError('needs family = "module"; set that, or remove module')
        elif not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", module):
            raise ValueError('with family = "module", must name a function like "package.module:function"')
        return module


MOST_TARGETS = 100
"""Names of modules in adapter.targets."""


class Adapter(Table):
    """Fine-tuning by LoRA. With this table the weights of `model.pretrained` stay as they are, and the run trains small matrices
    beside them. Nodes reduce, keep and send these alone."""

    pretrained: str = Field(
        default="",
        max_length=4096,
        description="The adapter to begin with, as peft's save_pretrained writes it (adapter_config.json and "
        "adapter_model.safetensors): a folder, a URL, or a name on the Hugging Face hub. If it is a folder on the coordinator's "
        "disk, nodes read it from the coordinator, and keys that are left out follow from it. Such a folder, or a run in "
        "dtfm-runs, may also be named as `model.pretrained`: then the model follows from it too. Without this key a new adapter "
        "begins.",
    )
    rank: int = Field(default=16, ge=1, le=4096, description="The rank of the two matrices beside each trained one.")
    alpha: float = Field(
        default_factory=lambda known: 2.0 * known.get("rank", 0),
        gt=0,
        le=1e6,
        description="The product of the two matrices counts times `alpha / rank`. Default: twice `rank`.",
    )
    rs: bool = Field(
        default=False,
        description="The product counts times `alpha` over the square root of `rank` (rsLoRA), which suits high ranks.",
    )
    dropout: float = Field(default=0.0, description="Only 0 is supported: a step must not depend on who computes it.")
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description='The modules that get an adapter, like ["q_proj", "v_proj"], by the ends of their names. "all-linear": all '
        "matrices of the decoder layers.",
    )

    @field_validator("pretrained")
    @classmethod
    def _pretrained_usable(cls, pretrained: str) -> str:
        if "://" in pretrained or "::" in pretrained:
            check_url(pretrained)
        return pretrained

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, dropout: float) -> float:
        if dropout:
            raise ValueError("dropout is not supported yet: replicas would train different things; leave it out")
        return dropout

    @field_validator("targets", mode="plain")
    @classmethod
    def _targets_fit(cls, targets: object) -> object:
        named = targets if isinstance(targets, list) and len(targets) <= MOST_TARGETS else []
        are_names = [isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.]{1,200}", name) for name in named]
        if targets == "all-linear" or (are_names and all(are_names)):
            return targets
        raise ValueError('must be "all-linear", or names of modules, like ["q_proj", "v_proj"]')


class Train(Table):
    """The training itself: batches, AdamW, the learning rate's schedule, precision and evaluation.

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
    learning_rate: float = Field(default=3e-3, gt=0, le=100, description="AdamW's learning rate after the warm-up.")
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
    weight_decay: float = Field(
        default=0.1, ge=0, le=10, description="AdamW's weight decay, applied to matrices alone."
    )
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
        description="Norm to which the whole model's gradient is clipped. 0 disables clipping.",
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
        "10, 30 or 100 steps, or 0, whichever brings the present nodes to the same loss soonest. Where work is audited, moments "
        'begin at zero in each round. There a round has at most 100 steps, and "auto" chooses 100 or 0. "auto" is 0 if '
        "`cluster.stages` is given.",
    )
    outer_rate: float = Field(
        default=1.0,
        gt=0,
        le=10,
        description="With `rounds`: the rate at which the sum of the islands' changes is applied.",
    )
    outer_momentum: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="With `rounds`: Nesterov's momentum of the exchanges. Others published 0.9 with a rate of 0.7 for "
        "hundreds of exchanges. With few exchanges the model learns less with these.",
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


class Network(Table):
    """Compression of the tensors that nodes send each other while they train. State is never compressed.

    - `"auto"` chooses for each link. It takes the gentlest of off, raw16 and i8b256 that hides the transfer behind computing.
    - `"off"` sends tensors unchanged.
    - `"raw16"` rounds to bfloat16.
    - `"i8b256"` quantizes to 8 bits in blocks of 256.
    - `"i4b64"` quantizes to 4 bits in blocks of 64.
    - `"topk"`, for `exchange` alone, sends the largest thirtieth of the elements. Most of the rest counts in later exchanges.
    """

    compression: Codec = Field(default="auto", description="Codec of all tensors for which no own key is given.")
    activations: Codec = Field(
        default_factory=lambda known: known.get("compression", "auto"),
        description="Codec of activations. Default: `compression`.",
    )
    gradients: Codec = Field(
        default_factory=lambda known: known.get("compression", "auto"),
        description="Codec of the gradients that flow back through the pipeline. Default: `compression`.",
    )
    reduction: Codec = Field(
        default_factory=lambda known: known.get("compression", "auto"),
        description="Codec of the gradients that the replicas of a stage reduce. Default: `compression`.",
    )
    exchange: ExchangeCodec = Field(
        default_factory=lambda known: known.get("compression", "auto"),
        description='Codec of the changes that islands exchange (`train.rounds`). "auto" is "i4b64": no computing hides an '
        "exchange, and 4 bits cost nothing in the measurement. Default: `compression`.",
    )

    @field_validator("exchange")
    @classmethod
    def _auto_is_known(cls, codec: ExchangeCodec) -> ExchangeCodec:
        return "i4b64" if codec == "auto" else codec


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


class Checkpoint(Table):
    """Where and how often the run writes the model. Nodes also keep snapshots of the whole state on their own disks."""

    uri: str = Field(
        default=f"{COORDINATOR}:",
        min_length=1,
        max_length=4096,
        description=f'Where the run writes checkpoints. "{COORDINATOR}:" is the folder dtfm-runs/NAME on the coordinator\'s '
        "disk, to which nodes send them. Otherwise it is a path or a URL that the coordinator and all nodes reach. Kinds of URL, "
        f"as fsspec names them: {', '.join(sorted(KNOWN))}; not wrapped into each other (::).",
    )
    every: int = Field(
        default=100,
        ge=0,
        description="Steps between checkpoints. 0: none but the last. A checkpoint always follows the last step.",
    )
    holds: Literal["auto", "weights", "state"] = Field(
        default="auto",
        description='"weights": the model alone, which `from_pretrained` loads. "state": the optimizer\'s state too, three times '
        'as many bytes. Training can go on from it if all nodes are lost. "auto": "weights" on the coordinator\'s disk, "state" '
        "elsewhere.",
    )
    keep: int = Field(
        default=3,
        ge=1,
        le=1_000_000,
        description="The number of whole checkpoints to keep. The coordinator deletes older ones once a newer one is whole.",
    )

    @property
    def weights(self) -> bool:
        """Whether checkpoints hold the weights alone."""
        return self.holds == "weights" or (self.holds == "auto" and self.uri == f"{COORDINATOR}:")

    @field_validator("uri")
    @classmethod
    def _uri_reachable(cls, uri: str) -> str:
        check_url(uri)
        protocol, _, path = uri.partition(":") if re.match(r"[A-Za-z][\w+.-]*:", uri) else ("file", "", uri)
        if protocol == COORDINATOR:
            return f"{COORDINATOR}:"
        if protocol == "file":
            return f"file://{expanded(path.removeprefix('//') or '/').resolve()}"
        try:
            fsspec.get_filesystem_class(protocol)
        except (ValueError, ImportError) as error:
            extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(protocol)
            fix = f"; install it, here and on each node, with: {install_line(extra)}" if extra else ""
            raise ValueError(f"names a kind of storage that is not installed here: {error}{fix}") from None
        return uri.rstrip("/")


class Notify(Table):
    """Where the coordinator sends a message when a person should look. The log does not keep this table, and nodes do not get it:
    `serve` reads it at each start."""

    url: str = Field(
        default="",
        max_length=2048,
        repr=False,
        description="The URL to which `serve` sends a message (POST, JSON). It sends one when the run begins or ends, when no "
        "step is committed for long, when the loss spikes, and when a member is quarantined. The URL may hold a token: keep the "
        "file to yourself.",
    )

    @field_validator("url")
    @classmethod
    def _url_usable(cls, url: str) -> str:
        if not re.fullmatch(r"(https?://[A-Za-z0-9.\-\[\]:]+(/[!-~]*)?)?", url):
            raise ValueError("must begin with https:// or http://, a host without a user name, and have no spaces")
        return url


class Track(Table):
    """Trackers that also get the run's curves: TensorBoard, Weights & Biases or trackio. The log does not keep this table, and
    nodes do not get it: `serve` reads it at each start."""

    to: list[str] = Field(
        default=[],
        description='"tensorboard:DIR" writes into a folder of the coordinator\'s machine. "wandb:PROJECT" and '
        '"wandb:ENTITY/PROJECT" write to Weights & Biases. "trackio:PROJECT" writes into trackio\'s own folder on that machine, '
        f'and "trackio:OWNER/SPACE" to a Space on the Hugging Face hub. At most {MOST_TRACKERS}. Each needs its library there, '
        "as in dtfm[tensorboard].",
    )

    @field_validator("to")
    @classmethod
    def _all_known(cls, to: list[str]) -> list[str]:
        if len(to) > MOST_TRACKERS:
            raise ValueError(f"must be at most {MOST_TRACKERS}")
        for text in to:
            read_destination(text)
        return to

    @property
    def destinations(self) -> list[Destination]:
        """Each once."""
        return list(dict.fromkeys(map(read_destination, self.to)))
