"""With Muon, nodes train what one process does with torch's Muon and AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtfm.node.model import placement
from dtfm.node.model.optimizer.muon import USED, check_muon, orthogonalise
from dtfm.node.model.placement import matrix_pieces
from dtfm.node.training.reduction import matrix_updates
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from dtfm.scheduler.model.plan import Takeover
from tests.cluster.runs import GPT2, losses_alone, run_file
from tests.node.in_process import InProcess, nodes_of


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def text(stages: Sequence[int] = (2, 2)) -> str:
    of_run = run_file(model=GPT2, stages=[*stages], steps=6)
    return of_run.replace("[train]\n", '[train]\noptimizer = "muon"\nclip_norm = 0.5\n')


def digests(nodes: InProcess) -> list[tuple[str, int, bytes]]:
    """(stage, bucket, digest) of each node's state."""
    return [
        (str(each.placement.layers), index, bucket.digests()[0])
        for each in nodes.generations.values()
        for index, bucket in each.stage.buckets.items()
    ]


def equal_one_process(losses: list[float]) -> bool:
    return losses == pytest.approx(losses_alone(Path("run.toml"), steps=len(losses)), rel=1e-9, abs=0)


@pytest.mark.parametrize(
    ("stages", "replicas"),
    [(2, 2), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((1, 1), (1, 2), (2, 1)))],
)
def test_losses_are_those_of_torchs_muon_and_adamw(stages: int, replicas: int) -> None:
    with nodes_of(text([replicas] * stages), stages, replicas) as nodes:
        assert equal_one_process([nodes.train() for _ in range(6)])
        held = digests(nodes)
        assert len({*held}) * replicas == len(held), "replicas of a stage hold the same bits"


def test_state_in_the_hosts_memory_moves_by_the_same_bits() -> None:
    host = Keeping(Checkpointing.NONE, OptimizerState.HOST)
    with nodes_of(text([2]), 1, 2, Keeping(), host) as nodes:
        assert equal_one_process([nodes.train() for _ in range(3)])
        assert len({*digests(nodes)}) * 2 == len(digests(nodes))


def test_replicas_whose_products_round_otherwise_still_hold_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the owner's count."""
    calls = list[str]()

    def of_an_unlike_device(bucket: object, gradients: torch.Tensor, name: str) -> None:
        orthogonalise(bucket, gradients, name)  # type: ignore[arg-type]
        calls.append(name)
        bucket.matrices(bucket.updates)[name].mul_(1 + len(calls) / 64)  # type: ignore[attr-defined]

    monkeypatch.setattr(matrix_updates, "orthogonalise", of_an_unlike_device)
    with nodes_of(text([2]), 1, 2) as nodes:
        for _ in range(3):
            nodes.train()
        assert len({*digests(nodes)}) * 2 == len(digests(nodes))
        matrices = [name for spec in nodes.generations["n0"].stage.model.buckets for name in spec.orthogonal]
    assert sorted(calls) == sorted(3 * matrices), "each update is found once"


def test_a_step_that_is_interrupted_goes_on_without_a_replica() -> None:
    """Its matrices get another owner, which has their momentum."""
    with nodes_of(text()) as nodes:
        losses = [nodes.train() for _ in range(2)]
        nodes.interrupt(150)
        first, last = nodes.plan.stages
        alone = replace(first, replicas=("n0",), loads=(10,))
        takeover = Takeover(0, "n1", 1, (("n0", 5),))
        nodes.go_on(replace(nodes.plan, generation=2, stages=(alone, last), takeovers=(takeover,)))
        losses += [nodes.train() for _ in range(2)]
    assert equal_one_process(losses)


def test_an_aborted_step_leaves_momentum_as_it_was() -> None:
    with nodes_of(text([2]), 1, 2) as nodes:
        nodes.train()
        before = digests(nodes)
        nodes.train(commit=False)
        assert digests(nodes) == before


def test_matrices_of_layers_alone_are_muons_and_have_one_moment() -> None:
    with nodes_of(text([1]), 1, 1) as nodes:
        stage = nodes.generations["n0"].stage
        of_layer, embedding, head = (stage.buckets[index].spec for index in (1, 0, 4))
        assert {name.split(".", 3)[-1] for name in of_layer.orthogonal} == {
            "attn.c_attn.weight",
            "attn.c_proj.weight",
            "mlp.c_fc.weight",
            "mlp.c_proj.weight",
        }
        assert not embedding.orthogonal
        assert not head.orthogonal
        moments = stage.buckets[1].moments
        assert (len(moments[0]), len(moments[1])) == (of_layer.size, of_layer.size - sum(of_layer.matrix_sizes))
        device, _ = stage.state_bytes
        held = sum(t.nbytes for b in stage.buckets.values() for t in (*b.state, b.gradients, b.updates))
        assert device == held


def test_each_matrix_is_owned_by_one_member_and_owners_have_about_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "PIECE_ELEMENTS", 100)
    matrix_pieces.cache_clear()
    found = matrix_pieces((250, 90, 120, 40), 2)
    assert [(piece.start, piece.stop) for piece in found] == [
        *((0, 100), (100, 200), (200, 250)),
        (250, 340),
        *((340, 440), (440, 460)),
        (460, 500),
    ]
    assert [piece.owner for piece in found] == [0, 0, 0, 1, 1, 1, 1]
    assert matrix_pieces((), 2) == ()
    matrix_pieces.cache_clear()


@pytest.mark.parametrize("table", ['mode = "open"', "audit_rate = 0.1"])
def test_a_run_whose_work_is_audited_or_whose_members_are_strangers_is_refused(tmp_path: Path, table: str) -> None:
    (tmp_path / "run.toml").write_text(f'[train]\noptimizer = "muon"\n[trust]\n{table}\n')
    with pytest.raises(ValueError, match=r'set train.optimizer = "adamw", or mode = "trusted" without audits'):
        read_run_file(tmp_path / "run.toml")


@pytest.mark.parametrize("gone", USED)
def test_another_torch_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    check_muon()
    monkeypatch.delattr(torch.optim._muon, gone)
    with pytest.raises(ValueError, match=r"needs 2\.9 or later"):
        check_muon()
