"""How far apart honest devices' results are: ``python -m tests.bench.rounding [--layers 8] [--trained 10] [--json]``.

Stages of several families, with weights that were trained for some steps, are computed forward and backward from the same
inputs by different processes. The processes differ in things that change the order of sums: threads, instruction sets (as on
older processors), with and without oneDNN, deterministic kernels, the precision of float32 products, compiled layers.

For each process, the largest relative error against the first one is printed, as audits compute it
(node/training/audits/step_again.py). It is the error of the tensors that each stage passes on and back, of the losses, and of the
pieces of a share's gradients, with two and with eight replicas. "2 threads" stands for a restart, the instruction sets for other
kinds of processors.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dtfm.coordinator.core.step.commits import learning_rate
from dtfm.node.data.dataset import Data
from dtfm.node.data.load import load_data
from dtfm.node.model.compiled_layer import can_compile
from dtfm.node.model.load import load_model
from dtfm.node.model.optimizer.optimizer import Terms, adamw, squared_norms
from dtfm.node.model.placement import pieces
from dtfm.node.model.precision import compute_dtype, run_dtype
from dtfm.node.model.stage import Stage, build_stage
from dtfm.node.training.audits.step_again import relative_error
from dtfm.protos.clipping import clip_coefficient
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.run_file.run_file import read_run_file
from tests.bench.older_cpus import AS_ON_AVX2
from tests.bench.rows import Row, show
from tests.cluster.plain import batch
from tests.cluster.runs import run_file, write_corpus
from tests.node.model.initialised import initialise_all

FAMILIES = {
    "gpt2": "n_embd = {width}, n_layer = {layers}, n_head = 4, n_positions = 128",
    "llama": "hidden_size = {width}, num_hidden_layers = {layers}, num_attention_heads = 4, intermediate_size = {wide}",
}
PRECISIONS = ("fp32", "bf16")
WIDTH, SHARE = 192, 4
"""Hidden size, and the micro-batches of a share."""
REPLICAS = (2, 8)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Variant:
    """A process with these environment variables, and its first call."""

    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    onednn: bool = True
    deterministic: bool = False
    products: str = "highest"
    compiles: bool = False


REFERENCE = "1 thread"
VARIANTS = {
    REFERENCE: Variant(),
    "again": Variant(),
    "2 threads": Variant(threads=2),
    "deterministic": Variant(deterministic=True),
    "products=medium": Variant(products="medium"),
    "no oneDNN": Variant(onednn=False),
    "oneDNN as on AVX2": Variant({"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "oneDNN as on AVX-512 without bf16": Variant({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    "all as on AVX2": Variant(AS_ON_AVX2),
    "all as on AVX2, 2 threads": Variant(AS_ON_AVX2, threads=2),
    "MKL the same everywhere": Variant({"MKL_CBWR": "COMPATIBLE"}),
    "compiled layers": Variant(compiles=True),
}

#: What is compared: its kind, its name, and the tensor.
Result = tuple[str, str, torch.Tensor]


@dataclass
class Work:
    """The micro-batches of one share, through all stages."""

    run: Run
    data: Data
    stages: list[Stage]

    def batch(self, number: int, step: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
        of_step = self.run.train.global_batch // self.run.train.micro_batch
        return batch(self.run, self.data, (step - 1) * of_step + number)

    def train(self, steps: int) -> None:
        for step in range(1, steps + 1):
            for stage in self.stages:
                stage.zero_gradients()
            for number in range(SHARE):
                tokens, labels = self.batch(number, step)
                x = tokens
                for stage in self.stages[:-1]:
                    x = stage.forward(x)
                self.stages[-1].loss(x, labels, 1 / SHARE).weighted.backward()  # type: ignore[no-untyped-call]
            train = self.run.train
            norm = sum(squared_norms(b.gradients for stage in self.stages for b in stage.buckets.values()))
            clip = clip_coefficient(norm**0.5, train.clip_norm)
            terms = Terms(clip, learning_rate(train, step), train.weight_decay)
            for stage in self.stages:
                for index, bucket in stage.buckets.items():
                    adamw(train, step, terms, bucket, bucket.gradients)
                    stage.refresh(index)

    def results(self, given: Mapping[str, torch.Tensor] | None) -> Iterator[Result]:
        """The results of each stage, from the inputs in ``given``, or from the outputs of the stage before (None)."""
        for stage in self.stages:
            stage.zero_gradients()
        for number in range(SHARE):
            yield from self._micro_batch(number, given)
        for place, stage in enumerate(self.stages):
            for index, bucket in stage.buckets.items():
                yield "addends", f"bucket {place} {index}", bucket.gradients.clone()

    def _micro_batch(self, number: int, given: Mapping[str, torch.Tensor] | None) -> Iterator[Result]:
        tokens, labels = self.batch(number)
        entered, left = [tokens], list[torch.Tensor]()
        for place, stage in enumerate(self.stages[:-1]):
            left.append(stage.forward(entered[place]))
            name = f"out {place} {number}"
            yield "activations", name, left[place].detach()
            entered.append((left[place].detach() if given is None else given[name]).requires_grad_())
        scored = self.stages[-1].loss(entered[-1], labels, 1 / SHARE)
        yield "losses", f"loss {number}", scored.mean.view(1)
        scored.weighted.backward()  # type: ignore[no-untyped-call]
        for place in range(len(self.stages) - 1, 0, -1):
            gradient, name = entered[place].grad, f"back {place} {number}"
            assert gradient is not None
            yield "gradients", name, gradient
            torch.autograd.backward(left[place - 1], gradient if given is None else given[name])


def works(folder: Path, layers: int, compiles: bool) -> Iterator[tuple[str, Work]]:
    for family, config in FAMILIES.items():
        sizes = config.format(width=WIDTH, wide=3 * WIDTH, layers=layers)
        model_table = f'[model]\nfamily = "{family}"\nconfig = {{ {sizes} }}\n'
        for precision in PRECISIONS:
            text = run_file(model=model_table, stages=[2, 2, 2], steps=10, precision=precision, learning_rate=1e-3)
            (folder / "run.toml").write_text(text.replace("sequence_length = 32", "sequence_length = 96"))
            run = read_run_file(folder / "run.toml").message("test")
            with contextlib.chdir(folder):
                data = load_data(run)
                model = load_model(run.model, data.sample)
            model.compiles = compiles
            borders = [0, 1, len(model.layers) - 1, len(model.layers)]  # so that errors add up over many layers
            stages = [
                build_stage(model, *ends, CPU, run_dtype(run), computes_in=compute_dtype(run))
                for ends in itertools.pairwise(borders)
            ]
            for stage in stages:
                initialise_all(stage, run.seed)
            yield f"{family} {precision} {layers}", Work(run, data, stages)


def compute(folder: Path, name: str, layers: int, trained: int) -> None:
    """Writes the results of this variant, in a process of its own. The reference also trains, and writes the weights that
    others begin with."""
    variant = VARIANTS[name]
    torch.set_num_threads(variant.threads)
    torch.backends.mkldnn.enabled = variant.onednn  # type: ignore[assignment]
    torch.use_deterministic_algorithms(variant.deterministic)
    torch.set_float32_matmul_precision(variant.products)
    for title, work in works(folder, layers, variant.compiles and can_compile(CPU)):
        known = folder / f"{title} begins.safetensors"
        buckets = {
            f"{place} {index}": bucket
            for place, stage in enumerate(work.stages)
            for index, bucket in stage.buckets.items()
        }
        given = None
        if name == REFERENCE:
            work.train(trained)
        else:
            stored = load_file(known)
            for key, bucket in buckets.items():
                bucket.parameters.copy_(stored[f"weights {key}"])
            for stage in work.stages:
                for index in stage.buckets:
                    stage.refresh(index)
            given = stored
        weights = {f"weights {key}": bucket.parameters.clone() for key, bucket in buckets.items()}
        found = {of: tensor.clone() for _, of, tensor in work.results(given)}
        if name == REFERENCE:
            save_file({**weights, **found}, known)
        save_file(found, folder / f"{title} {name}.safetensors")


def compared(mine: Mapping[str, torch.Tensor], its: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The largest error, by the tensors that audits compare."""
    kinds = {"out": "activations", "back": "gradients", "loss": "losses", "bucket": "addends"}
    worst = dict.fromkeys(kinds.values(), 0.0)
    for name, tensor in mine.items():
        kind, a, b = kinds[name.split()[0]], its[name].flatten(), tensor.flatten()
        ranges = [(0, b.numel())]
        if kind == "addends":
            ranges = [ends for replicas in REPLICAS for ends in pieces(b.numel(), replicas) if ends[0] < ends[1]]
        errors = [relative_error(a[start:stop], b[start:stop]) for start, stop in ranges]
        worst[kind] = max(worst[kind], *errors)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[8])
    parser.add_argument("--trained", type=int, default=10, help="steps of training before")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--compute", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compute:
        compute(arguments.folder, arguments.compute, arguments.layers[0], arguments.trained)
        return
    rows = []
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory() as folder:
            write_corpus(Path(folder))
            for name, variant in VARIANTS.items():
                again = ["--compute", name, "--folder", folder, "--layers", str(layers)]
                command = [sys.executable, "-m", "tests.bench.rounding", *again, "--trained", str(arguments.trained)]
                subprocess.run(command, check=True, env={**os.environ, **variant.environment})
            for precision in PRECISIONS:
                rows += rows_of(Path(folder), precision, layers)
    show("Relative errors between honest devices", [*rows, *norms()], arguments.json)


def rows_of(folder: Path, precision: str, layers: int) -> list[Row]:
    rows = []
    for name in VARIANTS.keys() - {REFERENCE}:
        worst: dict[str, float] = {}
        for family in FAMILIES:
            title = f"{family} {precision} {layers}"
            mine = load_file(folder / f"{title} {REFERENCE}.safetensors")
            found = compared(mine, load_file(folder / f"{title} {name}.safetensors"))
            worst = {kind: max(error, worst.get(kind, 0.0)) for kind, error in found.items()}
        rows += [
            Row(f"{precision}, {layers} layers, {name}: {kind}", error, "relative error", REFERENCE)
            for kind, error in worst.items()
        ]
    return sorted(rows, key=lambda row: row.measure)


def norms() -> list[Row]:
    """The rows on the error of the gradient of a norm's bias alone, which torch sums in bfloat16."""
    rows = []
    for tokens in (192, 1024, 4096):
        torch.manual_seed(0)
        x, given = (torch.randn(tokens, WIDTH, dtype=torch.bfloat16) for _ in range(2))
        found = list[torch.Tensor]()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            weight, bias = (torch.ones(WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
            y = torch.nn.functional.layer_norm(x.requires_grad_(), (WIDTH,), weight, bias)
            found += torch.autograd.grad(y, bias, given)
        error = relative_error(found[1], found[0])
        rows.append(Row(f"bf16, a norm's bias, {tokens} tokens, 2 threads", error, "relative error", REFERENCE))
    return rows


if __name__ == "__main__":
    main()
