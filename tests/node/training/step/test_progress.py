"""What is kept of a step for another attempt, and when nothing is."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from dtfm.kernels.codec import Codec, Encoded, encode
from dtfm.node.model.placement import Placement, placement_of
from dtfm.node.training import adoption
from dtfm.node.training.memory_budget import LEAST_EARLY_BYTES, early_bytes, free_bytes, is_short, retry_bytes
from dtfm.node.training.step.progress import Progress
from dtfm.node.transport.receiver import Arrival, Closed
from dtfm.protos.control_pb2 import Assignment, Device
from dtfm.protos.frame import Header, Kind
from dtfm.scheduler.model.plan import Stage, from_routes

TENSOR = torch.arange(4.0)
ENCODED: Future[Encoded] = Future()
ENCODED.set_result(encode(Codec.OFF, TENSOR))
CAME = Arrival("a", Header(Kind.ACTIVATION, 0, 1, 1, 5, 0, 0, 4, 16), memoryview(bytes(16)))


def middle(micro_batches: int) -> Placement:
    """The placement of the middle one of three stages."""
    stages = [Stage((i, i + 1), (name,), ()) for i, name in enumerate("abc")]
    placement = placement_of(from_routes(2, stages, [("abc", micro_batches)]), "b", 0)
    assert placement is not None
    return placement


def test_the_report_says_by_micro_batch_what_came_and_what_is_done() -> None:
    progress = Progress(1, 5, activations={1: CAME}, inputs={2: TENSOR}, gradients={2: CAME}, finished={0})
    report = progress.report(middle(4))
    assert list(report.activations) == [0, 1, 2]
    assert list(report.gradients) == [0, 2]
    assert list(report.finished) == [0]


def test_it_fits_no_placement_without_the_micro_batches_that_are_added_up() -> None:
    progress = Progress(1, 5, activations={3: CAME}, inputs={4: TENSOR}, finished={0, 2})
    assert progress.fits(middle(3))
    assert not progress.fits(middle(2))
    progress.narrow(middle(3))
    assert (progress.activations, progress.inputs) == ({}, {})


def test_beyond_its_room_nothing_is_kept_and_another_attempt_begins_from_nothing() -> None:
    progress = Progress(1, 5, room=3 * TENSOR.nbytes)
    progress.keep(Kind.ACTIVATION, 0, ENCODED, TENSOR.nbytes)
    progress.keep(Kind.ACTIVATION, 0, ENCODED, TENSOR.nbytes)  # the same one counts once
    progress.keep_unreduced(7, TENSOR)
    progress.keep(Kind.ACTIVATION, 1, ENCODED, TENSOR.nbytes)
    assert progress.fits(middle(2))
    progress.keep(Kind.ACTIVATION, 2, ENCODED, TENSOR.nbytes)
    assert not progress.fits(middle(2))
    assert not progress.sent
    assert not progress.unreduced


def test_unreduced_gradients_are_copies_and_taking_them_frees_their_room() -> None:
    progress = Progress(1, 5, room=TENSOR.nbytes)
    gradients = TENSOR.clone()
    for _ in range(3):
        progress.keep_unreduced(7, gradients)
        gradients.zero_()
        assert torch.equal(progress.take_unreduced()[7], TENSOR)
        gradients.copy_(TENSOR)
    assert progress.fits(middle(1))


def test_what_others_send_now_frees_its_room() -> None:
    progress = Progress(1, 5, room=2 * TENSOR.nbytes)
    progress.keep(Kind.ACTIVATION, 0, ENCODED, TENSOR.nbytes)
    progress.keep(Kind.ACTIVATION, 1, ENCODED, TENSOR.nbytes)
    progress.narrow(middle(1))
    assert list(progress.sent) == [(Kind.ACTIVATION, 0)]
    progress.keep_unreduced(7, TENSOR)
    assert progress.fits(middle(1))


def test_the_next_generation_has_room_of_its_own() -> None:
    progress = Progress(1, 5, room=TENSOR.nbytes)
    progress.keep(Kind.ACTIVATION, 0, ENCODED, TENSOR.nbytes)
    progress.room = 2 * TENSOR.nbytes
    progress.keep(Kind.ACTIVATION, 1, ENCODED, TENSOR.nbytes)
    assert progress.fits(middle(2))
    progress.keep(Kind.ACTIVATION, 2, ENCODED, TENSOR.nbytes)
    assert not progress.fits(middle(2))


@pytest.mark.parametrize(("memory", "room"), [(1300 + 400, 200), (1300, 0), (1000, 0), (1300 + (1 << 40), 1 << 39)])
def test_half_of_what_training_leaves_free_may_be_kept(memory: int, room: int) -> None:
    hardware = Device(kind="cpu", memory_bytes=memory)
    assert retry_bytes(free_bytes(1000, 300, hardware)) == room


def test_beside_a_gpu_what_is_kept_lies_in_the_hosts_memory() -> None:
    hardware = Device(kind="cuda", memory_bytes=1000, host_memory_bytes=500)
    assert free_bytes(1000, 300, hardware) == 200
    assert early_bytes(200, 3) == LEAST_EARLY_BYTES


@pytest.mark.parametrize(("kind", "memory", "short"), [("cpu", 1499, True), ("cpu", 1500, False), ("cuda", 0, False)])
def test_memory_is_short_where_the_state_leaves_less_than_half_its_size_on_a_cpu(
    kind: str, memory: int, short: bool
) -> None:
    assert is_short(1000, Device(kind=kind, memory_bytes=memory)) is short


def test_a_step_that_is_called_off_after_spoiling_keeps_nothing() -> None:
    progress = Progress(1, 5)
    progress.keep(Kind.ACTIVATION, 0, ENCODED, TENSOR.nbytes)
    progress.spoil()
    progress.keep_unreduced(7, TENSOR)
    progress.keep(Kind.ACTIVATION, 1, ENCODED, TENSOR.nbytes)
    assert (progress.sent, progress.unreduced) == ({}, {})


def test_nothing_of_a_step_is_held_while_another_stage_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(1, 5, activations={1: CAME}, inputs={0: TENSOR}, gradients={0: CAME})
    progress.outputs[0] = get_gradient_edge(TENSOR.clone().requires_grad_() * 2)
    progress.keep(Kind.ACTIVATION, 0, ENCODED, TENSOR.nbytes)
    progress.keep_unreduced(7, TENSOR)

    def acquire(*_: object) -> None:
        came = (progress.activations, progress.gradients)
        held = (*came, progress.inputs, progress.outputs, progress.sent, progress.unreduced)
        assert not any(held)
        raise Closed("a newer plan")

    monkeypatch.setattr(adoption, "acquire_stage", acquire)
    anything: Any = SimpleNamespace(device=None, snapshots=None, model=SimpleNamespace(frozen=None))
    earlier: Any = SimpleNamespace(stage=None, progress=progress)
    inventory: Any = SimpleNamespace(still_has=lambda *_: False)
    with pytest.raises(Closed):
        adoption.set_up(anything, middle(2), Assignment(step=4), inventory, earlier, anything, anything)
    assert not progress.fits(middle(2))  # the newer plan may want the old stage again
