"""Events as sentences for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from dtfm.coordinator.log import events as ev
from dtfm.scheduler.model.chains import heaviest_routes
from dtfm.scheduler.model.memory import Checkpointing, OptimizerState
from dtfm.scheduler.model.plan import Plan

MOST_NAMED = 8
"""Largest number of nodes that one sentence names."""

MOST_ROUTES = 3
"""Number of routes that are shown of a plan."""

AS_GOOD = 1.005
"""Up to this gap nothing that counts can be gained."""


def narrate(event: ev.Event) -> str:
    """The event as one line of text."""
    match event:
        case ev.RunStarted():
            return f"run {event.run.get('name')} started (id {event.run_id})"
        case ev.RunResumed():
            return f"run resumed: {event.reason}"
        case ev.NodeJoined():
            device = event.device
            power = f"{device.memory_bytes / 2**30:.1f} GiB, {device.flops / 1e9:.0f} GFLOP/s"
            return f"{event.node} joined from {event.address}: {device.name} ({device.kind}, {power}); {event.reason}"
        case ev.NodeRefused():
            return f"{event.node or 'a node'} was refused: {event.refusal}: {event.reason}"
        case ev.NodeReady():
            return f"{event.node} is ready"
        case ev.NodeLeaving():
            return f"{event.node} is leaving ({event.reason}) and hands over its work first"
        case ev.NodeLeft():
            return f"{event.node} left: {event.reason}"
        case ev.DeviceTimed():
            return f"{event.node} computes this model's layers at {event.flops / 1e9:.0f} GFLOP/s"
        case ev.DeviceDrifted():
            return f"{event.node} changed its speed: {event.reason}"
        case ev.DeviceShown():
            return f"{event.node} has shown {event.flops / 1e9:,.0f} GFLOP/s in training: more of what it claims counts"
        case ev.LinksMeasured():
            return _measured(event)
        case ev.WaysChosen():
            return _chosen(event)
        case ev.RunDescribed():
            workload = event.described.workload
            size = sum(layer.parameter_bytes for layer in workload.layers)
            return (
                f"the model has {len(workload.layers)} layers, {size / 2**20:.1f} MiB of parameters; the data has "
                f"{event.described.training_samples} samples (to pin both in the run file: [trust] data = "
                f'"{event.described.data_digest}", workload = "{event.described.workload_digest}")'
            )
        case ev.DataConfirmed():
            return f"{event.node} has read the same data; nodes that join later may fetch its tokens from beside the checkpoints"
        case ev.Waiting():
            return f"waiting: {event.reason}"
        case ev.PlanAdopted():
            expected = describe_seconds(event.predicted_seconds, event.lower_bound_seconds)
            what = f"{describe_plan(event.plan)}; {f'{expected}; ' if expected else ''}{event.reason}"
            return f"plan {event.generation} from step {event.step + 1} on: {what}"
        case ev.PlanStarted():
            used = Counter(
                codec for links in event.codecs.values() for tensors in links.values() for codec in tensors.values()
            )
            under = ", ".join(f"{codec} on {count}" for codec, count in sorted(used.items()))
            return (
                f"plan {event.generation} begins with step {event.step}{f'; codecs of links: {under}' if under else ''}"
            )
        case ev.PlanFailed():
            return f"plan {event.generation} failed on {event.node}: {event.reason}"
        case ev.CodecsChosen():
            sent = [f"to {node} {describe_codecs(tensors)}" for node, tensors in sorted(event.codecs.items())]
            return f"{event.node} now sends {'; '.join(sent) or 'nothing'}"
        case ev.StepCommitted():
            speed = event.tokens_per_second
            rate = f", {speed:,.0f} tokens/s" if speed is not None else ""
            return f"step {event.step}: loss {event.loss:.4f}, gradient norm {event.gradient_norm:.3f}{rate}"
        case ev.GradientsClipped():
            told = [item for whose in event.times.values() for item in whose.items()]
            worst = {node: max(times for n, times in told if n == node) for node, _ in told}
            whose = ", ".join(f"{node} ({worst[node]:.3g} times the bound)" for node in sorted(worst)[:MOST_NAMED])
            return f"step {event.step}: gradients were clipped of {whose}"
        case ev.StepAborted():
            return f"step {event.step} was aborted: {event.problem} on {event.node}: {event.reason}"
        case ev.DigestMismatch():
            return f"step {event.step}: the replicas of stage {event.stage} hold different state: {event.digests}"
        case ev.Evaluated():
            return (
                f"held-out loss after step {event.step}: {event.loss:.4f} nats per token (token frequencies alone: "
                f"{event.unigram_entropy:.4f})"
            )
        case ev.CheckpointWritten():
            return f"checkpoint of step {event.step}: {event.folder}"
        case ev.CheckpointFailed():
            return f"no checkpoint of step {event.step}: {event.reason}"
        case ev.StandbyPromoted():
            layers = f"{event.layers[0]}-{event.layers[1] - 1}"
            return f"standby {event.node} takes over the state of layers {layers} as of step {event.step}"
        case ev.SnapshotWritten():
            holders = [f"buckets {_numbers(ranges)} on {node}" for node, ranges in event.holders.items()]
            more = f"; on {len(holders) - MOST_NAMED} more nodes too" if len(holders) > MOST_NAMED else ""
            return f"snapshot of step {event.step} on disks in {event.seconds:.1f} s: {'; '.join(holders[:MOST_NAMED])}{more}"
        case ev.RolledBack():
            return f"back from step {event.from_step} to step {event.step}: {event.reason}"
        case ev.InvitationMade():
            whom = f" for {event.name}" if event.name else ""
            until = datetime.fromtimestamp(event.expires, UTC).strftime("%Y-%m-%d %H:%M UTC")
            uses = f"{event.uses} use{'s' if event.uses > 1 else ''}"
            return f"{event.by} made invitation {event.invitation}{whom} (role {event.role}, {uses}, until {until})"
        case ev.Enrolled():
            how = f" by invitation {event.invitation}" if event.invitation else ", on the coordinator's machine"
            return f"{event.name} was enrolled as {event.role}{how}"
        case ev.Revoked():
            ended = [event.name] if event.name else []
            ended += [f"invitation {id}" for id in event.invitations]
            return f"{event.by} revoked {' and '.join(ended)}"
        case ev.NodeQuarantined():
            return f"{event.node} is quarantined: {event.charge}: {event.reason}"
        case ev.StateAgreed():
            return f"the digests of the state after step {event.step} are agreed on"
        case ev.StateRefused():
            whose = f"from {name_nodes(event.donors)}" if event.donors else "that it has"
            return f"the state of bucket {event.bucket} {whose} is refused on {event.node}: it differs from that of the others"
        case ev.WorkAudited():
            found = "found it right" if event.clean else "came to something else"
            found = "it was not settled whether they are right" if event.tied else found
            work = f"{event.micro_batches} micro-batches of {event.node}"
            said = f"{event.raised_by} found them" if event.raised_by else "its digests are"
            why = f", as {said} unusual" if event.why == "unusual" else ""
            where = f"the evaluation after step {event.step - 1}" if event.why == "evaluation" else f"step {event.step}"
            return f"{event.by} did {work} again in {where}{why}, and {found}"
        case ev.AuditHindered(of=""):
            return f"{event.node} did not answer an audit in step {event.step}"
        case ev.AuditHindered():
            how = "it ended the step" if event.ended else "it withheld what that needs"
            said = f", say {name_nodes(event.by)}" if event.by else ""
            return f"an audit of {event.of} in step {event.step} came to nothing because of {event.node}: {how}{said}"
        case ev.StrikesEnded():
            return "no strike is left against a member" if event.all else "a member has worked off a strike"
        case ev.StandingChanged():
            return f"{event.node} is {event.standing}: {event.reason}"
        case ev.NodesBenched():
            return f"the step is tried without {name_nodes(event.nodes)}: {event.reason}"
        case ev.NodeForgiven():
            return f"{event.by} has forgiven {event.node}: it may come back"
        case ev.RunFinished():
            return f"run finished: {event.reason}"
        case ev.RunFailed():
            return f"run failed: {event.reason}"
        case ev.CoordinatorStopped():
            return f"coordinator stopped: {event.reason}"


def _measured(event: ev.LinksMeasured) -> str:
    if event.reason:
        return f"{event.node}: {event.reason}"
    broken = [f"{link.source} to {link.destination} ({link.problem})" for link in event.links if link.problem]
    more = f", and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
    unusable = f"; unusable: {', '.join(broken[:MOST_NAMED])}{more}" if broken else ""
    return f"{len(event.links)} link{'s' if len(event.links) != 1 else ''} of {event.node} measured{unusable}"


def _chosen(event: ev.WaysChosen) -> str:
    said = [f"{way.source} reaches {way.destination} by {way.name}" for way in event.ways[:MOST_NAMED]]
    more = f", and {len(event.ways) - MOST_NAMED} more" if len(event.ways) > MOST_NAMED else ""
    why = next((f": {way.reason}" for way in event.ways if way.reason), "")
    return f"{', '.join(said)}{more}{why}"


def describe_seconds(predicted: float | None, bound: float | None) -> str:
    """What a plan is expected to take, and what no plan can beat, like "12.3 s a step, at best 8.1 s"; empty if unknown."""
    if predicted is None:
        return ""
    return f"{seconds_in_words(predicted)} a step" + (f", at best {seconds_in_words(bound)}" if bound else "")


def describe_gap(bound: float, gap: float) -> str:
    """How far a plan is from what no plan can beat: ``bound`` seconds a step, and ``gap`` times that."""
    if gap < AS_GOOD:
        compared = "is as good as any"
    elif gap < 1.1:
        compared = f"takes {gap - 1:.0%} longer"
    else:
        compared = f"takes {gap:.1f} times as long"
    return f"No plan can take less than {seconds_in_words(bound)}; this one {compared}."


def seconds_in_words(seconds: float) -> str:
    """The seconds to three digits, like "8.12 s", "19.0 s", "1,234 s"."""
    if seconds < 10:
        return f"{seconds:.3g} s"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def describe_codecs(tensors: Mapping[str, str]) -> str:
    """The tensors that go over a link and the codec of each, like "activations i8b256, gradients off"."""
    return ", ".join(f"{what} {codec}" for what, codec in sorted(tensors.items()))


def _numbers(ranges: Iterable[tuple[int, int]]) -> str:
    """The ranges with their last numbers included, like "0-4, 7"."""
    return ", ".join(f"{first}-{past - 1}" if past - first > 1 else str(first) for first, past in ranges)


def describe_plan(plan: Plan) -> str:
    """The plan as one line, like "2 stages: layers 0-4 on a, b; layers 5-9 on c, d; layers are computed again on a; heaviest
    routes: a -> c 12 micro-batches, b -> d 4, and 3 more"."""
    stages = "; ".join(f"layers {s.layers[0]}-{s.layers[1] - 1} on {name_nodes(s.replicas)}" for s in plan.stages)
    routes = f"; heaviest routes: {describe_routes(plan)}" if len(plan.stages) > 1 else ""
    return f"{len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''}: {stages}{_describe_keeping(plan)}{routes}"


def _describe_keeping(plan: Plan) -> str:
    """Who keeps less than usual."""
    ways = [(node, way) for stage in plan.stages for node, way in zip(stage.replicas, stage.keeping, strict=False)]
    again = [node for node, way in ways if way.checkpointing is Checkpointing.LAYER]
    hosted = [node for node, way in ways if way.optimizer_state is OptimizerState.HOST]
    return (f"; layers are computed again on {name_nodes(again)}" if again else "") + (
        f"; optimizer state is in the host's memory of {name_nodes(hosted)}" if hosted else ""
    )


def describe_routes(plan: Plan) -> str:
    """The chains of nodes that most micro-batches travel, like "a -> c 12 micro-batches, b -> d 4, and 3 more"."""
    heaviest, in_all = heaviest_routes(plan, MOST_ROUTES)
    shown = [f"{' -> '.join(chain)} {count}" for chain, count in heaviest]
    shown[0] += f" micro-batch{'es' if heaviest[0][1] > 1 else ''}"
    return ", ".join(shown) + (f", and {in_all - len(shown)} more" if in_all > len(shown) else "")


def name_nodes(nodes: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
    return ", ".join(nodes[:MOST_NAMED]) + more
