"""One request of an actor raises what its port may raise, and nothing else: the boundary at which a bug ends.

An exception that nobody expects (`RecursionError`, `KeyError`) would end the actor with all its other requests, and
after some restarts the daemon, for one claim or file. Here it ends its own request, in the way of every other failure
of that request. Must not be used where the state itself is at stake: in the registry, around a write of the checkpoint
(ADR 0013).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, final

from gpuactors.process.logger import get_logger
from gpuactors.process.resource_exhaustion import shortage

E = TypeVar("E", bound=Exception)

_SHOWN_CHARS: Final = 300
"""Limit on quoted exception text, which may hold untrusted input."""

_log = get_logger(__name__)


@final
class raises_only:  # read as a word of the `with` statement, like `suppress`
    """Raise any other exception as `error`, and log it with its traceback if it is a bug and no shortage.

    `make` makes the error of a sentence; None: its class does. Cancellation passes, as what else is no `Exception`.
    """

    def __init__(self, error: type[E], actor: str, make: Callable[[str], E] | None = None) -> None:
        self._error = error
        self._actor = actor
        self._make: Callable[[str], Exception] = make or error

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        if exc is None or isinstance(exc, self._error) or not isinstance(exc, Exception):
            return
        reason = shortage(exc)
        if reason is None:
            _log.error("actor.failed", actor=self._actor, exc_info=exc)
            reason = _internal_error(exc)
        raise self._make(reason) from exc


def _internal_error(exc: Exception) -> str:
    shown = ascii(exc)  # whatever its text has
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[:_SHOWN_CHARS]}…"
    return f"internal error: {shown}; please report it, with the traceback in the log"
