"""Plays the fake kernel for a real process: takes what is written to the real files of a fake tree's sysfs, does it.

The files are ordinary ones, so a write has returned before anything is done, and without an error whatever is done:
what follows from it is there a moment later (the daemon's act looks for it, as it believes no write). A write hangs
in a `HangingFile`. The kernel's errors are played in memory (`memory/acts.py`), and by the
real kernel in the virtual machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

from inotify_simple import INotify, flags

from gpuactors_simulation.host.kernel import FakeKernel, SleepsError
from tests.memory.hanging import HangingFile

_CONTROLS: Final = frozenset({"bind", "unbind", "drivers_probe", "driver_override"})
_MASK: Final = flags.CLOSE_WRITE | flags.ONLYDIR
_POLL_MS: Final = 20
_ANSWER_S: Final = 60.0


@final
class WriteWatcher:
    """Takes the writes to the files of those drivers and functions that are there when it begins."""

    def __init__(self, kernel: FakeKernel) -> None:
        self._kernel = kernel
        self._root = kernel.tree.root
        self._directories: dict[int, Path] = {}
        self._hanging: list[HangingFile] = []
        self.lock = threading.Lock()
        """Held while the tree is changed; for whoever changes it while `serving`."""
        self.written: list[tuple[str, str]] = []
        """Path below the root and text of each write that was taken, in order."""

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Takes writes in a thread as long as the context is open."""
        with INotify(nonblocking=True) as inotify:
            for directory in self._all_directories():
                self._directories[inotify.add_watch(directory, _MASK)] = directory
            over = threading.Event()
            thread = threading.Thread(
                target=self._serve, args=(inotify, over), name="fake kernel", daemon=True
            )
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
                for file in self._hanging:
                    file.close()

    def hang(self, path: str) -> None:
        """Writes to this file (its path on the host) hang from now on, until `release`, and fail if `serving` ends."""
        file = self._root / path.lstrip("/")
        file.unlink()
        self._hanging.append(HangingFile(file))

    def release(self) -> None:
        """Writers that hang go on, one for each file, and what they have written is done; later writes do not hang."""
        hanging, self._hanging = self._hanging, []
        for file in hanging:
            with file:
                text = file.answer(_ANSWER_S)
            file.path.unlink()
            file.path.write_text("")
            self._do(file.path, text)

    def _all_directories(self) -> list[Path]:
        tree = self._kernel.tree
        drivers = self._root / "sys/bus/pci/drivers"
        return [
            self._root / "sys/bus/pci",
            *(path for path in drivers.iterdir() if path.is_dir()),
            *(tree.device_dir(address) for address in tree.functions),
        ]

    def _serve(self, inotify: INotify, over: threading.Event) -> None:
        while not over.is_set():
            for event in inotify.read(timeout=_POLL_MS):
                if event.name in _CONTROLS and event.wd in self._directories:
                    self._take(self._directories[event.wd] / event.name)

    def _take(self, file: Path) -> None:
        with suppress(OSError):
            if not file.is_file():
                return
            text = file.read_text()
            # What we have written there ourselves is what the kernel shows: nothing, or the override as it is.
            if text and text != self._shown(file):
                if file.name != "driver_override":
                    file.write_text("")
                self._do(file, text)

    def _shown(self, file: Path) -> str:
        if file.name != "driver_override":
            return ""
        return self._kernel.read(f"{self._root}/sys/bus/pci/devices/{file.parent.name}/driver_override")

    def _do(self, file: Path, text: str) -> None:
        self.written.append((f"/{file.relative_to(self._root)}", text))
        with self.lock, suppress(OSError, SleepsError):
            self._kernel.write(str(file), text, self._kernel.take(str(file)))
