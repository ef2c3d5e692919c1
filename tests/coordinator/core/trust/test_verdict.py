"""What follows from all suspicions together: the rule of core/trust/verdict.py, on ledgers alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hypothesis import given, strategies as st

from dtfm.coordinator.core.state.state import ATTEMPTS, State
from dtfm.coordinator.core.trust.verdict import LEAST_VOICES, Verdict, unseparable, verdict
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import fold
from dtfm.coordinator.log.standing import PROVEN_AFTER
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.script import LAYERS, LONG, World, fresh_state

HONEST, NEW = "abcdef", "uvwx"
CONTRADICTIONS = [charge for charge in Charge if charge.is_contradiction]


def one_stage(nodes: Iterable[str]) -> Plan:
    """All of them are replicas of one another."""
    names = sorted(nodes)
    return from_routes(0, [Stage((0, LAYERS), tuple(names), ())], [([name], 1) for name in names])


def strangers(*nodes: str, believed: str = "") -> World:
    """They train one stage, in mode "open"."""
    cluster = {"nodes": len(nodes), "stages": 1}
    world = World(fresh_state(**LONG, trust={"mode": "open"}, cluster=cluster), one_stage)
    for node in nodes:
        world.belong_together(node, key=f"key of {node}", believed=node == believed)
    world.join(*nodes)
    world.settle()
    return world


def proven(world: World, *nodes: str) -> World:
    """Others have found these nodes' work right."""
    audits = [
        ev.WorkAudited(step, 1, node, by, 1, True, {}, others=2)
        for node in nodes
        for step, by in enumerate(["a", "b", "c", "d"][:PROVEN_AFTER] * 2, 1)
        if by != node
    ]
    world.state = replace(world.state, ledger=fold(audits, world.state.ledger))
    return world


def from_addresses(state: State, **origins: str) -> State:
    """By node, its address."""
    for node, origin in origins.items():
        session = replace(state.members.sessions[node], origin=origin)
        state = replace(state, members=state.members.with_session(session))
    return state


def suspected(state: State, *said: ev.Suspected) -> State:
    return replace(state, ledger=fold(said, state.ledger))


def contradicts(*pairs: str, charge: Charge = Charge.HOP, attempt: int = 1) -> list[ev.Suspected]:
    """The two nodes of each pair contradict each other."""
    return [ev.Suspected(1, attempt, charge, tuple(pair), "they differ", tuple(pair)) for pair in pairs]


def fails(node: str, times: int, charge: Charge = Charge.DIGEST, by: Sequence[str] = ()) -> list[ev.Suspected]:
    return [ev.Suspected(1, attempt, charge, (node,), "why", tuple(by)) for attempt in range(1, times + 1)]


def guilty(found: Verdict) -> list[str]:
    return [each.node for each in found.guilty]


STRANGERS = strangers(*HONEST, *NEW).state
THREE = strangers(*"auv").state
WITH_PROVEN = proven(strangers(*HONEST, *NEW), *HONEST).state


# One party alone.


def test_who_fails_by_itself_is_at_fault_after_three_attempts_not_before() -> None:
    assert guilty(verdict(suspected(STRANGERS, *fails("a", ATTEMPTS - 1)))) == []
    assert guilty(verdict(suspected(STRANGERS, *fails("a", ATTEMPTS)))) == ["a"]


def test_several_doubts_in_one_attempt_count_once() -> None:
    once = [ev.Suspected(1, 1, Charge.DIGEST, ("a",), "why", ())] * ATTEMPTS
    assert verdict(suspected(STRANGERS, *once)) == Verdict()


def test_what_older_logs_say_of_nodes_that_did_not_work_accuses_nobody() -> None:
    for charge in Charge:
        if charge.is_health:
            assert suspected(STRANGERS, *fails("a", ATTEMPTS, charge)).ledger.trust.suspicions == ()


# One against another.


def test_two_that_contradict_each_other_are_kept_apart_at_once() -> None:
    found = verdict(suspected(STRANGERS, *contradicts("au")))
    assert (guilty(found), found.apart) == ([], (("a", "u"),))


def test_two_that_accuse_each_other_are_kept_apart_after_three_attempts() -> None:
    said = [ev.Suspected(1, n, Charge.WITHHELD, ("a", "b"), "why", ("a",)) for n in range(1, ATTEMPTS + 1)]
    assert verdict(suspected(STRANGERS, *said[:-1])).apart == ()
    assert verdict(suspected(STRANGERS, *said)).apart == (("a", "b"),)


def test_whom_three_strangers_contradict_is_at_fault_if_they_are_most_of_its_neighbours() -> None:
    state = suspected(STRANGERS, *contradicts("ua", "ub", "uc", "ud", "ue"))
    assert guilty(verdict(state)) == ["u"], "five of nine"
    assert guilty(verdict(suspected(STRANGERS, *contradicts("ua", "ub", "uc", "ud")))) == [], "four of nine"


def test_among_people_who_know_each_other_two_are_enough_of_three_neighbours() -> None:
    world = World(fresh_state(**LONG, cluster={"nodes": 3, "stages": 1}), one_stage)
    world.join(*"abc")
    world.settle()
    state = world.state
    assert guilty(verdict(suspected(state, *contradicts("ca", "cb")))) == ["c"]


def test_those_that_come_from_one_address_have_one_voice() -> None:
    state = from_addresses(STRANGERS, a="10.0.0.1", b="10.0.0.1", c="10.0.0.1", d="10.0.0.1", e="10.0.0.1")
    found = verdict(suspected(state, *contradicts("ua", "ub", "uc", "ud", "ue")))
    assert guilty(found) == []
    assert len(found.apart) == 5


def test_where_as_many_say_the_opposite_nobody_is_at_fault() -> None:
    state = strangers(*"abcuvw").state
    found = verdict(suspected(state, *contradicts(*(one + other for one in "abc" for other in "uvw"))))
    assert (guilty(found), len(found.apart)) == ([], 9)


def test_a_believed_nodes_word_decides() -> None:
    state = strangers(*"abcu", believed="a").state
    found = verdict(suspected(state, *contradicts("ua")))
    assert guilty(found) == ["u"]
    assert found.guilty[0].against == ("a",)


def test_a_believed_node_that_is_contradicted_by_all_stays() -> None:
    world = proven(strangers(*"abcdef", believed="a"), *"bcdef")
    assert "a" not in guilty(verdict(suspected(world.state, *contradicts("ab", "ac", "ad", "ae", "af"))))


def test_where_no_plan_does_without_a_pair_the_one_of_less_standing_goes() -> None:
    assert unseparable(WITH_PROVEN) is None
    named = unseparable(suspected(WITH_PROVEN, *contradicts("ua")))
    assert named is not None
    assert (named.node, named.undecided) == ("u", True)


# Whatever liars say.

Said = tuple[int, Charge, str, str]


def lies(liars: str, others: str, most: int = 40) -> st.SearchStrategy[list[Said]]:
    """By attempt and charge, whom a liar contradicts or accuses."""
    charges = [*CONTRADICTIONS, Charge.WITHHELD]
    one = st.tuples(st.integers(1, 6), st.sampled_from(charges), st.sampled_from(liars), st.sampled_from(others))
    return st.lists(one, max_size=most).map(lambda said: sorted(said, key=lambda each: each[0]))


def told(said: Iterable[Said]) -> list[ev.Suspected]:
    return [
        ev.Suspected(1, attempt, charge, (liar, other), "a lie", (liar, other) if charge.is_contradiction else (liar,))
        for attempt, charge, liar, other in said
    ]


@given(lies(NEW, HONEST))
def test_newcomers_however_many_and_from_wherever_throw_out_nobody_proven(said: list[Said]) -> None:
    state = from_addresses(WITH_PROVEN, **{node: f"10.0.0.{n}" for n, node in enumerate(NEW)})
    for each in told(said):
        state = suspected(state, each)
        assert set(guilty(verdict(state))) <= set(NEW)


@given(lies("uv", "a"), st.booleans())
def test_two_throw_out_nobody_as_long_as_plans_can_keep_them_apart(said: list[Said], one_address: bool) -> None:
    """Even where nobody is proven, and the third stands alone."""
    state = from_addresses(THREE, u="10.0.0.1", v="10.0.0.1" if one_address else "10.0.0.2")
    for each in told(said):
        state = suspected(state, each)
        assert "a" not in guilty(verdict(state))


@given(lies("u", HONEST))
def test_who_contradicts_most_others_goes_however_it_lies(said: list[Said]) -> None:
    state = suspected(WITH_PROVEN, *told(said))
    against = {other for _, charge, _, other in said if charge.is_contradiction}
    if 2 * len(against) > len(HONEST + NEW) - 1 and len(against) >= LEAST_VOICES:
        assert "u" in guilty(verdict(state))
