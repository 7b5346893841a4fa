"""The claim worker: carries out the acts of claims, on devices and on files. For each device and each claim's files one
after the other, so that an act that hangs stops no other one.

An act says what is to be, and the adaptor goes on from what it finds. One that is no longer wanted is not begun; one
that has begun is not stopped. A number is carried out once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from functools import partial
from typing import TypeVar

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.claims.driver import DeviceAct
from gpuactors.core.claims.files import ClaimContents
from gpuactors.core.claims.outputs import ClaimsWanted, FilesAct
from gpuactors.core.events import ActDone, ActFailed, Event, GpusLooked
from gpuactors.core.gpus.content import contents_of
from gpuactors.core.state.claims import LookWanted
from gpuactors.core.values.claim import ActFault, Claim, ClaimsOf, ClaimUid, LookFinding
from gpuactors.core.values.model import PciAddress
from gpuactors.ports.node import ActError, ClaimFileStore, DriverBinder, StateFileError

Key = TypeVar("Key", PciAddress, ClaimUid)
Act = TypeVar("Act", DeviceAct, FilesAct, LookWanted)


async def run(
    wanted: LatestReader[ClaimsWanted],
    binder: DriverBinder | None,
    files: ClaimFileStore,
    driver: str,
    inbox: trio.MemorySendChannel[Event],
    of: ClaimsOf,
) -> None:
    """Runs for ever. `driver` is the DRA driver's name, which the files carry; `of`: whose claims they are. `binder`:
    None where no claim binds a device."""
    devices: dict[PciAddress, _Lane] = {}
    claims: dict[ClaimUid, _Lane] = {}
    looks = _Lane()
    async with trio.open_nursery() as nursery:
        async for now in wanted:
            for address in now.devices:
                lane = devices.setdefault(address, _Lane())
                if not lane.is_busy:
                    assert binder is not None, "an act on a device of a driver that binds none"
                    lane.is_busy = True
                    nursery.start_soon(_on_device, address, lane, wanted, binder, inbox, of)
            if now.look is not None and binder is not None and not looks.is_busy:
                looks.is_busy = True
                nursery.start_soon(_look, looks, wanted, binder, inbox)
            for uid in now.files:
                lane = claims.setdefault(uid, _Lane())
                if not lane.is_busy:
                    lane.is_busy = True
                    nursery.start_soon(_on_files, uid, lane, wanted, files, driver, inbox, of)
            _forget(devices, now.devices.keys())
            _forget(claims, now.files.keys())


class _Lane:
    """The acts on one device, or on one claim's files, or the looks."""

    def __init__(self) -> None:
        self.is_busy = False
        self.done = 0
        """The number of the last one that was carried out."""


def _forget(lanes: dict[Key, _Lane], wanted: Set[Key]) -> None:
    for key in [k for k, lane in lanes.items() if k not in wanted and not lane.is_busy]:
        del lanes[key]


async def _on_device(
    address: PciAddress,
    lane: _Lane,
    wanted: LatestReader[ClaimsWanted],
    binder: DriverBinder,
    inbox: trio.MemorySendChannel[Event],
    of: ClaimsOf,
) -> None:
    async def carry_out(act: DeviceAct) -> Event:
        try:
            with raises_only(ActError, "claim_worker", partial(ActError, ActFault.REFUSED)):
                return ActDone(act.number, await binder.bring(address, act.target, act.functions), of=of)
        except ActError as exc:
            return ActFailed(act.number, str(exc), exc.fault, exc.moved, of=of)

    await _all(lane, lambda: wanted.value.devices.get(address), carry_out, inbox)


async def _look(
    lane: _Lane,
    wanted: LatestReader[ClaimsWanted],
    binder: DriverBinder,
    inbox: trio.MemorySendChannel[Event],
) -> None:
    async def carry_out(look: LookWanted) -> Event:
        try:
            with raises_only(ActError, "claim_worker", partial(ActError, ActFault.REFUSED)):
                findings = await binder.look(look.devices)
        except ActError as exc:
            findings = tuple(LookFinding(device, exc.fault, str(exc)) for device in look.devices)
        return GpusLooked(look.number, findings)

    await _all(lane, lambda: wanted.value.look, carry_out, inbox)


async def _on_files(
    uid: ClaimUid,
    lane: _Lane,
    wanted: LatestReader[ClaimsWanted],
    files: ClaimFileStore,
    driver: str,
    inbox: trio.MemorySendChannel[Event],
    of: ClaimsOf,
) -> None:
    async def carry_out(act: FilesAct) -> Event:
        try:
            with raises_only(StateFileError, "claim_worker"):
                if act.claim is None:
                    await files.remove(uid, act.directories)
                else:
                    await files.write(_contents(driver, act.claim, act))
        except StateFileError as exc:
            return ActFailed(act.number, str(exc), of=of)
        return ActDone(act.number, of=of)

    await _all(lane, lambda: wanted.value.files.get(uid), carry_out, inbox)


def _contents(driver: str, claim: Claim, act: FilesAct) -> ClaimContents:
    """Raises `StateFileError`."""
    try:
        return contents_of(driver, claim, act.devices, act.directories, act.placed)
    except ValueError as exc:  # a name from outside that is no part of a path
        raise StateFileError(str(exc)) from None


async def _all(
    lane: _Lane,
    newest: Callable[[], Act | None],
    carry_out: Callable[[Act], Awaitable[Event]],
    inbox: trio.MemorySendChannel[Event],
) -> None:
    """Carries out the newest act, until none is newer. Between the last look and the end nothing can come in."""
    while (act := newest()) is not None and act.number > lane.done:
        event = await carry_out(act)
        lane.done = act.number
        await inbox.send(event)
    lane.is_busy = False
