"""The ledger: a pure fold of the events in the log. Restarts, ``watch`` and ``check`` all read it.

The run's own values come first. The rest is in parts, each in the file of the events that change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dtfm.coordinator.log.access import Access
from dtfm.coordinator.log.copies import Copies
from dtfm.coordinator.log.health import Health
from dtfm.coordinator.log.members import Member, recounted
from dtfm.coordinator.log.reach import Reach
from dtfm.coordinator.log.recent_losses import Losses
from dtfm.coordinator.log.run import Described, Listens, RunFailed, RunFinished, RunPaused
from dtfm.coordinator.log.steps import Evaluated, TextWritten
from dtfm.coordinator.log.training import Optimizer, Training
from dtfm.coordinator.log.trust import NodeQuarantined, Trust

if TYPE_CHECKING:  # events change a ledger
    from dtfm.coordinator.log.events import Event

MOST_CHECKPOINTS = 100
"""The number of checkpoints that are remembered if the run file is not known."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The state of a run."""

    run_id: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    """The run in force, as JSON: the run file with the changes that operators have made since."""
    file: Mapping[str, Any] = field(default_factory=dict)
    """The run file as JSON, as it was at the last start."""
    listens: Listens | None = None
    """Where nodes look for the coordinator; None before its first start."""
    described: Described | None = None
    described_by: str = ""
    """The node that described the run; empty: none has."""
    data_confirmed: bool = False
    """Whether a second party has read the same data."""
    evaluated: Evaluated | None = None
    """The last held-out loss."""
    texts: Mapping[str, TextWritten] = field(default_factory=dict)
    """By prompt, the last text that continues it."""
    losses: Losses = field(default_factory=Losses)
    """The last losses."""
    hold: RunPaused | None = None
    """The operator's pause or stop that holds the run; None: steps follow each other."""
    outcome: RunFinished | RunFailed | None = None
    """None: the run is not over."""
    members: Mapping[str, Member] = field(default_factory=dict)
    former: tuple[str, ...] = ()
    """The candidates of the nodes that were members when the last process ended."""
    access: Access = field(default_factory=Access)
    reach: Reach = field(default_factory=Reach)
    training: Training = field(default_factory=Training)
    """Training under the plan in force: see training.py."""
    copies: Copies = field(default_factory=Copies)
    trust: Trust = field(default_factory=Trust)
    health: Health = field(default_factory=dict)
    leaving: tuple[str, ...] = ()
    """The members that want to leave, by name."""
    is_alone: bool = True
    """Whether all members belong to one party. In an open run, names enrolled as nodes count too. Then nobody has to be protected
    from that party."""

    @property
    def is_open(self) -> bool:
        """Whether the members are strangers to each other."""
        return bool(self.run.get("trust", {}).get("mode") == "open")

    @property
    def description(self) -> Described:
        """What the run trains. It must have been described."""
        assert self.described is not None
        return self.described

    @property
    def keeps_checkpoints(self) -> int:
        """The number of checkpoints that the run keeps."""
        return int(self.run.get("checkpoint", {}).get("keep", MOST_CHECKPOINTS))

    def with_run(self, run: Mapping[str, Any]) -> Ledger:
        """The ledger with ``run`` in force. A completed run goes on if it has more steps now; a failed run is tried again."""
        more = run.get("train", {}).get("steps", 0) > self.training.step
        over = self.outcome is not None and self.outcome.completed and not more
        return replace(self, run=run, outcome=self.outcome if over else None)

    @property
    def ready(self) -> tuple[str, ...]:
        """The nodes that can take part, by name."""
        return tuple(sorted(node for node, member in self.members.items() if member.ready))

    @property
    def staying(self) -> tuple[str, ...]:
        """The nodes to plan with, by name: they work and do not want to leave."""
        return tuple(node for node in self.working if not self.members[node].leaving)

    @property
    def working(self) -> tuple[str, ...]:
        """The nodes that are ready and not out of use, by name."""
        return tuple(node for node in self.ready if node not in self.health or not self.health[node].out)

    @property
    def holders(self) -> tuple[tuple[str, ...], ...]:
        """Per layer, the members that hold its state as of the last step in memory, in the `whole_island`."""
        return self.holders_in(self.whole_island)

    def holders_in(self, island: int | None) -> tuple[tuple[str, ...], ...]:
        """By layer, the holders in this island: between exchanges, other islands have other state. None: in any island, for state
        that all islands share."""
        islands, present = self.training.islands, {(node, each.incarnation) for node, each in self.members.items()}
        return tuple(
            tuple(who[0] for who in layer if who in present and island in (None, islands.get(who[0], 0)))
            for layer in self.training.held
        )

    @property
    def whole_islands(self) -> tuple[int, ...]:
        """The islands whose members hold all of their state."""
        numbers = sorted({*self.training.islands.values()}) or [0]
        return tuple(number for number in numbers if (held := self.holders_in(number)) and all(held))

    @property
    def whole_island(self) -> int:
        """The first of the `whole_islands`; if there are none, the first island."""
        if not self.training.islands:
            return 0
        return next(iter(self.whole_islands), min(self.training.islands.values(), default=0))

    def source_of(self, node: str) -> int | None:
        """The island whose state the node needs for the plan: its own, or the one whose moments its own gets. A node without a
        part in the plan needs the state of the `whole_island`. None: the state that all islands share is enough, as the node's
        own island begins with this plan."""
        plan, training = self.training.plan, self.training
        own = None if plan is None else plan.island_of(node)
        if own is None:
            return self.whole_island
        if own in training.moments:
            return training.moments[own]
        return None if 0 < training.began.get(own, 0) == training.step else own

    @property
    def state_is_held(self) -> bool:
        """Whether members hold the whole state as of the last step in memory; at step 0 it follows from the seed."""
        return self.training.step == 0 or (bool(self.holders) and all(self.holders))

    @property
    def optimizer(self) -> Optimizer:
        """The values that the next step is applied with. A change by an operator holds from the beginning of a round: islands
        train a whole round with equal values."""
        training = self.training
        if training.optimizer is None or training.rounds.at_rest(training.step):
            return Optimizer.of(self.run)
        return training.optimizer

    def key_of(self, name: str) -> str:
        """The key of the name; empty: not known."""
        return self.access.names[name].key if name in self.access.names else ""

    def party(self, name: str) -> str:
        """The party behind the name: its key, or the name itself if its key is not known. If a party is alone, each of its names
        counts separately, so that one broken device does not speak for all."""
        return name if self.is_alone else self.key_of(name) or name

    def quarantine_of(self, name: str) -> NodeQuarantined | None:
        """The quarantine that binds the name, if there is one."""
        return self.trust.quarantined.get(name) or self.trust.quarantined.get(self.key_of(name))

    @property
    def quarantined_names(self) -> tuple[str, ...]:
        """All names that may take no part, in order: all names of quarantined keys, and names that are quarantined alone."""
        quarantined = self.trust.quarantined
        of_keys = (name for name, holder in self.access.names.items() if holder.key in quarantined)
        alone = (why.node for why in quarantined.values() if not why.key)
        return tuple(sorted({*of_keys, *alone}))

    def with_member(self, node: str, member: Member) -> Ledger:
        return replace(self, members={**self.members, node: member})

    def without_members(self) -> Ledger:
        """The ledger when all members are gone. Nodes that return still have their state."""
        reach, training = Reach(changes=self.reach.changes), replace(self.training, plan=None)
        former = tuple(candidate for member in self.members.values() for candidate in member.candidates)
        without = replace(self, members={}, former=former or self.former, reach=reach, training=training)
        return recounted(without)


def fold(events: Iterable[Event], ledger: Ledger | None = None) -> Ledger:
    """The ledger after ``events``."""
    ledger = ledger or Ledger()
    for event in events:
        ledger = event.apply(ledger)
    return ledger
