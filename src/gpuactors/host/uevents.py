"""Uevents from the kernel, or from a test rig in the kernel's format, as hints.

A hint only names what to inspect. Everything in it comes from the message, as the sysfs directory may be gone by the
time it is read. Must not read sysfs, must not raise for a malformed message.

pyudev opens the kernel's socket and sizes its buffer (libudev asks for 128 MiB and gets 2 × net.core.rmem_max without
CAP_NET_ADMIN). The datagrams are received here, not by `Monitor.poll()`: after an overflow that raises for ever (pyudev
#194), and a pyudev device reads sysfs, which is not allowed here. pyudev's `filter_by` is not used: its filter in the
kernel reads udevd's message header and lets every message of the kernel pass (libudev, udev_monitor_filter_update), so
nothing is gained over filtering here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, final

import pyudev
import trio

from gpuactors import limits
from gpuactors.core.values.mediated import is_mediated_key
from gpuactors.core.values.model import DeviceKey, PciAddress, is_pci_address
from gpuactors.host.faults import raise_if_short
from gpuactors.ports.errors import HostError, UeventsOverflowError
from gpuactors.ports.node import Hint, OpenUevents, UeventSource
from gpuactors.process.logger import get_logger

UEVENTS_AT_ONCE: Final = 256
"""The number of uevent messages taken from the socket before other tasks run: the inbox's size, far above one GPU's
three or four."""

_log = get_logger(__name__)

SUBSYSTEMS: Final = frozenset({"pci", "mdev", "vfio", "vfio-dev", "egm"})
ACTIONS: Final = frozenset({"add", "remove", "bind", "unbind", "change"})

_DATAGRAM_BYTES: Final = 16 * 1024
"""A uevent is at most 2,048 bytes of properties (UEVENT_BUFFER_SIZE, include/linux/kobject.h) and one path."""

_NETWORK_NAMESPACE: Final = "/proc/self/ns/net"
_NS_GET_USERNS: Final = 0xB701
"""The ioctl for a descriptor of the user namespace that a namespace belongs to (linux/nsfs.h, `_IO(0xb7, 1)`)."""

_INITIAL_USER_NAMESPACE: Final = 0xEFFFFFFD
"""Its inode: PROC_USER_INIT_INO, include/linux/proc_ns.h."""

_ERROR_EVENTS: Final = frozenset({"BEGIN_RECOVERY", "SUCCESSFUL_RECOVERY", "FAILED_RECOVERY"})
"""The states of an error recovery (drivers/pci/pci-driver.c, pci_uevent_ers): no facts, as FAILED_RECOVERY names the
bridge on most kernels, and no uevent reports that the function was reset."""

_KERNEL_PORT: Final = 0
"""The netlink port of the kernel itself (man 7 netlink); any other sender is a process."""


def parse_datagram(datagram: bytes) -> Mapping[str, str] | None:
    """Return the properties of a message in the kernel's format; None for anything else.

    `action@devpath`, then `KEY=value`, each ended by a NUL (lib/kobject_uevent.c, alloc_uevent_skb). The heading must
    agree with ACTION and DEVPATH.
    """
    heading, *lines = datagram.decode("utf-8", errors="replace").split("\0")
    pairs = (line.partition("=") for line in lines if line)
    properties = {key: value for key, equals, value in pairs if equals}
    if heading != f"{properties.get('ACTION')}@{properties.get('DEVPATH')}":
        return None
    return properties


def hint_of(properties: Mapping[str, str]) -> Hint | None:
    """Return the target of a uevent; None if it is not relevant or names nothing that can be inspected."""
    action, subsystem = properties.get("ACTION", ""), properties.get("SUBSYSTEM", "")
    if subsystem not in SUBSYSTEMS or action not in ACTIONS:
        return None
    parts = properties.get("DEVPATH", "").split("/")
    cause = f"{action} {subsystem}"
    match subsystem:
        case "pci":
            if (error := properties.get("ERROR_EVENT")) in _ERROR_EVENTS:
                cause = f"{cause} {error}"
            address = _address(properties.get("PCI_SLOT_NAME") or parts[-1])
            return None if address is None else Hint(address, None, cause)
        case "mdev":
            # …/0000:23:00.0/<uuid>
            return _mediated(parts[-1], cause)
        case "egm":
            return Hint(None, None, cause, egm=True)
        case "vfio-dev":
            # …/0000:23:00.0/vfio-dev/vfio0; a mediated device has a UUID in the place of the address.
            device = parts[-3] if len(parts) >= 3 else ""
            address = _address(device)
            return _mediated(device, cause) if address is None else Hint(address, None, cause)
        case _:
            # /devices/virtual/vfio/51; without an IOMMU the name is noiommu-0, which is no group to pass through.
            name = properties.get("DEVNAME", "").removeprefix("/dev/").removeprefix("vfio/") or parts[-1]
            return Hint(None, int(name), cause) if _is_group(name) else None


def _is_group(name: str) -> bool:
    # Group numbers are non-negative C ints (drivers/iommu/iommu.c); a longer one is garbage.
    return name.isascii() and name.isdigit() and len(name) <= 10


def _mediated(name: str, cause: str) -> Hint | None:
    return Hint(None, None, cause, DeviceKey(name)) if is_mediated_key(name) else None


def _address(text: str) -> PciAddress | None:
    return PciAddress(text) if is_pci_address(text) else None


@final
class DatagramSource:
    """`ports.node.UeventSource` on an open, non-blocking datagram socket. `from_kernel_only` drops what processes
    sent."""

    def __init__(self, receiver: socket.socket, *, from_kernel_only: bool) -> None:
        self._socket = receiver
        self._from_kernel_only = from_kernel_only
        self._overflowed = False

    async def receive(self) -> Sequence[Hint]:
        """Implement `ports.node.UeventSource.receive`; take at most `limits.UEVENTS_AT_ONCE` messages at a time.

        An overflow is raised when the queue has been emptied, not when it is noticed: until then the kernel drops
        further messages silently (net/netlink/af_netlink.c, NETLINK_S_CONGESTED), and the scan that follows must begin
        after the last such loss. The hints from before it are dropped: the scan reads everything.
        """
        if self._overflowed:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.wait_readable(self._socket)
        hints: list[Hint] = []
        for _ in range(UEVENTS_AT_ONCE):
            try:
                datagram, _, flags, sender = self._socket.recvmsg(_DATAGRAM_BYTES)
            except BlockingIOError:
                if self._overflowed:
                    self._overflowed = False
                    raise UeventsOverflowError(
                        "the kernel dropped uevents: the socket's buffer was full (ENOBUFS)"
                    ) from None
                break
            except OSError as error:
                # Reported once, and before the messages that are still queued.
                if error.errno != errno.ENOBUFS:
                    raise
                self._overflowed = True
                continue
            hint = None if flags & socket.MSG_TRUNC else self._hint(datagram, sender)
            if hint is not None:
                hints.append(hint)
        return [] if self._overflowed else hints

    def _hint(self, datagram: bytes, sender: Any) -> Hint | None:
        if self._from_kernel_only and sender[0] != _KERNEL_PORT:
            _log.debug("uevent.ignored", reason="sent by a process, not by the kernel", port=sender[0])
            return None
        properties = parse_datagram(datagram)
        if properties is None:
            _log.debug("uevent.ignored", reason="not in the kernel's format", start=repr(datagram[:64]))
            return None
        hint = hint_of(properties)
        if hint is None and properties.get("SUBSYSTEM") in SUBSYSTEMS:
            _log.debug("uevent.ignored", reason="names no device and no group", devpath=properties["DEVPATH"])
        return hint


def open_uevents(setting: str) -> OpenUevents | None:
    """Return how to open the source that `--uevents` names: `kernel` or `unix:PATH`; None for `off`.

    Raises `ValueError` for anything else.
    """
    kind, _, path = setting.partition(":")
    match kind, path:
        case "kernel", "":
            return kernel_uevents
        case "off", "":
            return None
        case "unix", path if path:
            return lambda: unix_uevents(Path(path))
        case _:
            raise ValueError(f"uevents = {setting!r} is none of kernel, off and unix:PATH")


@asynccontextmanager
async def kernel_uevents() -> AsyncIterator[UeventSource]:
    """Yield the kernel's own uevents (netlink group `kernel`), which a pod's network namespace receives as well.

    Raises `HostError` if the kernel refuses the socket, or would send nothing there.
    """
    if _is_deaf():
        raise HostError(
            "the kernel's uevents are not sent to the network namespace of a user namespace: run gpuactors without one "
            "(in a pod: without hostUsers: false)"
        )
    try:
        monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
        monitor.start()
        receiver = socket.socket(fileno=os.dup(monitor.fileno()))
    except (OSError, ImportError) as error:
        if isinstance(error, OSError):
            raise_if_short(error, "the kernel's netlink socket for uevents")
        raise HostError(
            f"the kernel's uevents cannot be received ({error}): libudev must be installed and netlink sockets allowed "
            "(seccomp, address families of the service manager); with --uevents off only the periodic scan is used"
        ) from error
    # The monitor is kept alive by this frame: it owns the socket that `receiver` is a second descriptor of.
    with receiver:
        receiver.setblocking(False)
        yield DatagramSource(receiver, from_kernel_only=True)
    del monitor


def _is_deaf() -> bool:
    """Return whether our network namespace belongs to a user namespace: then the socket is given, and nothing is ever
    sent to it (lib/kobject_uevent.c, uevent_net_init). Where the owner is not shown it is an ancestor of this process's
    namespace, and may be the initial one."""
    try:
        namespace = os.open(_NETWORK_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
    except OSError:
        return False
    finally:
        os.close(namespace)
    try:
        return os.fstat(owner).st_ino != _INITIAL_USER_NAMESPACE
    finally:
        os.close(owner)


@asynccontextmanager
async def unix_uevents(path: Path) -> AsyncIterator[UeventSource]:
    """Uevents from a test rig: a datagram socket that is made at `path` and removed at the end.

    An overflow cannot be seen here: when the queue is full (net.unix.max_dgram_qlen, 10 by default) a unix datagram
    sender waits or gets EAGAIN, and the receiver is not notified; a rig has to wait for room. Raises `HostError` if the
    socket cannot be made.
    """
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as receiver,
        _bound(receiver, path),
    ):
        yield DatagramSource(receiver, from_kernel_only=False)


@contextmanager
def _bound(receiver: socket.socket, path: Path) -> Iterator[None]:
    """Bind at `path`, replacing a stale socket; at the end remove the file if it is still this one."""
    length = len(os.fsencode(path))
    if length > limits.SOCKET_PATH_MAX_BYTES:
        raise HostError(
            f"the uevents socket {path} has a path of {length} bytes, and the kernel takes at most "
            f"{limits.SOCKET_PATH_MAX_BYTES}: choose a shorter path"
        )
    try:
        _remove_stale(path)
        receiver.bind(str(path))
        own_file = os.lstat(path)
    except OSError as error:
        raise_if_short(error, str(path))
        raise HostError(
            f"the uevents socket {path} cannot be made ({error.strerror}): its directory must exist and be writable"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            if os.path.samestat(os.lstat(path), own_file):
                os.unlink(path)


def _remove_stale(path: Path) -> None:
    """Remove a socket file that no process receives on. Raises `HostError` for anything else that is in the way."""
    try:
        existing = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(existing.st_mode):
        raise HostError(f"{path} is not a socket: remove it, or choose another path for the uevents socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise HostError(
        f"another process receives on {path}: stop it, or choose another path for the uevents socket"
    )
