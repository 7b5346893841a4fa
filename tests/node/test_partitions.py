"""Partitions of an NVLink fabric that the daemon activates, on a real node: for claims and for pods by Allocate.

The fabric manager and the operator's command are a stand-in in the daemon's container. What it activates stays active
when the daemon is killed: 12 times, or `TEST_PARTITION_ROUNDS=4` times as often, at 7 s each.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from itertools import product
from typing import Any, Final, Literal, final

import pytest

from tests.node import daemonset, pods
from tests.node.books import key_of
from tests.node.claims import ClaimNode, from_template, kill, request, serving_claims
from tests.node.cluster import eventually
from tests.node.fake_host import H100_RESOURCE, FakeHost, address
from tests.node.node import Node
from tests.node.test_sets import DIRECTORY
from tests.support.fabric_manager import FabricManagerStandIn, Moment
from tests.support.patience import patient

H: Final = H100_RESOURCE

SLOTS: Final = (0x21, 0x22, 0x23, 0x24)
A, B, C, D = (address(slot) for slot in SLOTS)
PARTITIONS: Final = {"1": [A, C], "2": [B, D], "3": [A, B, C, D]}
"""No pair is neighbours by address."""

HOME: Final = DIRECTORY / "fabric"
INTENTS: Final = DIRECTORY / "partitions.json"
SETTINGS: Final = {
    "GPUACTORS_PARTITION_COMMAND": str(HOME / "command"),
    "GPUACTORS_PARTITION_ACTIVATION": "on",
    "GPUACTORS_SETS": "require",
}

Way = Literal["claim", "allocate"]
WAYS: Final[tuple[Way, ...]] = ("claim", "allocate")

MOMENTS: Final[tuple[tuple[str, Moment], ...]] = (
    ("query", "before"),  # before the intent
    ("activate", "before"),  # after the intent
    ("activate", "after"),  # before the answer
    ("", "before"),  # after the answer
    ("deactivate", "before"),
    ("deactivate", "after"),
)

ROUNDS: Final = int(os.environ.get("TEST_PARTITION_ROUNDS", "1"))
"""So often is the daemon killed in each moment."""

LOOK_S: Final = 0.02

RUNS_S: Final = patient(120.0)
"""Kubelet may ask again after 60 to 90 s."""

SAID_S: Final = patient(60.0)
"""The daemon waits in a prepare for 35 s."""


@final
class Board:
    """The four GPUs and their fabric manager."""

    def __init__(self, claims: ClaimNode, manager: FabricManagerStandIn) -> None:
        self.claims = claims
        self.node = claims.node
        self.manager = manager

    def create(self, pod: str, way: Way) -> None:
        """A pod for two GPUs of one partition."""
        if way == "claim":
            self.claims.create(pod, from_template("pair"))
        else:
            pods.create(self.node.api, pods.tenant(pod, {H: 2}))

    def devices_of(self, pod: str, way: Way) -> frozenset[str]:
        """What a pod has been given."""
        if way == "claim":
            return frozenset(map(key_of, self.claims.devices_of(pod)))
        return self.node.devices_of(pod)

    def runs(self, pod: str, way: Way) -> str:
        """Waits until a pod has the GPUs of one partition open, and that is active. Its number."""
        self.claims.comes_to(pod, "Running", RUNS_S)
        (number,) = (n for n, gpus in PARTITIONS.items() if self.devices_of(pod, way) == {*gpus})
        groups = {self.node.host.group_of(gpu) for gpu in PARTITIONS[number]}
        eventually(lambda: groups <= self.node.host.owners().keys(), f"{pod} to have its GPUs open")
        assert number in self.manager.active, self.manager.acts
        return number

    def tries_again(self, pod: str, way: Way) -> str:
        """Has kubelet try again until a pod runs, as in `runs`: a query may still show what was."""

        def look() -> bool:
            if pods.phase(pods.get(self.node.api, pod)) == "Running":
                return True
            self.claims.nudge(pod)
            return False

        eventually(look, f"{pod} to run", RUNS_S, 1.0)
        return self.runs(pod, way)

    def said_of(self, pod: str, words: str) -> bool:
        """Whether an event of a pod has these words."""
        events = [str(event.get("message", "")) for event in self.claims.events_of(pod)]
        assert any(words in message for message in events), events
        return True

    def changes(self, state: str) -> list[dict[str, Any]]:
        """The lines of the daemon's log about partitions that came to a state."""
        return [line for line in self.claims.logged("partition.changed") if line["state"] == state]

    def is_clean(self) -> bool:
        """No partition is active, and no intent is left."""
        assert not self.manager.active, self.manager.acts
        assert not INTENTS.exists() or '"id"' not in INTENTS.read_text(), INTENTS.read_text()
        return True

    def ends(self, *names: str) -> None:
        """Deletes pods; waits until nothing of their partitions is left."""
        for name in names:
            pods.stop(self.node.api, name)
        eventually(self.is_clean, "the end of the partitions", SAID_S)

    def kill_daemon(self) -> None:
        """SIGKILL; another pod of the DaemonSet comes at once, where a container would be started again ever later."""
        self.node.excuse_no_plugin()
        before = self.node.daemon()
        kill(before)
        self.node.api.delete(f"/api/v1/namespaces/{daemonset.NAMESPACE}/pods/{before.name}", 1)
        eventually(lambda: self.node.daemon().uid != before.uid, "another pod of the DaemonSet")
        self.claims.registered()


@pytest.fixture
def board(node: Node) -> Iterator[Board]:
    manager = FabricManagerStandIn(HOME, PARTITIONS, "/opt/gpuactors/bin/python")
    try:
        with serving_claims(node, SETTINGS) as claims:
            for slot in SLOTS:
                node.host.plug(slot)
            node.settled({H: 4})
            claims.offered(A, B, C, D)
            claims.template("pair", request(count=2), match="gpu.nvidia.com/partition2")
            yield Board(claims, manager)
    finally:
        manager.let_go()
        shutil.rmtree(HOME)
        INTENTS.unlink(missing_ok=True)


@contextmanager
def never_used_without(manager: FabricManagerStandIn, host: FakeHost) -> Iterator[None]:
    """While the context is open no pod has the GPUs of a partition open that is not active."""
    over, seen = threading.Event(), list[str]()

    def used() -> frozenset[str]:
        """The partitions whose GPUs, and no others, one pod has open."""
        opened: dict[str, set[int]] = {}
        for group, owners in host.owners().items():
            for owner in owners:
                opened.setdefault(owner, set()).add(group)
        groups = {number: {host.group_of(gpu) for gpu in gpus} for number, gpus in PARTITIONS.items()}
        return frozenset(number for number, mine in groups.items() if mine in opened.values())

    def watch() -> int:
        looks = 0
        while not over.wait(LOOK_S):
            before, active, after = used(), manager.active, used()
            for one in (before & after) - active:
                now = datetime.now().strftime("%H:%M:%S.%f")
                seen.append(
                    f"{now}: partition {one} is in use and not active; {manager.acts[-1:]}, {host.owners()}"
                )
            looks += bool(before)
        return looks

    with ThreadPoolExecutor(1) as thread:
        looks = thread.submit(watch)
        try:
            yield
        finally:
            over.set()
    assert looks.result(), "nothing was ever used"
    assert not seen, seen


# --- scenarios --------------------------------------------------------------------------------------------------------


def test_a_partition_is_active_while_its_pod_has_it(board: Board) -> None:
    """Of a claim by `matchAttribute`, and of a pod by Allocate, at the same time."""
    with never_used_without(board.manager, board.node.host):
        board.create("vm-1", "claim")
        first = board.runs("vm-1", "claim")
        board.create("vm-2", "allocate")
        second = board.runs("vm-2", "allocate")
        assert board.manager.active == {"1", "2"}
        board.node.check_open("vm-2")
        pods.stop(board.node.api, "vm-1")
        eventually(lambda: board.manager.active == {second}, "the end of the claim's partition")
        board.ends("vm-2")
    acts = [f"activate {first}", f"activate {second}", f"deactivate {first}", f"deactivate {second}"]
    assert board.manager.acts == acts
    board.claims.settled({H: 4})


@pytest.mark.timeout(patient(60.0 + 120.0 * ROUNDS))
def test_the_daemon_is_killed_in_each_moment_of_a_partition(board: Board) -> None:
    """SIGKILL in each moment, for a claim and for a pod by Allocate. Of two pods that wait one ends meanwhile. Nothing
    is used without its partition, and nothing is left."""
    moments = list(product(range(ROUNDS), WAYS, MOMENTS))
    with never_used_without(board.manager, board.node.host):
        for number, (turn, way, (word, moment)) in enumerate(moments):
            board.node.said(f"{number}: {way}, {word or 'answered'}, {moment}")
            lives = (number + turn) % 2 == 0
            _killed(board, f"vm-{number}", way, word, moment, lives=lives)
        pods.start(board.node.api, "after", {H: 4})
        assert board.manager.active == {"3"}, "something is in the way of another one"
        board.ends("after")
    board.claims.settled({H: 4})


def _killed(board: Board, pod: str, way: Way, word: str, moment: Moment, *, lives: bool) -> None:
    """One SIGKILL; afterwards the pod runs unless it is deleted, and nothing is left of it."""
    manager, api = board.manager, board.node.api
    starts = word in ("query", "activate")
    if starts:
        manager.hold(word, moment)
    board.create(pod, way)
    if not starts:
        board.runs(pod, way)
    elif way == "allocate":  # kubelet refuses a pod for good whose Allocate fails
        eventually(lambda: board.node.devices_of(pod), f"Allocate of {pod}")
    if word == "deactivate":
        manager.hold(word, moment)
        pods.delete(api, pod)
    if word:
        eventually(lambda: manager.is_held(word, moment), f"the moment: {word}, {moment}")
    if starts and not lives:
        pods.delete(api, pod)
    board.kill_daemon()
    manager.let_go()
    board.claims.nudge(pod)
    if starts and lives:
        board.runs(pod, way)
    board.ends(pod)


def test_a_partition_of_another_program_is_refused_in_the_pods_events(board: Board) -> None:
    """And left as it is. When that is inactive the pod runs: of a claim first, then one by Allocate."""
    manager, wanted = (
        board.manager,
        "is active, and not by gpuactors. Deactivate it by the fabric manager's tool",
    )
    manager.restart(active=["3"])
    board.create("vm-1", "claim")
    board.claims.says("vm-1", wanted)
    assert (manager.active, manager.acts) == ({"3"}, [])
    manager.restart()
    first = board.tries_again("vm-1", "claim")
    (other,) = {"1", "2"} - {first}
    manager.restart(active=["1", "2"])
    board.create("vm-2", "allocate")
    eventually(lambda: board.said_of("vm-2", wanted), "a refusal of vm-2")
    assert manager.acts == [f"activate {first}"]
    manager.restart(active=[first])
    assert board.tries_again("vm-2", "allocate") == other
    board.ends("vm-1", "vm-2")
    board.claims.settled({H: 4})


@pytest.mark.timeout(patient(180.0))
def test_a_command_that_fails_is_in_the_pods_events(board: Board) -> None:
    board.manager.go_away()
    board.create("vm-1", "claim")
    said = "Failed to connect to Fabric Manager instance."
    eventually(lambda: board.said_of("vm-1", said), "a refusal", SAID_S)
    assert not board.manager.acts
    board.manager.come_back()
    board.tries_again("vm-1", "claim")
    board.ends("vm-1")


def test_the_fabric_manager_is_restarted_under_a_virtual_machine(board: Board) -> None:
    """It is told, and nothing is activated under it; what is lost is not deactivated. The next pod has its own."""
    board.create("vm-1", "allocate")
    lost = board.runs("vm-1", "allocate")
    board.manager.restart()
    board.create("vm-2", "claim")  # whose queries show it
    board.claims.comes_to("vm-2", "Running", RUNS_S)
    lines = eventually(lambda: board.claims.logged("partition.lost"), "a line of the log")
    assert [line["partition"] for line in lines] == [lost]
    pods.stop(board.node.api, "vm-1")
    board.ends("vm-2")
    assert f"deactivate {lost}" not in board.manager.acts
    board.create("vm-3", "allocate")
    board.runs("vm-3", "allocate")
    board.ends("vm-3")
    board.claims.settled({H: 4})
