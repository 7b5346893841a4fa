"""The record of a history, byte by byte: the proof that playing it again is the same again."""

from __future__ import annotations

import hashlib
from typing import final

import trio

from gpuactors.core.values.effects import Log
from gpuactors.ports.node import Step


@final
class Trace:
    """A digest of all that happened, in its order and with its time; the lines themselves if `keep`."""

    def __init__(self, *, keep: bool = False) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._lines: list[str] | None = [] if keep else None

    def add(self, line: str) -> None:
        """Something happened now."""
        line = f"{trio.current_time():.6f} {line}"
        self._hash.update(line.encode())
        if self._lines is not None:
            self._lines.append(line)

    def stepped(self, daemon: str, step: Step) -> None:
        """A daemon's core took an event. All of it is in the kept line; its kind and time are in the digest, as its
        consequences are there byte by byte."""
        line = f"{trio.current_time():.6f} {daemon}: {type(step.event).__name__}, {len(step.effects)} effects"
        self._hash.update(line.encode())
        if self._lines is not None:
            self._lines.append(f"{line}: {step.event} {step.failure}")

    def carried(self, connection: str, data: bytes) -> None:
        """Bytes arrived at the end of a connection."""
        self.add(f"{connection} {data.hex()}")

    def logged(self, daemon: str, line: Log) -> None:
        """A daemon logged a line."""
        fields = " ".join(f"{name}={value!r}" for name, value in sorted(line.fields.items()))
        self.add(f"{daemon}: {line.level} {line.name} {fields}")

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that were added; empty unless they are kept."""
        return tuple(self._lines or ())

    def digest(self) -> str:
        """The same for two runs in which the same happened at the same times."""
        return self._hash.hexdigest()
