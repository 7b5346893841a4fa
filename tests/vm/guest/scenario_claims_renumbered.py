"""Prepared claims whose cards are removed and rescanned: no CDI file gives a group number that another card has by now.

A container that restarts gets the CDI file as it is, without a call. Two cards are on vfio-pci by its ids, so that they
come back there, and their files with them. Two were bound for their claims: a rescan loses the override, and gives them
to the host's driver. They are swapped while the daemon looks on, while it is stopped, so that it sees it all at once,
and while none runs. One card is pulled out, and a new one gets its number.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from tests.support.claims import device_of, prepare
from tests.support.patience import patient
from tests.vm.guest.claims import GPU_DRIVER, MODULES, Cluster
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import KUBELET_DIR, SLACK_S, Node
from tests.vm.guest.pod import CHECKOUT
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, function_behind, functions_behind, rescan, rescan_behind
from tests.vm.machine import VFIO_USER, Machine, PciFunction, PciIds

H100: Final = PciIds("10de", "2330", "030200")
BOUND: Final = PciFunction("bound", GPU_DRIVER, "rp3", properties=("romfile=",))
"""Bound for its claim, as the other e1000e. It is the one that is pulled out."""

NEW: Final = PciFunction("new", VFIO_USER, "rp5", ids=H100)
"""It is plugged in when another one has been pulled out."""

MACHINE: Final = Machine(
    ports=("rp1", "rp2", "rp3", "rp4", "rp5"),
    functions=(
        PciFunction("by-ids", VFIO_USER, "rp1", ids=H100),
        PciFunction("by-ids-too", VFIO_USER, "rp2", ids=H100),
        BOUND,
        PciFunction("bound-too", GPU_DRIVER, "rp4", properties=("romfile=",)),
    ),
    spares=(NEW,),
    modules=MODULES,
    vfio_pci_parameters=("ids=10de:2330",),
    scenario_timeout_s=420.0,
)

RIGHT_WITHIN_S: Final = UNSETTLED_INSPECTIONS_S[0] + SLACK_S
"""From a rescan, or from the daemon's first scan, until no file gives another card's group."""

WRITTEN_WITHIN_S: Final = UNSETTLED_INSPECTIONS_S[1] + 2 * SLACK_S
"""From a rescan until the files are there again: reserved, on disk, bound, written."""

UNPLUG_TIMEOUT_S: Final = patient(15.0)
"""From QEMU's word to the kernel's: pciehp may wait for five seconds after the button was pressed."""

EXPLAIN_TIMEOUT_S: Final = patient(60.0)
WATCH_PERIOD_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class _Card:
    """A card and the claim that has it."""

    name: str
    port: str
    function: Function
    uid: str


@dataclass(slots=True)
class _Scene:
    guest: Guest
    cluster: Cluster
    daemon: DaemonProcess
    plugin: Mapping[str, Any]
    cards: list[_Card]

    def check_files_until_right(self, figure: str) -> None:
        """Soon no file gives a group that its claim's card does not have. Raises TimeoutError, with the last ones."""
        began = time.monotonic()
        wrong: dict[str, str] = {}

        def right() -> bool:
            wrong.clear()
            wrong.update(self.wrong_files())
            return not wrong

        try:
            eventually("only files with their own groups", right, timeout_s=RIGHT_WITHIN_S)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {wrong}") from None
        self.cluster.figure(figure, round((time.monotonic() - began) * 1000, 1))

    def wrong_files(self) -> dict[str, str]:
        named = self.cluster.named
        own = {card.uid: f"/dev/vfio/{card.function.group}" for card in self.cards}
        return {
            uid: f"{paths}, and the card has {own[uid]}"
            for uid, paths in named.items()
            if paths[0] != own[uid]
        }

    def wait_written(self, *cards: _Card) -> None:
        """By itself each claim gets its file again, with the card's group. Raises TimeoutError."""
        wanted = {card.uid for card in cards}
        eventually(
            f"files of {[card.name for card in cards]}",
            lambda: wanted <= self.cluster.named.keys() and not self.wrong_files(),
            timeout_s=WRITTEN_WITHIN_S,
        )
        for card in cards:
            self.cluster.check_cdi(card.uid, card.function)

    def wait_published(self, card: _Card) -> None:
        """The scheduler gives a card away only once the slices have it. Raises TimeoutError."""
        device = device_of(card.function.address)
        eventually(f"{device} in the slices", lambda: device in self.cluster.api.devices(), timeout_s=SLACK_S)

    def check_prepared_again(self, *cards: _Card) -> None:
        """Kubelet repeats the prepare: the answer is right, and so is the file."""
        for card in cards:
            self.cluster.prepared(self.plugin, card.name, card.uid)
            assert card.function.driver == "vfio-pci", card
            self.cluster.check_cdi(card.uid, card.function)

    def astray(self, card: _Card) -> list[str]:
        """The causes that the log has given for the claim's card being elsewhere."""
        return [str(line["cause"]) for line in self.daemon.said("claim.astray") if line["uid"] == card.uid]


def run(guest: Guest) -> None:
    """Two daemons, one after the other."""
    with ExitStack() as stack:
        stack.enter_context(Node.with_kubelet(guest))
        cluster = stack.enter_context(Cluster.running(guest, KUBELET_DIR))
        cards = _cards(guest.machine, cluster)
        with cluster.start("first") as daemon, cluster.plugin(daemon) as plugin:
            scene = _Scene(guest, cluster, daemon, plugin, cards)
            with guest.step("four claims are prepared, each with its own group"):
                scene.check_prepared_again(*cards)
            with _no_node_in_two_files(cluster):
                _swapped(scene)
                _swapped_at_once(scene)
                _number_of_a_pulled_card(scene)
            with guest.step("SIGTERM: 0; one card is pulled, the numbers of the others change"):
                assert daemon.terminate() == 0
                daemon.check_one_life()
                _swapped_while_none_runs(scene)
        with cluster.start("second") as daemon, cluster.plugin(daemon) as plugin:
            _after_the_start(replace(scene, daemon=daemon, plugin=plugin))
            assert daemon.terminate() == 0
            daemon.check_one_life()


def _cards(machine: Machine, cluster: Cluster) -> list[_Card]:
    """Waits until the drivers of the boot have taken them. Raises TimeoutError."""
    found = []
    for function in machine.functions:
        card = function_behind(machine, function.port)
        driver = GPU_DRIVER if function.model == GPU_DRIVER else "vfio-pci"
        _wait_driver(card, driver)
        found.append(_Card(function.id, function.port, card, cluster.api.claim(function.id, card.address)))
    return found


def _wait_driver(function: Function, driver: str) -> None:
    eventually(f"{function.address} on {driver}", lambda: function.driver == driver, timeout_s=SLACK_S)


def _swapped(scene: _Scene) -> None:
    by_ids, bound = scene.cards[:2], scene.cards[2:]
    with scene.guest.step("all four are removed and found in the other order: each number is another card's"):
        _renumber(scene.guest.machine, scene.cards)
        scene.check_files_until_right("swapped_to_right_files_ms")
    with scene.guest.step("those that vfio-pci takes by ids have their files again, the others have none"):
        scene.wait_written(*by_ids)
        assert scene.cluster.named.keys() == {card.uid for card in by_ids}
        assert [card.function.driver for card in bound] == [GPU_DRIVER] * 2, (
            "no driver changes without a call"
        )
    with scene.guest.step("log and explain say so of each"):
        assert all(scene.astray(card) for card in scene.cards), scene.daemon.said("claim.astray")
        explained = _explain(scene, bound[0])
        assert "Drifted" in explained, explained
        assert f"is on {GPU_DRIVER}, and no longer on a vfio driver" in explained, explained
    with scene.guest.step("kubelet repeats the prepare of each"):
        scene.check_prepared_again(*scene.cards)


def _swapped_at_once(scene: _Scene) -> None:
    before = {card.uid: len(scene.astray(card)) for card in scene.cards}
    with scene.guest.step(
        "the daemon is stopped meanwhile, and one rescan of all buses changes the numbers again"
    ):
        scene.daemon.process.send_signal(signal.SIGSTOP)
        _renumber(scene.guest.machine, scene.cards, at_once=True)
        assert scene.wrong_files().keys() == {card.uid for card in scene.cards}, scene.cluster.named
        scene.daemon.process.send_signal(signal.SIGCONT)
        scene.check_files_until_right("swapped_at_once_to_right_files_ms")
    with scene.guest.step("said again, written again, prepared again"):
        scene.wait_written(*scene.cards[:2])
        said = {card.name: scene.astray(card)[before[card.uid] :] for card in scene.cards}
        assert [causes[0] for causes in said.values()] == ["GroupChanged"] * 2 + ["NotBound"] * 2, said
        scene.check_prepared_again(*scene.cards)


def _number_of_a_pulled_card(scene: _Scene) -> None:
    guest, cluster, pulled = scene.guest, scene.cluster, scene.cards[2]
    with guest.step("a card is pulled out; a new one gets its number, and is claimed"):
        group = pulled.function.group
        _pull_out(guest, BOUND)
        guest.qmp.plug(NEW)
        function = function_behind(guest.machine, NEW.port)
        assert function.group == group, "the kernel has not given the number away again"
        new = _Card(NEW.id, NEW.port, function, cluster.api.claim(NEW.id, function.address))
        scene.cards.append(new)
        _wait_driver(function, "vfio-pci")
        scene.check_files_until_right("pulled_to_right_files_ms")
        scene.wait_published(new)
        scene.check_prepared_again(new)
    with guest.step("the claim of the pulled one has no file, and is refused"):
        reason = prepare(scene.plugin, pulled.name, pulled.uid).error
        assert f"{pulled.function.address} is gone from this node" in reason, reason
        assert pulled.uid not in cluster.named
        assert scene.astray(pulled)[-1] == "Gone"
    with guest.step("it is plugged in again, with another number: a prepare gives it that"):
        guest.qmp.plug(BOUND)
        assert function_behind(guest.machine, BOUND.port) == pulled.function
        assert pulled.function.group not in (None, group)
        _wait_driver(pulled.function, GPU_DRIVER)
        scene.check_prepared_again(*scene.cards)


def _swapped_while_none_runs(scene: _Scene) -> None:
    *others, new = scene.cards
    gone = new.function.group
    _pull_out(scene.guest, NEW)
    _renumber(scene.guest.machine, others)
    assert gone in [card.function.group for card in others], "nobody has the number of the pulled card"


def _after_the_start(scene: _Scene) -> None:
    *others, new = scene.cards
    with scene.guest.step("the next daemon starts: soon no file gives another card's group"):
        scene.check_files_until_right("start_to_right_files_ms")
        scene.wait_written(*others[:2])
        assert scene.cluster.named.keys() == {card.uid for card in others[:2]}
        said = [scene.astray(card) for card in scene.cards]
        assert said == [["GroupChanged"]] * 2 + [["NotBound"]] * 2 + [["Gone"]], said
    with scene.guest.step("kubelet repeats the prepare of each"):
        scene.check_prepared_again(*others)
        assert "is gone from this node" in prepare(scene.plugin, new.name, new.uid).error
    with scene.guest.step("all are unprepared: nothing is left"):
        for card in scene.cards:
            scene.cluster.unprepared(scene.plugin, card.name, card.uid)
        assert [card.function.driver for card in others] == ["vfio-pci"] * 2 + [GPU_DRIVER] * 2
        assert scene.cluster.files == []
        eventually("a checkpoint without claims", lambda: scene.cluster.stored == {}, timeout_s=SLACK_S)


def _renumber(machine: Machine, cards: list[_Card], *, at_once: bool = False) -> None:
    """Remove them and find them again, so that each has a number that another one had. The kernel gives the lowest free
    one: by port from the highest to the lowest, or `at_once` by the order of the buses."""
    before = {card.uid: card.function.group for card in cards}
    descending = sorted(cards, key=lambda card: -int(card.function.group or ""))
    for card in cards:
        card.function.remove()
    if at_once:
        rescan()
    else:
        for card in descending:
            rescan_behind(machine, card.port)
    for card in cards:
        assert function_behind(machine, card.port) == card.function
    after = {card.uid: card.function.group for card in cards}
    assert all(after[uid] != group for uid, group in before.items()), (before, after)


def _pull_out(guest: Guest, function: PciFunction) -> None:
    guest.qmp.unplug(function.id)
    guest.qmp.wait_unplugged(function.id, timeout_s=UNPLUG_TIMEOUT_S)
    assert functions_behind(guest.machine, function.port) == []


def _explain(scene: _Scene, card: _Card) -> str:
    done = subprocess.run(
        (
            sys.executable, "-m", "gpuactors", "explain", card.function.address,
            "--state-dir", str(scene.daemon.state_dir),
        ),
        capture_output=True, text=True, timeout=EXPLAIN_TIMEOUT_S, check=False,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "src")},
    )  # fmt: skip
    (scene.guest.artifacts / "explain.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    return done.stdout


# --- at no moment -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Watch:
    """A thread that reads the claims' files all the time."""

    cluster: Cluster
    readings: int = 0
    twice: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        before = self.cluster.named
        while not self.over.wait(WATCH_PERIOD_S):
            now = self.cluster.named
            # What is the same in two readings, one after the other, was there at one moment between them.
            groups = [paths[0] for uid, paths in now.items() if before.get(uid) == paths]
            if len(groups) != len({*groups}):
                self.twice.append(str(now))
            before = now
            self.readings += 1


@contextmanager
def _no_node_in_two_files(cluster: Cluster) -> Iterator[None]:
    """At no moment the files of two claims name one group."""
    watch = _Watch(cluster)
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    try:
        yield
        assert thread.is_alive(), "nobody has watched"
    finally:
        watch.over.set()
        thread.join(SLACK_S)
    cluster.figure("readings_of_all_files", watch.readings)
    assert watch.twice == []
