"""The claim worker's looks: one for a set of GPUs, and a finding for each whatever happens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

import pytest
import trio
import trio.testing

from gpuactors.actors import claim_worker
from gpuactors.concurrency.latest import Latest
from gpuactors.core.claims.driver import DeviceAct
from gpuactors.core.claims.outputs import FilesAct
from gpuactors.core.events import Event
from gpuactors.core.events.claims import ActDone, FitnessChecked
from gpuactors.core.values.claim import ActFault, ClaimsOf, ClaimUid, FitnessCheck, FitnessFinding, Target
from gpuactors.core.values.model import PciAddress, device_key
from gpuactors.ports.claims import ActError, ClaimFileStore, DriverBinder

GPUS = (PciAddress("0000:01:00.0"), PciAddress("0000:02:00.0"))


class Binder:
    """Looks when it is let, and raises what it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.looks: list[Collection[PciAddress]] = []
        self.may_look = trio.Event()

    async def check_fitness(self, devices: Collection[PciAddress]) -> tuple[FitnessFinding, ...]:
        self.looks.append(devices)
        await self.may_look.wait()
        if self.error is not None:
            raise self.error
        return tuple(FitnessFinding(device_key(device)) for device in devices)


async def looked(binder: Binder, *numbers: int) -> list[Event]:
    """The answers to the first of these looks and the last, when the others are wanted while the first is under way."""
    wanted = Latest[FitnessCheck | None](None)
    devices = Latest[Mapping[PciAddress, DeviceAct]]({})
    of_files = Latest[Mapping[ClaimUid, FilesAct]]({})
    acts = claim_worker.Acts(devices.subscribe(), wanted.subscribe(), of_files.subscribe())
    inbox, events = trio.open_memory_channel[Event](2)
    files = cast("ClaimFileStore", None)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            worker = cast("DriverBinder", binder)
            nursery.start_soon(claim_worker.run, acts, worker, files, "gpu.example", inbox, ClaimsOf.GPUS)
            for number in numbers:
                wanted.set(FitnessCheck(number, tuple(map(device_key, GPUS))))
                await trio.testing.wait_all_tasks_blocked()
            binder.may_look.set()
            found = [await events.receive() for _ in {numbers[0], numbers[-1]}]
            nursery.cancel_scope.cancel()
    return found


async def test_one_look_is_under_way_at_a_time_and_the_newest_follows() -> None:
    binder = Binder()
    fit = tuple(FitnessFinding(device_key(device)) for device in GPUS)
    assert await looked(binder, 1, 2, 3) == [FitnessChecked(1, fit), FitnessChecked(3, fit)]
    assert binder.looks == [GPUS, GPUS]


@pytest.mark.parametrize("error", [ActError(ActFault.REFUSED, "no"), ValueError("a bug")])
async def test_a_look_that_fails_is_a_finding_for_each_gpu(error: Exception) -> None:
    (event,) = await looked(Binder(error), 1)
    assert isinstance(event, FitnessChecked)
    assert [(f.device, f.fault) for f in event.findings] == [(device_key(g), ActFault.REFUSED) for g in GPUS]
    assert all(str(error) in f.reason for f in event.findings)


async def test_the_egms_are_read_between_an_act_and_its_event() -> None:
    """An EGM may come with the binding of its GPU, and the claim's files follow the event."""
    order: list[str] = []

    class Bringing:
        async def bring(self, *_: object) -> tuple[()]:
            await trio.lowlevel.checkpoint()
            order.append("act")
            return ()

    async def read_egms() -> None:
        await trio.lowlevel.checkpoint()
        order.append("read")
        assert events.statistics().current_buffer_used == 0

    act = DeviceAct(1, Target.VFIO, ())
    devices = Latest[Mapping[PciAddress, DeviceAct]]({GPUS[0]: act})
    acts = claim_worker.Acts(
        devices.subscribe(),
        Latest[FitnessCheck | None](None).subscribe(),
        Latest[Mapping[ClaimUid, FilesAct]]({}).subscribe(),
    )
    inbox, events = trio.open_memory_channel[Event](2)
    binder, files = cast("DriverBinder", Bringing()), cast("ClaimFileStore", None)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                claim_worker.run, acts, binder, files, "gpu.example", inbox, ClaimsOf.GPUS, read_egms
            )
            assert await events.receive() == ActDone(1, (), driver_kind=ClaimsOf.GPUS)
            nursery.cancel_scope.cancel()
    assert order == ["act", "read"]
