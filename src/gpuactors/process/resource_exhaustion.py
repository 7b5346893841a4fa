"""Shortages of the process or of the node: no descriptors, no memory, no threads left.

They pass, and are no fault of what was to be read or made: the caller logs the shortage, keeps the known state, and
retries. Must not be taken for a fault of a device, of kubelet or of an actor (issue 10).
A file of its own: actors, each adaptor and the composition ask it the same question.
"""

from __future__ import annotations

import errno
from typing import Final

_REMEDIES: Final = {
    errno.EMFILE: "this process has no file descriptors left (EMFILE): raise its limit (LimitNOFILE= of the service "
    "manager, the container runtime's in a pod) and see in /proc/PID/fd what uses them",
    errno.ENFILE: "this node has no file descriptors left (ENFILE): end the process that has them open, or raise the "
    "sysctl fs.file-max",
    errno.ENOMEM: "there is no memory left (ENOMEM): raise the container's limit, or end processes that use the node's",
    errno.ENOBUFS: "the kernel has no buffers left (ENOBUFS): check the node's memory",
}

NO_THREAD: Final = (
    "no thread can be started: raise the limit of tasks "
    "(TasksMax= of the service manager, the pids limit of the pod)"
)
"""The meaning of Python's RuntimeError of that name (man 2 clone: EAGAIN)."""


def shortage(error: BaseException | None) -> str | None:
    """Return the shortage and its remedy, if `error` or one of its causes was raised for one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _REMEDIES:
            return f"{_REMEDIES[error.errno]}; it is retried automatically"
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return f"{NO_THREAD}; it is retried automatically"
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
    return None
