"""Histories of a node with claims: what must hold does, planted bugs are found, and what the checks see really
happens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gpuactors.acts.driver import SysfsBinder
from gpuactors.acts.files import ClaimFiles
from gpuactors.core.claims import machine as claims
from gpuactors.core.claims import slice_writes
from gpuactors.core.gpus import claiming, exclusion, reservation, returns
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimedGpu
from gpuactors.core.values.model import DeviceKey, PciAddress
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.claim_events import BESIDE, CLAIM_KINDS
from tests.histories.claims import CLAIMS
from tests.histories.draw import drawn
from tests.histories.events import DRAWN, DRAWN_WITH_CLAIMS, KINDS, OF_CLAIMS
from tests.histories.found import FOUND_WITH_CLAIMS
from tests.histories.play import Played, play, play_chosen
from tests.histories.script import Step, parse_script
from tests.histories.world import World

HOST, PREBOUND = 3, 0
"""A place with a card on its host's driver, and one with a pre-bound card."""

QUICK = 16
"""The bit of a seed by which a history is neither watched for long nor replayed from its journal, if it has no higher
ones."""

STORY = f"a pod with a claim comes@{HOST}+30; a pod with a claim ends+30"
SUCCESSION = (
    f"a pod with a claim comes@{HOST}+30; "
    "a pod with a claim is force-deleted, has a successor and dies late+1; the uevent socket overflows+30"
)
RACE = f"a pod and a claim race for a card@{PREBOUND}+11"
DELETION = f"a pod with a claim comes@{HOST}+11; a claim is deleted at the API server+70; a stream is lost+70"


def passes(played: Played) -> None:
    assert played.failure is None, played.failure


@pytest.mark.parametrize("seed", range(2))
def test_a_drawn_history_of_a_node_with_claims(seed: int) -> None:
    passes(play_chosen(drawn(random.Random(seed)), seed | CLAIMS))


def test_a_history_of_a_node_with_claims_is_the_same_each_time() -> None:
    first, again = (play_chosen(drawn(random.Random(6)), 19 | CLAIMS) for _ in range(2))
    assert (first.digest, first.script) == (again.digest, again.script)


def test_a_claim_binds_its_card_and_gives_it_back() -> None:
    seen: list[tuple[Phase | None, str | None, str | None, int]] = []

    def look(world: World, _step: Step | None) -> None:
        assert world.claims is not None
        pod = world.kubelet.view.pods.get("c-1")
        card, audio = world.driver(HOST), world.driver(HOST, 1)
        seen.append((pod.phase if pod else None, card, audio, len(world.claims.left_over())))

    passes(play(parse_script(STORY), CLAIMS | QUICK, on_step=look))
    before = (None, "nvidia", "snd_hda_intel", 0)
    assert seen == [before, (Phase.RUNNING, "vfio-pci", "vfio-pci", 3), before, before]


def test_a_successor_waits_for_the_process_of_the_pod_before() -> None:
    phases: list[Phase | None] = []

    def look(world: World, _step: Step | None) -> None:
        pod = world.kubelet.view.pods.get("c-2")
        phases.append(pod.phase if pod else None)

    passes(play(parse_script(SUCCESSION), CLAIMS | QUICK, on_step=look))
    assert phases[2] is Phase.STARTING
    assert Phase.RUNNING in phases


@pytest.mark.parametrize("name", sorted(FOUND_WITH_CLAIMS))
def test_a_found_history_of_a_node_with_claims_stays_found(name: str) -> None:
    seed, script = FOUND_WITH_CLAIMS[name]
    played = play(script, seed)
    passes(played)
    assert played.script == script, "a step of it could not happen: it tries something else now"


# --- planted bugs -----------------------------------------------------------------------------------------


def _no_other_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim looks at no other one's devices (NVIDIA: by name only)."""
    monkeypatch.setattr(exclusion, "_by_another_claim", lambda *_, **__: None)


def _rebinds_prebound(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA 1099: a pre-bound card goes to the host's driver when its pod goes."""
    claimed_gpu = reservation.claimed_gpu

    def of_the_host(state: NodeState, device: DeviceKey) -> ClaimedGpu:
        gpu = claimed_gpu(state, device)
        functions = tuple(replace(f, driver="nvidia", vfio=False) for f in gpu.functions)
        return replace(gpu, keep_on_vfio="", functions=functions)

    monkeypatch.setattr(claiming, "claimed_gpu", of_the_host)


def _never_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card stays where the claim has put it."""
    monkeypatch.setattr(returns, "is_to_be_returned", lambda *_: False)


def _keeps_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a claim stay when it is released."""
    monkeypatch.setattr(ClaimFiles, "remove", lambda *_: None)


def _no_device_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim looks at no allocation of the device plugin: neither at kubelet's ledger nor at who has it open."""
    monkeypatch.setattr(exclusion, "_by_holding", lambda *_, **__: None)


def _always_writes_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server has is never what is wanted (a taint that it drops, written again for ever)."""
    monkeypatch.setattr(slice_writes, "_is", lambda *_: False)


def _collects_live_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA: a claim that the API server does not have is rolled back, whatever kubelet lists and whoever has its card
    open."""

    async def look_at_nobody(*_: object, **__: object) -> frozenset[PciAddress]:
        return frozenset()

    monkeypatch.setattr(claims, "_listed", lambda *_: set())
    monkeypatch.setattr(SysfsBinder, "_refuse_users", look_at_nobody)


Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("plant", "script", "check"),
    [
        (_no_other_claim, SUCCESSION, "two owners"),
        (_rebinds_prebound, f"a pod with a claim comes@{PREBOUND}+30", "a pre-bound card was unbound"),
        (_never_returns, STORY, "something of a claim is left"),
        (_keeps_files, STORY, "something of a claim is left"),
        (_no_device_plugin, RACE, "two owners"),
        (_always_writes_slices, STORY, "the slices do not rest"),
        (_collects_live_claims, DELETION, "a live claim lost its card"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Plant, script: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    failure = play(parse_script(script), CLAIMS).failure
    assert failure is not None
    assert failure.check == check, failure


@pytest.mark.parametrize("script", [STORY, SUCCESSION, RACE, DELETION])
def test_what_finds_planted_bugs_passes_without_them(script: str) -> None:
    passes(play(parse_script(script), QUICK | CLAIMS))


# --- the tables -------------------------------------------------------------------------------------------


def test_every_kind_of_claims_is_drawn_on_a_node_with_claims_and_nowhere_else() -> None:
    assert {kind.name for kind in CLAIM_KINDS} <= DRAWN_WITH_CLAIMS.keys()
    assert set(BESIDE) <= KINDS.keys()
    assert OF_CLAIMS.isdisjoint(DRAWN)
