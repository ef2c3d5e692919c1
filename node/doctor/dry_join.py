"""A join without joining, by the code that joins.

It finds out whether the coordinator lets this machine in, whether the machine may use the places that the run names, and
whether its data and weights equal the others'. Nobody is enrolled. The tokens of the text are kept for a later `join`; nothing
else of the run is written.
"""

from __future__ import annotations

import asyncio
import time

from dtfm.node.data.allowed import EVERYTHING, Allowed
from dtfm.node.data.problems import in_full, sentence_of
from dtfm.node.data.reading.sources import named
from dtfm.node.doctor.findings import Finding
from dtfm.node.doctor.wish import Wish
from dtfm.node.host.device import open_device
from dtfm.node.host.long_parts import long_part
from dtfm.protos.connection import read_address
from dtfm.protos.control_pb2 import EnrolReply, Prepared
from dtfm.protos.identity.access import Role, kept, runs_it
from dtfm.protos.identity.enrolment import Entry, NotAdmitted
from dtfm.protos.identity.private_files import cache_folder
from dtfm.protos.places import COORDINATORS_DISK
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.source_files import difference, read_file

ANSWER_SECONDS = 20.0
"""Most seconds to wait for the coordinator's answer."""
FAR_SECONDS = 0.3
"""A round trip to the coordinator that is worth a warning."""


async def dry_join(entry: Entry, wish: Wish) -> list[Finding]:
    """Findings about a coordinator that has answered with the right identity."""
    try:
        reply = await entry.look(ANSWER_SECONDS)
    except NotAdmitted as refused:
        return [
            Finding("admission", False, f"join would be refused: {refused}", "see the reason; often a new invitation")
        ]
    except ConnectionError as error:
        return [Finding("admission", False, f"the coordinator broke off: {error}", "try again")]
    found = [Finding("admission", True, f"run {reply.run!r} would let this machine in"), await look_at_line(entry)]
    return [*found, *await _look_at_run(entry, reply, wish)]


async def look_at_line(entry: Entry) -> Finding:
    """How far the coordinator is. A node measures the lines to other nodes when it joins."""
    try:
        address, _, _ = await entry.answering(ANSWER_SECONDS)
        began = time.monotonic()
        async with asyncio.timeout(ANSWER_SECONDS):
            _, writer = await asyncio.open_connection(*read_address(address))
    except (OSError, NotAdmitted) as error:  # TimeoutError and ConnectionError are OSErrors
        return Finding("line", None, f"the coordinator broke off: {sentence_of(error)}", "try again")
    took = time.monotonic() - began
    writer.transport.abort()
    sentence = f"a round trip to the coordinator takes {1000 * took:.0f} ms; lines to other nodes are measured by join"
    if took < FAR_SECONDS:
        return Finding("line", True, sentence)
    return Finding("line", None, sentence, "far away, or a busy line: what else uses it?")


def _allowed(entry: Entry, wish: Wish) -> Allowed:
    """As in `join`: the operator's statement now, otherwise the earlier one. The user who runs the coordinator may use
    everything."""
    _, pin = entry.leads_to
    before = next(iter(kept([Role.NODE], pin)), None) if pin is not None else None
    places = wish.places if wish.places is not None or before is None else before.allowed_data
    modules = wish.modules if wish.modules is not None or before is None else before.allowed_modules
    return Allowed(EVERYTHING if pin is not None and runs_it(pin) else places or (), modules or ())


async def _look_at_run(entry: Entry, reply: EnrolReply, wish: Wish) -> list[Finding]:
    from dtfm.node.data.dataset import Agreed
    from dtfm.node.training.preparing.preparation import check_run, description, read_run

    run, allowed = reply.training, await asyncio.to_thread(_allowed, entry, wish)
    try:
        check_run(run, open_device(wish.device), allowed)
    except ValueError as problem:
        return [Finding("run", False, line, "the sentence says what to do") for line in str(problem).split("\n")]
    found = [Finding("run", True, _wants(run))]
    if any(place.startswith(COORDINATORS_DISK) for place in (run.model.pretrained, run.model.adapter.pretrained)):
        sentence = "the run begins with weights that are on the coordinator's disk, which members alone may read"
        return [*found, Finding("weights", None, sentence, "join reads them")]
    if not wish.reads:
        return found
    others, agreed = reply.prepared, None
    if reply.data_confirmed:
        agreed = Agreed(others.data_fingerprint, others.unigram_entropy)
    try:
        with long_part("reading the run's model and data"):
            tokens = cache_folder() / "tokens"
            model, data = await asyncio.to_thread(read_run, run, allowed, tokens, agreed, lambda what, done, of: None)
            mine = await asyncio.to_thread(description, run, model, data)
    except (ValueError, OSError) as problem:
        return [*found, Finding("data and weights", False, in_full(problem), "the sentence says what to do")]
    has = f"{data.training_count:,} samples to train on; the model has {len(mine.layers)} layers"
    if (differs := _difference(mine, others)) is not None:
        return [*found, differs]
    compared = "as the others have them" if others.data_fingerprint else "readable; nobody has prepared the run yet"
    return [*found, Finding("data and weights", True, f"{compared}: {has}")]


def _difference(mine: Prepared, others: Prepared) -> Finding | None:
    """Why `join` would be refused. None: this machine has read the same as the others, as far as they have read."""
    if not others.data_fingerprint:
        return None
    for name in ("data_fingerprint", "training_samples", "evaluation_samples", "tokens_per_sample"):
        if getattr(mine, name) != getattr(others, name):
            here, there = (tuple(map(read_file, said.files)) for said in (mine, others))
            file = difference(here, there, "the others")
            what = f": {file}" if file else f": this machine's data has another {name} than the others'"
            sentence = f"join would be refused: DATA_DIFFERS{what}"
            fix = (
                "give this machine the same files (for python-stdlib: the same Python; for the hub: the same revision)"
            )
            return Finding("data and weights", False, sentence, fix)
    if mine.weights_fingerprint != others.weights_fingerprint:
        sentence = "join would be refused: WORKLOAD_DIFFERS: the weights here differ from the others'"
        return Finding("data and weights", False, sentence, "copy the folder here again, or name a revision")
    return None


def _wants(run: Run) -> str:
    its = run.model.pretrained or run.model.module or run.model.family
    return f"this machine may use what it names: data {named(run.data)}, model {its}, tokenizer {run.data.tokenizer}"
