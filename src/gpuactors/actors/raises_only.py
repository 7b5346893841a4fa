"""One request of an actor raises what its port may raise, and nothing else: the boundary at which a bug ends.

An exception that nobody expects (`RecursionError`, `KeyError`) would end the actor with all its other requests, and
after some restarts the daemon, for one claim or file. Here it ends its own request, in the way of every other failure
of that request. Must not be used where the state itself is at stake: in the registry, around a write of the checkpoint
(ADR 0013).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from gpuactors.process.logger import get_logger
from gpuactors.process.resource_exhaustion import shortage

E = TypeVar("E", bound=Exception)

_SHOWN_CHARS: Final = 300
"""Of an exception's own text, which may quote what came from outside."""

_log = get_logger(__name__)


@contextmanager
def raises_only(error: type[E], actor: str, make: Callable[[str], E] | None = None) -> Iterator[None]:
    """Raise any other exception as `error`, and log it with its traceback if it is a bug and no shortage.

    `make` makes the error of a sentence; None: its class does. Cancellation passes, as what else is no `Exception`.
    """
    try:
        yield
    except error:
        raise
    except Exception as exc:
        reason = shortage(exc)
        if reason is None:
            _log.error("actor.failed", actor=actor, exc_info=exc)
            reason = _internal_error(exc)
        raise (make or error)(reason) from exc


def _internal_error(exc: Exception) -> str:
    shown = ascii(exc)  # whatever its text has
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[:_SHOWN_CHARS]}…"
    return f"internal error: {shown}; please report it, with the traceback in the log"
