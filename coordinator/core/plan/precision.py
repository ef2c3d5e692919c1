"""The precision of a run whose run file leaves it open ("auto"). The first plan decides it, by its nodes.

Until then nodes prepare in the precision of the first node that has read the run. If the plan's nodes need another precision, all
prepare again, which times devices and reads nothing. After the first step the precision stays.
"""

from __future__ import annotations

from dtfm.coordinator.core.findings import OtherPrecision
from dtfm.coordinator.core.state.session import Session
from dtfm.coordinator.core.state.state import State
from dtfm.protos.run_file.run_file import RunFile
from dtfm.scheduler.model.plan import Plan

MOST_DECISIONS = 3
"""How often plans may decide the precision. More could go on forever: the plan for the new precision could need the old one."""


def may_change(state: State) -> bool:
    """Whether the run file leaves the precision open, and nothing is trained. A pinned workload fixes the precision."""
    file = state.ledger.file.get("train", {}).get("precision")
    return file == "auto" and state.ledger.training.step == 0 and not state.run.trust.workload


def of_newcomer(state: State, device: tuple[str, bool]) -> str:
    """The precision that a node prepares the run in after its hello. ``device``: its kind, and whether it has bf16. If nobody
    has read the run yet, the device decides. An old GPU among strangers, or one that joins after a plan has decided, ends by
    itself."""
    known, is_old = state.run.train.precision, device == ("cuda", False)
    if known == "auto":
        return "bf16" if device == ("cuda", True) else "fp32"
    may_ask = may_change(state) and not state.members.decisions and not state.ledger.is_open
    return "fp32" if known == "bf16" and is_old and may_ask else known


def of_plan(state: State, plan: Plan) -> OtherPrecision | None:
    """Another precision, if the plan's nodes need it: bf16 if it has GPUs and all of them have bf16, otherwise fp32. None: they
    do not."""
    sessions = [state.members.sessions[node] for node in plan.nodes if node in state.members.sessions]
    gpus = [session for session in sessions if session.device[0] == "cuda"]
    wanted = "bf16" if gpus and all(session.device[1] for session in gpus) else "fp32"
    if wanted == state.run.train.precision or not may_change(state) or state.members.decisions >= MOST_DECISIONS:
        return None
    why = "has a GPU, and all of its GPUs have bf16" if wanted == "bf16" else "has a GPU without bf16, or none"
    return OtherPrecision(wanted, f"the first plan, which {why},")


def prepared_for(state: State, session: Session) -> RunFile:
    """The run as the node was told to prepare it."""
    return in_precision(state.run, session.precision)


def in_precision(run: RunFile, precision: str) -> RunFile:
    """Returns the run with this precision, or unchanged if it is empty."""
    if precision in ("", run.train.precision):
        return run
    return run.model_copy(update={"train": run.train.model_copy(update={"precision": precision})})
