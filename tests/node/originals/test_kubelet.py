"""The fake kubelets against the original: the same script of calls, step by step.

Run inside the node's namespaces: `$K8S_DIR/in.sh .venv/bin/python -m pytest tests/node/originals`, after its `env.sh`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from tests.node.originals.differences import KNOWN_DIFFERENCES, NOT_PLAYED
from tests.node.originals.dra_script import DRA_GROUPS, DraPlay
from tests.node.originals.kubelet_script import GROUPS
from tests.node.originals.kubelets import Kubelet, Original, Shipped, original, shipped, stand_in
from tests.node.originals.node import Api, Machine, inside
from tests.node.originals.play import Observations, Play

pytestmark = pytest.mark.skipif(not inside(), reason="needs a node's namespaces (K8S_INSIDE, K8S_DIR)")

FAKES: Final[Mapping[str, Callable[[Path], AbstractContextManager[Kubelet]]]] = {
    "shipped": shipped,
    "grpcio": stand_in,
}

ALL: Final = (*GROUPS, *DRA_GROUPS)


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    """The node's API server. Kubelet is left as it is started by default."""
    yield Api(Path(os.environ["KUBECONFIG"]))
    machine = Machine()
    machine.down("kubelet")
    machine.up("kubelet")


def play_original(api: Api, group: str) -> Observations:
    """The group's observations on the node's kubelet."""
    with original(Machine(), api) as kubelet, ExitStack() as stack:
        return played(group, kubelet, stack)


def play_fake(fake: str, group: str) -> Observations:
    """The group's observations on a fake, in a directory whose name is short enough for sockets."""
    with (
        TemporaryDirectory(prefix="k-") as directory,
        FAKES[fake](Path(directory)) as kubelet,
        ExitStack() as stack,
    ):
        return played(group, kubelet, stack)


def played(group: str, kubelet: Kubelet, stack: ExitStack) -> Observations:
    """Plays a group."""
    play = Play(kubelet, stack)
    if group in GROUPS:
        GROUPS[group](play)
    else:
        assert isinstance(kubelet, Original | Shipped), "the stand-in has no DRA manager"
        DRA_GROUPS[group](DraPlay(play, kubelet, stack))
    return play.observations


def differences(found: Observations, wanted: Observations) -> dict[tuple[str, str], tuple[object, object]]:
    """(step, key) → the fake's value and the original's."""
    return {
        (step, key): (found.get(step, {}).get(key), wanted.get(step, {}).get(key))
        for step in {**found, **wanted}
        for key in {**found.get(step, {}), **wanted.get(step, {})}
        if found.get(step, {}).get(key) != wanted.get(step, {}).get(key)
    }


@pytest.mark.parametrize("group", ALL)
def test_the_fakes_do_what_the_original_does(api: Api, group: str) -> None:
    fakes = [fake for fake in FAKES if (fake, group) not in NOT_PLAYED]
    with ThreadPoolExecutor(len(FAKES)) as threads:
        plays = {fake: threads.submit(play_fake, fake, group) for fake in fakes}
        wanted = play_original(api, group)
    for fake, played_fake in plays.items():
        found = differences(played_fake.result(), wanted)
        known = {(d.step, d.key) for d in KNOWN_DIFFERENCES if (d.fake, d.group) == (fake, group)}
        news = {at: values for at, values in found.items() if at not in known}
        assert not news, f"{fake} and the original differ (step, value: the fake's, the original's): {news}"
        assert not known - found.keys(), f"listed, and no longer different: {known - found.keys()}"


def test_every_difference_names_a_group_that_is_played() -> None:
    for difference in KNOWN_DIFFERENCES:
        assert difference.fake in FAKES
        assert difference.group in ALL
        assert (difference.fake, difference.group) not in NOT_PLAYED
    assert {group for _, group in NOT_PLAYED} <= set(ALL)
