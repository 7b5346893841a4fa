"""A node to measure on: a fake tree, a kubelet stand-in in this process (grpcio), and one party as its own process.

The daemon runs as in its pod (`parties.daemon`), its log going to a file; only the tree and the uevent socket are the
test rig's. Nothing of it is called directly.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, final

import trio

from gpuactors_simulation.host.tree import HostTree, PciSpec
from gpuactors_simulation.host.uevents import Uevent, UeventSender
from tests.bench.parties import Party, Place
from tests.support.kubelet_grpcio import HEALTHY, KubeletStandIn
from tests.support.kubelet_seen import Frame, Registration

WAIT_S: Final = 60.0
"""Nothing here takes a second; past this something does not work."""

LOOK_AFTER_S: Final = 1.0
"""How often a wait checks whether the process still lives."""

MEMORY: Final = Path("/dev/shm")
MEMORY_FREE_MIN: Final = 2 << 30
"""Bytes: a function is some twenty small files, and there may be 8,192 at once."""

DRIVER: Final = "vfio-pci"
_GPU: Final = ("10de", "2330", "030200")
_NIC: Final = ("8086", "1889", "020000")
"""A virtual function of a network card: what large hosts have thousands of."""


class DidNotWork(Exception):
    """The process died or did not do what is to be measured; the text says what and shows its log."""


def gpu_addresses(gpus: int) -> tuple[str, ...]:
    """The addresses of the GPUs of `plugged`."""
    return tuple(_gpu_address(i) for i in range(gpus))


def plugged(gpus: int, others: int = 0) -> HostTree:
    """A host with `gpus` GPUs on vfio-pci and `others` functions that no selector chooses, each in its own group.

    In memory, as sysfs is, where there is room; `discard` removes it."""
    is_roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_FREE_MIN
    tree = HostTree(Path(tempfile.mkdtemp(prefix="bench-", dir=MEMORY if is_roomy else None)))
    for i, address in enumerate(gpu_addresses(gpus)):
        tree.plug(_spec(address, _GPU, group=i, driver=DRIVER))
    for i in range(others):
        tree.plug(_spec(_other_address(i), _NIC, group=gpus + i, driver="iavf"))
    return tree


def discard(tree: HostTree) -> None:
    """Removes what `plugged` made."""
    shutil.rmtree(tree.root)


@final
class Node:
    """Has the GPUs of a tree, which is made unless it is given; `addresses` are theirs if it is not by `plugged`.

    Without `uevents` nothing can be sent to the party, and two may run: the socket has one owner. `words` follow those
    of the party's own command.
    """

    def __init__(
        self,
        directory: Path,
        party: Party,
        *,
        gpus: int,
        tree: HostTree | None = None,
        addresses: Sequence[str] | None = None,
        uevents: bool = True,
        words: Sequence[str] = (),
    ) -> None:
        self.party = party
        self.gpus = gpu_addresses(gpus) if addresses is None else tuple(addresses)
        self.directory = directory
        self._owned = tree is None
        self.tree = plugged(gpus) if tree is None else tree
        self.place = Place(
            host=self.tree.root,
            kubelet=directory / "kubelet",
            state=directory / "state",
            http=directory / "http.sock",
            uevents=directory / "uevents.sock" if uevents else None,
        )
        self.kubelet = KubeletStandIn(self.place.kubelet)
        self.kubelet.start()
        self.log = directory / "log"
        self._words = tuple(words)
        self._sender = UeventSender(directory / "uevents.sock")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._resource = ""

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._sender.close()
        self.kubelet.stop()
        if self._owned:
            discard(self.tree)

    # --- the process ----------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The party's process id."""
        (process,) = self._processes
        return process.pid

    @property
    def resource(self) -> str:
        """The resource of the node's GPUs, as the party named it."""
        assert self._resource, "nobody has registered yet"
        return self._resource

    @property
    def plugin_socket(self) -> Path:
        """Where the party serves the device plugin API."""
        return self.place.kubelet / "device-plugins" / self.kubelet.registrations[-1].endpoint

    def start(self, *before: str) -> int:
        """Spawns the party's process, a successor if one runs; time.monotonic_ns() from just before. Waits for nothing.

        `before`: words before those of the party's command, for the interpreter.
        """
        assert not (self._processes and self.place.uevents), "the socket for uevents has an owner already"
        command = (self.party.python, *before, *self.party.command(self.place), *self._words)
        with self.log.open("ab" if self._processes else "wb") as log:
            began_ns = time.monotonic_ns()
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.party.environment(),
                )
            )
        return began_ns

    def started(self) -> tuple[Registration, Frame]:
        """As `start` and `settle`, for whom the time does not matter."""
        known = len(self.kubelet.registrations)
        self.start()
        return self.settle(known)

    def settle(self, registrations: int = 0) -> tuple[Registration, Frame]:
        """Waits for the registration after the first `registrations` and for its first frame with all GPUs healthy."""

        def found() -> tuple[Registration, Frame] | None:
            for registration in self.kubelet.registrations[registrations:]:
                for frame in self.kubelet.frames(registration.resource):
                    if frame.client == registration.client and _healthy(frame) == set(self.gpus):
                        return registration, frame
            return None

        self._wait(lambda: found() is not None, "the first frame with every GPU")
        first = found()
        assert first is not None
        self._resource = first[0].resource
        return first

    def stop(self) -> float:
        """SIGTERM to the one that runs longest; returns the seconds until the process had ended."""
        process = self._processes.pop(0)
        ended = len(self.kubelet.stream_ends(self.resource))
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=WAIT_S)
        took_s = time.monotonic() - began
        if status != 0:
            raise DidNotWork(f"{self.party.name} ended with {status} on SIGTERM\n{self._last_words()}")
        if not self._processes:
            self._wait(lambda: len(self.kubelet.stream_ends(self.resource)) > ended, "the end of its stream")
        return took_s

    # --- what happens on the node ---------------------------------------------------------------------------

    def bind(self, address: str) -> tuple[Uevent, ...]:
        """Binds the tree's function to vfio-pci. The uevents are returned, not sent: the last is `bind pci`."""
        return self.tree.bind(address, DRIVER)

    def send(self, uevents: Iterable[Uevent]) -> int:
        """Sends the datagrams; returns time.monotonic_ns() from just before the first."""
        began_ns = time.monotonic_ns()
        self._sender.send(uevents)
        if self._sender.dropped:
            raise DidNotWork(f"{self.party.name} did not take a uevent\n{self._last_words()}")
        return began_ns

    def send_patiently(self, uevents: Iterable[Uevent]) -> None:
        """Sends the datagrams as fast as they are taken."""

        async def send() -> None:
            with trio.fail_after(WAIT_S):
                await self._sender.send_all(uevents)

        trio.run(send)
        if self._sender.dropped:
            raise DidNotWork(f"{self.party.name} did not take a uevent\n{self._last_words()}")

    def frame_with(self, address: str, *, after: int) -> Frame:
        """The first frame of the resource, from the one numbered `after` on, that lists `address` healthy."""
        return self._frame(lambda frame: address in _healthy(frame), after, f"a frame with {address}")

    def frame_without(self, address: str, *, after: int) -> Frame:
        """The first frame of the resource, from the one numbered `after` on, that does not list `address`."""
        return self._frame(lambda frame: address not in frame.ids, after, f"a frame without {address}")

    def frames_so_far(self) -> int:
        """How many frames of the resource have come."""
        return len(self.kubelet.frames(self.resource))

    def _frame(self, wanted: Callable[[Frame], bool], after: int, what: str) -> Frame:
        def found() -> Frame | None:
            return next((f for f in self.kubelet.frames(self.resource)[after:] if wanted(f)), None)

        self._wait(lambda: found() is not None, what)
        frame = found()
        assert frame is not None
        return frame

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Raises `DidNotWork` when it takes too long, and at once (more or less) when the daemon has died."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                self.kubelet.wait_for(lambda _: condition(), LOOK_AFTER_S, what)
                return
            except TimeoutError as error:
                died = any(process.poll() is not None for process in self._processes)
                if died or time.monotonic() > deadline:
                    raise DidNotWork(f"{error}\n{self._last_words()}") from error

    def _last_words(self) -> str:
        ends = [f"process {process.pid} ended with {process.poll()}" for process in self._processes]
        alive = ", ".join(end for end in ends if not end.endswith("None")) or "it still runs"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        return "\n".join([f"{self.party.name}: {alive}; the end of the log:", *lines])


def _healthy(frame: Frame) -> set[str]:
    return {device.id for device in frame.devices if device.health == HEALTHY}


def _gpu_address(i: int) -> str:
    return f"{i // 256:04x}:{i % 256:02x}:00.0"


def _other_address(i: int) -> str:
    # Domains from 0x10 on, eight functions to a device: no address of a GPU comes near.
    return f"{0x10 + i // 2048:04x}:{i // 8 % 256:02x}:00.{i % 8}"


def _spec(address: str, identity: tuple[str, str, str], *, group: int, driver: str) -> PciSpec:
    vendor, device, class_code = identity
    return PciSpec(
        address,
        vendor,
        device,
        class_code,
        group,
        numa_node=0,
        pcie_root=f"pci{address[:4]}:00",
        driver=driver,
    )
