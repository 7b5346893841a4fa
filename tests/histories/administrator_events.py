"""The acts of a second administrator on a node with claims of GPUs, between any two steps of the daemon and of kubelet.

Drivers are bound and unbound, overrides and ids written, modules loaded and unloaded, CDI files and the checkpoint
removed, slices made anew. What he decided is kept in `administrator.py`; that nobody undoes it is checked in
`claim_check.py`. What the other administrator does, ours, is in `daemon_events.py` and `kubelet_events.py`: the daemon
and kubelet are stopped and started. Beside these and `BESIDE` nothing is drawn on such a node.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

from gpuactors_simulation.host.kernel import NVIDIA
from gpuactors_simulation.kube.status import SLICES
from tests.histories.administrator import VFIO, VIRTUAL_FUNCTIONS, Administrator
from tests.histories.claim_events import FIRST_OF_CLAIMS
from tests.histories.claims import ClaimsNode
from tests.histories.dra_node import CDI_DIR
from tests.histories.kinds import Flag, Kind, KindsOn, detail_of
from tests.histories.world import World

BESIDE: Final = (
    FIRST_OF_CLAIMS,
    "a pod with a claim for two cards comes",
    "a pod with a claim ends",
    "a pod with a claim is force-deleted and has a successor",
    "a pod with a claim is force-deleted, has a successor and dies late",
    "a claim is deleted at the API server",
    "a pod and a claim race for a card",
    "a write to sysfs hangs",
    "a write to sysfs is slow",
    "a write to sysfs fails with EBUSY",
    "writes that hang go on",
    "a process uses a card by its host driver",
    "that process ends",
    "the checkpoint is lost",
    "the slices are deleted",
    "the daemon is told to stop",
    "a daemon starts",
    "a successor starts",
    "the predecessor is told to stop",
    "a daemon crashes",
    "kubelet stops",
    "kubelet starts",
    "a pod comes",
    "a pod ends",
    "a pod is force-deleted",
    "the node reboots",
    "the next uevents are lost",
    "the next uevents are late",
    "late uevents come",
    "the uevent socket overflows",
    "an external process opens a card",
    "an external process is killed",
)
"""The kinds that are drawn beside those of the administrator."""

_OVERRIDES: Final = ("vfio-pci", "nvidia", "pci-stub", "", "none")
_GARBAGE: Final = (b"", b"{", b"\xff\xfe", b"[" * 3000, b'{"devices": 1}')

Do = Callable[[World, ClaimsNode, int], object]


def administered(world: World) -> ClaimsNode | None:
    """The part of the node for claims, where there is a second administrator."""
    claims = world.claims
    return claims if claims is not None and claims.administrator is not None else None


_kind: Final[KindsOn[ClaimsNode]] = KindsOn(administered)


def _him(claims: ClaimsNode) -> Administrator:
    assert claims.administrator is not None
    return claims.administrator


# --- drivers ----------------------------------------------------------------------------------------------


def _function(world: World, slot: int) -> str:
    """The card, or one time in four its companion."""
    companion = world.address(slot, 1)
    return (
        companion if detail_of(slot) % 4 == 3 and companion in world.tree.functions else world.address(slot)
    )


def _is_there(world: World, claims: ClaimsNode, slot: int) -> bool:
    """His shell would not hang at once: nobody has a device of the group open by any driver. He looks before he
    writes."""
    address = _function(world, slot)
    if not world.is_plugged(slot) or address not in claims.home or claims.kernel.sleeps(address):
        return False
    return address not in claims.users and not world.is_held(slot)


def _can_unbind(world: World, claims: ClaimsNode, slot: int) -> bool:
    return _is_there(world, claims, slot) and _driver(world, slot) is not None


def _can_go_to_vfio(world: World, claims: ClaimsNode, slot: int) -> bool:
    return _is_there(world, claims, slot) and VFIO in claims.kernel.drivers and _driver(world, slot) != VFIO


def _can_go_home(world: World, claims: ClaimsNode, slot: int) -> bool:
    if not _is_there(world, claims, slot):
        return False
    driver = _him(claims).host_driver(_function(world, slot))
    return driver in claims.kernel.drivers and _driver(world, slot) != driver


def _driver(world: World, slot: int) -> str | None:
    return world.tree.driver_of(_function(world, slot))


def _under_its_machine(world: World, claims: ClaimsNode, slot: int) -> bool:
    """A virtual machine has it open: his shell hangs until that ends."""
    address = world.address(slot)
    return (
        world.is_plugged(slot)
        and address in claims.home
        and world.is_bound(address)
        and world.tree.is_open(address)
        and not claims.kernel.sleeps(address)
    )


def _can_unload(driver: str) -> Callable[[World, ClaimsNode, int], bool]:
    def can(world: World, claims: ClaimsNode, _slot: int) -> bool:
        mine = [a for a in world.tree.functions if world.tree.driver_of(a) == driver]
        return (
            driver in claims.kernel.drivers
            and not any(a in claims.users or world.tree.is_open(a) for a in mine)
            and not any(map(claims.kernel.sleeps, world.tree.functions))
        )

    return can


def _module(driver: str, flag: Flag) -> tuple[Kind, Kind]:
    return (
        _kind(
            f"an administrator unloads {driver}",
            lambda _w, c, _s: _him(c).unload(driver),
            _can_unload(driver),
            needs={flag: False},
            leaves={flag: True},
        ),
        _kind(
            f"an administrator loads {driver}",
            lambda _w, c, _s: _him(c).load(driver),
            lambda _w, c, _s: driver not in c.kernel.drivers,
            needs={flag: True},
            leaves={flag: False},
        ),
    )


# --- virtual functions ------------------------------------------------------------------------------------


def _can_virtualize(world: World, claims: ClaimsNode, slot: int) -> bool:
    address = world.address(slot)
    return (
        world.is_plugged(slot)
        and world.driver(slot) == NVIDIA
        and not claims.kernel.sleeps(address)
        and not world.tree.virtual_functions(address)
    )


def _has_virtual_functions(world: World, claims: ClaimsNode, slot: int) -> bool:
    address = world.address(slot)
    return (
        world.is_plugged(slot)
        and not claims.kernel.sleeps(address)
        and bool(world.tree.virtual_functions(address))
    )


# --- files ------------------------------------------------------------------------------------------------


def _cdi_files(claims: ClaimsNode) -> list[str]:
    return [path for path in claims.disk.files if path.startswith(f"{CDI_DIR}/")]


def _loses_file(_world: World, claims: ClaimsNode, slot: int) -> None:
    files = _cdi_files(claims)
    claims.disk.lose(files[slot % len(files)])
    claims.touched.touch()


def _loses_directory(_world: World, claims: ClaimsNode, _slot: int) -> None:
    claims.disk.lose_directory(CDI_DIR)
    claims.touched.touch()


def _writes_over(_world: World, claims: ClaimsNode, slot: int) -> None:
    """Overwrite one of gpuactors' files with a content that no CDI reader takes."""
    files = _cdi_files(claims)
    claims.disk.put(files[slot % len(files)], _GARBAGE[detail_of(slot) % len(_GARBAGE)])
    claims.touched.touch()


def _leaves_behind(_world: World, claims: ClaimsNode, slot: int) -> None:
    """In our directories, under names that are not ours or that a killed daemon may have left."""
    content = _GARBAGE[detail_of(slot) % len(_GARBAGE)]
    for path in (
        f"{claims.plugin_dir}/.checkpoint.json.new",
        f"{claims.plugin_dir}/notes.txt",
        f"{claims.plugin_dir}/backup/checkpoint.json",
    ):
        claims.disk.put(path, content)


# --- the slices -------------------------------------------------------------------------------------------


def _brings_back(_world: World, claims: ClaimsNode, _slot: int) -> None:
    """`kubectl delete` and `kubectl create -f` of what he had saved, maybe of another day."""
    him, store = _him(claims), claims.api.store
    claims.api.delete_slices(claims.driver)
    for saved in him.slices:
        again: dict[str, Any] = deepcopy(saved)
        if store.find(SLICES, "", again["metadata"]["name"]) is None:
            store.put(SLICES, store.named(SLICES, again))


ADMINISTRATOR_KINDS: Final = (
    _kind(
        "an administrator binds a card to vfio-pci",
        lambda w, c, s: _him(c).to_vfio(_function(w, s), keeps_override=detail_of(s) % 2 == 0),
        _can_go_to_vfio,
    ),
    _kind(
        "an administrator writes the id of a card to vfio-pci",
        lambda w, c, s: _him(c).to_vfio_by_id(w.address(s)),
        lambda w, c, s: _can_go_to_vfio(w, c, s) and w.driver(s) != VFIO,
    ),
    _kind(
        "an administrator unbinds a card",
        lambda w, c, s: _him(c).unbind(_function(w, s)),
        _can_unbind,
    ),
    _kind(
        "an administrator unbinds a card under its virtual machine",
        lambda w, c, s: _him(c).unbind(w.address(s)),
        _under_its_machine,
    ),
    _kind(
        "an administrator binds a card to its host driver",
        lambda w, c, s: _him(c).to_home(_function(w, s)),
        _can_go_home,
    ),
    _kind(
        "an administrator writes a driver_override",
        lambda w, c, s: _him(c).override(_function(w, s), _OVERRIDES[detail_of(s) % len(_OVERRIDES)]),
        _is_there,
    ),
    *_module(NVIDIA, Flag.NVIDIA_IS_UNLOADED),
    *_module(VFIO, Flag.VFIO_IS_UNLOADED),
    _kind(
        "an administrator starts virtual functions",
        lambda w, c, s: _him(c).virtualize(w.address(s), 1 + detail_of(s) % VIRTUAL_FUNCTIONS),
        _can_virtualize,
    ),
    _kind(
        "an administrator ends virtual functions",
        lambda w, c, s: _him(c).virtualize(w.address(s), 0),
        _has_virtual_functions,
    ),
    _kind("an administrator removes a CDI file", _loses_file, lambda _w, c, _s: bool(_cdi_files(c))),
    _kind("an administrator removes the CDI directory", _loses_directory),
    _kind("an administrator writes over a CDI file", _writes_over, lambda _w, c, _s: bool(_cdi_files(c))),
    _kind("an administrator leaves files in the state directory", _leaves_behind),
    _kind(
        "an administrator removes the checkpoint under the daemon",
        lambda _w, c, _s: c.lose_checkpoint(),
        lambda w, c, _s: bool(w.daemons) and c.checkpoint in c.disk.files,
    ),
    _kind("an administrator saves the slices", lambda _w, c, _s: _him(c).keep(c.api.slices(c.driver))),
    _kind(
        "an administrator brings back the slices that he saved",
        _brings_back,
        lambda _w, c, _s: bool(_him(c).slices),
    ),
)
"""Every kind of event of the second administrator."""
