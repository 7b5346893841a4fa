"""A node to measure on: a fake tree, a kubelet stand-in in this process (grpcio), and the daemon as its own process.

The daemon runs as on a node (`python -m gpuactors run`, its log going to a file at the default level); only the tree
and the uevent socket are the test rig's. Nothing of it is called directly.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, final

from gpuactors.simulation.host.tree import HostTree, PciSpec
from gpuactors.simulation.host.uevents import Uevent, UeventSender
from tests.support.kubelet_grpcio import HEALTHY, KubeletStandIn
from tests.support.kubelet_seen import Frame, Registration

WAIT_S: Final = 60.0
"""Nothing here takes a second; past this something does not work."""

LOOK_AFTER_S: Final = 1.0
"""How often a wait checks whether the daemon still lives."""

DRIVER: Final = "vfio-pci"
_GPU: Final = ("10de", "2330", "030200")
_NIC: Final = ("8086", "1889", "020000")
"""A virtual function of a network card: what large hosts have thousands of."""


class DidNotWork(Exception):
    """The daemon died or did not do what is to be measured; the text says what and shows its log."""


@final
class Node:
    """`gpus` GPUs on vfio-pci and `others` functions that no selector chooses, each in an IOMMU group of its own.

    Without `uevents` nothing can be sent to the daemon, and two may run: the socket has one owner. `python` is the
    interpreter whose gpuactors runs.
    """

    def __init__(
        self,
        directory: Path,
        *,
        gpus: int,
        others: int = 0,
        uevents: bool = True,
        words: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        self.gpus = tuple(_gpu_address(i) for i in range(gpus))
        self.functions = gpus + others
        self.directory = directory
        self.tree = HostTree(directory / "host")
        for i, address in enumerate(self.gpus):
            self.tree.plug(_spec(address, _GPU, group=i, driver=DRIVER))
        for i in range(others):
            self.tree.plug(_spec(_other_address(i), _NIC, group=gpus + i, driver="iavf"))
        self.kubelet = KubeletStandIn(directory / "kubelet")
        self.kubelet.start()
        self._log = directory / "daemon.log"
        self._uevents = directory / "uevents.sock"
        self.http = directory / "http.sock"
        """Where the daemon's HTTP endpoints are, unless `words` say otherwise."""
        self._hears_uevents = uevents
        self._words = tuple(words)
        self._python = python
        self._sender = UeventSender(self._uevents)
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

    # --- the daemon -----------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        (process,) = self._processes
        return process.pid

    @property
    def resource(self) -> str:
        """The resource of the node's GPUs, as the daemon named it."""
        assert self._resource, "the daemon has not registered yet"
        return self._resource

    def start_daemon(self) -> int:
        """Spawns one, a successor if one runs; returns time.monotonic_ns() from just before. Waits for nothing."""
        assert not (self._processes and self._hears_uevents), "the socket for uevents has an owner already"
        command = [
            self._python,
            "-m",
            "gpuactors",
            "run",
            f"--host-root={self.tree.root}",
            f"--kubelet-dir={self.directory / 'kubelet'}",
            f"--state-dir={self.directory / 'state'}",
            f"--uevents=unix:{self._uevents}" if self._hears_uevents else "--uevents=off",
            # Another installation may be of a version without endpoints.
            *([f"--http-address=unix:{self.http}"] if self._python == sys.executable else []),
            *self._words,
        ]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GPUACTORS_")}
        with self._log.open("ab" if self._processes else "wb") as log:
            began_ns = time.monotonic_ns()
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
                )
            )
        return began_ns

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

    def stop_daemon(self) -> float:
        """SIGTERM to the one that runs longest; returns the seconds until the process had ended."""
        process = self._processes.pop(0)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=WAIT_S)
        took_s = time.monotonic() - began
        if status != 0:
            raise DidNotWork(f"the daemon ended with {status} on SIGTERM\n{self._last_words()}")
        self._wait(lambda: bool(self.kubelet.stream_ends(self.resource)), "the end of its stream")
        return took_s

    # --- what happens on the node ---------------------------------------------------------------------------

    def bind(self, address: str) -> tuple[Uevent, ...]:
        """Binds the tree's function to vfio-pci. The uevents are returned, not sent: the last is `bind pci`."""
        return self.tree.bind(address, DRIVER)

    def plug_model(self, device: str, group: int) -> tuple[str, tuple[Uevent, ...]]:
        """A GPU of another model appears, on vfio-pci at once; its address and the uevents, which are not sent."""
        address = _gpu_address(group)
        return address, self.tree.plug(_spec(address, (_GPU[0], device, _GPU[2]), group=group, driver=DRIVER))

    def send(self, uevents: Iterable[Uevent]) -> int:
        """Sends the datagrams; returns time.monotonic_ns() from just before the first."""
        began_ns = time.monotonic_ns()
        self._sender.send(uevents)
        if self._sender.dropped:
            raise DidNotWork(f"the daemon did not take a uevent at {self._uevents}\n{self._last_words()}")
        return began_ns

    def frame_with(self, address: str, *, after: int) -> Frame:
        """The first frame of the resource, from the one numbered `after` on, that lists `address` healthy."""
        return self._frame(lambda frame: address in _healthy(frame), after, f"a frame with {address}")

    def frame_without(self, address: str, *, after: int) -> Frame:
        """The first frame of the resource, from the one numbered `after` on, that does not list `address`."""
        return self._frame(lambda frame: address not in frame.ids, after, f"a frame without {address}")

    def frame_unhealthy(self, address: str, *, after: int) -> Frame:
        """The first frame of the resource, from the one numbered `after` on, that lists `address` unhealthy."""
        return self._frame(
            lambda frame: address in frame.ids and address not in _healthy(frame),
            after,
            f"a frame with {address} unhealthy",
        )

    def frames_so_far(self) -> int:
        """How many frames of the resource have come."""
        return len(self.kubelet.frames(self.resource))

    def registered_with(self, address: str, *, after: int) -> tuple[Registration, Frame]:
        """The first registration, from the one numbered `after` on, and its first frame, which lists `address`."""

        def frame() -> Frame | None:
            news = self.kubelet.registrations[after:]
            frames = self.kubelet.frames(news[0].resource) if news else ()
            return next((frame for frame in frames if address in _healthy(frame)), None)

        self._wait(lambda: frame() is not None, f"the registration of the model at {address}")
        found = frame()
        assert found is not None
        return self.kubelet.registrations[after], found

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
        ends = [f"daemon {process.pid} ended with {process.poll()}" for process in self._processes]
        alive = ", ".join(end for end in ends if not end.endswith("None")) or "every daemon still runs"
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        return "\n".join([f"{alive}; the end of the log:", *lines])


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
