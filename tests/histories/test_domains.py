"""Histories of a node with compute domains: what must hold does, planted bugs are found, and what the checks see really
happens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.acts.files import ClaimFiles
from gpuactors.core.domains import exclusion, label, reads
from gpuactors.core.domains import step as domains_step
from gpuactors.core.state import NodeState
from gpuactors.core.state.domains import Domains, DomainView, Label
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import DomainUid, LabelChange, LabelPatch
from gpuactors.kube.client import ApiClient, Call
from gpuactors_simulation.kubelet.values import Phase
from tests.histories import domain_check
from tests.histories.claim_events import OF_ANY_DRIVER
from tests.histories.domain_events import BESIDE, DOMAIN_KINDS
from tests.histories.domains import DOMAINS
from tests.histories.draw import drawn
from tests.histories.events import DRAWN, DRAWN_WITH_CLAIMS, DRAWN_WITH_DOMAINS, KINDS
from tests.histories.found import FOUND_WITH_DOMAINS
from tests.histories.play import Played, play, play_chosen
from tests.histories.script import Step, parse_script
from tests.histories.world import World

TWO_CHANNELS = 256
"""The bit of a seed by which the node offers two."""

QUICK = 16
"""That by which a history is neither watched for long nor replayed from its journal, if it has no higher ones."""

COMES = "a pod with a channel comes"
STORY = f"{COMES}+11; a pod with a claim ends+110"
BOTH_CHANNELS = f"{COMES}+11; {COMES}+11; a pod with a claim ends+11"
SUCCESSION = f"{COMES}+11; a pod with a claim is force-deleted, has a successor and dies late+30"
ANOTHER = f"{COMES}+11; a pod with a channel is force-deleted and another domain gets it+30"
DAEMON_ANEW = f"{COMES}+11; the daemon pod of a domain is force-deleted@6+11"
IN_PROGRESS = (
    f"the controller of compute domains stops; {COMES}+3; "
    "a pod with a claim is force-deleted and has a successor+0.05"
)
NOT_READY = f"the daemons of domains are not ready; {COMES}+3"
STOPPED = f"the controller of compute domains stops; {COMES}+70"
STRANGER = "somebody sets the label to what no claim has+11"
FOUND_BY_A_SUCCESSOR = (
    f"{COMES}+11; a daemon crashes; {STRANGER}; a daemon starts+11; a pod with a claim ends+30"
)
RACE = f"a patch takes long; {COMES}+1; somebody sets the label to what no claim has+30"


def passes(played: Played) -> None:
    assert played.failure is None, played.failure


@pytest.mark.parametrize("seed", range(2))
def test_a_drawn_history_of_a_node_with_compute_domains(seed: int) -> None:
    passes(play_chosen(drawn(random.Random(seed)), seed | DOMAINS))


def test_a_history_of_a_node_with_compute_domains_is_the_same_each_time() -> None:
    first, again = (play_chosen(drawn(random.Random(3)), 19 | DOMAINS) for _ in range(2))
    assert (first.digest, first.script) == (again.digest, again.script)


def test_a_channel_brings_the_label_and_the_domains_daemon_and_both_go_with_it() -> None:
    seen: list[tuple[Phase | None, bool, list[str]]] = []

    def look(world: World, _step: Step | None) -> None:
        assert world.domains is not None
        pods, node = world.kubelet.view.pods, world.domains
        pod = pods.get("c-1")
        is_ours = node.label == node.domains["left"]
        seen.append((pod.phase if pod else None, is_ours, sorted(pods.keys() & node.controller.pods)))

    passes(play(parse_script(STORY), DOMAINS | QUICK, on_step=look))
    assert seen[1] == (Phase.RUNNING, True, ["left-daemon-1"])
    assert [*seen[:1], *seen[2:]] == [(None, False, [])] * 3


def test_a_successor_of_another_domain_waits_until_the_label_names_it() -> None:
    labels: list[str | None] = []

    def look(world: World, _step: Step | None) -> None:
        assert world.domains is not None
        names = {uid: name for name, uid in world.domains.domains.items()}
        labels.append(names.get(world.domains.label or ""))

    passes(play(parse_script(ANOTHER), DOMAINS | QUICK, on_step=look))
    assert labels == [None, "left", "right", None]


@pytest.mark.parametrize("name", sorted(FOUND_WITH_DOMAINS))
def test_a_found_history_of_a_node_with_compute_domains_stays_found(name: str) -> None:
    seed, script = FOUND_WITH_DOMAINS[name]
    played = play(script, seed)
    passes(played)
    assert played.script == script, "a step of it could not happen: it tries something else now"


# --- planted bugs -----------------------------------------------------------------------------------------


def _holds_no_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """The label is removed under the claim that has set it, once that is prepared."""
    for states in ("_NEEDS", "_KEEPS"):
        monkeypatch.setattr(label, states, getattr(label, states) - {ClaimState.PREPARED})


def _removes_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA: an unprepare removes the label, whoever else needs it."""
    held = label.held

    def of_nobody(domains: Domains) -> label.Held:
        states = {entry.state for entry in domains.claims.entries.values()}
        of = held(domains)
        return label.Held(owning=of.owning) if ClaimState.RELEASING in states else of

    monkeypatch.setattr(label, "held", of_nobody)
    _takes_no_time(monkeypatch)


def _forgets_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA 641: the old claim's end removes the label under the new one, which waits."""
    monkeypatch.setattr(label, "_KEEPS", label._NEEDS)
    _takes_no_time(monkeypatch)


def _takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The label goes at once, as upstream's."""
    monkeypatch.setattr(label, "_lingering", lambda domains, _of, patch, _at: (domains, patch))


def _sees_prepared_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA: entries in progress are no owners."""
    others = exclusion._others
    monkeypatch.setattr(
        exclusion, "_others", lambda *of: [e for e in others(*of) if e.state is ClaimState.PREPARED]
    )


def _removes_any_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has set it."""

    def wanted(now: Label, of: label.Held) -> LabelPatch | None:
        if now.value is None or now.value in of.kept:
            return LabelPatch(LabelChange.ADD, of.needed) if now.value is None and of.needed else None
        return LabelPatch(LabelChange.REMOVE, DomainUid(now.value))

    monkeypatch.setattr(label, "patch_wanted", wanted)


def _removes_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its start, although a claim that it knows had a channel then."""
    judged = label._judged

    def wrongly(now: Label, of: label.Held) -> Label:
        after = judged(now, of)
        return after if now.initial is None else replace(after, removable=(*after.removable, now.initial))

    monkeypatch.setattr(label, "_judged", wrongly)


def _overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch without `test` (NVIDIA: a PUT of the whole Node)."""
    ask = ApiClient.ask

    async def untested(self: ApiClient, call: Call) -> bytes:
        if isinstance(call.body, bytes) and b'"test"' in call.body and b'"add"' in call.body:
            _, _, rest = call.body.partition(b"},")
            call = replace(call, body=b"[" + rest)
        return await ask(self, call)

    monkeypatch.setattr(ApiClient, "ask", untested)


def _waits_for_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel is ready when its domain's daemon has a claim, whatever the API server says."""
    monkeypatch.setattr(DomainView, "is_ready_by_clique", lambda *_: True)


def _keeps_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a claim stay when it is released."""
    monkeypatch.setattr(ClaimFiles, "remove", lambda *_: None)


def _answers_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA: the deadline of a call is kubelet's own."""
    monkeypatch.setattr(limits, "CLAIM_ANSWER_S", 44.9)


def _spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that has handed over has something due, and does nothing about it."""

    def deadline(state: NodeState) -> float:
        return min(label.deadline(state.domains), reads.deadline(state.domains))

    monkeypatch.setattr(domains_step, "deadline", deadline)


Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("plant", "script", "check"),
    [
        (_holds_no_label, f"{COMES}+110", domain_check.LIVE),
        (_removes_with_each, BOTH_CHANNELS, domain_check.LIVE),
        (_forgets_who_waits, SUCCESSION, domain_check.FOLLOWER),
        (_sees_prepared_only, IN_PROGRESS, "two owners"),
        (_removes_any_label, STRANGER, domain_check.FOREIGN),
        (_removes_what_it_found, FOUND_BY_A_SUCCESSOR, domain_check.FOREIGN),
        (_overwrites, RACE, "a label was overwritten"),
        (_waits_for_no_daemon, NOT_READY, "prepared before its domain was ready"),
        (_keeps_files, STORY, "something of a claim is left"),
        (_answers_late, STOPPED, "a call was answered late"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Plant, script: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    failure = play(parse_script(script), DOMAINS | TWO_CHANNELS).failure
    assert failure is not None
    assert failure.check == check, failure


def test_a_daemon_that_spins_after_its_hand_over_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _spins(monkeypatch)
    monkeypatch.setattr("tests.histories.play.ROUNDS_MAX", 3000)
    seed, script = FOUND_WITH_DOMAINS["a daemon hands over while a claim waits"]
    failure = play(script, seed).failure
    assert failure is not None
    assert failure.check == "no time passes"


@pytest.mark.parametrize(
    "script",
    [STORY, BOTH_CHANNELS, SUCCESSION, ANOTHER, DAEMON_ANEW, IN_PROGRESS, NOT_READY, STOPPED, STRANGER, RACE],
)
def test_what_finds_planted_bugs_passes_without_them(script: str) -> None:
    passes(play(parse_script(script), QUICK | TWO_CHANNELS | DOMAINS))


# --- the tables -------------------------------------------------------------------------------------------


def test_every_kind_of_compute_domains_is_drawn_on_such_a_node_and_nowhere_else() -> None:
    of_domains = {kind.name for kind in DOMAIN_KINDS}
    assert of_domains | OF_ANY_DRIVER | set(BESIDE) == DRAWN_WITH_DOMAINS.keys()
    assert set(BESIDE) <= DRAWN.keys()
    assert OF_ANY_DRIVER <= DRAWN_WITH_CLAIMS.keys() <= KINDS.keys()
    assert of_domains.isdisjoint({*DRAWN, *DRAWN_WITH_CLAIMS})
