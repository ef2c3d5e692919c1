"""A join without joining, by the code that joins. It finds out whether the coordinator lets this machine in, whether the
machine may use what the run names, and whether its data and weights equal the others'. Nobody is enrolled. The tokens of the
text are kept for a later `join`; nothing else of the run is written."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from dtfm.node.data.allowed import EVERYTHING, Allowed
from dtfm.node.doctor.findings import Finding
from dtfm.node.host.device import open_device
from dtfm.node.host.long_parts import long_part
from dtfm.protos.connection import read_address
from dtfm.protos.control_pb2 import EnrolReply
from dtfm.protos.identity.access import Role, kept, runs_it
from dtfm.protos.identity.enrolment import Entry, NotAdmitted
from dtfm.protos.identity.private_files import cache_folder
from dtfm.protos.places import COORDINATORS_DISK
from dtfm.protos.plan_pb2 import Run

ANSWER_SECONDS = 20.0
"""Most seconds to wait for the coordinator's answer."""
FAR_SECONDS = 0.3
"""A round trip to the coordinator that is worth a warning."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How a node would join: its ``device``, and the places and modules that its operator allows. None: as before."""

    device: str
    places: tuple[str, ...] | None = None
    modules: tuple[str, ...] | None = None


async def dry_join(entry: Entry, wish: Wish) -> list[Finding]:
    """For a coordinator that has answered, as who it should be."""
    try:
        reply = await entry.look(ANSWER_SECONDS)
    except NotAdmitted as refused:
        return [
            Finding("admission", False, f"join would be refused: {refused}", "see the reason; often a new invitation")
        ]
    except ConnectionError as error:
        return [Finding("admission", False, f"the coordinator broke off: {error}", "try again")]
    found = [Finding("admission", True, f"run {reply.run!r} would let this machine in"), await look_at_line(entry)]
    return [*found, *await _look_at_run(entry, reply, await asyncio.to_thread(_allowed, entry, wish), wish.device)]


async def look_at_line(entry: Entry) -> Finding:
    """How far the coordinator is. How fast lines to other nodes are, a node measures once it joins."""
    address, _, _ = await entry.answering(ANSWER_SECONDS)
    began = time.monotonic()
    _, writer = await asyncio.open_connection(*read_address(address))
    took = time.monotonic() - began
    writer.transport.abort()
    sentence = f"a round trip to the coordinator takes {1000 * took:.0f} ms; lines to other nodes are measured by join"
    if took < FAR_SECONDS:
        return Finding("line", True, sentence)
    return Finding("line", None, sentence, "far away, or a busy line: what else uses it?")


def _allowed(entry: Entry, wish: Wish) -> Allowed:
    """As in `join`: what the operator says now, or else said before. The user who runs the coordinator may use everything."""
    _, pin = entry.leads_to
    before = next(iter(kept([Role.NODE], pin)), None) if pin is not None else None
    places, modules = wish.places, wish.modules
    if before is not None:
        places = before.allowed_data if places is None else places
        modules = before.allowed_modules if modules is None else modules
    if pin is not None and runs_it(pin):
        places = EVERYTHING
    return Allowed(places or (), modules or ())


async def _look_at_run(entry: Entry, reply: EnrolReply, allowed: Allowed, device: str) -> list[Finding]:
    from dtfm.node.data.dataset import Agreed
    from dtfm.node.training.preparation import check_run, description, read_run

    run = reply.training
    try:
        check_run(run, open_device(device), allowed)
    except ValueError as problem:
        return [Finding("run", False, line, "as it says") for line in str(problem).split("\n")]
    found = [Finding("run", True, _wants(run))]
    if run.model.pretrained.startswith(COORDINATORS_DISK):
        sentence = "the run begins with weights that are on the coordinator's disk, which members alone may read"
        return [*found, Finding("weights", None, sentence, "join reads them")]
    agreed = Agreed(reply.data_fingerprint, reply.unigram_entropy) if reply.data_fingerprint else None
    try:
        with long_part("reading the run's model and data"):
            tokens = cache_folder() / "tokens"
            model, data = await asyncio.to_thread(read_run, run, allowed, tokens, agreed, lambda what, done, of: None)
            prepared = await asyncio.to_thread(description, run, model, data)
    except ValueError as problem:
        return [*found, Finding("data and weights", False, str(problem), "as it says")]
    samples = f"{data.training_count:,} samples to train on; the model has {len(prepared.layers)} layers"
    try:
        await entry.look(ANSWER_SECONDS, prepared)
    except NotAdmitted as refused:
        return [*found, Finding("data and weights", False, f"join would be refused: {refused}", "as it says")]
    except ConnectionError as error:
        return [
            *found,
            Finding("data and weights", False, f"{samples}; the coordinator broke off: {error}", "try again"),
        ]
    return [*found, Finding("data and weights", True, f"as the run wants them: {samples}")]


def _wants(run: Run) -> str:
    its = run.model.pretrained or run.model.module or run.model.family
    return f"this machine may use what it names: data {run.data.source}, model {its}, tokenizer {run.data.tokenizer}"
