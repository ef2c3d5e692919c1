"""Frozen layers from other nodes, where their source cannot be read: `state/frozen_layers.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import torch

from dtfm.node.data.allowed import Allowed
from dtfm.node.data.dataset import Data
from dtfm.node.model.causal.weight_files import WeightFiles
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.state.frozen_layers import hold_frozen
from dtfm.node.state.state_store import StateStore
from dtfm.node.transport.peer_server import PeerServer
from dtfm.protos.control_pb2 import FrozenLayer, Peer
from dtfm.protos.plan_pb2 import BF16, FP32, Run
from tests.node.dialling import dialler
from tests.node.model.causal.test_kept_frozen import digests, started
from tests.protos.members import member
from tests.published import publish

LAYERS = (0, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published"))


class Node:
    """A node that may serve its frozen layers."""

    def __init__(self, name: str, folder: Path, cache: Path, weights: str = "bf16") -> None:
        self.name, self.given, self.stops_after = name, 0, -1
        self.model = started(folder, cache, weights=weights)
        run = Run(id="run", lease_seconds=2, train=Run.Train(precision=BF16 if weights == "bf16" else FP32))
        self.loaded = LoadedRun(run, self.model, cast(Data, None), dialler(name), Allowed(["/"]))
        self.dtype = torch.bfloat16 if weights == "bf16" else torch.float32
        store = StateStore()
        store.frozen = self.model.frozen
        self.server = PeerServer(store, self._gave)
        self.server.become(member(name))
        self.address = ""

    @property
    def peer(self) -> Peer:
        return Peer(node=self.name, candidates=[self.address])

    def offered(self, *donors: Node) -> list[FrozenLayer]:
        names = [donor.name for donor in (self, *donors)]
        held = self.model.frozen.digests(*LAYERS)
        return [FrozenLayer(layer=layer, digest=digest, nodes=names) for layer, digest in held]

    async def _gave(self, _: float) -> None:
        self.given += 1
        if self.given == self.stops_after:
            raise ConnectionError("in the middle")


@asynccontextmanager
async def serving(*nodes: Node) -> AsyncIterator[None]:
    """The nodes have all layers, and serve them."""
    for node in nodes:
        await asyncio.to_thread(node.model.frozen.load, *LAYERS, node.dtype)
        node.address = f"127.0.0.1:{await node.server.start('127.0.0.1:0')}"
    try:
        yield
    finally:
        for node in nodes:
            await node.server.stop()


def fail_from_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(files: WeightFiles, name: str) -> torch.Tensor:
        raise ValueError(f"model.pretrained: {files.name}: {name} cannot be read")

    monkeypatch.setattr(WeightFiles, "read", fail)


@pytest.mark.parametrize("weights", ["nf4", *(pytest.param(each, marks=pytest.mark.soak) for each in ("bf16", "int8"))])
async def test_a_node_gets_from_others_what_it_cannot_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, caplog: pytest.LogCaptureFixture
) -> None:
    donor, me = Node("donor", folder, tmp_path / "there", weights), Node("me", folder, tmp_path / "here", weights)
    async with serving(donor):
        fail_from_now(monkeypatch)
        with caplog.at_level("INFO"):
            await hold_frozen(me.loaded, LAYERS, donor.offered(), [donor.peer])
    assert digests(me.model) == digests(donor.model)
    assert me.model.frozen.digests(*LAYERS) == donor.model.frozen.digests(*LAYERS)
    assert len(me.model.frozen.digests(*LAYERS)) == 5
    assert "got the frozen weights of layer 2 from donor" in caplog.text


async def test_what_others_gave_is_kept_here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    donor, me = Node("donor", folder, tmp_path / "there", "int8"), Node("me", folder, tmp_path / "here", "int8")
    async with serving(donor):
        fail_from_now(monkeypatch)
        await hold_frozen(me.loaded, LAYERS, donor.offered(), [donor.peer])
    again = started(folder, tmp_path / "here", weights="int8")
    again.frozen.load(*LAYERS, torch.float32)
    assert digests(again) == digests(donor.model)


async def test_a_lying_donor_is_not_used_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    liar, honest = Node("liar", folder, tmp_path / "liar"), Node("honest", folder, tmp_path / "honest")
    me = Node("me", folder, tmp_path / "here")
    async with serving(liar, honest):
        for held in liar.model.frozen._held.values():
            held.data.view(-1)[0] += 1
        fail_from_now(monkeypatch)
        offered = [each for each in honest.offered(liar) if each.layer == 1]
        for each in offered:
            each.nodes[:] = ["liar", "honest"]
        await hold_frozen(me.loaded, (1, 2), offered, [liar.peer, honest.peer])
        assert me.model.frozen.digests(1, 2) == honest.model.frozen.digests(1, 2)
        me.model.frozen.keep()
        with pytest.raises(ValueError, match="cannot be read"):
            await hold_frozen(me.loaded, (1, 2), offered, [liar.peer])
    assert "liar: its frozen weights of layer 1 are not those that the coordinator has named" in caplog.text


async def test_a_broken_transfer_goes_on_at_the_next_donor(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = publish(tmp_path / "large", hidden_size=128, intermediate_size=512, num_hidden_layers=1)
    breaks, other = Node("breaks", large, tmp_path / "1"), Node("other", large, tmp_path / "2")
    me = Node("me", large, tmp_path / "here")
    async with serving(breaks, other):
        fail_from_now(monkeypatch)
        breaks.stops_after = 3
        offered = [each for each in breaks.offered(other) if each.layer == 1]
        size = me.model.frozen.layer_bytes(1, me.dtype)
        await hold_frozen(me.loaded, (1, 2), offered, [breaks.peer, other.peer])
    assert me.model.frozen.digests(1, 2) == other.model.frozen.digests(1, 2)
    assert breaks.given == 3
    assert 0 < other.given < size / (1 << 16)


async def test_without_an_offer_the_sources_error_counts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = Node("me", folder, tmp_path / "here")
    fail_from_now(monkeypatch)
    with pytest.raises(ValueError, match="cannot be read"):
        await hold_frozen(me.loaded, LAYERS, [], [])


async def test_a_node_that_no_longer_holds_a_layer_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    donor, me = Node("donor", folder, tmp_path / "there"), Node("me", folder, tmp_path / "here")
    async with serving(donor):
        offered = donor.offered()
        donor.model.frozen.keep((0, 1))
        fail_from_now(monkeypatch)
        with pytest.raises(ValueError, match="cannot be read"):
            await hold_frozen(me.loaded, (1, 5), offered, [donor.peer])
    assert "NOT_HELD: the frozen weights of layer" in caplog.text
