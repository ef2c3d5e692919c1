"""One event of every kind."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.outer import Looked
from dtfm.protos.outer import OuterStep
from dtfm.protos.source_files import SourceFile
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from dtfm.scheduler.model.plan import Flow, Plan, Stage, Takeover
from dtfm.scheduler.model.workload import Layer, Workload

DEVICE = ev.DeviceSeen("cpu", "a cpu", 1 << 33, 1e11)
GPU = ev.DeviceSeen("cuda", "a gpu", 1 << 34, 1e14, 1 << 36)
PLAN = Plan(
    1,
    (Stage((0, 2), ("a", "b"), (3, 5), (4, 6)), Stage((2, 3), ("c",), (8,), (1,))),
    ((Flow("a", "c", 3), Flow("b", "c", 5)),),
    ("d",),
)
CARRIED_ON = Plan(
    2, (Stage((0, 2), ("a",), (8,), (4,)), PLAN.stages[1]), PLAN.flows, ("d",), (Takeover(0, "b", 1, (("a", 5),)),)
)
DESCRIBED = ev.Described(Workload((Layer("x", 1e9, 4e6, 1e5),), 8), "ab12", 100, 10, 3.2, 256, 1)
IN_BF16 = Workload(
    (Layer("x", 1e9, 4e6, 1e5, 2e6, 1e4),),
    8,
    copy_bytes_per_parameter_byte=0.5,
    checkpointing=None,
    optimizer_state=OptimizerState.HOST,
)
KEPT = Plan(
    3, (Stage((0, 1), ("a",), (8,), (1,), (Keeping(Checkpointing.LAYER, OptimizerState.HOST),)),), (), ("b", "c")
)

EVERY_EVENT: list[ev.Event] = [
    ev.RunStarted("id", {"name": "demo", "train": {"steps": 3}}),
    ev.RunResumed("why", {"name": "demo"}, {"name": "demo"}),
    ev.RunPaused("bob", ends=True),
    ev.RunPaused("bob"),
    ev.RunContinued("bob"),
    ev.RunChanged("bob", "train.steps", 400, 200),
    ev.RunChanged("bob", "train.learning_rate", 0.001, 0.003, 7),
    ev.RunStopped(7, "why"),
    ev.Listens("0.0.0.0:7400", ("run.example.org",)),
    ev.NodeJoined("a", "first contact", "10.0.0.1:7000", DEVICE, "0.1"),
    ev.NodeJoined("g", "first contact", "10.0.0.1:7001", GPU, "0.1"),
    ev.NodeRefused("a", "FULL", "why"),
    ev.NodePrepares("a", "compiles"),
    ev.NodePrepares("a", "reads data", 400, 1000),
    ev.NodeReady("a"),
    ev.NodeLeaving("a", "why"),
    ev.StandbyPromoted("a", "1f", (0, 2), 1),
    ev.DeviceTimed("a", 1e9),
    ev.DeviceTimed("a", 1e9, "why"),
    ev.DeviceDrifted("a", 1e9, "why"),
    ev.NodeLeft("a", "why"),
    ev.LinksMeasured("a", (ev.Link("a", "b", 0.001, 1e9), ev.Link("b", "a", 0.0, 0.0, "no route")), up=2e9),
    ev.WaysChosen((ev.Way("a", "b", "lan"), ev.Way("b", "a", "relay", "r", "why"), ev.Way("a", "c", "dial-back"))),
    ev.RunDescribed(DESCRIBED, "a"),
    ev.RunDescribed(replace(DESCRIBED, workload=IN_BF16), "a"),
    ev.DataConfirmed("b"),
    ev.RunDescribed(replace(DESCRIBED, files=(SourceFile("data.source", "x.txt", 5, "ab" * 32, 4096, "cd" * 8),)), "a"),
    ev.DescriptionDropped("a"),
    ev.DescriptionDropped("a", "why"),
    ev.Waiting("why"),
    ev.PlanAdopted(1, PLAN, "why", 0, 1.5, None),
    ev.PlanAdopted(2, CARRIED_ON, "why", 0),
    ev.PlanAdopted(3, KEPT, "why", 0, moments={1: 0}),
    ev.StagesUnaudited(3, {"stage 1": "b alone holds it"}),
    ev.PlanRepriced(3, 2.5, None, 0.25, "why"),
    ev.PlanStarted(1, 1, 0, {"a": {"b": {"activations": "raw16"}}}),
    ev.CodecsChosen("a", {"b": {"activations": "i8b256"}}),
    ev.PlanFailed(1, "a", "why"),
    ev.StepCommitted(1, 1, 2.5, 8192, 0.5, 1.25, 32, {"a": 1.0}, {"a": 0.25}),
    ev.StepCommitted(
        2,
        1,
        2.5,
        0,
        0.5,
        1.25,
        0,
        {},
        {},
        exchange=True,
        outer=OuterStep(0.7, 0.9),
        looked=Looked((OuterStep(1.0, 0.0), OuterStep(0.7, 0.9)), {"0": (2.5, 2.25)}, 0.25),
        change_norms={"0": 1.5, "1": 2.5},
    ),
    ev.StageBounded(2, 1, 1, ("b",), 1e12, 8.5e3, 0.85, 1.25),
    ev.GradientsClipped(2, 1, {"a": {"b": 3.5}}),
    ev.StepAborted(2, 1, "NON_FINITE", "a", "why"),
    ev.DigestMismatch(2, 1, 0, {"a": "00", "b": "01"}),
    ev.Evaluated(1, 2.5, 64, 3.2),
    ev.TextWritten(1, "a", "def f", "(x):\\n    return x", False),
    ev.TextWritten(1, "a", "Hello", " there.", True),
    ev.CheckpointWritten(1, "file:///x/step-00000001", "ab12"),
    ev.CheckpointFailed(1, "why"),
    ev.DiskShort("", 1 << 30, 1 << 34),
    ev.DiskShort("a, b", 1 << 30, 1 << 34),
    ev.SnapshotWritten(
        1, (ev.SnapshotPart(10, "ab"), ev.SnapshotPart(20, "cd")), {"a": ((0, 2),), "b": ((1, 2),)}, 0.5
    ),
    ev.LossSpiked(1, "training", 9.5, 2.5, 3.5, 1, 0, 0.003),
    ev.RolledBack(0, 1, "why"),
    ev.RolledBack(0, 1, "why", weights=True),
    ev.InvitationMade("0123456789ab", "ab" * 32, "Bob's PC", "node", 1.7e9, 1.8e9, 3, "operator"),
    ev.Enrolled("a", "node", "MFkw", "0123456789ab"),
    ev.Revoked("a", ("0123456789ab",), 1.75e9, "operator"),
    ev.NodeQuarantined("a", Charge.DIGEST, "why", 3, True, ("b",), "MFkw"),
    ev.StateAgreed(1, ("ab12", "")),
    ev.Suspected(2, 1, Charge.HOP, ("a", "b"), "why", ("a", "b")),
    ev.Suspected(2, 1, Charge.STALLED, ("a", "b", "c"), "why"),
    ev.WorkAudited(4, 2, "a", "b", 8, False, {"activations": 0.05, "addends": 0.0}),
    ev.WorkAudited(5, 2, "b", "a", 8, True, {"losses": 1e-4}, others=3),
    ev.DeviceShown("a", 1e11),
    ev.StandingLost("a", "why"),
    ev.NodeOutOfUse("a", "OUT_OF_MEMORY", "why", 10.0),
    ev.NodeTested("a"),
    ev.StandingChanged("a", "proven", "3 audits in a row, the last at step 4"),
    ev.NodeForgiven("a", "operator", "MFkw"),
    ev.RunFinished(3, "why"),
    ev.RunFailed(3, "why"),
    ev.CoordinatorStopped("why"),
]
