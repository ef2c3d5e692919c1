"""What events do to standing, quarantine and strikes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import (
    CLEARED_BY,
    Ledger,
)
from dtfm.coordinator.log.rounding import party_named, without

MOST_QUARANTINED = 10_000
"""The number of quarantines that are remembered. From then on the oldest is forgotten for each new one."""

NO_TRIAL: dict[str, Any] = {"benched": (), "benched_for": "", "tried_without": (), "failed_without": ()}


def quarantined(ledger: Ledger, event: ev.NodeQuarantined) -> Ledger:
    """What the node had in memory counts no more, and it may have been the cause of all the waiting until now. It may also
    be why a step failed. So the trial of a step starts again if the node goes during it, or if an operator expels the node."""
    anew: dict[str, Any] = (
        {"failures": (), **NO_TRIAL} if event.charge is Charge.OPERATOR or ledger.tried_without else {}
    )
    names = {event.node, *(name for name, holder in ledger.access.items() if event.key and holder.key == event.key)}
    settled = names if ledger.is_open else set[str]()  # what strangers said before is settled against them
    who = event.key or event.node
    quarantined = dict(list({**ledger.quarantined, who: event}.items())[-MOST_QUARANTINED:])
    return replace(
        without_audits(without_witness(ledger, who), ledger.quarantined.keys() - quarantined.keys()),
        held=tuple(tuple(who for who in layer if who[0] not in names) for layer in ledger.held),
        quarantined=quarantined,
        rounding=without(ledger.rounding, who),
        waited_for=(),
        evaded={},
        plan_failures=tuple(node for node in ledger.plan_failures if node not in settled),
        checkpoint_failures=tuple(node for node in ledger.checkpoint_failures if node not in settled),
        **anew,
    )


def forgiven(ledger: Ledger, event: ev.NodeForgiven) -> Ledger:
    """Whom an operator forgives begins anew, as one who is suspected. Who was cleared is what it was before."""
    of = (event.node, event.key)
    ended = {who: why for who, why in ledger.quarantined.items() if who in of}
    fresh = replace(
        ledger,
        quarantined={who: why for who, why in ledger.quarantined.items() if who not in of},
        refused=tuple((node, donors) for node, donors in ledger.refused if event.node not in donors),
    )
    if event.by == CLEARED_BY:
        return fresh
    forgiven = {**{who: why for who, why in ledger.forgiven.items() if who not in of}, **ended}
    return replace(without_audits(fresh, ended), forgiven=dict(list(forgiven.items())[-MOST_QUARANTINED:]))


def without_audits(ledger: Ledger, whose: Collection[str]) -> Ledger:
    """``whose``: keys, or names where no key is known."""
    return replace(
        ledger,
        audits={who: audits for who, audits in ledger.audits.items() if who not in whose},
        began={who: step for who, step in ledger.began.items() if who not in whose},
    )


def without_witness(ledger: Ledger, who: str) -> Ledger:
    """What this party has found right counts for nobody any more."""
    name = party_named(who)
    return replace(
        ledger,
        audits={
            each: replace(audits, by=tuple(by for by in audits.by if by != name)) if name in audits.by else audits
            for each, audits in ledger.audits.items()
        },
    )


def strikes_but_ended(ledger: Ledger, event: ev.StrikesEnded) -> tuple[ev.AuditHindered, ...]:
    def is_of(name: str, who: str) -> bool:
        return who in (name, ledger.party(name))

    its = [each for each in ledger.strikes if is_of(each.node, event.who)]
    if not event.all:
        its = [each for each in its if (is_of(each.of, event.of) if event.of else not each.of)][:1]
    return tuple(each for each in ledger.strikes if not any(each is ended for ended in its))
