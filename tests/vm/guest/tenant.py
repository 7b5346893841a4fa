"""A process that holds an IOMMU group as a virtual machine does, or as an external process does.

`Tenant` starts and tells it; `python -m tests.vm.guest.tenant` is it: one word of command per line on its standard
input, one line of answer on its standard output. In a container it has a PID namespace and a mount namespace of its
own, with device nodes made there by mknod. Must not import anything of ours but plain helpers: it is an external
process."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn

from tests.support.patience import patient

VFIO_SET_IOMMU: Final = 0x3B66
VFIO_GROUP_SET_CONTAINER: Final = 0x3B68
VFIO_GROUP_GET_DEVICE_FD: Final = 0x3B6A
VFIO_DEVICE_BIND_IOMMUFD: Final = 0x3B76
"""linux/vfio.h: `_IO(';', 100 + n)`."""

VFIO_TYPE1V2_IOMMU: Final = 3

PAUSE_S: Final = 0.0005
"""Between two opens of a loop, so that they last through many polls."""

STOP_TIMEOUT_S: Final = patient(10.0)

DEV_VFIO: Final = "/dev/vfio"

CONTAINER: Final = "/dev/vfio/vfio"
"""VFIO's own container, an address space for DMA; it has nothing to do with those of containerd."""

INTO_CONTAINER: Final = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
"""Of util-linux: the program after it is process 1 of its own PID namespace, and sees mounts of its own."""


@dataclass(slots=True)
class Tenant:
    """The process, seen from the scenario. Killed when its `with` ends, if it still runs."""

    process: subprocess.Popen[str]
    pid: int
    """Its process id outside."""

    @classmethod
    def start(cls, *, contained: bool = False) -> Tenant:
        """Start it, `contained` or not; returns when it answers. Raises RuntimeError if it does not come up."""
        process = subprocess.Popen(
            [*(INTO_CONTAINER if contained else ()), sys.executable, "-S", "-m", "tests.vm.guest.tenant"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        tenant = cls(process, process.pid)
        tenant.pid = int(tenant.tell("hello"))
        if contained:
            tenant.tell("contain")
        return tenant

    def __enter__(self) -> Tenant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def command(self) -> str:
        """Its name, as the kernel has it."""
        return Path(f"/proc/{self.pid}/comm").read_text(encoding="utf-8").strip()

    def open_group(self, node: Path) -> None:
        """Hold the group alone: what `enable` does not show. Raises RuntimeError with the errno's name."""
        self.tell(f"group {node}")

    def open_container(self, node: Path) -> None:
        """Hold the group with an IOMMU container, but no device. Raises RuntimeError with the errno's name."""
        self.tell(f"container {node}")

    def open_device(self, node: Path, address: str) -> None:
        """Hold group, container and device, as QEMU does. Raises RuntimeError with the errno's name."""
        self.tell(f"device {node} {address}")

    def keep_device_alone(self) -> None:
        """Of what `open_device` opened close the group and the container: the kernel keeps both for the device."""
        self.tell("alone")

    def hide(self) -> None:
        """Put what it holds into a message to itself that it does not receive, and close it: no process has it in its
        table of open files then, and the kernel keeps it open."""
        self.tell("hide")

    def fork(self) -> int:
        """A child that holds what it holds; its process id. Not for one in a container."""
        return int(self.tell("fork"))

    def open_cdev(self, node: Path) -> None:
        """Hold the device's own node alone; it is not in use yet. Raises RuntimeError with the errno's name."""
        self.tell(f"cdev {node}")

    def bind_cdev(self, node: Path) -> None:
        """Hold the device's own node, bound to an iommufd, as QEMU does with `-object iommufd`. Raises RuntimeError
        with the errno's name."""
        self.tell(f"bound-cdev {node}")

    def close(self) -> None:
        """Let go of everything, in the order in which QEMU does."""
        self.tell("close")

    def quit(self) -> None:
        """End by itself, with everything still open; returns when the kernel has taken that back."""
        self._say("quit")
        self.process.wait(timeout=STOP_TIMEOUT_S)

    def begin_loop(self, node: Path, times: int) -> None:
        """Open and close the group `times` times, `PAUSE_S` apart; `end_loop` waits for it."""
        self._say(f"loop {times} {node}")

    def begin_device_loop(self, node: Path, address: str, times: int) -> None:
        """The same with container and device."""
        self._say(f"loop {times} {node} {address}")

    def loops(self) -> bool:
        """Whether a loop is still going on."""
        assert self.process.stdout is not None
        return not select.select([self.process.stdout], [], [], 0)[0]

    def end_loop(self) -> tuple[int, int]:
        """(opens that worked, opens that said EBUSY); any other error ends the process. Raises RuntimeError."""
        worked, busy = self._answer().split()
        return int(worked), int(busy)

    def tell(self, line: str) -> str:
        """Say one line and return the answer. Raises RuntimeError if that is an error or none comes."""
        self._say(line)
        return self._answer()

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken back what it held."""
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait(timeout=STOP_TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split(maxsplit=1)
        if not words or words[0] != "ok":
            raise RuntimeError(f"the tenant said {words or 'nothing'}")
        return words[1].strip() if len(words) > 1 else ""


@contextmanager
def closed_on_failure(*tenants: Tenant) -> Iterator[None]:
    """A daemon that hangs at a held device cannot be ended before the device's holder: so a failure is told at once."""
    try:
        yield
    except BaseException:
        for tenant in tenants:
            tenant.kill()
        raise


def main() -> None:
    """The process's own side, until its standard input ends."""
    held: list[int] = []
    for line in sys.stdin:
        try:
            answer = _do(line.split(), held)
        except OSError as error:
            answer = f"error {errno.errorcode.get(error.errno or 0, str(error.errno))}: {error}"
        print(answer, flush=True)


def _do(words: list[str], held: list[int]) -> str:
    match words:
        case ["hello"]:
            # Not getpid: this /proc is the one of outside, and knows us by the number that we have there.
            return f"ok {os.readlink('/proc/self')}"
        case ["contain"]:
            _contain()
        case ["group", node]:
            held.append(os.open(node, os.O_RDWR))
        case ["container", node]:
            _open_container(node, held)
        case ["device", node, address]:
            _open_device(node, address, held)
        case ["alone"]:
            for descriptor in (held.pop(0), held.pop(0)):
                os.close(descriptor)
        case ["hide"]:
            _hide(held)
        case ["fork"]:
            return f"ok {os.fork() or _hold()}"
        case ["cdev", node]:
            held.append(os.open(node, os.O_RDWR))
        case ["bound-cdev", node]:
            _bind_cdev(node, held)
        case ["close"]:
            _close(held)
        case ["quit"]:
            sys.exit()
        case ["loop", times, *what]:
            worked, busy = _loop(int(times), *what)
            return f"ok {worked} {busy}"
        case _:
            return f"error: no such command: {words}"
    return "ok"


def _contain() -> None:
    """In a mount namespace of our own: a /dev/vfio with nodes that mknod made, and a /proc that knows us as 1."""
    numbers = {entry.path: entry.stat().st_rdev for entry in os.scandir(DEV_VFIO) if not entry.is_dir()}
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, target in ((b"tmpfs", DEV_VFIO), (b"proc", "/proc")):
        if libc.mount(kind, target.encode(), kind, 0, None) != 0:
            raise OSError(ctypes.get_errno(), f"mount of {target}")
    for path, number in numbers.items():
        os.mknod(path, 0o600 | stat.S_IFCHR, number)


def _hide(held: list[int]) -> None:
    """In the queue of a socket (man 7 unix, SCM_RIGHTS); the socket's two ends are held instead."""
    ends = socket.socketpair()
    socket.send_fds(ends[0], [b"-"], held)
    _close(held)
    held.extend(end.detach() for end in ends)


def _hold() -> NoReturn:
    """As a child: keep what is open until killed, and nothing of the parent's conversation."""
    os.close(sys.stdin.fileno())
    os.close(sys.stdout.fileno())
    while True:
        signal.pause()


def _open_container(node: str, held: list[int]) -> int:
    """The group's descriptor."""
    container = os.open(CONTAINER, os.O_RDWR)
    held.append(container)
    group = os.open(node, os.O_RDWR)
    held.append(group)
    fcntl.ioctl(group, VFIO_GROUP_SET_CONTAINER, struct.pack("i", container))
    fcntl.ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1V2_IOMMU)
    return group


def _open_device(node: str, address: str, held: list[int]) -> None:
    group = _open_container(node, held)
    # With a mutable buffer the ioctl's own result is returned, which is the descriptor.
    held.append(fcntl.ioctl(group, VFIO_GROUP_GET_DEVICE_FD, bytearray(address.encode() + b"\0")))


def _bind_cdev(node: str, held: list[int]) -> None:
    iommufd = os.open("/dev/iommu", os.O_RDWR)
    held.append(iommufd)
    device = os.open(node, os.O_RDWR)
    held.append(device)
    # struct vfio_device_bind_iommufd: argsz, flags, iommufd, out_devid
    fcntl.ioctl(device, VFIO_DEVICE_BIND_IOMMUFD, bytearray(struct.pack("=IIiI", 16, 0, iommufd, 0)))


def _close(held: list[int]) -> None:
    while held:
        os.close(held.pop())


def _loop(times: int, node: str, address: str | None = None) -> tuple[int, int]:
    worked = busy = 0
    held: list[int] = []
    for _ in range(times):
        try:
            if address is None:
                held.append(os.open(node, os.O_RDWR))
            else:
                _open_device(node, address, held)
            worked += 1
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            busy += 1
        _close(held)
        time.sleep(PAUSE_S)
    return worked, busy


if __name__ == "__main__":
    main()
