"""A process that holds an IOMMU group as a virtual machine does, or as a stranger does.

`Tenant` starts and tells it; `python -m tests.vm.guest.tenant` is it: one word of command per line on its standard
input, one line of answer on its standard output. Must not import anything of ours but plain helpers: it is a stranger.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

VFIO_SET_IOMMU: Final = 0x3B66
VFIO_GROUP_SET_CONTAINER: Final = 0x3B68
VFIO_GROUP_GET_DEVICE_FD: Final = 0x3B6A
"""linux/vfio.h: `_IO(';', 100 + n)`."""

VFIO_TYPE1V2_IOMMU: Final = 3

PAUSE_S: Final = 0.001
"""Between two opens of `loop`, so that 2,000 of them last through many polls."""

STOP_TIMEOUT_S: Final = 10.0


@dataclass(slots=True)
class Tenant:
    """The process, seen from the scenario. Killed when its `with` ends, if it still runs."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls) -> Tenant:
        """Start it; returns when it answers. Raises RuntimeError if it does not come up."""
        process = subprocess.Popen(
            [sys.executable, "-S", "-m", "tests.vm.guest.tenant"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        tenant = cls(process)
        tenant.tell("hello")
        return tenant

    def __enter__(self) -> Tenant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def command(self) -> str:
        """Its name, as the kernel has it."""
        return Path(f"/proc/{self.pid}/comm").read_text(encoding="utf-8").strip()

    def open_group(self, node: Path) -> None:
        """Hold the group alone: what `enable` does not show. Raises RuntimeError with the errno's name."""
        self.tell(f"group {node}")

    def open_device(self, node: Path, address: str) -> None:
        """Hold group, container and device, as QEMU does. Raises RuntimeError with the errno's name."""
        self.tell(f"device {node} {address}")

    def close(self) -> None:
        """Let go of everything, in the order in which QEMU does."""
        self.tell("close")

    def begin_loop(self, node: Path, times: int) -> None:
        """Open and close the group `times` times, `PAUSE_S` apart; `end_loop` waits for it."""
        self._say(f"loop {node} {times}")

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
        self.process.kill()
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
            pass
        case ["group", node]:
            held.append(os.open(node, os.O_RDWR))
        case ["device", node, address]:
            _open_device(node, address, held)
        case ["close"]:
            while held:
                os.close(held.pop())
        case ["loop", node, times]:
            worked, busy = _loop(node, int(times))
            return f"ok {worked} {busy}"
        case _:
            return f"error: no such command: {words}"
    return "ok"


def _open_device(node: str, address: str, held: list[int]) -> None:
    container = os.open("/dev/vfio/vfio", os.O_RDWR)
    held.append(container)
    group = os.open(node, os.O_RDWR)
    held.append(group)
    fcntl.ioctl(group, VFIO_GROUP_SET_CONTAINER, struct.pack("i", container))
    fcntl.ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1V2_IOMMU)
    # With a mutable buffer the ioctl's own result is returned, which is the descriptor.
    held.append(fcntl.ioctl(group, VFIO_GROUP_GET_DEVICE_FD, bytearray(address.encode() + b"\0")))


def _loop(node: str, times: int) -> tuple[int, int]:
    worked = busy = 0
    for _ in range(times):
        try:
            os.close(os.open(node, os.O_RDWR))
            worked += 1
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            busy += 1
        time.sleep(PAUSE_S)
    return worked, busy


if __name__ == "__main__":
    main()
