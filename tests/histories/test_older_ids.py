"""The IDs of older plugins, which are group numbers: which card each means after a reboot, and that kubelet gives none
to two pods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import pytest

from gpuactors.core.deviceplugin import calls
from gpuactors.core.events.deviceplugin import PreferenceRequest
from gpuactors.core.ledger import identity
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import DeviceId, DeviceKey, Resolved
from gpuactors.core.values.owner import Named
from tests.histories.answers import UNREADABLE
from tests.histories.play import play
from tests.histories.script import Script, Step, parse_script
from tests.histories.truth import HEALTHY, NOT_OFFERED, expected, given_by_us
from tests.histories.world import MODEL, World

SEED: Final = 16

OLDER: Final = "an older plugin has given a card away"
TWO: Final = parse_script(f"a daemon crashes; {OLDER}@2; {OLDER}@1+3")

FIRST, BEFORE, AFTER = "0000:01:00.0", "0000:03:00.0", "0000:02:00.0"
"""The card that has group 3 after two reboots, the one that has it at the beginning, and that after one reboot."""

GIVEN_AGAIN: Final = parse_script(
    f"a daemon crashes; {OLDER}@2; the node reboots+0.001; pods come in a burst+3"
)
"""Kubelet's file names `3` for a pod that has ended, so the daemon lists the card of group 3 by it, and kubelet gives
it to one of the pods."""

KEPT: Final = (*GIVEN_AGAIN, *parse_script("a pod ends+3; the node reboots+3"))
"""That pod keeps `3` over a reboot; the pod of the first card has ended."""

TAKEN: Final = parse_script(
    f"a daemon crashes; {OLDER}@2; a daemon starts+3; pods come in a burst+3; the node reboots+3; a pod comes+3"
)
"""The last pod is offered `3`, by which kubelet's file names the card of another pod, and a card that is free."""

OF_ANOTHER_PLUGIN: Final = parse_script(
    f"a daemon crashes; {OLDER}@2; the node reboots+0.001; a second plugin takes our resource+0.001; "
    f"pods come in a burst+0.3; a daemon crashes; {OLDER}@1"
)
"""The second plugin gives `3` away, and nothing has the group open. Only the last step cannot happen."""


def lists_are_as_expected(script: Script, look: Callable[[World], None]) -> None:
    """The history passes; `look` is called once, after its last step."""
    looked: list[Step] = []

    def on_step(world: World, step: Step | None) -> None:
        if step == script[-1]:
            looked.append(step)
            look(world)

    played = play(script, SEED, on_step=on_step)
    assert played.failure is None, played.failure
    assert looked == [script[-1]]


def test_an_older_id_means_the_other_card_of_the_group_when_the_one_that_was_taken_for_it_is_gone() -> None:
    """The first card had been another pod's, by kubelet's file, so the second one was taken for `1`. That was plugged
    in later, and is gone now."""
    script = parse_script(
        "a pod for two cards comes+0.001; the daemon is told to stop; a pod is force-deleted+0.001; "
        f"{OLDER}; plug a second card into the group; a daemon starts+0.001; unplug the second card"
    )
    played = play(script, 711202759)
    assert played.failure is None, played.failure
    assert played.script == script


def test_an_older_plugin_gives_two_cards_away() -> None:
    played = play(TWO, SEED)
    assert played.failure is None, played.failure
    assert played.script == TWO


def test_an_older_plugin_gives_no_card_away_that_a_pod_has_by_its_group() -> None:
    played = play(OF_ANOTHER_PLUGIN, SEED)
    assert played.failure is None, played.failure
    assert played.script == OF_ANOTHER_PLUGIN[:-1]


def test_an_id_that_is_given_again_after_a_reboot_means_the_card_of_that_group() -> None:
    def look(world: World) -> None:
        assert {g.device: g.card for g in given_by_us(world)} == {"3": AFTER, FIRST: FIRST, BEFORE: BEFORE}
        wanted = expected(world)[world.resource(MODEL)]
        assert wanted["3"] == wanted[BEFORE] == HEALTHY
        assert wanted.get(AFTER, NOT_OFFERED) == NOT_OFFERED

    lists_are_as_expected(GIVEN_AGAIN, look)


def test_an_id_that_a_pod_keeps_over_a_reboot_means_the_card_of_that_group() -> None:
    def look(world: World) -> None:
        ((pod, card),) = ((g.pod, g.card) for g in given_by_us(world) if g.device == "3")
        assert card == FIRST
        resource = world.resource(MODEL)
        assert "/dev/vfio/3" in world.kubelet.view.holdings[pod, resource].nodes
        wanted = expected(world)[resource]
        assert wanted["3"] == wanted[AFTER] == HEALTHY

    lists_are_as_expected(KEPT, look)


@pytest.mark.parametrize("script", [GIVEN_AGAIN, KEPT], ids=["given again", "kept"])
def test_a_daemon_that_takes_it_for_the_card_before_the_reboot_is_noticed(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(
        _state: NodeState, names: Iterable[Named], _targets: Mapping[Named, Resolved]
    ) -> dict[Named, Resolved]:
        return {name: Resolved(DeviceKey(BEFORE)) for name in names}

    monkeypatch.setattr(identity, "_resolved_older", stale)
    failure = play(script, SEED).failure
    assert failure is not None
    assert failure.check == UNREADABLE


@pytest.mark.parametrize("event", ["another plugin gives a card away@12", "another plugin has odd IDs@12"])
def test_another_plugin_gives_no_id_of_its_resource_away_twice(event: str) -> None:
    once = parse_script(event)
    played = play((*once, *once), SEED)
    assert played.failure is None, played.failure
    assert played.script == once


def test_a_card_that_a_pod_has_is_not_preferred_by_its_number_to_a_free_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = play(TAKEN, SEED)
    assert passed.failure is None, passed.failure
    assert passed.script == TAKEN

    def numbers_first(request: PreferenceRequest, *_: object) -> tuple[DeviceId, ...]:
        return tuple(sorted(request.available, key=len)[: request.size])

    monkeypatch.setattr(calls, "prefer", numbers_first)
    failure = play(TAKEN, SEED).failure
    assert failure is not None
    assert failure.check == "a group in use was preferred to a free one"
