"""Uevents: the parser, the three sources, overflow, and everything malformed."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pyudev
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from gpuactors.core.values.model import PciAddress
from gpuactors.host import uevents
from gpuactors.host.uevents import (
    UEVENTS_AT_ONCE,
    DatagramSource,
    hint_of,
    kernel_uevents,
    open_uevents,
    parse_datagram,
    unix_uevents,
)
from gpuactors.ports.errors import HostError, UeventsOverflowError
from gpuactors.ports.node import Hint
from gpuactors_simulation.host.tree import HostTree, PciSpec
from gpuactors_simulation.host.uevents import Uevent, UeventSender
from tests.support.mdev_files import UUID
from tests.support.patience import patient

PATIENCE_S = patient(10.0)
GPU = PciAddress("0000:23:00.0")
SPEC = PciSpec(GPU, "10de", "2330", "030200", 51, driver="vfio-pci", bridges=("0000:20:01.0",))
BIND = (
    b"bind@/devices/pci0000:20/0000:23:00.0\0ACTION=bind\0DEVPATH=/devices/pci0000:20/0000:23:00.0\0"
    b"SUBSYSTEM=pci\0DRIVER=vfio-pci\0PCI_SLOT_NAME=0000:23:00.0\0SEQNUM=7\0"
)


def hint(datagram: bytes) -> Hint | None:
    properties = parse_datagram(datagram)
    return None if properties is None else hint_of(properties)


def datagram(action: str, devpath: str, subsystem: str, **properties: str) -> bytes:
    return Uevent(action, devpath, subsystem, tuple(properties.items())).encode()


# --- the parser -------------------------------------------------------------------------------------------------


def test_a_life_in_uevents_points_at_the_function_and_its_group(tmp_path: Path) -> None:
    tree = HostTree(tmp_path, cdev=True)
    life = (*tree.plug(SPEC), *tree.unplug(GPU))
    assert [hint(uevent.encode()) for uevent in life] == [
        Hint(GPU, None, "add pci"),
        Hint(None, 51, "add vfio"),
        Hint(GPU, None, "add vfio-dev"),
        Hint(GPU, None, "bind pci"),
        Hint(GPU, None, "remove vfio-dev"),
        Hint(None, 51, "remove vfio"),
        Hint(GPU, None, "unbind pci"),
        Hint(GPU, None, "remove pci"),
    ]


def test_all_properties_of_a_uevent_are_parsed(tmp_path: Path) -> None:
    for uevent in HostTree(tmp_path, cdev=True).plug(SPEC):
        assert parse_datagram(uevent.encode()) == {
            "ACTION": uevent.action,
            "DEVPATH": uevent.devpath,
            "SUBSYSTEM": uevent.subsystem,
            **dict(uevent.properties),
        }


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        # Without the optional properties, from DEVPATH alone.
        (datagram("remove", f"/devices/pci0000:20/{GPU}", "pci"), Hint(GPU, None, "remove pci")),
        (datagram("add", "/devices/virtual/vfio/51", "vfio"), Hint(None, 51, "add vfio")),
        (datagram("add", "/x/51", "vfio", DEVNAME="/dev/vfio/52"), Hint(None, 52, "add vfio")),
        (datagram("change", f"/devices/pci0000:20/{GPU}", "pci"), Hint(GPU, None, "change pci")),
        (
            datagram("change", f"/devices/pci0000:20/{GPU}", "pci", ERROR_EVENT="BEGIN_RECOVERY"),
            Hint(GPU, None, "change pci BEGIN_RECOVERY"),
        ),
        (
            datagram("change", f"/devices/pci0000:20/{GPU}", "pci", ERROR_EVENT="nonsense"),
            Hint(GPU, None, "change pci"),
        ),
        # Not ours, or without an address.
        (datagram("add", "/devices/virtual/net/eth0", "net"), None),
        (datagram("online", f"/devices/pci0000:20/{GPU}", "pci"), None),
        (datagram("add", "/devices/pci0000:20", "pci"), None),
        (datagram("add", f"/d/{GPU}", "pci", PCI_SLOT_NAME="nonsense"), None),
        (datagram("add", "/devices/virtual/vfio/noiommu-0", "vfio", DEVNAME="vfio/noiommu-0"), None),
        (datagram("add", "/devices/virtual/vfio/vfio", "vfio"), None),
        (datagram("add", "/devices/virtual/vfio/x", "vfio", DEVNAME="vfio/٣"), None),
        (datagram("add", "/devices/virtual/vfio/x", "vfio", DEVNAME="vfio/" + "9" * 5000), None),
        (datagram("add", "/d/no-uuid/vfio-dev/vfio3", "vfio-dev"), None),
        (datagram("add", "/devices/virtual/mtty/mtty/no-uuid", "mdev"), None),
        (datagram("add", "vfio3", "vfio-dev"), None),
        (datagram("add", "/devices/virtual/egm/egm4", "egm"), Hint(None, None, "add egm", egm=True)),
        (datagram("remove", "/devices/virtual/egm/egm4", "egm"), Hint(None, None, "remove egm", egm=True)),
    ],
)
def test_what_a_uevent_points_at(message: bytes, expected: Hint | None) -> None:
    assert hint(message) == expected


def test_a_life_of_a_mediated_device_in_uevents_points_at_it_and_its_group() -> None:
    """In the order of drivers/vfio/mdev/mdev_core.c and drivers/vfio, on Linux 6.12."""
    device = f"/devices/pci0000:20/{GPU}/{UUID}"
    life = (
        datagram("change", f"/devices/pci0000:20/{GPU}", "pci", MDEV_STATE="registered"),
        datagram("add", device, "mdev"),
        datagram("add", "/devices/virtual/vfio/70", "vfio"),
        datagram("add", f"{device}/vfio-dev/vfio3", "vfio-dev"),
        datagram("bind", device, "mdev", DRIVER="nvidia-vgpu-vfio"),
        datagram("remove", f"{device}/vfio-dev/vfio3", "vfio-dev"),
        datagram("remove", "/devices/virtual/vfio/70", "vfio"),
        datagram("unbind", device, "mdev"),
        datagram("remove", device, "mdev"),
        datagram("change", f"/devices/pci0000:20/{GPU}", "pci", MDEV_STATE="unregistered"),
    )
    assert [hint(message) for message in life] == [
        Hint(GPU, None, "change pci"),
        Hint(None, None, "add mdev", UUID),
        Hint(None, 70, "add vfio"),
        Hint(None, None, "add vfio-dev", UUID),
        Hint(None, None, "bind mdev", UUID),
        Hint(None, None, "remove vfio-dev", UUID),
        Hint(None, 70, "remove vfio"),
        Hint(None, None, "unbind mdev", UUID),
        Hint(None, None, "remove mdev", UUID),
        Hint(GPU, None, "change pci"),
    ]


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0",
        b"libudev\0\xfe\xed\xca\xfe" + b"\0" * 28 + b"ACTION=bind\0",
        BIND.replace(b"bind@", b"add@"),
        BIND.replace(b"DEVPATH=", b"DEVPATH"),
        BIND.replace(b"\0", b"\n"),
        b"add@",
        b"None@None\0",
    ],
)
def test_what_is_not_the_kernels_format_is_no_hint(message: bytes) -> None:
    assert hint(message) is None


@given(st.binary() | st.binary().map(lambda tail: BIND + tail) | st.binary().map(lambda head: head + BIND))
def test_no_bytes_make_the_parser_fail(message: bytes) -> None:
    hint(message)


@given(
    st.tuples(st.integers(0, len(BIND)), st.integers(0, len(BIND)), st.binary(max_size=8)).map(
        lambda cut: BIND[: cut[0]] + cut[2] + BIND[cut[1] :]
    )
)
def test_no_damage_makes_the_parser_fail_or_point_elsewhere(message: bytes) -> None:
    found = hint(message)
    assert found is None or found.iommu_group is None


@given(
    st.dictionaries(
        st.sampled_from(["ACTION", "DEVPATH", "SUBSYSTEM", "PCI_SLOT_NAME", "DEVNAME"]),
        st.sampled_from(["add", "bind", "pci", "vfio", "vfio-dev", "/", "//vfio-dev/", "vfio/", GPU])
        | st.text(),
    )
)
def test_no_properties_make_the_hint_fail(properties: dict[str, str]) -> None:
    found = hint_of(properties)
    assert found is None or (found.address is None) != (found.iommu_group is None)


# --- which source -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["", "kernel:x", "off:x", "unix", "unix:", "udev", "Kernel"])
def test_an_unknown_source_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match="kernel, off and unix:PATH"):
        open_uevents(setting)


def test_off_is_no_source() -> None:
    assert open_uevents("off") is None


# --- a unix socket ----------------------------------------------------------------------------------------------


async def gather(source: Any, count: int) -> list[Hint]:
    """Receives until `count` hints are there."""
    hints: list[Hint] = []
    with trio.fail_after(PATIENCE_S):
        while len(hints) < count:
            hints += await source.receive()
    return hints


@pytest.mark.trio
async def test_a_rigs_uevents_arrive_in_order(tmp_path: Path) -> None:
    path = tmp_path / "uevents"
    tree = HostTree(tmp_path / "host")
    opened = open_uevents(f"unix:{path}")
    assert opened is not None
    async with opened() as source:
        with UeventSender(path) as sender:
            uevents = tree.plug(SPEC)
            assert sender.send(uevents) == len(uevents) == 4
            assert await gather(source, 4) == [hint(uevent.encode()) for uevent in uevents]
    assert not path.exists()


@pytest.mark.trio
async def test_a_burst_is_larger_than_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "uevents"
    burst = HostTree(tmp_path / "host").plug(SPEC) * 100
    async with unix_uevents(path) as source:
        with UeventSender(path) as sender:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender.send_all, burst)
                assert len(await gather(source, len(burst))) == 400
            assert (sender.sent, sender.dropped) == (400, 0)


@pytest.mark.trio
async def test_garbage_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "uevents"
    async with unix_uevents(path) as source:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rig:
            for message in (b"", b"\xff" * 100, b"add@/x\0ACTION=add\0", BIND + b"X" * 20_000, BIND):
                rig.sendto(message, str(path))
            assert await gather(source, 1) == [Hint(GPU, None, "bind pci")]


@pytest.mark.trio
async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "uevents"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(path))
    async with unix_uevents(path) as source:
        with UeventSender(path) as sender:
            sender.send(HostTree(tmp_path / "host").plug(SPEC)[:1])
            assert len(await gather(source, 1)) == 1


@pytest.mark.trio
async def test_a_live_socket_is_not(tmp_path: Path) -> None:
    path = tmp_path / "uevents"
    async with unix_uevents(path):
        with pytest.raises(HostError, match=r"another process receives on .*uevents"):
            async with unix_uevents(path):
                pass
        assert path.is_socket()


@pytest.mark.trio
async def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    with pytest.raises(HostError, match="precious is not a socket"):
        async with unix_uevents(precious):
            pass
    assert precious.read_text() == "data"
    with pytest.raises(HostError, match=r"missing/uevents cannot be made .*directory"):
        async with unix_uevents(tmp_path / "missing" / "uevents"):
            pass


@pytest.mark.trio
async def test_a_path_over_the_kernels_limit(tmp_path: Path) -> None:
    path = Path("/tmp") / ("é" * 51)
    assert len(os.fsencode(path)) == 107
    async with unix_uevents(path):
        assert path.is_socket()
    with pytest.raises(HostError, match=r"108 bytes.*at most 107.*shorter"):
        async with unix_uevents(Path(f"{path}x")):
            pass


@pytest.mark.trio
async def test_a_successors_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "uevents"
    async with unix_uevents(path):
        path.unlink()
        path.write_text("a successor's")
    assert path.exists()


# --- overflow ---------------------------------------------------------------------------------------------------


class ScriptedSocket(socket.socket):
    """A datagram socket on which overflows happen where the script says so."""

    script: Iterator[bytes | OSError]

    def recvmsg(self, *_: Any) -> Any:
        message = next(self.script, BlockingIOError(errno.EAGAIN, "nothing there"))
        if isinstance(message, OSError):
            raise message
        return message, [], 0, (0, 1)


def scripted(script: Iterable[bytes | OSError]) -> ScriptedSocket:
    """Always readable; what is received is the script."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with theirs:
        theirs.send(b"readable")
    receiver = ScriptedSocket(fileno=ours.detach())
    receiver.setblocking(False)
    receiver.script = iter(script)
    return receiver


@pytest.mark.trio
async def test_an_overflow_is_raised_once_when_the_queue_is_empty() -> None:
    full = OSError(errno.ENOBUFS, "No buffer space available")
    script: Iterator[bytes | OSError] = iter([full, BIND, full, BIND])
    with scripted(script) as receiver, trio.fail_after(PATIENCE_S):
        source = DatagramSource(receiver, from_kernel_only=True)
        with pytest.raises(UeventsOverflowError, match="ENOBUFS"):
            await source.receive()
        assert list(script) == []
        assert await source.receive() == []


@pytest.mark.trio
async def test_an_overflow_before_more_than_is_taken_at_once_is_not_forgotten() -> None:
    full = OSError(errno.ENOBUFS, "No buffer space available")
    with scripted([full, *[BIND] * UEVENTS_AT_ONCE]) as receiver, trio.fail_after(PATIENCE_S):
        source = DatagramSource(receiver, from_kernel_only=True)
        assert await source.receive() == []  # a scan follows, which reads that too
        receiver.recv(100)  # not readable any more: what is pending must not wait for the next uevent
        with pytest.raises(UeventsOverflowError):
            await source.receive()


@pytest.mark.trio
async def test_another_error_of_the_socket_is_not_hidden() -> None:
    broken = OSError(errno.EBADF, "Bad file descriptor")
    with (
        scripted([broken]) as receiver,
        trio.fail_after(PATIENCE_S),
        pytest.raises(OSError, match="Bad file descriptor"),
    ):
        await DatagramSource(receiver, from_kernel_only=True).receive()


# --- the kernel's own -------------------------------------------------------------------------------------------


def trigger(device: str, times: int = 1) -> None:
    """Has the kernel send a `change` uevent, as `udevadm trigger` does."""
    try:
        descriptor = os.open(f"{device}/uevent", os.O_WRONLY)
    except OSError as error:
        pytest.skip(f"{device}/uevent cannot be written here ({error.strerror}): only root may")
    with os.fdopen(descriptor, "wb", buffering=0) as attribute:
        for _ in range(times):
            attribute.write(b"change")


def a_pci_function() -> str:
    bus = Path("/sys/bus/pci/devices")
    found = sorted(bus.iterdir()) if bus.is_dir() else []
    if not found:
        pytest.skip("this machine has no PCI function")
    return str(found[0])


@pytest.mark.trio
async def test_the_kernels_uevents_are_heard() -> None:
    function = a_pci_function()
    async with kernel_uevents() as source:
        trigger("/sys/devices/virtual/mem/null")  # not ours: heard, and no hint
        trigger(function)
        expected = Hint(PciAddress(os.path.basename(function)), None, "change pci")
        assert expected in await gather(source, 1)


@pytest.mark.trio
async def test_the_kernels_overflow_is_raised_once_and_then_all_is_well() -> None:
    """The kernel's own ENOBUFS, provoked with the smallest buffer (pyudev #194 is about what comes after it)."""
    function = a_pci_function()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, 15) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        receiver.bind((0, 1))
        source = DatagramSource(receiver, from_kernel_only=True)
        for _ in range(3):
            trigger("/sys/devices/virtual/mem/null", times=200)
            with trio.fail_after(PATIENCE_S):
                with pytest.raises(UeventsOverflowError):
                    await source.receive()
                # All that was queued is gone, and from here on nothing is dropped again.
                trigger(function)
                assert [found.cause for found in await gather(source, 1)] == ["change pci"]


@pytest.mark.trio
@pytest.mark.parametrize(
    "refusal", [OSError("Could not create udev monitor"), ImportError("No library named udev")]
)
async def test_without_a_netlink_socket_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise refusal

    monkeypatch.setattr(pyudev.Monitor, "from_netlink", refuse)
    with pytest.raises(HostError, match=rf"{refusal}.*--uevents off"):
        async with kernel_uevents():
            pass


@pytest.mark.trio
async def test_in_a_user_namespace_nothing_is_heard_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespace is asked for its owner by the real ioctl; which owner would hear is played."""
    monkeypatch.setattr(uevents, "_INITIAL_USER_NAMESPACE", 0)
    with pytest.raises(HostError, match="hostUsers: false"):
        async with kernel_uevents():
            pass


@pytest.mark.trio
async def test_a_process_cannot_pose_as_the_kernel() -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, 15) as receiver:
        receiver.bind((0, 0))
        port = receiver.getsockname()[0]
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15) as forger:
            try:
                forger.sendto(BIND, (port, 0))
            except OSError as error:
                pytest.skip(f"a message to another netlink socket is refused here ({error.strerror})")
        source = DatagramSource(receiver, from_kernel_only=True)
        with trio.fail_after(PATIENCE_S):
            assert await source.receive() == []
