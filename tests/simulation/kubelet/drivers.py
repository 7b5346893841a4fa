"""The two fake kubelets behind one face: the shipped one, and the stand-in that is made with grpcio. Both on real
sockets, for the same tests (`test_alike.py`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol, final

import trio

from gpuactors_simulation.kubelet.fake import FakeKubelet, open_fake_kubelet
from gpuactors_simulation.kubelet.transport import UnixTransport
from gpuactors_simulation.kubelet.values import KubeletView, Phase
from tests.support.admission_grpcio import UnexpectedAdmissionError, admit
from tests.support.kubelet_grpcio import KubeletStandIn
from tests.support.tiny_plugin import RESOURCE, WAIT_S

Devices = Mapping[str, Mapping[str, str]]
"""Resource → device → health, of the devices that are listed."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """What became of a pod. One that waits for room does not run either."""

    runs: bool
    message: str
    devices: tuple[str, ...] = ()
    """Sorted."""


class Driver(Protocol):
    """What the tests do with a kubelet, and see of it, besides what its sockets and its file say."""

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """It ends as by a crash: its sockets' files may stay."""
        ...

    async def until(self, condition: Callable[[Devices], bool]) -> None:
        """Waits until it holds of the listed devices."""
        ...

    async def until_a_stream_ended(self) -> None:
        """Waits until kubelet has read a ListAndWatch stream to its end, also one that it has forgotten."""
        ...

    async def admit(self, pod: str, size: int, resource: str = RESOURCE) -> Admitted:
        """A pod of one container, until it runs, or is refused."""
        ...

    def end_pod(self, pod: str) -> None:
        """It is deleted, and its container ends at once."""
        ...

    def force_delete(self, pod: str) -> None:
        """It is deleted with a grace of 0, and its container runs on."""
        ...

    def lose_api_server(self) -> None:
        """A kubelet that starts from now on hears of no pod."""
        ...

    def find_api_server(self) -> None: ...

    @property
    def panics(self) -> list[str]:
        """Where kubelet would have ended by a crash."""
        ...


@final
class Shipped:
    """The fake kubelet of `gpuactors_simulation`."""

    def __init__(self, kubelet: FakeKubelet) -> None:
        self._kubelet = kubelet
        self.start = kubelet.start
        self.stop = kubelet.stop
        self.end_pod = kubelet.delete
        self.force_delete = kubelet.force_delete
        self.lose_api_server = kubelet.lose_api_server
        self.find_api_server = kubelet.find_api_server

    async def until(self, condition: Callable[[Devices], bool]) -> None:
        with trio.fail_after(WAIT_S):
            await self._kubelet.until(lambda view: condition(_devices(view)))

    async def until_a_stream_ended(self) -> None:
        with trio.fail_after(WAIT_S):
            # No view changes with it where kubelet has forgotten the plugin.
            while not self._kubelet.streams_ended:  # noqa: ASYNC110
                await trio.sleep(0.005)

    async def admit(self, pod: str, size: int, resource: str = RESOURCE) -> Admitted:
        self._kubelet.submit(pod, {resource: size})
        with trio.fail_after(WAIT_S):
            view = await self._kubelet.until(lambda view: _settled(view, pod))
        found = view.pods[pod]
        if found.phase is not Phase.RUNNING:
            self._kubelet.force_delete(pod)
            return Admitted(False, found.message)
        return Admitted(True, "", tuple(sorted(view.holdings[pod, resource].devices)))

    @property
    def panics(self) -> list[str]:
        return self._kubelet.panics


def _devices(view: KubeletView) -> Devices:
    devices: dict[str, dict[str, str]] = {resource: {} for resource in view.resources}
    for row in view.devices:
        if row.health != "not listed":
            devices[row.resource][row.id] = row.health
    return devices


def _settled(view: KubeletView, name: str) -> bool:
    if not view.running:  # it has panicked
        return True
    pod = view.pods[name]
    return pod.phase in (Phase.RUNNING, Phase.FAILED) or (pod.phase is Phase.PENDING and bool(pod.message))


@final
class Independent:
    """The stand-in. It lives in threads."""

    def __init__(self, kubelet: KubeletStandIn) -> None:
        self._kubelet = kubelet
        self.end_pod = kubelet.end_pod
        self.force_delete = kubelet.force_delete
        self.lose_api_server = kubelet.lose_api_server
        self.find_api_server = kubelet.hear_of_pods

    async def start(self) -> None:
        await trio.to_thread.run_sync(self._kubelet.start)

    async def stop(self) -> None:
        await trio.to_thread.run_sync(partial(self._kubelet.stop, leave_sockets=True))

    async def until(self, condition: Callable[[Devices], bool]) -> None:
        await trio.to_thread.run_sync(self._kubelet.wait_for, condition, WAIT_S)

    async def until_a_stream_ended(self) -> None:
        await self.until(lambda _: bool(self._kubelet.stream_ends(RESOURCE)))

    async def admit(self, pod: str, size: int, resource: str = RESOURCE) -> Admitted:
        with trio.fail_after(WAIT_S):
            try:
                devices = await trio.to_thread.run_sync(
                    admit, self._kubelet, pod, resource, size, abandon_on_cancel=True
                )
            except UnexpectedAdmissionError as error:
                return Admitted(False, str(error))
        return Admitted(True, "", tuple(sorted(devices)))

    @property
    def panics(self) -> list[str]:
        return list(self._kubelet.panics)


@asynccontextmanager
async def _shipped(kubelet_dir: Path, dial_deadline_s: float) -> AsyncIterator[Driver]:
    transport = UnixTransport(kubelet_dir)
    async with open_fake_kubelet(transport, seed=1, dial_deadline_s=dial_deadline_s) as kubelet:
        await kubelet.start()
        yield Shipped(kubelet)


@asynccontextmanager
async def _independent(kubelet_dir: Path, dial_deadline_s: float) -> AsyncIterator[Driver]:
    with KubeletStandIn(kubelet_dir, dial_timeout_s=dial_deadline_s) as kubelet:
        yield Independent(kubelet)


KUBELETS: Final[Mapping[str, Callable[[Path, float], AbstractAsyncContextManager[Driver]]]] = {
    "shipped": _shipped,
    "grpcio": _independent,
}
