"""The kernel's uevents, sent by the kernel: into the network namespaces of the pods, for devices that are not there.

A process with CAP_SYS_ADMIN may have the kernel broadcast a uevent in a network namespace (lib/kobject_uevent.c,
uevent_net_rcv_skb): its listeners cannot tell it from one of the kernel's own.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gpuactors_simulation.host.uevents import Uevent

_NETLINK_KOBJECT_UEVENT: Final = 15
_NLMSG_MIN_TYPE: Final = 0x10
_NLM_F_REQUEST: Final = 1
_CLONE_NEWNET: Final = 0x40000000

POD_NAMESPACES: Final = Path("/run/netns")
"""Where the CNI keeps the network namespace of each pod."""


def broadcast(uevents: Iterable[Uevent], namespaces: Path = POD_NAMESPACES) -> None:
    """Has the kernel send these in each pod's network namespace. Raises `OSError`."""
    messages = [_message(uevent) for uevent in uevents]
    names = sorted(namespaces.iterdir()) if namespaces.is_dir() else []
    for namespace in names if messages else []:
        _run(namespace, messages)


def _message(uevent: Uevent) -> bytes:
    # The kernel adds a number of its own.
    text = b"".join(
        part + b"\0" for part in uevent.encode().split(b"\0") if part and not part.startswith(b"SEQNUM=")
    )
    return struct.pack("=IHHII", 16 + len(text), _NLMSG_MIN_TYPE, _NLM_F_REQUEST, 0, 0) + text


def _run(namespace: Path, messages: list[bytes]) -> None:
    """In a thread of its own, which enters the namespace and ends."""
    failed: list[OSError] = []

    def enter_and_send() -> None:
        try:
            descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # the pod is gone
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(descriptor, _CLONE_NEWNET) != 0:
                return  # it was unmounted meanwhile
            with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_KOBJECT_UEVENT) as netlink:
                for message in messages:
                    try:
                        netlink.sendto(message, (0, 0))
                    except ConnectionRefusedError:
                        return  # nobody in this namespace listens
        except OSError as error:
            failed.append(error)
        finally:
            os.close(descriptor)

    thread = threading.Thread(target=enter_and_send)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
