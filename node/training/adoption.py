"""How a node takes up a plan: an assignment becomes a generation with a stage, its state and streams; or a reason why not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from dtfm.node.data.holding import Holding
from dtfm.node.host.device import free_memory
from dtfm.node.host.long_parts import long_part
from dtfm.node.host.trace import Activity, span
from dtfm.node.model.bucket import HOST, Bucket, bucket_bytes
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.placement import Placement, placement_of, read_plan
from dtfm.node.model.precision import run_dtype
from dtfm.node.model.stage import Stage, home_of
from dtfm.node.state.digests import StateDigests
from dtfm.node.state.frozen_layers import hold_frozen
from dtfm.node.state.images import FREE_MEMORY_FRACTION
from dtfm.node.state.making_room import make_room
from dtfm.node.state.recovery import Inventory, Wait, acquire_stage, take_inventory
from dtfm.node.state.state_store import HeldState
from dtfm.node.training.equipment import Equipment
from dtfm.node.training.failure import is_device_lost, plan_failed
from dtfm.node.training.generation import Generation, Inherited
from dtfm.node.training.reduction.contribution_bound import ContributionBound
from dtfm.node.training.standing_by import StandingBy
from dtfm.node.training.step.progress import Progress
from dtfm.node.transport.receiver import Closed, Receiver
from dtfm.protos import control_pb2 as wire
from dtfm.protos.places import COORDINATOR
from dtfm.protos.plan_pb2 import Run
from dtfm.scheduler.model.rounds import Rounds

log = logging.getLogger(__name__)

DeliverTo = Callable[[Receiver | None], None]


class Adoption:
    """This node's present generation, and the state that it holds. For the training thread; any thread may read
    ``generation``."""

    def __init__(
        self,
        equipment: Equipment,
        standing_by: StandingBy,
        data: Holding,
        digests: StateDigests,
        report: Callable[[wire.NodeMessage], None],
    ) -> None:
        self.generation: Generation | None = None
        """None while this node has no part in a plan."""
        self._store = equipment.store
        self._standing_by = standing_by
        self._data = data
        self._digests = digests
        self._report = report
        self._earlier: Generation | None = None  # the last one, on which the next may build
        self._committed_in = 0  # the generation whose commit made the held state; 0: none did

    def forget(self) -> None:
        """Holds no state any more: it is of another run."""
        self._store.replace(HeldState())
        self._committed_in = 0

    def end(self) -> None:
        """Ends the present generation. The next one may build on it."""
        if (generation := self.generation) is not None:
            generation.release()
            self._earlier = generation
        self.generation = None

    def begin(self, begin: wire.Begin) -> None:
        """All nodes of the present generation are ready: its first step begins."""
        generation = self.generation
        assert generation is not None
        assert begin.step == self._store.held.step + 1, (begin.step, self._store.held.step)
        generation.neighbours_have(begin.activations, begin.gradients)
        for bucket in generation.stage.buckets.values():
            bucket.donors = ()  # others have the same
        self._hold(begin.step - 1, generation.stage.buckets)

    def apply(self, commit: wire.Commit) -> None:
        """Applies a commit of the present generation to the held state."""
        generation = self.generation
        assert generation is not None
        self._committed_in = commit.generation
        with span(Activity.APPLY, commit.step):
            self._store.apply(commit, partial(generation.apply, commit))
        self._digests.begin(commit.step, generation.stage.buckets.values())  # the next step's vote waits for them

    def adopt(
        self,
        loaded: LoadedRun,
        equipment: Equipment,
        assignment: wire.Assignment,
        deliver_to: DeliverTo,
        wait: Wait,
    ) -> None:
        """Sets up this node's part in the assignment's plan, after `end`, and reports PlanReady or PlanFailed. Raises Closed when
        called off, and the error of a device that is lost."""
        number, train = assignment.generation, loaded.run.train
        held_out, buckets = train.evaluation_samples // train.micro_batch, loaded.model.buckets
        try:
            layers, micro_batches = len(loaded.model.layers), train.global_batch // train.micro_batch
            plan = read_plan(assignment.plan, layers, micro_batches, assignment.step)
        except ValueError as error:
            self._cannot_adopt(plan_failed(number, error))
            return
        self._drop_other_history(assignment, plan.rounds)
        placement = placement_of(
            plan,
            equipment.node,
            held_out,
            buckets,
            twice=loaded.run.trust.mode == Run.Trust.OPEN,
            trained_before=assignment.trained_before,
            is_new=assignment.takes_moments or 0 < assignment.island_began == assignment.step,
        )
        try:
            if placement is not None and placement.frees_first:
                free_first(loaded, placement, assignment, self._earlier, equipment)
        except OSError as error:
            self._cannot_adopt(plan_failed(number, error))
            return
        inventory = take_inventory(assignment, buckets, equipment.node, placement, self._store.held)
        begins = placement is not None and placement.is_new  # it needs only the state that islands share
        if inventory.is_incomplete and (begins or self._standing_by.role.is_of_all):  # copies of less are for others
            inventory = replace(inventory, copied=self._take_copies(loaded, assignment, wait))
            self._hold(assignment.step, {**inventory.held, **inventory.copied})
        if lost := inventory.lost:
            problem = f"this node does not have the state of layers {lost} as of step {assignment.step}, as expected"
            self._cannot_adopt(wire.PlanFailed(generation=number, problem=problem, lost=lost))
        elif placement is None:
            log.info("idle in generation %d: %s", number, assignment.reason)
            self._earlier = None
            self._keep_frozen(loaded)
            if inventory.expected:  # it vouches for the state that others may get from it
                self._is_ready(wire.PlanReady(generation=number), assignment.step, inventory.expected.values())
            self._data.begin_early(loaded.data)  # should another node be lost, nobody is to wait for it
            deliver_to(None)
        else:
            self._enter(loaded, equipment, placement, assignment, inventory, deliver_to, wait)

    def _enter(
        self,
        loaded: LoadedRun,
        equipment: Equipment,
        placement: Placement,
        assignment: wire.Assignment,
        inventory: Inventory,
        deliver_to: DeliverTo,
        wait: Wait,
    ) -> None:
        """Sets up the generation, and reports PlanReady or PlanFailed."""
        first, past_last = placement.layers
        log.info(
            "generation %d: layers %d-%d, stage %d of %d (replicas: %d), %d micro-batches a step. %s",
            *(placement.generation, first, past_last - 1, placement.stage, placement.stages),
            *(len(placement.replicas), len(placement.micro_batches), assignment.reason),
        )
        try:
            with span(Activity.ADOPT, assignment.step), long_part(f"setting up generation {placement.generation}"):
                needs_data = placement.first or placement.last or loaded.data.sample.isolated
                held = self._data.begin(loaded.data) if needs_data else None
                if held is not None and held.done():
                    held.result()  # without samples, no state is fetched
                generation = set_up(loaded, placement, assignment, inventory, self._earlier, equipment, wait)
                if held is not None:
                    _await_data(held, generation, wait)
        except Closed:
            raise
        except Exception as problem:
            if is_device_lost(problem):
                raise
            self._cannot_adopt(plan_failed(placement.generation, problem))
            return
        itself = loaded.run.checkpoint.uri.startswith(COORDINATOR)  # it keeps no tokens for others
        if placement.first and placement.replicas[0] == placement.node and not itself:
            self._data.publish(loaded.data, loaded.run.checkpoint.uri)
        log.info("compression: %s", generation.codecs)
        deliver_to(generation.receiver)
        self.generation, self._earlier = generation, None
        self._keep_frozen(loaded, placement.layers)
        # Until the generation begins, this node still donates what it held before, and still has it if it never does.
        self._hold(assignment.step, {**generation.stage.buckets, **self._store.held.buckets})
        progress, codecs = generation.progress.report(placement), generation.codecs.report
        frozen = [wire.FrozenLayer(layer=n, digest=d) for n, d in loaded.model.frozen.digests(first, past_last)]
        ready = wire.PlanReady(generation=generation.number, progress=progress, codecs=codecs, frozen=frozen)
        self._is_ready(ready, assignment.step, {**inventory.expected, **generation.stage.buckets}.values())

    def _drop_other_history(self, assignment: wire.Assignment, rounds: Rounds) -> None:
        """Drops held state as of another step, or made by another commit of the same step: its memory may be needed. What is left
        is held for a plan with these ``rounds``."""
        last, buckets = assignment.last_commit, self._store.held.buckets
        committed_in = last.generation if last.step == assignment.step else 0
        if (self._store.held.step, self._committed_in) != (assignment.step, committed_in):
            buckets, self._earlier, self._committed_in = {}, None, committed_in
        self._store.replace(HeldState(assignment.step, buckets, rounds))

    def _hold(self, step: int, buckets: Mapping[int, Bucket]) -> None:
        self._store.replace(HeldState(step, buckets, self._store.held.rounds))

    def _take_copies(self, loaded: LoadedRun, assignment: wire.Assignment, wait: Wait) -> Mapping[int, Bucket]:
        """This node's standby copies, if they are as of the assignment's step or, of the state that islands share, as of the last
        exchange. Raises Closed."""
        step = self._store.held.rounds.rested(assignment.step)
        is_known = assignment.last_commit.step == step
        last = assignment.last_commit if is_known else wire.Commit(step=step)
        try:
            return wait(self._standing_by.role.take(last, loaded.run.lease_seconds))
        except Closed:
            raise
        except Exception:
            log.exception("the standby's copies cannot be used")
            return {}

    def _keep_frozen(self, loaded: LoadedRun, *layers: tuple[int, int]) -> None:
        """Lets go of frozen weights but those of these layers, and those that it may get."""
        wanted = self._standing_by.wanted
        loaded.model.frozen.keep(*layers, (wanted.first_layer, wanted.past_last_layer))

    def _is_ready(self, ready: wire.PlanReady, step: int, states: Collection[Bucket]) -> None:
        self._digests.begin(step, states)
        ready.states.extend(self._digests.of(states))
        self._report(wire.NodeMessage(plan_ready=ready))

    def _cannot_adopt(self, failed: wire.PlanFailed) -> None:
        log.error("generation %d cannot be adopted: %s", failed.generation, failed.problem)
        self._report(wire.NodeMessage(plan_failed=failed))


def _await_data(held: Future[None], generation: Generation, wait: Wait) -> None:
    """Returns when this node has the samples; if it cannot have them, or is called off, ``generation`` is released."""

    async def have() -> None:
        await asyncio.wrap_future(held)

    try:
        wait(have())
    except Exception as problem:
        generation.close(f"this node does not have the data: {problem}")
        generation.release()
        raise


def set_up(
    loaded: LoadedRun,
    placement: Placement,
    assignment: wire.Assignment,
    inventory: Inventory,
    earlier: Generation | None,
    equipment: Equipment,
    wait: Wait,
) -> Generation:
    """This node's part in the assignment's plan.

    ``earlier``, its part in the last plan, is closed and released; its stage, and its progress on an interrupted step, are
    taken over if they still count. Raises what `acquire_stage` and `Sender.connect` raise, and Closed when called off.
    """
    stage = earlier.stage if earlier is not None and inventory.still_has(earlier.stage, placement) else None
    progress = None
    if earlier is not None:
        # Gradients are means over the island's share of a step, which must be the same.
        if stage is not None and earlier.placement.places == placement.places:
            progress = _usable_progress(earlier.progress, placement, assignment)
        if progress is None:
            earlier.progress.discard()  # its graphs hold the old stage's weights, and memory that the new one needs
    if stage is None:
        if loaded.model.frozen:
            # Called off, it goes on in its thread: what it has read stays.
            wait(hold_frozen(loaded, placement.layers, assignment.frozen, assignment.peers))
        stage = acquire_stage(loaded, equipment.device, placement, assignment, inventory, equipment.snapshots, wait)
    if placement.rounds.at_rest(assignment.step):
        for bucket in stage.buckets.values():
            bucket.rest(rounds=placement.rounds.count > 0)
    links = [link for link in assignment.links if link.source == placement.node]
    bandwidth = {link.destination: link.bandwidth for link in links if link.bandwidth}
    inherited = inherit(earlier, stage, placement, assignment.step, progress) if earlier is not None else Inherited()
    around = [peer for peer in assignment.peers if peer.node in placement.peers | placement.near]
    generation = Generation(
        loaded, placement, stage, assignment.step, equipment.sender, equipment.hardware, bandwidth, inherited, around
    )
    dialler = loaded.dialler
    targets = {p.node: dialler.target(p) for p in assignment.peers if p.node in placement.peers}
    lease = loaded.run.lease_seconds
    try:
        wait(equipment.sender.connect(generation.number, dialler, targets, lease, lease))
    except (ConnectionError, Closed):
        generation.release()
        raise
    return generation


def free_first(
    loaded: LoadedRun,
    placement: Placement,
    assignment: wire.Assignment,
    earlier: Generation | None,
    equipment: Equipment,
) -> None:
    """Makes room for the placement's stage where it does not fit beside the old one. Releases the stage of ``earlier``, this
    node's part in the last plan, unless that stage goes on. Raises OSError if the disk has no room for state that others need."""
    if earlier is not None:
        stage = earlier.stage
        if stage.buckets and (stage.first, stage.past_last, stage.keeping) == (*placement.layers, placement.keeping):
            return
        earlier.progress.discard()
        stage.release()
    loaded.model.frozen.keep(placement.layers)
    expected = {layer for layer, donors in enumerate(assignment.donors) if equipment.node in donors.nodes}
    mine = [spec for spec in loaded.model.buckets if spec.used_by(*placement.layers)]
    home = home_of(placement.keeping, equipment.device)
    left = -1  # bytes for state in the host's memory; none where the device computes there
    if equipment.device != HOST:
        held, dtype = equipment.store.held.buckets, run_dtype(loaded.run)
        more = sum(bucket_bytes(spec, dtype) for spec in mine if spec.index not in held) if home == HOST else 0
        left = int(FREE_MEMORY_FRACTION * free_memory(HOST)) - more
    make_room(
        equipment.store,
        needed={spec.index for spec in mine},
        expected={spec.index for spec in loaded.model.buckets if not expected.isdisjoint(spec.layers)},
        placed=partial(Bucket.placed, device=equipment.device, home=home),
        host_bytes=left,
        scratch=equipment.snapshots.disk.scratch,
    )


def inherit(earlier: Generation, stage: Stage, placement: Placement, step: int, progress: Progress | None) -> Inherited:
    """Returns the things that a generation with this ``stage``, ``placement`` and ``progress`` takes over from ``earlier``.
    ``step`` is the last one in the stage's state. If the earlier generation stood at another step, its residuals do not count."""
    carried = earlier.exchanger.carried
    residuals = {index: carried[index] for index in placement.exchange_groups if index in carried}
    bound, of_changes = (
        ContributionBound(bound) if bound is not None and stage is not earlier.stage else bound
        for bound in (earlier.reducer.bound, earlier.exchanger.bound)
    )
    if earlier.progress.step != step + 1:
        residuals = {}
    return Inherited(progress, earlier.codecs, bound, of_changes, residuals)


def _usable_progress(progress: Progress, placement: Placement, assignment: wire.Assignment) -> Progress | None:
    """The progress on the next step, if it can be built on."""
    is_next = progress.step == assignment.step + 1 and progress.generation >= assignment.counts_from
    if not is_next or not progress.fits(placement):
        return None
    progress.narrow(placement)
    return progress
