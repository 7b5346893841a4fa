"""Histories of a node with claims: what must hold does, planted bugs are found, and what the checks see really
happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpuactors.acts.files import ClaimFiles
from gpuactors.core.dra import exclusion, progress
from gpuactors.core.dra.entries import ClaimedGpu
from gpuactors.core.model import PciAddress
from gpuactors.core.state import NodeState
from gpuactors.simulation.histories.claim_events import BESIDE, CLAIM_KINDS
from gpuactors.simulation.histories.claims import CLAIMS
from gpuactors.simulation.histories.draw import drawn
from gpuactors.simulation.histories.events import DRAWN, DRAWN_WITH_CLAIMS, KINDS, OF_CLAIMS
from gpuactors.simulation.histories.play import Played, play, play_chosen
from gpuactors.simulation.histories.script import Step, parse_script
from gpuactors.simulation.histories.world import World
from gpuactors.simulation.kubelet.values import Phase

HOST, PREBOUND = 3, 0
"""A place with a card on its host's driver, and one with a pre-bound card."""

STORY = f"a pod with a claim comes@{HOST}+30; a pod with a claim ends+30"
SUCCESSION = (
    f"a pod with a claim comes@{HOST}+30; "
    "a pod with a claim is force-deleted, has a successor and dies late+1; the uevent socket overflows+30"
)


def passes(played: Played) -> None:
    assert played.failure is None, played.failure


@pytest.mark.parametrize("seed", range(6))
def test_a_drawn_history_of_a_node_with_claims(seed: int) -> None:
    passes(play_chosen(drawn(random.Random(seed)), seed | CLAIMS))


def test_a_history_of_a_node_with_claims_is_the_same_each_time() -> None:
    first, again = (play_chosen(drawn(random.Random(3)), 3 | CLAIMS) for _ in range(2))
    assert (first.digest, first.script) == (again.digest, again.script)


def test_a_claim_binds_its_card_and_gives_it_back() -> None:
    seen: list[tuple[Phase | None, str | None, str | None, int]] = []

    def look(world: World, _step: Step | None) -> None:
        assert world.claims is not None
        pod = world.kubelet.view.pods.get("c-1")
        card, audio = world.driver(HOST), world.driver(HOST, 1)
        seen.append((pod.phase if pod else None, card, audio, len(world.claims.left_over())))

    passes(play(parse_script(STORY), CLAIMS, on_step=look))
    before = (None, "nvidia", "snd_hda_intel", 0)
    assert seen == [before, (Phase.RUNNING, "vfio-pci", "vfio-pci", 3), before, before]


def test_a_successor_waits_for_the_process_of_the_pod_before() -> None:
    phases: list[Phase | None] = []

    def look(world: World, _step: Step | None) -> None:
        pod = world.kubelet.view.pods.get("c-2")
        phases.append(pod.phase if pod else None)

    passes(play(parse_script(SUCCESSION), CLAIMS, on_step=look))
    assert phases[2] is Phase.STARTING
    assert Phase.RUNNING in phases


# --- planted bugs -----------------------------------------------------------------------------------------


def _no_other_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim looks at no other one's devices (NVIDIA: by name only)."""
    monkeypatch.setattr(exclusion, "_by_another_claim", lambda *_: "")


def _rebinds_prebound(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA 1099: a pre-bound card goes to the host's driver when its pod goes."""
    claimed_gpu = progress._claimed_gpu

    def of_the_host(state: NodeState, address: PciAddress) -> ClaimedGpu:
        gpu = claimed_gpu(state, address)
        functions = tuple(replace(f, driver="nvidia", vfio=False) for f in gpu.functions)
        return replace(gpu, stays="", functions=functions)

    monkeypatch.setattr(progress, "_claimed_gpu", of_the_host)


def _never_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card stays where the claim has put it."""
    monkeypatch.setattr(progress, "_is_returned", lambda _gpu: False)


def _keeps_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a claim stay when it is released."""
    monkeypatch.setattr(ClaimFiles, "remove", lambda *_: None)


Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("plant", "script", "check"),
    [
        (_no_other_claim, SUCCESSION, "two owners"),
        (_rebinds_prebound, f"a pod with a claim comes@{PREBOUND}+30", "a pre-bound card was unbound"),
        (_never_returns, STORY, "something of a claim is left"),
        (_keeps_files, STORY, "something of a claim is left"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Plant, script: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    failure = play(parse_script(script), CLAIMS).failure
    assert failure is not None
    assert failure.check == check, failure


# --- the tables -------------------------------------------------------------------------------------------


def test_every_kind_of_claims_is_drawn_on_a_node_with_claims_and_nowhere_else() -> None:
    assert {kind.name for kind in CLAIM_KINDS} <= DRAWN_WITH_CLAIMS.keys()
    assert set(BESIDE) <= KINDS.keys()
    assert OF_CLAIMS.isdisjoint(DRAWN)
