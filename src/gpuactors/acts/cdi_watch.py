"""Notices that somebody has touched the CDI files of the claims: a container that restarts is started with what is
there, without a call to us, so a file that was removed is to be written again at once.

By inotify: the directory is an ordinary one, made by programs. Must not read or write a file in it.

A container has the directory mounted. If the host's is removed, the container keeps the old one, in which nothing can
be made; inotify does not tell, and only a new container has the new one. So the liveness probe fails then.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from typing import Final, TypeVar, final

import trio
from inotify_simple import INotify, flags
from msgspec import Struct

T = TypeVar("T")

CDI_DIR_RETRY_S: Final = 5.0
"""The interval between two looks for a missing CDI directory, in seconds: it is made when the first claim is prepared,
or by the container runtime."""


@final
class MountedDirectory(Struct, frozen=True):
    """The CDI directory, as far as the container runtime reaches us by it. Implements `ports.node.Reachable`."""

    path: str

    async def unreachable(self) -> tuple[str, ...]:
        await trio.lowlevel.checkpoint()
        try:
            is_removed = os.stat(self.path).st_nlink == 0
        except OSError:  # it is not there, and can be made
            return ()
        if not is_removed:
            return ()
        return (
            f"{self.path} was removed on the host, and this container has the removed one mounted: it must be started "
            "again for the claims' files to be where the container runtime looks",
        )


_CHANGES: Final = (
    flags.CLOSE_WRITE
    | flags.DELETE
    | flags.MOVED_FROM
    | flags.MOVED_TO
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
)
_LOST: Final = flags.DELETE_SELF | flags.MOVE_SELF | flags.IGNORED | flags.UNMOUNT | flags.Q_OVERFLOW


async def touches(
    directory: str, owner_of: Callable[[str], T | None]
) -> AsyncGenerator[frozenset[T] | None, None]:
    """Yield the claims, or resources, whose CDI file anyone has written, made or removed, by `owner_of` its name. None,
    which is any of them: at the start, and when the directory was replaced or removed, which the consumer makes again
    if a file is needed. All that happens while the consumer works is yielded once after it. Never ends; while there is
    no directory it looks for one every CDI_DIR_RETRY_S."""
    while True:
        try:
            inotify = INotify(nonblocking=True)
        except OSError:  # no descriptors, or no instances (sysctl fs.inotify.max_user_instances)
            await trio.sleep(CDI_DIR_RETRY_S)
            continue
        with inotify:
            try:
                inotify.add_watch(directory, _CHANGES)
            except OSError:
                yield None
                await trio.sleep(CDI_DIR_RETRY_S)
                continue
            # Between the loss of the last directory, or the start, and this watch nobody watched.
            yield None
            lost = False
            while not lost:
                try:
                    await trio.lowlevel.wait_readable(inotify.fileno())
                    changes = inotify.read(timeout=0)
                except OSError:  # no memory, or no room in epoll: another one may do
                    await trio.sleep(CDI_DIR_RETRY_S)
                    break
                lost = any(change.mask & _LOST for change in changes)
                touched = frozenset(
                    owner for change in changes if (owner := owner_of(change.name)) is not None
                )
                if not lost and touched:
                    yield touched
