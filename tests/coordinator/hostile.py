"""Messages as somebody would send them who wants to harm the run: any kind, any values, half of them nearly right."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field

from dtfm.coordinator.core.audits import COMPARED
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import DIGEST, FILE_DIGEST, evaluated, links, reached, stored, uploaded
from tests.coordinator.script import BUCKETS, hello, prepared

DOUBLES = (0.0, 1.0, -1.0, 0.5, 2.0, 5e-324, 1e-9, 1e18, 1e308, 1.7e308, -1.7e308, math.nan, math.inf, -math.inf)
NUMBERS = (0, 0, 1, 1, 2, 3, 4, 5, 8, 100, 2**31 - 1, 2**32 - 1)
LONG_NUMBERS = (*NUMBERS, 2**53, 2**63 - 1, 2**64 - 1)
TEXTS = (
    *("", *"abcde", "x" * 65, "x" * 70_000, "a\x00b\n", "été\u202e\uffff", "../../etc/passwd", "10.0.0.1:7000"),
    *("loopback", "lan", "i8b256", "activations", "gradients", "reduction", "node", "operator", "0123456789ab"),
    "1.2.3.4:99999",
)
BLOBS = (b"", b"short", bytes(8), DIGEST, FILE_DIGEST, bytes(33), bytes(65), b"\xff" * 70_000)
KINDS = tuple(field.name for field in wire.NodeMessage.DESCRIPTOR.fields)


def hostile(random: Random, generation: int, step: int) -> wire.NodeMessage:
    """A message from a node, mostly about this generation and step. ``step``: the current step."""
    kind = random.choice(KINDS)
    message = _right(kind, random, generation, step) if random.random() < 0.6 else wire.NodeMessage()
    if message.WhichOneof("message") is None:
        fill(getattr(message, kind), random)
        getattr(message, kind).SetInParent()
    for _ in range(random.choice((0, 1, 1, 2))):
        _spoil(getattr(message, kind), random)
    inner = getattr(message, kind)
    if random.random() < 0.7:
        if "generation" in inner.DESCRIPTOR.fields_by_name:
            inner.generation = generation
        if "step" in inner.DESCRIPTOR.fields_by_name:
            done = kind in ("evaluated", "applied", "moved", "standby_progress", "texts")
            inner.step = max(0, step - done)
    return message


def fill(message: Any, random: Random, depth: int = 0) -> None:
    """Sets some of its fields to anything."""
    for field in message.DESCRIPTOR.fields:
        if random.random() < 0.7:
            _set(message, field, random, depth)


def _right(kind: str, random: Random, generation: int, step: int) -> wire.NodeMessage:
    """What an honest node might say of this kind; empty if that depends on too much."""
    peers = random.sample("abcd", 2)
    match kind:
        case "hello":
            return hello("d", port=7000)
        case "prepared":
            return prepared()
        case "links":
            return links("d", [peer for peer in peers if peer != "d"])
        case "reached":
            return reached(*peers)
        case "moved" if random.random() < 0.5:
            files = dict.fromkeys(range(random.randrange(BUCKETS + 1)), (1, FILE_DIGEST))
            return stored(step - 1, files)
        case "moved":
            return uploaded(step - 1, {random.randrange(BUCKETS): (1, FILE_DIGEST)}, random.choice(("", "no room")))
        case "evaluated":
            return evaluated(generation, step - 1)
        case "texts":
            return wire.NodeMessage(texts=wire.Texts(texts=[wire.Texts.Text(text=random.choice(TEXTS))]))
        case "step_ready":
            vote = wire.StepReady(squared_gradient_norm=2.0, loss_sum=4.0, state_digest=DIGEST)
            vote.samples = random.choice((0, 2, 4, 8))
            if random.random() < 0.5:
                peer, of = random.choice("abcd"), random.choice((1, 2, 3, 4, 5))
                vote.sent.add(peer=peer, kind=of, indices=[0], parts=[0], digests=bytes(16))
                vote.losses.append(0.5)
                vote.received.add(peer=peer, kind=of, indices=[0], parts=[0], digests=bytes(16))
            return wire.NodeMessage(step_ready=vote)
        case "audited":
            audited = wire.Audited(number=random.randrange(20), withheld_by=random.choice(("", "", *"abcd")))
            for error in COMPARED:
                setattr(audited, error, random.choice(DOUBLES))
            return wire.NodeMessage(audited=audited)
        case "step_failed":
            problem = wire.StepProblem.Name(random.choice(wire.StepProblem.values()))
            return wire.NodeMessage(step_failed=wire.StepFailed(problem=problem, peer=random.choice("abcd")))
        case "plan_failed":
            return wire.NodeMessage(plan_failed=wire.PlanFailed(problem="x", lost=random.choice(((), (0,), (1, 2)))))
    return wire.NodeMessage()


def _spoil(message: Any, random: Random) -> None:
    """Changes one field, at any depth."""
    field = random.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    if field.type == Field.TYPE_MESSAGE and random.random() < 0.7:
        inner = [value] if not field.is_repeated else list(value)
        if inner and inner[0].DESCRIPTOR.fields:
            _spoil(random.choice(inner), random)
            return
    message.ClearField(field.name)
    _set(message, field, random, 0)


def _set(message: Any, field: Any, random: Random, depth: int) -> None:
    if field.type == Field.TYPE_MESSAGE:
        if depth > 3:
            return
        inner = getattr(message, field.name)
        for target in [inner.add() for _ in range(random.randrange(4))] if field.is_repeated else [inner]:
            fill(target, random, depth + 1)
    elif field.is_repeated:
        getattr(message, field.name).extend(_value(field, random) for _ in range(random.randrange(5)))
    else:
        setattr(message, field.name, _value(field, random))


def _value(field: Any, random: Random) -> Any:
    match field.type:
        case Field.TYPE_DOUBLE | Field.TYPE_FLOAT:
            return random.choice(DOUBLES)
        case Field.TYPE_BOOL:
            return random.random() < 0.5
        case Field.TYPE_STRING:
            return random.choice(TEXTS)
        case Field.TYPE_BYTES:
            return random.choice(BLOBS)
        case Field.TYPE_ENUM:
            return random.choice((*field.enum_type.values_by_number, 77))
        case Field.TYPE_UINT32:
            return random.choice(NUMBERS)
        case Field.TYPE_UINT64 | Field.TYPE_FIXED64:
            return random.choice(LONG_NUMBERS)
    raise AssertionError(field)
