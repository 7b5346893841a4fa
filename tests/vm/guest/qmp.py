"""QEMU's monitor (QMP, JSON lines) as the guest reaches it: through a virtio-serial port of its own.

So a scenario plugs and unplugs its own devices between its own steps. Must not be used for anything that a node could
not suffer: it is the hand that pulls the card out, not a way to look inside.
"""

from __future__ import annotations

import json
import os
import select
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support.patience import patient
from tests.vm.machine import PciFunction

ANSWER_TIMEOUT_S: Final = patient(10.0)
"""From a command to its answer. QEMU answers within milliseconds; the guest's own kernel is not asked."""


class QmpError(Exception):
    """QEMU refused a command or did not answer."""


@dataclass(slots=True)
class QmpClient:
    """A connected monitor. Single-threaded; events are kept in the order in which they came."""

    descriptor: int
    events: list[dict[str, Any]] = field(default_factory=list)
    _buffer: bytes = b""

    @classmethod
    def through_port(cls, name: str) -> QmpClient:
        """Open the virtio-serial port `name` and finish QMP's greeting."""
        # Without udevd there are no /dev/virtio-ports/<name> links; the kernel's own names are vportNpM.
        for entry in Path("/sys/class/virtio-ports").iterdir():
            if (entry / "name").exists() and (entry / "name").read_text(encoding="ascii").strip() == name:
                client = cls(os.open(Path("/dev") / entry.name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
                client.command("qmp_capabilities")
                return client
        raise QmpError(f"the guest has no virtio-serial port named {name}")

    def command(self, name: str, **arguments: object) -> Any:
        """Execute one command and return what it answers. Raises QmpError."""
        message = {"execute": name, **({"arguments": arguments} if arguments else {})}
        os.write(self.descriptor, json.dumps(message).encode() + b"\n")
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while (answer := self._next(deadline)) is not None:
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                raise QmpError(f"{name} {arguments}: {answer['error'].get('desc', answer['error'])}")
            self._keep(answer)
        raise QmpError(f"no answer to {name} {arguments} within {ANSWER_TIMEOUT_S:g} s")

    def plug(self, function: PciFunction) -> None:
        """Hot plug: returns when QEMU has plugged it, before the guest's kernel has noticed."""
        properties = dict(item.split("=", 1) for item in function.properties)
        self.command(
            "device_add", driver=function.model, id=function.id, bus=function.port,
            addr=f"0.{function.function}", **properties, **function.backend,
        )  # fmt: skip

    def unplug(self, device_id: str) -> None:
        """Ask for a device to be unplugged: the guest's kernel has to let go, then `wait_unplugged` comes back."""
        self.command("device_del", id=device_id)

    def wait_unplugged(self, device_id: str, *, timeout_s: float) -> None:
        """Wait for QEMU's DEVICE_DELETED. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not any(
            event["event"] == "DEVICE_DELETED" and event["data"].get("device") == device_id
            for event in self.events
        ):
            message = self._next(deadline)
            if message is None:
                raise TimeoutError(f"QEMU did not see {device_id} go within {timeout_s:g} s")
            self._keep(message)
        self.events = [event for event in self.events if event["data"].get("device") != device_id]

    def _keep(self, message: dict[str, Any]) -> None:
        if "event" in message:
            self.events.append({"data": {}, **message})

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """The next message, or None when the deadline has passed."""
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self.descriptor], [], [], left_s)[0]:
                return None
            chunk = os.read(self.descriptor, 65536)
            if not chunk:
                raise QmpError("QEMU closed its monitor")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message
