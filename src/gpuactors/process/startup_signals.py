"""The effect of signals on `gpuactors run` before its event loop handles them: the process exits at once, with code 0.

The kernel drops a signal to process 1 of a PID namespace (every container's first process) that has no handler
(kernel/signal.c, SIGNAL_UNKILLABLE): a SIGTERM during the imports, some 0.3 s, would be lost, and the container be
killed when its grace period is over. So the handlers come first. At that time there is nothing to remove.

Must import nothing but the standard library's `signal` and what the interpreter has loaded anyway.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Final

STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""The signals that stop the daemon in an orderly way: Kubernetes and systemd send the first, a terminal the others."""

IGNORED: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""The signals that the daemon ignores. Their default is to end the process, with its sockets left behind."""


class _Phase:
    """Whether the event loop has the signals, or has had them."""

    handed_over = False


def guard() -> None:
    """Handle the signals from now on. Called once, before anything heavy is imported."""
    for number in handled():
        signal.signal(number, _end if number in STOPPING else _ignore)


def hand_over() -> None:
    """Leave the signals to the event loop. A signal after its end has no effect: the process ends anyway."""
    _Phase.handed_over = True


def handled() -> tuple[signal.Signals, ...]:
    """Return the signals that the daemon handles. `nohup` sets SIGHUP to ignored, and it stays so."""
    return tuple(
        number
        for number in (*STOPPING, *IGNORED)
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    )


def _end(_number: int, _frame: FrameType | None) -> None:
    if not _Phase.handed_over:
        os._exit(0)  # no exit by exception: a module that is being imported might catch it


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass
