"""The claim worker: carries out the acts of claims, on devices and on files. For each device and each claim's files one
after the other, so that an act that hangs stops no other one.

An act says what is to be, and the adaptor goes on from what it finds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import trio
from msgspec import Struct

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.each_once import each_once, only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.claims.driver import DeviceAct
from gpuactors.core.claims.files import ClaimContents, contents_of
from gpuactors.core.claims.outputs import FilesAct
from gpuactors.core.events import Event
from gpuactors.core.events.claims import ActDone, ActFailed, FitnessChecked
from gpuactors.core.values.claim import ActFault, Claim, ClaimsOf, ClaimUid, FitnessCheck, FitnessFinding
from gpuactors.core.values.model import DeviceKey, PciAddress, function_address
from gpuactors.ports.claims import ActError, ClaimFileStore, DriverBinder
from gpuactors.ports.errors import DirectoryLeftError, StateFileError


class Acts(Struct, frozen=True):
    """The acts that are wanted."""

    devices: LatestReader[Mapping[PciAddress, DeviceAct]]
    fitness_check: LatestReader[FitnessCheck | None]
    files: LatestReader[Mapping[ClaimUid, FilesAct]]


async def run(
    acts: Acts,
    binder: DriverBinder | None,
    files: ClaimFileStore,
    driver: str,
    inbox: trio.MemorySendChannel[Event],
    driver_kind: ClaimsOf,
    read_egms: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint_if_cancelled,
) -> None:
    """Run for ever. `driver` is the DRA driver's name, which the files carry; `driver_kind` the driver whose claims
    they are. `binder`: None where no claim binds a device. `read_egms` is called after each act on a device, and posts
    what has changed."""
    on_files = partial(_on_files, files=files, driver=driver, driver_kind=driver_kind)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(each_once, acts.files, lambda now: now, on_files, inbox)
        if binder is not None:
            on_device = partial(_on_device, binder=binder, driver_kind=driver_kind, read_egms=read_egms)
            nursery.start_soon(each_once, acts.devices, lambda now: now, on_device, inbox)
            nursery.start_soon(each_once, acts.fitness_check, only, partial(_check, binder=binder), inbox)


async def _on_device(
    device: DeviceKey,
    act: DeviceAct,
    binder: DriverBinder,
    driver_kind: ClaimsOf,
    read_egms: Callable[[], Awaitable[None]],
) -> Event:
    try:
        with raises_only(ActError, "claim_worker", partial(ActError, ActFault.REFUSED)):
            beside = tuple(map(function_address, act.beside))
            bound = await binder.bring(function_address(device), act.target, act.functions, beside)
            await read_egms()
            return ActDone(act.number, bound, driver_kind=driver_kind)
    except ActError as exc:
        return ActFailed(act.number, str(exc), exc.fault, exc.moved, driver_kind=driver_kind)


async def _check(_: None, check: FitnessCheck, binder: DriverBinder) -> Event:
    try:
        with raises_only(ActError, "claim_worker", partial(ActError, ActFault.REFUSED)):
            findings = await binder.check_fitness(tuple(map(function_address, check.devices)))
    except ActError as exc:
        findings = tuple(FitnessFinding(device, exc.fault, str(exc)) for device in check.devices)
    return FitnessChecked(check.number, findings)


async def _on_files(
    uid: ClaimUid, act: FilesAct, files: ClaimFileStore, driver: str, driver_kind: ClaimsOf
) -> Event:
    try:
        with raises_only(StateFileError, "claim_worker"):
            if act.claim is None:
                await files.remove(uid, act.directories)
            else:
                await files.write(_contents(driver, act.claim, act))
    except DirectoryLeftError as exc:
        return ActFailed(act.number, str(exc), ActFault.DIRECTORY_LEFT, driver_kind=driver_kind)
    except StateFileError as exc:
        return ActFailed(act.number, str(exc), driver_kind=driver_kind)
    return ActDone(act.number, driver_kind=driver_kind)


def _contents(driver: str, claim: Claim, act: FilesAct) -> ClaimContents:
    """Return the content of the claim's files. Raises `StateFileError`."""
    try:
        return contents_of(driver, claim, act.devices, act.directories, act.placed)
    except ValueError as exc:  # a name from outside that is no part of a path
        raise StateFileError(str(exc)) from None
