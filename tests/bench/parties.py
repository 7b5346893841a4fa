"""Who is measured: daemons, each of a checkout and an interpreter, and plugins without any logic as floors.

Each is known by its command line only, so that an older checkout is measured as this one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = ROOT / "src"
BARE_PLUGIN: Final = "bare plugin"


@dataclass(frozen=True, slots=True)
class Place:
    """The files of one node that a party works with."""

    host: Path
    kubelet: Path
    state: Path
    http: Path
    uevents: Path | None
    """The socket that the party binds; None: it hears none."""


@dataclass(frozen=True, slots=True)
class Party:
    """`command` makes the words after the interpreter."""

    name: str
    command: Callable[[Place], Sequence[str]]
    python: str = sys.executable
    source: str = ""
    """PYTHONPATH."""

    def environment(self) -> Mapping[str, str]:
        """As in the image, but that bytecode is written: there it was compiled with the image."""
        mine = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("GPUACTORS_") and key not in ("PYTHONDONTWRITEBYTECODE", "NODE_NAME")
        }
        return mine | {"PYTHONPATH": self.source, "PYTHONUNBUFFERED": "1"}


def daemon(name: str, source: Path = SOURCE, python: str = sys.executable, *words: str) -> Party:
    """`gpuactors run` with the settings of deploy/base, then `words`."""

    def command(place: Place) -> Sequence[str]:
        return (
            *("-m", "gpuactors", "run"),
            f"--host-root={place.host}",
            f"--kubelet-dir={place.kubelet}",
            f"--device-plugin-dir={place.kubelet}/device-plugins",
            f"--state-dir={place.state}",
            f"--http-address=unix:{place.http}",
            f"--uevents=unix:{place.uevents}" if place.uevents else "--uevents=off",
            *words,
        )

    return Party(name, command, python, str(source))


def bare_plugin(descriptors: Path) -> Party:
    """A device plugin on grpcio that does the least (`bare_plugin.py`)."""

    def command(place: Place) -> Sequence[str]:
        uevents = (str(place.uevents),) if place.uevents else ()
        program = str(Path(__file__).with_name("bare_plugin.py"))
        return (program, str(descriptors), str(place.host), str(place.kubelet), *uevents)

    return Party(BARE_PLUGIN, command)
