"""The DevicePlugin service of one resource, for kubelet to call.

A handler turns its request into an event and waits for the core's answer. It decides nothing, and keeps only which list
was sent on each stream.

Allocating one device of an IOMMU group makes the others Unhealthy. That list is sent before the answer to Allocate, on
every open stream: else kubelet may allocate one of the others to its next pod, which could not be admitted. Kubelet
reads both from one connection, in this order, and processes them in two goroutines, in any order: so the answer that
changes a list for others follows after LIST_HANDLED_S. Of another resource's list, which has a connection of its own,
that is the whole order: it is sent at the same moment as ours.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

import trio

from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.values.effects import Granted
from gpuactors.core.values.model import DeviceList, ResourceName
from gpuactors.grpc_trio.service import TrioService
from gpuactors.kubelet import translate
from gpuactors.kubelet.list_messages import ListMessages
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb
from gpuactors.ports.node import Caller

LIST_FIRST_S: Final = 0.2
"""How long the answer to Allocate waits until the lists that kubelet must get before it have been sent; usually
microseconds. A client that does not read its stream delays one answer by this much, and none after it."""

LIST_HANDLED_S: Final = 0.1
"""The wait from a sent list to the answer of the Allocate that changed it for devices of other pods, 100 ms: kubelet's
goroutine for lists may be later than the one for answers, and kubelet would give the next pod a GPU of that group.
Measured with a client of another gRPC (grpcio, a thread for each) on 2 cores with a load of 21 to 28: with the answer
right behind the list 1,843 of 8,000 lists were handled after it, by at most 19.4 ms (p99.9 11 ms); 50 ms later 3 of
800; 100 ms later none of 1,000, the latest 37 ms before it. A pod's start takes seconds, and a grant in a group of its
own waits for nothing."""


class DevicePluginService(TrioService, pb.DevicePluginBase):
    """Serves one resource's device lists and answers kubelet's calls about it."""

    def __init__(
        self,
        resource: ResourceName,
        device_lists: LatestReader[DeviceList],
        caller: Caller,
        *,
        pre_start: bool,
    ) -> None:
        self._resource = resource
        self._device_lists = device_lists
        self._caller = caller
        self._pre_start = pre_start
        self._messages = ListMessages()
        self._sent = _Sent()

    async def get_device_plugin_options(self, message: pb.Empty) -> pb.DevicePluginOptions:
        return options(pre_start=self._pre_start)

    async def list_and_watch(self, message: pb.Empty) -> AsyncIterator[pb.ListAndWatchResponse]:
        sent: pb.ListAndWatchResponse | None = None
        device_lists = self._device_lists.subscribe()
        async with self._caller.stream(self._resource):
            with self._sent.stream() as stream:
                async for device_list in device_lists:
                    # Kubelet rewrites its ledger's file at each device list.
                    response = self._messages.of(device_list)
                    if response is not sent:
                        sent = response
                        yield response
                    self._sent.note(stream, device_lists.seen)

    async def allocate(self, message: pb.AllocateRequest) -> pb.AllocateResponse:
        requests = translate.allocate_requests(message)
        answer = await self._caller.allocate(self._resource, requests)
        await self._sent.wait(self._device_lists.version)
        if isinstance(answer, Granted) and answer.lists:
            await trio.sleep(LIST_HANDLED_S)
        return translate.allocate_response(answer)

    async def get_preferred_allocation(
        self, message: pb.PreferredAllocationRequest
    ) -> pb.PreferredAllocationResponse:
        requests = translate.preference_requests(message)
        return translate.preferred_response(await self._caller.prefer(self._resource, requests))

    async def pre_start_container(self, message: pb.PreStartContainerRequest) -> pb.PreStartContainerResponse:
        devices = translate.pre_start_devices(message)
        return translate.pre_start_response(await self._caller.pre_start(self._resource, devices))


def options(*, pre_start: bool) -> pb.DevicePluginOptions:
    """Return the options: kubelet calls GetPreferredAllocation, and (by default) PreStartContainer before each
    container start."""
    return pb.DevicePluginOptions(pre_start_required=pre_start, get_preferred_allocation_available=True)


@dataclass(eq=False, slots=True)
class _Stream:
    """One open ListAndWatch stream."""

    sent: int = -1
    """The version of the last list that has been sent."""
    reads: bool = True
    """True, except from a wait for it that timed out until it has caught up."""


@final
class _Sent:
    """The open streams, with the list that each was sent last."""

    def __init__(self) -> None:
        self._streams: set[_Stream] = set()
        self._changed = trio.Event()

    @contextmanager
    def stream(self) -> Iterator[_Stream]:
        """Yield a stream, as long as it is open."""
        stream = _Stream()
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.remove(stream)
            self._wake()

    def note(self, stream: _Stream, version: int) -> None:
        """Record that this list has been sent on the stream, or equals the one before for kubelet."""
        stream.sent, stream.reads = version, True
        self._wake()

    async def wait(self, version: int) -> None:
        """Wait until that list, or a newer one, has been sent on every stream that reads; at most for LIST_FIRST_S."""
        if not self._late(version):
            return
        with trio.move_on_after(LIST_FIRST_S):
            while self._late(version):
                await self._changed.wait()
        for stream in self._late(version):
            stream.reads = False

    def _late(self, version: int) -> list[_Stream]:
        return [s for s in self._streams if s.reads and s.sent < version]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
