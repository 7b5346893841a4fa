"""The end of one resource's endpoint, on a real unix socket."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gpuactors import limits
from gpuactors.concurrency.latest import Latest
from gpuactors.core.values.effects import Answer, Grant, Granted
from gpuactors.core.values.model import DeviceId, DeviceList, ResourceName
from gpuactors.grpc_trio import open_unix_channel
from gpuactors.kubelet.kubelet import UnixKubelet
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb
from tests.core.builders import H100
from tests.kubelet.stub_core import StubCore
from tests.support.patience import patient


@dataclass
class Core(StubCore):
    """Answers the first Allocate when it may, and each other one at once."""

    may: trio.Event = field(default_factory=trio.Event)
    asked: int = 0

    async def allocate(self, resource: ResourceName, requests: tuple[tuple[DeviceId, ...], ...]) -> Answer:
        self.asked += 1
        if self.asked == 1:
            await self.may.wait()
        return Granted((Grant((), ("/dev/vfio/7",)),))


@pytest.mark.trio
async def test_an_allocate_that_comes_while_another_one_is_in_flight_is_answered_at_the_end_too(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet fails the pod of an Allocate that is refused, for good, and begins the next before a hand-over ends."""
    monkeypatch.setattr(limits, "LATE_CALL_S", patient(10.0))
    core, lists = Core(), Latest[DeviceList](())
    answers: list[pb.AllocateResponse] = []
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["a"])])
    with trio.fail_after(patient(10.0)):
        async with UnixKubelet(str(tmp_path)).serve(
            H100, lists.subscribe(), core, pre_start=False
        ) as endpoint:
            path = str(tmp_path / endpoint.name)
            async with open_unix_channel(path, connect_deadline_s=patient(1.0)) as channel:

                async def allocate() -> None:
                    answers.append(await pb.DevicePluginStub(channel).allocate(request))

                nursery.start_soon(allocate)
                while not core.asked:  # noqa: ASYNC110 - the call crosses a socket
                    await trio.sleep(0.01)
                drained = trio.Event()

                async def drain() -> None:
                    await endpoint.drain(limits.DRAIN_S)
                    drained.set()

                nursery.start_soon(drain)
                await wait_all_tasks_blocked()
                await allocate()
                assert len(answers) == 1
                assert not drained.is_set()
                core.may.set()
                await drained.wait()
                while len(answers) < 2:  # noqa: ASYNC110 - the answer crosses a socket
                    await trio.sleep(0.01)
