"""A small JSON file in the state directory that counts in this boot of the host alone: `{"boot": "<id>", …}`.

Written by the daemon that serves, and read by the next one. A file of another boot says nothing. Must not know what a
file is for: its module has the form of its content, and the port that it implements.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Generic, TypeVar, final

import trio
from msgspec import Meta, Struct, ValidationError, convert

from gpuactors.decoding import decode_json
from gpuactors.ports.errors import StateFileError
from gpuactors.process.plain_files import read_plain, replace_own

BOOT_JSON_READ_S: Final = 2.0
"""The deadline of a read, at the start and before the daemon serves: kubelet waits for its plugin as long."""

_MODE: Final = 0o644

Value = TypeVar("Value")


class BootContent(Struct, frozen=True):
    """The form of a file; each has fields of its own besides."""

    boot: Annotated[str, Meta(min_length=1)]


class Form(Struct, Generic[Value], frozen=True):
    """The form of one kind of file."""

    name: str
    """The name of the file."""
    bytes_max: int
    """The maximum length of the file."""
    content: type[BootContent]
    nothing: Value
    """The value where there is no file, or one of another boot."""
    value_of: Callable[[Any], Value]
    """Makes the value of the content. May raise `ValueError`."""
    content_of: Callable[[Value], Mapping[str, object]]
    """Makes the content of a value, without the boot."""
    damaged: str
    """The fault of a file of another form, for the log: `is no list of …`."""
    remedy: str
    """The end of that sentence: `it is written again`."""


@final
class BootJson(Generic[Value]):
    """The file of one state directory, which is there."""

    def __init__(self, form: Form[Value], directory: str, boot: str) -> None:
        """`boot`: the id of this boot of the host."""
        self._form: Final = form
        self._path: Final = os.path.join(directory, form.name)
        self._boot: Final = boot

    async def read(self) -> Value:
        """Return what the file has of this boot, read in a thread, as a disk that hangs must not stop the daemon.
        Raises `StateFileError`, also where the disk does not answer in time."""
        with trio.move_on_after(BOOT_JSON_READ_S):
            return await trio.to_thread.run_sync(self.read_here, abandon_on_cancel=True)
        raise StateFileError(f"cannot read {self._path}: no answer within {BOOT_JSON_READ_S:g} s")

    def read_here(self) -> Value:
        """Read it in this thread. Raises `StateFileError`."""
        try:
            text = read_plain(self._path, self._form.bytes_max + 1)
        except FileNotFoundError:
            return self._form.nothing
        except OSError as exc:
            raise StateFileError(f"cannot read {self._path}: {exc.strerror}") from None
        try:
            content = convert(decode_json(text, dict[str, object]), self._form.content)
            value = self._form.value_of(content)
        except (ValueError, ValidationError) as exc:
            raise StateFileError(
                f"{self._path} {self._form.damaged} ({type(exc).__name__}: {str(exc)[:100]}); {self._form.remedy}"
            ) from None
        return value if content.boot == self._boot else self._form.nothing

    async def write(self, value: Value, /) -> None:
        """Replace the file by one with this value, which is whole at any moment, and on disk when this returns. Raises
        `StateFileError`."""
        await trio.to_thread.run_sync(self.write_here, value)

    def write_here(self, value: Value) -> None:
        """Write it in this thread. Raises `StateFileError`."""
        text = json.dumps({"boot": self._boot, **self._form.content_of(value)})
        try:
            replace_own(self._path, text.encode(), _MODE, durable=True)
        except OSError as exc:
            raise StateFileError(f"cannot write {self._path}: {exc.strerror}; it is tried again") from None
