"""PLAN.json: a plan, and the decision that it came from."""

from __future__ import annotations

from typing import Any

from dtfm.scheduler.formats.fields import check_keys, ids_of, integer_of, list_of, read_document, text_of, whole_number
from dtfm.scheduler.model.decision import Decision, Objective
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from dtfm.scheduler.model.plan import Flow, Plan, Stage, Takeover


def parse_plan(text: str) -> Plan:
    """A plan from PLAN.json: ``{"generation", "stages": [{"layers", "replicas", "loads", "in_flight", "keeping"}], "flows",
    "idle", "takeovers"}``. plan.check and plan.validate say whether it fits together, and suits a cluster and a workload.

    ``keeping``, optional, has by replica ``{"checkpointing": "none" | "layer", "optimizer_state": "device" |
    "host"}``; without it all do as Keeping() says. ``flows`` has a list per boundary between two stages, of ``{"sender",
    "receiver", "micro_batches"}``; ``takeovers`` are ``{"stage", "node", "place", "heirs": [[node, micro_batches], ...]}``.
    """
    needed = {"generation", "stages", "flows"}
    document = {"idle": [], "takeovers": [], **read_document(text, needed, {"idle", "takeovers"})}
    stages = []
    for index, entry in enumerate(list_of(document, "stages", "")):
        path = f"stages[{index}]"
        check_keys(entry, path, {"layers", "replicas", "loads"}, {"in_flight", "keeping"})
        layers = list_of(entry, "layers", path)
        if len(layers) != 2 or not all(type(layer) is int and layer >= 0 for layer in layers):
            raise ValueError(f"{path}.layers is {layers!r:.80}; it must be [first, past_last], two whole numbers")
        replicas = ids_of(entry, "replicas", path)
        loads, in_flight = (
            tuple(whole_number(number, f"{path}.{key}") for number in list_of({"in_flight": [], **entry}, key, path))
            for key in ("loads", "in_flight")
        )
        keeping = tuple(
            _keeping(way, f"{path}.keeping[{place}]")
            for place, way in enumerate(list_of({"keeping": [], **entry}, "keeping", path))
        )
        stages.append(Stage((layers[0], layers[1]), replicas, loads, in_flight, keeping))
    flows = []
    for boundary, entries in enumerate(list_of(document, "flows", "")):
        path = f"flows[{boundary}]"
        if not isinstance(entries, list):
            raise ValueError(f"{path} is {entries!r:.80}; it must be a list")
        flows.append(tuple(_flow(entry, f"{path}[{index}]") for index, entry in enumerate(entries)))
    return Plan(
        integer_of(document, "generation", ""),
        tuple(stages),
        tuple(flows),
        ids_of(document, "idle", ""),
        tuple(_takeover(each, f"takeovers[{index}]") for index, each in enumerate(list_of(document, "takeovers", ""))),
    )


def _keeping(entry: Any, path: str) -> Keeping:
    check_keys(entry, path, {"checkpointing", "optimizer_state"})
    made = []
    for key, choices in (("checkpointing", Checkpointing), ("optimizer_state", OptimizerState)):
        if (value := text_of(entry, key, path)) not in list(choices):
            raise ValueError(f"{path}.{key} is {value!r:.80}; it must be one of {', '.join(choices)}")
        made.append(value)
    return Keeping(Checkpointing(made[0]), OptimizerState(made[1]))


def _flow(entry: Any, path: str) -> Flow:
    check_keys(entry, path, {"sender", "receiver", "micro_batches"})
    return Flow(
        text_of(entry, "sender", path), text_of(entry, "receiver", path), integer_of(entry, "micro_batches", path)
    )


def _takeover(entry: Any, path: str) -> Takeover:
    check_keys(entry, path, {"stage", "node", "place", "heirs"})
    heirs = []
    for index, heir in enumerate(list_of(entry, "heirs", path)):
        if not isinstance(heir, list) or len(heir) != 2 or not isinstance(heir[0], str):
            raise ValueError(f"{path}.heirs[{index}] is {heir!r:.80}; it must be [node, micro_batches]")
        heirs.append((heir[0], whole_number(heir[1], f"{path}.heirs[{index}]")))
    stage, place = (integer_of(entry, key, path) for key in ("stage", "place"))
    return Takeover(stage, text_of(entry, "node", path), place, tuple(heirs))


def plan_document(plan: Plan) -> dict[str, Any]:
    """PLAN.json as an object; parse_plan reads its dump back."""
    return {
        "generation": plan.generation,
        "stages": [
            {
                "layers": list(stage.layers),
                "replicas": list(stage.replicas),
                "loads": list(stage.loads),
                "in_flight": list(stage.in_flight),
                "keeping": [
                    {"checkpointing": way.checkpointing.value, "optimizer_state": way.optimizer_state.value}
                    for way in stage.keeping
                ],
            }
            for stage in plan.stages
        ],
        "flows": [
            [
                {"sender": flow.sender, "receiver": flow.receiver, "micro_batches": flow.micro_batches}
                for flow in boundary
            ]
            for boundary in plan.flows
        ],
        "idle": list(plan.idle),
        "takeovers": [
            {
                "stage": takeover.stage,
                "node": takeover.node,
                "place": takeover.place,
                "heirs": [list(heir) for heir in takeover.heirs],
            }
            for takeover in plan.takeovers
        ],
    }


def gap(decision: Decision, objective: Objective) -> float | None:
    """How many times as long as its lower bound the decision's plan takes; None where there is no bound."""
    predicted, bound = decision.predicted, decision.lower_bound_seconds
    paper = predicted.paper if objective is Objective.PAPER else None
    return (predicted.iteration_seconds if paper is None else paper.total) / bound if bound > 0 else None


def decision_document(
    decision: Decision, elapsed_seconds: float, objective: Objective = Objective.ITERATION
) -> dict[str, Any]:
    """The object that ``dtfm-coordinator plan --json`` prints.

    By the objective, no plan can take less than ``lower_bound_seconds``; the plan takes ``gap`` times as long, or null where
    there is no bound. ``reason`` is the sentence, ``reason_code`` the value of Reason, and ``moves`` are the state transfers.
    """
    predicted = decision.predicted
    paper = predicted.paper
    return {
        "plan": plan_document(decision.plan),
        "predicted": {
            "iteration_seconds": predicted.iteration_seconds,
            "paper_seconds": paper
            and {"total": paper.total, "data_parallel": paper.data_parallel, "pipeline": paper.pipeline},
            "migration_seconds": predicted.migration_seconds,
        },
        "lower_bound_seconds": decision.lower_bound_seconds,
        "gap": gap(decision, objective),
        "evaluations": decision.evaluations,
        "moves": [
            {
                "node": transfer.node,
                "layers": list(transfer.layers),
                "bytes": transfer.bytes,
                "why": transfer.why.value,
            }
            for transfer in decision.transfers
        ],
        "reason": decision.sentence,
        "reason_code": decision.reason.value,
        "elapsed_seconds": elapsed_seconds,
    }
