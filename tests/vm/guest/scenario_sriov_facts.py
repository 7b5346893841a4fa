"""The daemon's assumptions about SR-IOV, checked: the order of uevents, the links between a card and its virtual
functions, and what waits for a virtual function that is held. No daemon here: a failure means that the kernel differs,
not the daemon.

The card is QEMU's igb, whose driver makes and removes virtual functions as a GPU's driver of the host does. The fact
that no reader may miss: while the removal of a held virtual function waits, the function is there with its group and
its node, and both links that say whose it is are gone. A second card, QEMU's nvme, has a driver that leaves its virtual
functions when it is unbound, and they have the card's own ids.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Thread
from types import MappingProxyType
from typing import Final

from tests.support.patience import patient
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sriov import IGB, NVME, PhysicalFunction, physical_function_of
from tests.vm.guest.sysfs import Function, blocked_reads, in_background
from tests.vm.guest.tenant import Tenant
from tests.vm.guest.uevents import WATCHED, Uevent, UeventListener
from tests.vm.kernels import SRIOV
from tests.vm.machine import VFIO_MODULES, Machine, PciFunction

VIRTUAL_DRIVER: Final = "igbvf"

KEEPING_DRIVER: Final = "pci-pf-stub"
"""A driver for any physical function, which leaves the virtual functions when it is unbound."""

MACHINE: Final = Machine(
    ports=("rp1", "rp2"),
    functions=(IGB, NVME),
    kernels=("6.1", "6.12"),
    needs=frozenset({SRIOV}),
    modules=(*VFIO_MODULES, IGB.model, VIRTUAL_DRIVER, NVME.model, "pci_pf_stub"),
    vfio_pci_parameters=("enable_sriov=1",),
)

EVENT_TIMEOUT_S: Final = patient(10.0)
"""Two virtual functions are made within 0.4 s; a driver of network functions takes the most of it."""

NOTHING_FOR_S: Final = 0.3
"""How long silence is listened to; what would come comes within 10 ms."""

OF_CARD: Final = (
    "class", "config", "device", "driver_override", "enable", "numa_node", "sriov_drivers_autoprobe", "sriov_numvfs",
    "sriov_offset", "sriov_totalvfs", "uevent", "vendor",
)  # fmt: skip
"""What somebody might read of a card, the daemon among them."""

OF_VIRTUAL: Final = (
    "class",
    "config",
    "device",
    "driver_override",
    "enable",
    "numa_node",
    "uevent",
    "vendor",
)

CARD_BLOCKS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {"6.1": frozenset({"driver_override", "sriov_numvfs", "uevent"}), "6.12": frozenset({"sriov_numvfs"})}
)
"""Of OF_CARD, what waits for the card's lock, which a removal of virtual functions has until their holder lets go."""

VIRTUAL_BLOCKS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {"6.1": frozenset({"driver_override", "uevent"}), "6.12": frozenset()}
)
"""Of OF_VIRTUAL, the same for the virtual function's own lock."""

EARLY: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({"6.1": (), "6.12": ("remove vfio-dev",)})
"""What the kernel says of a held virtual function while its removal waits."""

REMOVED_FROM_VFIO: Final = ("remove vfio-dev", "remove vfio")

ONLY_A_VIRTUAL_FUNCTION_HAS: Final = "sriov_vf_msix_count"
"""A file (kernel 5.13 and newer) that stays to the last, unlike the links."""


@dataclass(frozen=True, slots=True)
class _Scene:
    guest: Guest
    uevents: UeventListener
    card: PhysicalFunction
    driver: str
    """The card's, which makes its virtual functions."""
    names: Mapping[str, str]
    """What each function is called by its address: `card`, `1` and `2`."""
    tenant: Tenant
    """Who holds a function in most steps: to start a process costs more than a step does."""

    @classmethod
    def of(cls, guest: Guest, uevents: UeventListener, tenant: Tenant, function: PciFunction) -> _Scene:
        """IGB or NVME, when its driver has it."""
        card = PhysicalFunction.booted(guest.machine, function)
        names = {card.function.address: "card", **{card.address_of(n): str(n) for n in (1, 2)}}
        return cls(guest, uevents, card, function.model, names, tenant)

    def until(self, *wanted: str) -> None:
        """Check that the watched subsystems say `wanted`, in this order."""
        told: list[str] = []

        def last(event: Uevent) -> bool:
            if event.subsystem in WATCHED:
                told.append(self._words(event))
            return bool(told) and told[-1] == wanted[-1]

        self.uevents.until(last, timeout_s=EVENT_TIMEOUT_S)
        assert told == list(wanted), told

    def silence(self) -> list[str]:
        """What the watched subsystems say for a while."""
        heard = self.uevents.silence(for_s=NOTHING_FOR_S)
        return [self._words(event) for event in heard if event.subsystem in WATCHED]

    def _words(self, event: Uevent) -> str:
        if event.subsystem != "pci":
            return f"{event.action} {event.subsystem}"
        address = event.properties["PCI_SLOT_NAME"]
        return f"{event.action} {self.names.get(address, address)}"

    def two_on_vfio(self) -> tuple[Function, Function]:
        """Two virtual functions that no driver has had before; their uevents are read."""
        self.card.autoprobe(False)
        first, second = self.card.enable(2)
        for function in (first, second):
            function.bind_vfio()
        self.uevents.silence(for_s=NOTHING_FOR_S)
        return first, second


def run(guest: Guest) -> None:
    """Every fact once, in the order of a card's life; then those of the second card that do not follow."""
    with UeventListener() as uevents, Tenant.start() as tenant:
        scene = _Scene.of(guest, uevents, tenant, IGB)
        nvme = _Scene.of(guest, uevents, tenant, NVME)
        scene.silence()  # what the drivers' probes have said
        _made_and_removed(scene)
        _made_without_drivers(scene)
        _first_is_held(scene)
        _last_is_held(scene)
        _card_unbound(scene)
        _left_by_the_driver(scene, KEEPING_DRIVER)
        _card_on_vfio(scene)
        _card_unplugged(scene)
        _with_the_ids_of_its_card(nvme)
        _first_is_held(nvme)
        nvme.card.function.unbind()
        nvme.until("unbind card")
        _left_by_the_driver(nvme, NVME.model)
        guest.figures["uevents"] = [str(event) for event in uevents.heard]


def _made_and_removed(scene: _Scene) -> None:
    step, card = scene.guest.step, scene.card
    with step(
        "made: add, change and bind of each, then change of the card; own groups, and no `remove` of one alone"
    ):
        assert (card.total, card.virtual_functions) == (7, ()), card
        made = card.enable(2)
        scene.until("add 1", "change 1", "bind 1", "add 2", "change 2", "bind 2", "change card")
        assert card.virtual_functions == made
        assert [physical_function_of(function) for function in made] == [card.function] * 2
        assert [function.ids for function in made] == [("8086", "10ca")] * 2
        assert [function.driver for function in made] == [VIRTUAL_DRIVER] * 2
        assert len({card.function.group, *(function.group for function in made)}) == 3
        for function in made:
            assert (function.path / ONLY_A_VIRTUAL_FUNCTION_HAS).exists()
            assert not (function.path / "sriov_totalvfs").exists()
            assert not (function.path / "remove").exists()
        assert not (card.path / ONLY_A_VIRTUAL_FUNCTION_HAS).exists()
    with step("another number while there are some, more or half of them: EBUSY"):
        assert [_errno_of(lambda: card.enable(3)), _errno_of(lambda: card.enable(1))] == [errno.EBUSY] * 2
        assert card.virtual_functions == made
    with step("removed: unbind and remove of each, nothing of the card"):
        card.disable()
        scene.until("unbind 1", "remove 1", "unbind 2", "remove 2")
        assert scene.silence() == []
        assert card.virtual_functions == ()


def _with_the_ids_of_its_card(scene: _Scene) -> None:
    card = scene.card
    with scene.guest.step("the second card: its virtual functions have its own ids, and groups of their own"):
        card.autoprobe(False)
        made = card.enable(2)
        scene.until("add 1", "change 1", "add 2", "change 2", "change card")
        assert [function.ids for function in (card.function, *made)] == [("1b36", "0010")] * 3
        assert len({card.function.group, *(function.group for function in made)}) == 3
        card.disable()
        scene.until("remove 1", "remove 2")


def _made_without_drivers(scene: _Scene) -> None:
    step, card = scene.guest.step, scene.card
    with step("made with sriov_drivers_autoprobe 0: on no driver, until an override names one"):
        card.autoprobe(False)
        first, second = card.enable(2)
        scene.until("add 1", "change 1", "add 2", "change 2", "change card")
        first.probe()
        assert (first.driver, second.driver) == (None, None)
        first.bind_vfio()
        scene.until("add vfio", "add vfio-dev", "bind 1")
        assert first.open_error() is None
    with step("one that is open is enabled, and its card is not more than before"):
        before = card.function.enable_count
        scene.tenant.open_device(first.group_node, first.address)
        assert (first.enable_count, second.enable_count, card.function.enable_count) == (1, 0, before)
        scene.tenant.close()
    with step("removed while it is free: as any function of vfio-pci"):
        card.disable()
        scene.until(*REMOVED_FROM_VFIO, "unbind 1", "remove 1", "remove 2")


def _first_is_held(scene: _Scene) -> None:
    guest, card = scene.guest, scene.card
    with guest.step("removed while the first is held: both links of it gone, the second untouched"):
        first, second = scene.two_on_vfio()
        scene.tenant.open_device(first.group_node, first.address)
        disable = in_background(card.disable)
        _wait_until_taken(first)
        assert scene.silence() == list(EARLY[guest.kernel])
        _check_looks_like_a_whole_function(first)
        assert card.virtual_functions == (second,)
        assert physical_function_of(second) == card.function
        assert (second.driver, second.open_error()) == ("vfio-pci", None)
        waiting = {"card": blocked_reads(card.function, OF_CARD), "first": blocked_reads(first, OF_VIRTUAL)}
        guest.figures["card_blocks_while_removed"] = sorted(waiting["card"])
        guest.figures["virtual_function_blocks_while_removed"] = sorted(waiting["first"])
        assert waiting["card"].keys() == CARD_BLOCKS[guest.kernel], waiting
        assert waiting["first"].keys() == VIRTUAL_BLOCKS[guest.kernel], waiting
        assert not blocked_reads(second, OF_VIRTUAL)
        assert disable.is_alive()
        scene.tenant.close()
        scene.until(*_rest_of_removal(scene, "1"), *REMOVED_FROM_VFIO, "unbind 2", "remove 2")
        _all_end((disable, *waiting["card"].values(), *waiting["first"].values()))


def _last_is_held(scene: _Scene) -> None:
    """The card then has no link at all, and a function on no driver that has a holder."""
    guest, card = scene.guest, scene.card
    with guest.step("removed while the last is held: the card has no links, and is not free of it"):
        _, second = scene.two_on_vfio()
        scene.tenant.open_device(second.group_node, second.address)
        disable = in_background(card.disable)
        _wait_until_taken(second)
        assert scene.silence() == [*REMOVED_FROM_VFIO, "unbind 1", "remove 1", *EARLY[guest.kernel]]
        _check_looks_like_a_whole_function(second)
        assert (card.virtual_functions, card.function.driver) == ((), scene.driver)
        unbind = in_background(card.function.unbind)
        unbind.join(timeout=NOTHING_FOR_S)
        assert unbind.is_alive(), "an unbind of the card does not wait for the removal"
        scene.tenant.close()
        scene.until(*_rest_of_removal(scene, "2"), "unbind card")
        _all_end((disable, unbind))
        card.function.bind_to(scene.driver)
        scene.until("bind card")


def _card_unbound(scene: _Scene) -> None:
    guest, card = scene.guest, scene.card
    with guest.step("the card's driver is unbound while one is held: they go as by a removal, then the card"):
        first, second = scene.two_on_vfio()
        scene.tenant.open_device(first.group_node, first.address)
        unbind = in_background(card.function.unbind)
        _wait_until_taken(first)
        assert scene.silence() == list(EARLY[guest.kernel])
        _check_looks_like_a_whole_function(first)
        assert (card.function.driver, card.virtual_functions) == (None, (second,))
        scene.tenant.close()
        scene.until(*_rest_of_removal(scene, "1"), *REMOVED_FROM_VFIO, "unbind 2", "remove 2", "unbind card")
        _all_end((unbind,))


def _left_by_the_driver(scene: _Scene, driver: str) -> None:
    card = scene.card.function
    with scene.guest.step(
        "a driver that leaves them: the card has them on no driver, and vfio-pci refuses it"
    ):
        _override(card, driver)
        card.probe()
        scene.card.enable(2)
        card.unbind()
        scene.until("bind card", "add 1", "change 1", "add 2", "change 2", "change card", "unbind card")
        assert (card.driver, len(scene.card.virtual_functions)) == (None, 2)
        card.override_vfio()
        assert _errno_of(card.bind_by_address) == errno.EBUSY
        card.probe()
        assert card.driver is None
        assert _errno_of(scene.card.disable) == errno.ENOENT
        _override(card, driver)
        card.probe()
        scene.card.disable()
        card.unbind()
        scene.until("bind card", "remove 1", "remove 2", "unbind card")


def _card_on_vfio(scene: _Scene) -> None:
    card = scene.card.function
    with scene.guest.step(
        "the card on vfio-pci (enable_sriov): its virtual functions get vfio-pci by an override"
    ):
        card.bind_vfio()
        scene.until("add vfio", "add vfio-dev", "bind card")
        scene.card.autoprobe(False)
        first, second = scene.card.enable(2)
        each = ("add vfio", "add vfio-dev")
        scene.until("add 1", "change 1", *each, "bind 1", "add 2", "change 2", *each, "bind 2", "change card")
        assert [_override_of(function) for function in (first, second)] == ["vfio-pci"] * 2
    with scene.guest.step("without a token such a one does not open, though its group does"):
        assert first.open_error() is None
        _check_refused(scene.tenant, first)
    with (
        scene.guest.step("nor while somebody has the card open, which nobody keeps from it"),
        Tenant.start() as owner,
    ):
        owner.open_device(card.group_node, card.address)
        _check_refused(scene.tenant, second)
    with scene.guest.step("the card leaves vfio-pci: they go"):
        card.unbind()
        scene.until(
            *REMOVED_FROM_VFIO, "unbind 1", "remove 1", *REMOVED_FROM_VFIO, "unbind 2", "remove 2",
            *REMOVED_FROM_VFIO, "unbind card",
        )  # fmt: skip


def _card_unplugged(scene: _Scene) -> None:
    guest, card = scene.guest, scene.card
    with guest.step("the card is pulled out while one is held: as an unbind, and then it goes"):
        _override(card.function, scene.driver)
        card.function.probe()
        first, second = scene.two_on_vfio()
        scene.tenant.open_device(first.group_node, first.address)
        guest.qmp.unplug(IGB.id)
        _wait_until_taken(first)
        assert scene.silence() == list(EARLY[guest.kernel])
        _check_looks_like_a_whole_function(first)
        assert card.virtual_functions == (second,)
        scene.tenant.close()
        scene.until(
            *_rest_of_removal(scene, "1"), *REMOVED_FROM_VFIO, "unbind 2", "remove 2", "unbind card",
            "remove card",
        )  # fmt: skip
        guest.qmp.wait_unplugged(IGB.id, timeout_s=EVENT_TIMEOUT_S)


def _rest_of_removal(scene: _Scene, number: str) -> tuple[str, ...]:
    rest = REMOVED_FROM_VFIO[len(EARLY[scene.guest.kernel]) :]
    return (*rest, f"unbind {number}", f"remove {number}")


def _check_looks_like_a_whole_function(function: Function) -> None:
    """It has no link to its card any more, and everything else: the directory, the group, a node that is busy."""
    assert physical_function_of(function) is None
    assert (function.driver, function.open_error()) == (None, errno.EBUSY)
    assert (function.path / ONLY_A_VIRTUAL_FUNCTION_HAS).exists()


def _wait_until_taken(function: Function) -> None:
    eventually("the driver's link gone", lambda: function.driver is None, timeout_s=EVENT_TIMEOUT_S)


def _check_refused(tenant: Tenant, function: Function) -> None:
    refusal = ""
    try:
        tenant.open_device(function.group_node, function.address)
    except RuntimeError as error:
        refusal = str(error)
    assert "EACCES" in refusal, f"{function.address} without a token: {refusal or 'opened'}"
    tenant.close()


def _override(function: Function, driver: str) -> None:
    (function.path / "driver_override").write_text(f"{driver}\n", encoding="ascii")


def _override_of(function: Function) -> str:
    return (function.path / "driver_override").read_text(encoding="ascii").strip()


def _errno_of(act: Callable[[], object]) -> int | None:
    try:
        act()
    except OSError as error:
        return error.errno
    return None


def _all_end(threads: Iterable[Thread]) -> None:
    for thread in threads:
        thread.join(timeout=EVENT_TIMEOUT_S)
        assert not thread.is_alive(), thread
