"""Training in one plain process, which tests of parity compare with.

It shares none of the product's steps, sums and optimizers, only what both must start from: initial weights and the order of
samples.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from dtfm.kernels.codec import codec_named, decode, encode
from dtfm.node.data.dataset import Data
from dtfm.node.data.load import load_data
from dtfm.node.data.samples import evaluation_samples
from dtfm.node.data.user_code import import_allowed
from dtfm.node.model.model import Model
from dtfm.protos.outer import OuterStep
from dtfm.protos.plan_pb2 import FP64, MUON, Run
from tests.node.load_once import load_once

CPU = torch.device("cpu")


Changes = Mapping[int, Mapping[str, float]]
"""Values of [train] that an operator has set, by the first step with them."""

Outer = Callable[[int, Callable[[OuterStep], Any]], OuterStep]
"""The outer step of an exchange, by its step. The second argument gives the model that another outer step would make."""


def plain_losses(
    run: Run,
    allowed_modules: tuple[str, ...] = (),
    held_out: list[float] | None = None,
) -> Iterator[float]:
    """The losses of step 1, 2, and so on without end, each computed when it is asked for. ``held_out`` gets the held-out loss
    after each step, before the loss of the next one."""
    torch.set_num_threads(
        1
    )  # several would wait for each other on busy cores: a second for a step of some milliseconds
    train = run.train
    dtype = torch.float64 if train.precision == FP64 else torch.float32
    data = load_data(run, allowed_modules)
    module = whole_model(run, data, allowed_modules)
    if run.model.weights in ("", "bf16"):
        module = module.to(dtype)
    optimizer = optimizer_of(run, module)
    for step in itertools.count(1):
        of_step = train.global_batch // train.micro_batch
        numbers = range((step - 1) * of_step, step * of_step)
        inputs, labels = whole_batch(run, data, numbers)
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        positions = data.positions(inputs)
        # With a cache, transformers would not look for documents.
        more = {} if positions is None else {"position_ids": positions, "use_cache": False}
        with dropping(module, numbers):
            loss = mean_loss(module(inputs, **more), labels, per_token=train.loss_per_token)
        torch.autograd.backward(loss)
        yield loss.item()
        update(run, module, optimizer, step)
        if held_out is not None:
            held_out.append(plain_held_out_loss(run, module, train.evaluation_samples))


def losses_of_islands(
    run: Run,
    shares: Callable[[int], Mapping[int, Sequence[int]]],
    exchanges: Callable[[int], bool | None],
    held_out: dict[int, float] | None = None,
    began: Callable[[int], Mapping[int, int]] = lambda _: {},
    device: torch.device = CPU,
    changes: Changes = MappingProxyType({}),
    outer: Outer | None = None,
    moments: Callable[[int], Mapping[int, int]] = lambda _: {},
    rate: Callable[[Run, int], float] | None = None,
) -> Iterator[float]:
    """The losses of step 1, 2, and so on, where islands train copies of the model. ``shares``: by step, the micro-batches of the
    run that each island trains, by its number; one that is missing has lost what it learnt since the last exchange. In a step
    that ``exchanges`` the loss is the loss of the step before; None: there are no rounds then. ``held_out`` gets the held-out
    loss after each. ``outer``: by default the run file's rate and momentum. ``began``: by step, the step after which an island
    began with moments of zero, where that is not the first. ``moments``: by step, and by island that begins before it, the island
    whose moments it begins with. ``rate``: of a step, by default the schedule's."""
    torch.set_num_threads(1)
    train, data = run.train, load_data(run)
    first = whole_model(run, data, ()).to(device, torch.float64 if train.precision == FP64 else torch.float32)
    copies: dict[int, tuple[Any, Optimizer]] = {}
    had: dict[int, int] = {}  # by island, the micro-batches since the last exchange, or since rounds began
    anchor = nn.utils.parameters_to_vector(first.parameters()).detach().clone()
    momentum, loss = torch.zeros_like(anchor), 0.0
    sums = SparseSums(run.network.exchange)
    for step in itertools.count(1):
        run, numbers = changed(run, changes.get(step, {})), shares(step)
        for island in numbers:
            if island not in copies or began(step).get(island) == step - 1 > 0:
                module = copy.deepcopy(first)
                if step > 1:
                    nn.utils.vector_to_parameters(anchor.clone(), module.parameters())
                optimizer = optimizer_of(run, module)
                if (source := moments(step).get(island)) is not None:
                    optimizer.load_state_dict(copy.deepcopy(copies[source][1].state_dict()))
                copies[island], had[island] = (module, optimizer), 0
        copies = {island: copies[island] for island in numbers}
        if exchanges(step):
            whole = sum(had[island] for island in copies)
            learnt = {
                island: (anchor - nn.utils.parameters_to_vector(module.parameters()).detach()) * (had[island] / whole)
                for island, (module, _) in copies.items()
            }
            had = dict.fromkeys(copies, 0)
            codec = run.network.exchange if len(learnt) > 1 else "off"  # one island sends nothing
            if codec in ("topk", "top64"):
                change = sums(learnt)
            else:
                change = rounded(torch.stack([rounded(each, codec) for each in learnt.values()]).sum(0), codec)
            under = partial(model_under, first, (anchor, momentum, change))
            fixed = OuterStep(train.outer_rate, train.outer_momentum)
            anchor, momentum = stepped((anchor, momentum, change), fixed if outer is None else outer(step, under))
            for module, _ in copies.values():
                nn.utils.vector_to_parameters(anchor.clone(), module.parameters())
            if run.trust.audit_rate > 0:  # each round begins with moments of zero
                copies = {island: (module, optimizer_of(run, module)) for island, (module, _) in copies.items()}
        else:
            total = torch.zeros((), dtype=anchor.dtype, device=device)
            counted = {island: len(mine) for island, mine in numbers.items()}
            if train.loss_per_token:
                counted = {i: int((whole_batch(run, data, mine)[1] >= 0).sum()) for i, mine in numbers.items()}
            for island, (module, optimizer) in copies.items():
                inputs, labels = whole_batch(run, data, numbers[island])
                with dropping(module, numbers[island]):
                    of_island = mean_loss(module(inputs.to(device)), labels.to(device), per_token=train.loss_per_token)
                torch.autograd.backward(of_island)
                total += of_island.detach() * (counted[island] / sum(counted.values()))
                update(run, module, optimizer, step, rate)
                had[island] += len(numbers[island])
            loss = total.item()
            if exchanges(step) is None:
                anchor = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
                had[island] = 0
        if held_out is not None and exchanges(step) is not False:
            held_out[step] = held_out_loss(run, data, module, train.evaluation_samples, device)
        yield loss


def stepped(state: tuple[torch.Tensor, ...], outer: OuterStep) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and momentum after an exchange, from the weights, momentum and mean change before it."""
    anchor, momentum, change = state
    momentum = outer.momentum * momentum + change
    return anchor - outer.rate * (outer.momentum * momentum + change), momentum


def model_under(first: nn.Module, state: tuple[torch.Tensor, ...], outer: OuterStep) -> nn.Module:
    """A model like ``first`` with the weights that this outer step would make."""
    module = copy.deepcopy(first)
    nn.utils.vector_to_parameters(stepped(state, outer)[0], module.parameters())
    return module


def changed(run: Run, values: Mapping[str, float]) -> Run:
    """The run with these keys of [train]."""
    if not values:
        return run
    other = Run()
    other.CopyFrom(run)
    for name, value in values.items():
        setattr(other.train, name, value)
    return other


def update(
    run: Run, module: nn.Module, optimizer: Optimizer, step: int, rate: Callable[[Run, int], float] | None = None
) -> None:
    """Applies the gradients of ``step``, and clears them. ``rate``: of a step, by default the schedule's."""
    if run.train.clip_norm > 0:
        norm = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        muons = {*map(id, matrices_of(module) if run.train.optimizer == MUON else ())}
        clipped = [p for p in module.parameters() if id(p) not in muons]
        nn.utils.clip_grads_with_norm_(clipped, run.train.clip_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = scheduled_rate(run, step) if rate is None else rate(run, step)
        if group["weight_decay"]:
            group["weight_decay"] = run.train.weight_decay
    optimizer.step()
    optimizer.zero_grad()


class MuonAndAdamW:
    """torch's, each for its part of the parameters."""

    def __init__(self, run: Run, module: nn.Module) -> None:
        matrices = matrices_of(module)
        muon = torch.optim.Muon(matrices, weight_decay=run.train.weight_decay, adjust_lr_fn="match_rms_adamw")
        self._both = muon, adamw_of(run, module, without=matrices)
        self.param_groups = [group for each in self._both for group in each.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"both": [each.state_dict() for each in self._both]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each, state in zip(self._both, state_dict["both"], strict=True):
            each.load_state_dict(state)

    def step(self) -> None:
        for each in self._both:
            each.step()

    def zero_grad(self) -> None:
        for each in self._both:
            each.zero_grad()


Optimizer = torch.optim.Optimizer | MuonAndAdamW


def optimizer_of(run: Run, module: nn.Module) -> Optimizer:
    return MuonAndAdamW(run, module) if run.train.optimizer == MUON else adamw_of(run, module)


def matrices_of(module: nn.Module) -> list[nn.Parameter]:
    """The matrices of a language model's layers, without embeddings and head."""
    return [p for name, p in module.named_parameters() if re.search(r"\.(h|layers)\.\d+\.", name) and p.ndim == 2]


def adamw_of(run: Run, module: nn.Module, without: Sequence[nn.Parameter] = ()) -> torch.optim.Optimizer:
    others = {*map(id, without)}
    trained = [p for p in module.parameters() if p.requires_grad and id(p) not in others]
    matrices, vectors = ([p for p in trained if (p.ndim >= 2) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": run.train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(run.train.beta1, run.train.beta2), eps=run.train.epsilon)


def rounded(values: torch.Tensor, codec: str) -> torch.Tensor:
    """The values as a codec of blocks decodes them, like "i4b64": 4 bits for each of 64 values, scaled by the largest."""
    if codec in ("off", "auto"):
        return values
    bits, length = (int(part) for part in codec[1:].split("b"))
    blocks = nn.functional.pad(values, (0, -len(values) % length)).view(-1, length)
    step = (blocks.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp_min(1e-30)
    sent: torch.Tensor = (blocks / step).round() * step
    return sent.view(-1)[: len(values)]


class SparseSums:
    """Sums of several islands' changes. Each sends only the largest changes to all others, and keeps the rest for later
    calls."""

    def __init__(self, codec: str) -> None:
        self._codec = codec
        self._left_out: dict[int, torch.Tensor] = {}

    def __call__(self, changes: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The sum of the ``changes`` (flat, by island), as all get it."""
        return torch.stack([self._sent(island, each) for island, each in changes.items()]).sum(0)

    def _sent(self, island: int, change: torch.Tensor) -> torch.Tensor:
        whole = change + 0.95 * self._left_out.get(island, 0.0)
        encoded = encode(codec_named(self._codec), whole)
        arrived = decode(encoded.codec, encoded.data, whole.numel(), whole.dtype, whole.device)
        self._left_out[island] = whole - arrived
        return arrived


def mean_loss(output: Any, labels: torch.Tensor, *, per_token: bool) -> torch.Tensor:
    """The mean over the learnt tokens, or over the samples of each one's mean."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    if labels.ndim == 1:
        return functional.cross_entropy(logits, labels)
    if per_token:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return torch.stack([functional.cross_entropy(x, y) for x, y in zip(logits, labels, strict=True)]).mean()


def plain_held_out_loss(run: Run, module: Any, count: int) -> float:
    """The mean loss of ``module`` over the first ``count`` held-out samples of a run that trains text."""
    return held_out_loss(run, load_data(run), module, count)


def held_out_loss(run: Run, data: Data, module: Any, count: int, device: torch.device = CPU) -> float:
    """The mean loss of ``module``, which is on ``device``, over the first ``count`` held-out samples of a text."""
    inputs, labels = data.evaluation_batch(evaluation_samples(0, micro_batch=count, count=data.evaluation_count))
    with torch.no_grad():
        output = module(inputs.to(device))
        return float(mean_loss(output, labels.to(device), per_token=run.train.loss_per_token))


def held_out_loss_of(run: Run, data: Data, module: Any, number: int, device: torch.device = CPU) -> float:
    """The mean loss of one held-out micro-batch; with more than there are, they begin again."""
    train = run.train
    number %= train.evaluation_samples // train.micro_batch
    samples = evaluation_samples(number, micro_batch=train.micro_batch, count=data.evaluation_count)
    inputs, labels = data.evaluation_batch(samples)
    with torch.no_grad():
        return float(mean_loss(module(inputs.to(device)), labels.to(device), per_token=train.loss_per_token))


def batch(run: Run, data: Data, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and labels of one of the run's micro-batches."""
    return data.training_batch(data.training_samples(run.seed, number, run.train.micro_batch))


def whole_batch(run: Run, data: Data, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and labels of several micro-batches, one after the other."""
    inputs, labels = zip(*(batch(run, data, number) for number in numbers), strict=True)
    return torch.cat(inputs), torch.cat(labels)


def whole_model(run: Run, data: Data, allowed_modules: tuple[str, ...]) -> Any:
    """The model in one piece, with a run's initial weights."""
    if run.model.HasField("adapter"):
        return adapted_model(run, data)
    if run.model.pretrained:
        return AutoModelForCausalLM.from_pretrained(run.model.pretrained, dtype=torch.float32)
    described = load_once(run.model, data.sample, allowed_modules)
    if run.model.family == "module":
        module: Any = import_allowed(run.model.module, allowed_modules, "model.module")()
    else:
        keywords = {"vocab_size": data.sample.vocabulary, **json.loads(run.model.config_json or "{}")}
        if run.model.family == "gpt2":
            keywords |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        config = AutoConfig.for_model(run.model.family, **keywords)
        module = AutoModelForCausalLM.from_config(config)
    load_initial(module, described, run.seed)
    return module


def adapted_model(run: Run, data: Data) -> Any:
    """The published model with the run's adapter, as people make it with transformers, bitsandbytes and peft."""
    spec, packing = run.model, dict[str, Any]()
    if spec.weights == "nf4":
        packing = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        packing["bnb_4bit_compute_dtype"] = torch.float32
    elif spec.weights == "int8":
        packing = {"load_in_8bit": True}
    keywords = {"quantization_config": BitsAndBytesConfig(**packing), "device_map": "cpu"} if packing else {}
    base: Any = AutoModelForCausalLM.from_pretrained(spec.pretrained, dtype=torch.float32, **keywords)
    config = LoraConfig(
        r=spec.adapter.rank,
        lora_alpha=int(spec.adapter.alpha),
        target_modules=list(spec.adapter.targets) or "all-linear",
        use_rslora=spec.adapter.rs,
        use_dora=spec.adapter.dora,
        lora_dropout=spec.adapter.dropout,
        modules_to_save=list(spec.adapter.train_also) or None,
        ensure_weight_tying=bool(spec.adapter.train_also and base.config.tie_word_embeddings),
    )
    if spec.adapter.pretrained:
        begun: Any = PeftModel.from_pretrained(base, spec.adapter.pretrained, is_trainable=True)
        return begun.train(bool(packing))
    module: Any = get_peft_model(base, config)
    for name, part in module.named_modules():
        if isinstance(part, LoraLayer) and spec.adapter.dropout:
            own = PlainDropout(run.seed, name.removeprefix("base_model.model."), spec.adapter.dropout)
            part.lora_dropout["default"] = own
    module.train(bool(packing))  # bitsandbytes computes otherwise for evaluations, and families drop out for training
    adapted: list[Any] = [part for part in module.modules() if isinstance(part, LoraLayer) and spec.adapter.dora]
    for part in adapted:
        part.training = True  # otherwise peft drops nothing there
    described = load_once(spec, data.sample)
    values = {k: v for spec in described.buckets for k, v in described.initial_parameters(spec, run.seed).items()}
    trained = trained_in(module)
    assert trained.keys() == values.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            if ".lora_magnitude_vector." not in name:  # peft has set these itself
                parameter.copy_(values[name])
    return module


def plain_adapter(run: Run, steps: int) -> dict[str, torch.Tensor]:
    """The adapter after this number of steps, by the names of its parameters in the model."""
    data, train = load_data(run), run.train
    dtype = torch.float64 if train.precision == FP64 else torch.float32
    module = adapted_model(run, data)
    module = module.to(dtype) if run.model.weights == "bf16" else module
    optimizer, of_step = adamw_of(run, module), train.global_batch // train.micro_batch
    for step in range(1, steps + 1):
        numbers = range((step - 1) * of_step, step * of_step)
        inputs, labels = whole_batch(run, data, numbers)
        with dropping(module, numbers):
            torch.autograd.backward(mean_loss(module(inputs), labels, per_token=train.loss_per_token))
        update(run, module, optimizer, step)
    return {name: parameter.detach() for name, parameter in trained_in(module).items()}


class PlainDropout(nn.Module):
    """Drops what the run's nodes drop of these micro-batches, one after the other: ``numbers``."""

    def __init__(self, seed: int, name: str, share: float) -> None:
        super().__init__()
        self._seed, self._name, self._share = seed, name, share
        self.numbers: Sequence[int] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.numbers:
            return x
        shape = (len(x) // len(self.numbers), *x.shape[1:])
        masks = [plain_mask(self._seed, number, self._name, self._share, shape) for number in self.numbers]
        return torch.where(torch.from_numpy(np.concatenate(masks)), 0.0, x / (1 - self._share))


@contextmanager
def dropping(module: nn.Module, numbers: Sequence[int]) -> Iterator[None]:
    """Inside, the adapters in the module drop what they should of these micro-batches of the run."""
    own = [part for part in module.modules() if isinstance(part, PlainDropout)]
    for part in own:
        part.numbers = numbers
    yield
    for part in own:
        part.numbers = ()


def plain_mask(seed: int, number: int, name: str, share: float, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """The numbers that the module of this name drops of a micro-batch's input."""
    one, other = np.frombuffer(blake3(f"{seed} {number} {name}".encode()).digest(8), "<u4")
    columns = shape[-1]
    rows = _mixed(np.arange(math.prod(shape) // columns, dtype=np.uint32) ^ one)
    mixed = _mixed(rows[:, None] ^ _mixed(np.arange(columns, dtype=np.uint32) ^ other))
    # As numbers with a sign, the lowest are those from the middle on.
    return ((mixed ^ np.uint32(1 << 31)) < round(share * 2**32)).reshape(shape)


def _mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def trained_in(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters of peft's ``module``, by their names in the model."""
    return {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default.", "."): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def load_initial(module: nn.Module, described: Model, seed: int) -> None:
    values = {k: v for spec in described.buckets for k, v in described.initial_parameters(spec, seed).items()}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])


def scheduled_rate(run: Run, step: int) -> float:
    train = run.train
    if train.warmup_steps and step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    floor = train.learning_rate * train.final_learning_rate_fraction
    return floor + (train.learning_rate - floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2
