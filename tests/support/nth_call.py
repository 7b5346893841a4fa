"""Makes the calls of a module to the system raise, one after the other and each with each error: none is drawn."""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, Final, final

import pytest

from tests.support.strikes import _struck, _System, every_error

NUMBERS: Final = every_error(
    errno.EIO, errno.EACCES, errno.ENOSPC, errno.EMFILE, errno.ENOMEM, errno.EAGAIN, errno.EBUSY, errno.ENODEV,
    errno.ENOENT, errno.EROFS, errno.ESTALE, errno.EINTR, errno.ENOLCK, errno.ENOTDIR,
)  # fmt: skip

Others = Mapping[str, Sequence[str]]
"""What else a module calls: functions by the name of the module or class that it has them from."""


@final
class Nth:
    """Counts calls; the one of this number raises."""

    def __init__(self, number: int, error: Exception) -> None:
        self._number = number
        self.error = error
        self.made: list[str] = []

    def called(self, what: str, _: FrameType) -> None:
        """A call is about to be made."""
        self.made.append(what)
        if len(self.made) == self._number + 1:
            raise self.error


def every_failure(modules: Mapping[ModuleType, Others]) -> Iterator[Callable[[], Any]]:
    """For each error and each call that is made in these modules a context in which that call raises that error. Ends
    with the first call of which there is none any more, for each error."""
    for number in NUMBERS:
        nth = 0
        while True:
            struck = Nth(nth, OSError(number, os.strerror(number), "/struck"))
            yield partial(_patched, modules, struck)
            if len(struck.made) <= nth:
                break
            nth += 1
        assert nth, "it makes no call"


@contextmanager
def _patched(modules: Mapping[ModuleType, Others], nth: Nth) -> Iterator[Nth]:
    with pytest.MonkeyPatch.context() as patch:
        for module, others in modules.items():
            patch.setattr(module, "os", _System(nth), raising=False)  # type: ignore[arg-type]
            patch.setattr(module, "open", _struck(nth, "open", builtins.open), raising=False)  # type: ignore[arg-type]
            for owner, names in others.items():
                real = getattr(module, owner)
                if not names:  # the name itself is called
                    patch.setattr(module, owner, _struck(nth, owner, real))  # type: ignore[arg-type]
                    continue
                found = {n: getattr(real, n) for n in dir(real)}
                found |= {n: _struck(nth, n, found[n]) for n in names}  # type: ignore[arg-type]
                patch.setattr(module, owner, SimpleNamespace(**found))
        yield nth
        nth.error.__traceback__ = None  # its frames name what holds a descriptor
