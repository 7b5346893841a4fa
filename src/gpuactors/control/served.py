"""The file `served.json` in the state directory: which resources this node's gpuactors has served. Implements
`ports.ServedResources`.

Only with it can a daemon that was started with other selectors, or with a newer pci.ids, know that a GPU was given away
by the daemon before it under another name, and not by another plugin.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, final

import trio

from gpuactors import limits
from gpuactors.core.model import ResourceName
from gpuactors.core.text import encodable
from gpuactors.ports import StateFileError

FILE_NAME: Final = "served.json"


@final
class ServedFile:
    """The file, in a state directory that is there."""

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, FILE_NAME)

    def read(self) -> frozenset[ResourceName]:
        """As `ports.ServedResources.read`."""
        try:
            with open(self._path, "rb") as file:
                text = file.read(limits.SERVED_FILE_MAX_BYTES + 1)
        except FileNotFoundError:
            return frozenset()
        except OSError as exc:
            raise StateFileError(f"cannot read {self._path}: {exc.strerror}") from None
        try:
            names = json.loads(text)["resources"]
            if not all(isinstance(name, str) for name in names):
                raise TypeError("a name that is no text")
            return frozenset(ResourceName(encodable(name)) for name in names)
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise StateFileError(
                f"{self._path} is no list of resources ({type(exc).__name__}: {str(exc)[:100]}); it is written anew"
            ) from None

    async def write(self, names: Iterable[ResourceName]) -> None:
        """As `ports.ServedResources.write`: a new file in the place of the old, so that it is whole at any moment."""
        text = json.dumps({"resources": sorted(names)}).encode()
        try:
            await trio.to_thread.run_sync(self._replace, text)
        except OSError as exc:
            raise StateFileError(f"cannot write {self._path}: {exc.strerror}; it is tried again") from None

    def _replace(self, text: bytes) -> None:
        new = f"{self._path}.new"
        try:
            with open(new, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
        except OSError:
            with suppress(OSError):
                os.unlink(new)
            raise
