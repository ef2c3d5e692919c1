"""NETWORK.json, WORKLOAD.json and PLAN.json: from text to values and back. Opens no files.

Every parser raises ValueError with the path of the field, its value, and what would be right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from dtfm.scheduler.assemble.compact import DENSE, CompactCluster
from dtfm.scheduler.model.cluster import Cluster, Node, Relay
from dtfm.scheduler.model.decision import Decision, Objective
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from dtfm.scheduler.model.plan import Flow, Plan, Stage, Takeover, for_each, from_routes
from dtfm.scheduler.model.problem import Floats, Ints
from dtfm.scheduler.model.workload import Layer, PaperCosts, Workload

Choice = TypeVar("Choice", Checkpointing, OptimizerState)

_RATIOS = {"optimizer": 2.0, "own": 0.0, "copy": 0.0}
"""What Workload has of bytes per parameter byte, with what counts where WORKLOAD.json does not say."""
PRECISIONS = ("fp32", "bf16", "fp64")
BYTES_PER_GIGABIT = 1e9 / 8
"""Converts Gbit/s to bytes per second."""


def parse_network(text: str) -> Cluster:
    """A cluster from NETWORK.json. As parse_any_network, but refuses networks too large for a link per pair of nodes."""
    network = parse_any_network(text)
    if isinstance(network, CompactCluster):
        raise ValueError(
            f"nodes has {len(network.nodes)} entries; in the compact form at most {DENSE} are possible here"
        )
    return network


def parse_any_network(text: str) -> Cluster | CompactCluster:
    """A cluster from NETWORK.json: ``{"nodes": [{"id", "region", "flops", "memory_bytes"}], "latency_ms", "bandwidth_gbps"}``.

    Matrices are one way: row = source, column = destination. ``region``, ``up_gbps``, ``down_gbps``, ``host_memory_bytes``
    and the matrix ``ratio`` are optional. ``host_memory_bytes`` are the host's, for optimizer state; without it the device
    computes in the host's own memory. ``ratio`` is the number of encoded bytes per byte of activations and gradients on each link
    (default 1).

    ``"via"``, optional too, has by link the id of the node or relay that passes everything on, or null. ``"relays": [{"id",
    "up_gbps", "down_gbps"}]`` are those that are no nodes.

    The compact form, for thousands of nodes, adds ``"classes": ["eu", ...]``, and to each node ``"class": "eu"``. The matrices
    then have a row and a column per class, their diagonals are the links between two nodes of one class, and ``ratio`` is not
    possible. ``up_gbps`` and ``down_gbps`` limit what one node sends and receives in total. For up to compact.DENSE nodes the
    result is a Cluster in this form too.
    """
    document = _document(text, {"nodes", "latency_ms", "bandwidth_gbps", "ratio", "classes", "relays", "via"})
    classes = _ids(document, "classes", "") if "classes" in document else None
    for key in ("ratio", "relays", "via"):
        if classes is not None and key in document:
            raise ValueError(f"{key} is not possible beside classes; it needs matrices with a row per node")
    class_of = []
    nodes = []
    for index, entry in enumerate(_list(document, "nodes", "")):
        path = f"nodes[{index}]"
        keys = {"id", "region", "flops", "memory_bytes", "host_memory_bytes", "up_gbps", "down_gbps"}
        _keys(entry, path, keys if classes is None else keys | {"class"})
        if classes is not None:
            name = _text(entry, "class", path)
            if name not in classes:
                raise ValueError(f"{path}.class is {name!r:.80}; it must be one of classes: {', '.join(classes)}")
            class_of.append(classes.index(name))
        limits = {
            name: _number(entry, f"{name}_gbps", path) * BYTES_PER_GIGABIT if f"{name}_gbps" in entry else None
            for name in ("up", "down")
        }
        region = _text(entry, "region", path) if "region" in entry else ""
        flops, memory = _number(entry, "flops", path), _number(entry, "memory_bytes", path)
        host = _number(entry, "host_memory_bytes", path) if "host_memory_bytes" in entry else None
        nodes.append(Node(_text(entry, "id", path), flops, memory, region, **limits, host_memory_bytes=host))
    if classes is not None:
        latency, bandwidth = (_matrix(document, key, classes, "classes") for key in ("latency_ms", "bandwidth_gbps"))
        compact = CompactCluster(
            tuple(nodes), classes, np.array(class_of), latency / 1e3, bandwidth * BYTES_PER_GIGABIT
        )
        return compact.of(list(range(len(nodes)))) if len(nodes) <= DENSE else compact
    latency, bandwidth = (_matrix(document, key, nodes, "nodes") for key in ("latency_ms", "bandwidth_gbps"))
    ratio = _matrix(document, "ratio", nodes, "nodes") if "ratio" in document else None
    relays = tuple(
        _relay(entry, f"relays[{i}]") for i, entry in enumerate(_list({"relays": [], **document}, "relays", ""))
    )
    via = _via(document, nodes, relays) if "via" in document else None
    return Cluster(tuple(nodes), latency / 1e3, bandwidth * BYTES_PER_GIGABIT, ratio, relays=relays, via=via)


def _relay(entry: Any, path: str) -> Relay:
    _keys(entry, path, {"id", "up_gbps", "down_gbps"})
    up, down = (_number(entry, key, path) * BYTES_PER_GIGABIT for key in ("up_gbps", "down_gbps"))
    return Relay(_text(entry, "id", path), up, down)


def _via(document: dict[str, Any], nodes: Sequence[Node], relays: Sequence[Relay]) -> Ints:
    """See Cluster.via."""
    names = [*(node.id for node in nodes), *(relay.id for relay in relays)]
    numbers = {name: number for number, name in enumerate(names)}
    rows = _list(document, "via", "")
    if len(rows) != len(nodes) or not all(isinstance(row, list) and len(row) == len(nodes) for row in rows):
        raise ValueError(f"via is not a square matrix of {len(nodes)} rows; it needs a row and a column per node")
    via = np.full((len(nodes), len(nodes)), -1)
    for i, row in enumerate(rows):
        for j, name in enumerate(row):
            if name is not None and (not isinstance(name, str) or name not in numbers):
                raise ValueError(f"via[{i}][{j}] is {name!r:.80}; it must be the id of a node or relay, or null")
            via[i, j] = -1 if name is None or i == j else numbers[name]
    return via


def dump_network(cluster: Cluster) -> str:
    """The text that parse_network reads back."""
    nodes = []
    for node in cluster.nodes:
        entry: dict[str, Any] = {
            "id": node.id,
            "region": node.region,
            "flops": node.flops,
            "memory_bytes": node.memory_bytes,
        }
        entry |= {} if node.host_memory_bytes is None else {"host_memory_bytes": node.host_memory_bytes}
        entry |= {} if node.up is None else {"up_gbps": node.up / BYTES_PER_GIGABIT}
        entry |= {} if node.down is None else {"down_gbps": node.down / BYTES_PER_GIGABIT}
        nodes.append(entry)
    latency, bandwidth = cluster.latency * 1e3, cluster.bandwidth / BYTES_PER_GIGABIT
    matrices = {"latency_ms": latency, "bandwidth_gbps": bandwidth}
    matrices |= {} if cluster.ratio is None else {"ratio": cluster.ratio.copy()}
    for matrix in matrices.values():
        np.fill_diagonal(matrix, 0.0)
    document: dict[str, Any] = {"nodes": nodes} | {key: matrix.tolist() for key, matrix in matrices.items()}
    if cluster.relays:
        document["relays"] = [
            {"id": each.id, "up_gbps": each.up / BYTES_PER_GIGABIT, "down_gbps": each.down / BYTES_PER_GIGABIT}
            for each in cluster.relays
        ]
    if cluster.via is not None:
        names = [*cluster.ids, *(each.id for each in cluster.relays), None]
        document["via"] = [[names[number] for number in row] for row in cluster.via.tolist()]
    return json.dumps(document)


def parse_workload(text: str) -> Workload:
    """A workload from ``{"layers": [{"name", "forward_flops", "parameter_bytes", "activation_bytes"}],
    "micro_batches", ...}``. FLOPs and bytes are numbers, per micro-batch except ``parameter_bytes``: see Layer and Workload.

    Optional, of a layer: ``kept_bytes`` and ``working_bytes``. Of the workload: ``optimizer_bytes_per_parameter_byte`` (default
    2), ``own_bytes_per_parameter_byte`` and ``copy_bytes_per_parameter_byte`` (default 0); ``checkpointing``, "auto",
    "none" (the default) or "layer"; ``optimizer_state``, "auto", "device" (the default) or "host"; ``paper``; and what no plan
    depends on: ``tokens_per_micro_batch`` (see parse_tokens) and ``precision`` (see parse_precision).
    """
    ratios = {f"{part}_bytes_per_parameter_byte": default for part, default in _RATIOS.items()}
    words = ("checkpointing", "optimizer_state", "tokens_per_micro_batch", "precision")
    document = _document(text, {"layers", "micro_batches", *ratios, *words, "paper"})
    sizes, optional = ("forward_flops", "parameter_bytes", "activation_bytes"), ("kept_bytes", "working_bytes")
    layers = []
    for index, entry in enumerate(_list(document, "layers", "")):
        path = f"layers[{index}]"
        _keys(entry, path, {"name", *sizes, *optional})
        more = {size: _number(entry, size, path) for size in optional if size in entry}
        layers.append(Layer(_text(entry, "name", path), *(_number(entry, size, path) for size in sizes), **more))
    paper = None
    if document.get("paper") is not None:
        entry = document["paper"]
        _keys(entry, "paper", {"stages", "replicas", "gradient_gigabytes", "activation_gigabytes"})
        paper = PaperCosts(
            stages=_integer(entry, "stages", "paper"),
            replicas=_integer(entry, "replicas", "paper"),
            gradient_gigabytes=_number(entry, "gradient_gigabytes", "paper"),
            activation_gigabytes=_number(entry, "activation_gigabytes", "paper"),
        )
    if "tokens_per_micro_batch" in document:
        _integer(document, "tokens_per_micro_batch", "")
    if "precision" in document and document["precision"] not in PRECISIONS:
        raise ValueError(f"precision is {document['precision']!r:.80}; it must be one of {', '.join(PRECISIONS)}")
    return Workload(
        layers=tuple(layers),
        micro_batches=_integer(document, "micro_batches", ""),
        paper=paper,
        checkpointing=_choice(document, "checkpointing", Checkpointing, Checkpointing.NONE),
        optimizer_state=_choice(document, "optimizer_state", OptimizerState, OptimizerState.DEVICE),
        **{ratio: _number(document, ratio, "") if ratio in document else default for ratio, default in ratios.items()},
    )


def parse_tokens(text: str) -> int | None:
    """The tokens of a micro-batch, ``tokens_per_micro_batch`` in a text that parse_workload reads; None where it does not say."""
    document: dict[str, int] = json.loads(text)
    return document.get("tokens_per_micro_batch")


def parse_precision(text: str) -> str:
    """The precision that is computed in, ``precision`` in a text that parse_workload reads: one of PRECISIONS. A text that does
    not say it is of a run in bf16 if it has copies of weights to compute with, otherwise in fp32."""
    document: dict[str, Any] = json.loads(text)
    copies = document.get("copy_bytes_per_parameter_byte", 0.0)
    return str(document.get("precision") or ("bf16" if copies else "fp32"))


def _choice(document: dict[str, Any], key: str, choices: Iterable[Choice], default: Choice) -> Choice | None:
    """None for "auto"."""
    if key not in document:
        return default
    known: dict[object, Choice | None] = {"auto": None} | {str(choice): choice for choice in choices}
    value = document[key]
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{key} is {value!r:.80}; it must be one of {', '.join(map(str, known))}")
    return known[value]


def dump_workload(workload: Workload, tokens: int | None = None) -> str:
    """The text that parse_workload reads back; parse_tokens gives ``tokens``, those of a micro-batch."""
    sizes = ("name", "forward_flops", "parameter_bytes", "activation_bytes")
    shape = ("stages", "replicas", "gradient_gigabytes", "activation_gigabytes")
    document: dict[str, Any] = {
        "layers": [
            {key: getattr(layer, key) for key in sizes}
            | ({} if layer.kept_bytes is None else {"kept_bytes": layer.kept_bytes})
            | ({"working_bytes": layer.working_bytes} if layer.working_bytes else {})
            for layer in workload.layers
        ],
        "micro_batches": workload.micro_batches,
        "checkpointing": workload.checkpointing or "auto",
        "optimizer_state": workload.optimizer_state or "auto",
    }
    document |= {ratio: getattr(workload, ratio) for ratio in (f"{part}_bytes_per_parameter_byte" for part in _RATIOS)}
    if tokens is not None:
        document["tokens_per_micro_batch"] = tokens
    if workload.paper is not None:
        document["paper"] = {key: getattr(workload.paper, key) for key in shape}
    return json.dumps(document)


def parse_plan(text: str) -> Plan:
    """A plan from PLAN.json: ``{"generation", "stages": [{"layers", "replicas", "loads", "in_flight", "keeping"}], "flows",
    "idle", "takeovers"}``. plan.check and plan.validate say whether it fits together, and suits a cluster and a workload.

    ``keeping``, optional, has by replica ``{"checkpointing": "none" | "layer", "optimizer_state": "device" |
    "host"}``; without it all do as Keeping() says. ``flows`` has a list per boundary between two stages, of ``{"sender",
    "receiver", "micro_batches"}``; ``takeovers`` are ``{"stage", "node", "place", "heirs": [[node, micro_batches], ...]}``. Older
    documents have ``"routes": [{"nodes", "micro_batches"}]`` instead of loads, flows and takeovers, and one number in flight per
    stage: they are read as the same plans.
    """
    document = _document(text, {"generation", "stages", "flows", "idle"}, {"takeovers", "routes"})
    old = "routes" in document
    stages = []
    for index, entry in enumerate(_list(document, "stages", "")):
        path = f"stages[{index}]"
        _keys(entry, path, {"layers", "replicas"} if old else {"layers", "replicas", "loads"}, {"in_flight", "keeping"})
        layers = _list(entry, "layers", path)
        if len(layers) != 2 or not all(type(layer) is int and layer >= 0 for layer in layers):
            raise ValueError(f"{path}.layers is {layers!r:.80}; it must be [first, past_last], two whole numbers")
        replicas = _ids(entry, "replicas", path)
        in_flight = _in_flight(entry, len(replicas), path) if "in_flight" in entry else ()
        loads = () if old else tuple(_whole(load, f"{path}.loads") for load in _list(entry, "loads", path))
        keeping = tuple(
            _keeping(way, f"{path}.keeping[{place}]")
            for place, way in enumerate(_list(entry, "keeping", path) if "keeping" in entry else [])
        )
        stages.append(Stage((layers[0], layers[1]), replicas, loads, in_flight, keeping))
    generation = _integer(document, "generation", "")
    idle = _ids(document, "idle", "") if "idle" in document else ()
    if old:
        routes = []
        for index, entry in enumerate(_list(document, "routes", "")):
            path = f"routes[{index}]"
            _keys(entry, path, {"nodes", "micro_batches"})
            routes.append((_ids(entry, "nodes", path), _integer(entry, "micro_batches", path)))
        return from_routes(generation, stages, routes, idle)
    flows = []
    for boundary, entries in enumerate(_list(document, "flows", "")):
        path = f"flows[{boundary}]"
        if not isinstance(entries, list):
            raise ValueError(f"{path} is {entries!r:.80}; it must be a list")
        flows.append(tuple(_flow(entry, f"{path}[{index}]") for index, entry in enumerate(entries)))
    takeovers = _list(document, "takeovers", "") if "takeovers" in document else []
    return Plan(
        generation,
        tuple(stages),
        tuple(flows),
        idle,
        tuple(_takeover(entry, f"takeovers[{index}]") for index, entry in enumerate(takeovers)),
    )


def _in_flight(entry: Any, replicas: int, path: str) -> tuple[int, ...]:
    if isinstance(entry["in_flight"], list):
        return tuple(_whole(number, f"{path}.in_flight") for number in entry["in_flight"])
    return for_each(_integer(entry, "in_flight", path), replicas)


def _keeping(entry: Any, path: str) -> Keeping:
    _keys(entry, path, {"checkpointing", "optimizer_state"})
    made = []
    for key, choices in (("checkpointing", Checkpointing), ("optimizer_state", OptimizerState)):
        if (value := _text(entry, key, path)) not in list(choices):
            raise ValueError(f"{path}.{key} is {value!r:.80}; it must be one of {', '.join(choices)}")
        made.append(value)
    return Keeping(Checkpointing(made[0]), OptimizerState(made[1]))


def _flow(entry: Any, path: str) -> Flow:
    _keys(entry, path, {"sender", "receiver", "micro_batches"})
    return Flow(_text(entry, "sender", path), _text(entry, "receiver", path), _integer(entry, "micro_batches", path))


def _takeover(entry: Any, path: str) -> Takeover:
    _keys(entry, path, {"stage", "node", "place", "heirs"})
    heirs = []
    for index, heir in enumerate(_list(entry, "heirs", path)):
        if not isinstance(heir, list) or len(heir) != 2 or not isinstance(heir[0], str):
            raise ValueError(f"{path}.heirs[{index}] is {heir!r:.80}; it must be [node, micro_batches]")
        heirs.append((heir[0], _whole(heir[1], f"{path}.heirs[{index}]")))
    stage, place = (_integer(entry, key, path) for key in ("stage", "place"))
    return Takeover(stage, _text(entry, "node", path), place, tuple(heirs))


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


def _document(text: str, keys: set[str], optional: Collection[str] = ()) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    _keys(document, "", keys, optional)
    return dict(document)


def _keys(entry: object, path: str, keys: set[str], optional: Collection[str] = ()) -> None:
    if not isinstance(entry, dict):
        raise ValueError(
            f"{path or 'the document'} is {entry!r:.80}; it must be an object with {', '.join(sorted(keys))}"
        )
    for key in entry:
        if key not in keys and key not in optional:
            raise ValueError(f"{_path(path, key)} is unknown; the keys are {', '.join(sorted(keys))}")


def _path(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _get(entry: dict[str, Any], key: str, path: str) -> Any:
    if key not in entry:
        raise ValueError(f"{_path(path, key)} is missing")
    return entry[key]


def _list(entry: dict[str, Any], key: str, path: str) -> list[Any]:
    value = _get(entry, key, path)
    if not isinstance(value, list):
        raise ValueError(f"{_path(path, key)} is {value!r:.80}; it must be a list")
    return value


def _text(entry: dict[str, Any], key: str, path: str) -> str:
    value = _get(entry, key, path)
    if not isinstance(value, str):
        raise ValueError(f"{_path(path, key)} is {value!r:.80}; it must be a text")
    return value


def _ids(entry: dict[str, Any], key: str, path: str) -> tuple[str, ...]:
    values = _list(entry, key, path)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueError(f"{_path(path, key)}[{index}] is {value!r:.80}; it must be a node's id")
    return tuple(values)


def _number(entry: dict[str, Any], key: str, path: str) -> float:
    value = _get(entry, key, path)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{_path(path, key)} is {value!r:.80}; it must be a finite number")
    return float(value)


def _integer(entry: dict[str, Any], key: str, path: str) -> int:
    return _whole(_get(entry, key, path), _path(path, key))


def _whole(value: Any, path: str) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{path} is {value!r:.80}; it must be a whole number, 0 or above")
    return value


def _matrix(document: dict[str, Any], key: str, names: Sequence[object], of: str) -> Floats:
    """A square matrix with a row and a column per name. Between nodes the diagonal is ignored."""
    size, diagonal = len(names), of != "nodes"
    rows = _list(document, key, "")
    if len(rows) != size:
        raise ValueError(f"{key} has {len(rows)} rows; there are {size} {of}")
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != size:
            shown = f"{len(row)} numbers" if isinstance(row, list) else f"{row!r:.80}"
            raise ValueError(f"{key}[{i}] is {shown}; it must be a list of {size} numbers, as there are {of}")
        for j, value in enumerate(row):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{key}[{i}][{j}] is {value!r:.80}; it must be a number")
            if not (math.isfinite(value) and value >= 0) and (diagonal or i != j):
                raise ValueError(f"{key}[{i}][{j}] is {value}; it must be a finite number, 0 or above")
    matrix = np.array(rows, dtype=np.float64).reshape(size, size)
    if not diagonal:
        np.fill_diagonal(matrix, 0.0)
    return matrix
