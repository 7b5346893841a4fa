"""Has the host's modprobe load a vfio driver (`--load-modules on`), in the host's own file system: as the kernel itself
does it, by the program that /proc/sys/kernel/modprobe names.

A driver that could not be loaded is not tried again for a while: no claim is to meet the same error, while a look
(`DriverBinder.check_fitness`) says that it could be loaded. Must not choose the driver.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final, final

from gpuactors.acts.blocking_runner import BlockingRunner
from gpuactors.core.values.quote import quoted, quoted_id
from gpuactors.host import modules
from gpuactors.host.asked import AskedProgram, Late
from gpuactors.host.root import FIRST_PROCESS_ROOT, MODPROBE, HostRoot
from gpuactors.ports.errors import HostError, HostShortError
from gpuactors.process.resource_exhaustion import shortage

MODPROBE_S: Final = 20.0
"""Deadline of a modprobe of a vfio driver, 20 s, below ACT_DEADLINE_S: it takes a tenth of a second, or seconds where
the disk is busy."""

MODPROBE_AGAIN_S: Final = 600.0
"""The time after which a driver that could not be loaded is tried again, 10 min, unless somebody has loaded it by then.
Until then its GPUs are not offered."""

MODPROBE_PATH_MAX_BYTES: Final = 256
"""Limit on /proc/sys/kernel/modprobe, which the kernel keeps in as many bytes (KMOD_PATH_LEN)."""

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,54}")
"""A module's name (MODULE_NAME_LEN: 56 with its end, include/linux/moduleparam.h); none is an option of modprobe."""

_OFF: Final = "its program is not named in /proc/sys/kernel/modprobe: load it yourself"


class ModprobeError(HostError):
    """A driver could not be loaded; the text says why, and what to do."""


@final
class Modprobe:
    """The host's modprobe."""

    def __init__(
        self,
        root: HostRoot,
        run_blocking: BlockingRunner,
        *,
        deadline_s: float = MODPROBE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now`: seconds; called from threads."""
        self._root = root
        self._run_blocking = run_blocking
        self._deadline_s = deadline_s
        self._now = now
        self._programs: dict[str, AskedProgram] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        """Until when each driver is not tried again, and why."""

    def why_not(self, driver: str) -> str:
        """Return why this driver cannot be loaded, as a sentence; empty if it can be tried. Blocks for a file or
        two."""
        if not _NAME.fullmatch(driver):
            return f"{quoted_id(driver)} is no module's name: see vfio_pci: in the host's modules.alias"
        until, why = self._failed.get(driver, (0.0, ""))
        if self._now() < until:
            return why
        if modules.is_installed(self._root, driver.replace("-", "_")) is False:
            return f"the running kernel has no module {driver}: install its package of extra modules"
        return ""

    async def load(self, driver: str) -> str:
        """Load the driver; return its name on the PCI bus. Raises `ModprobeError`, `HostShortError`."""
        if why := await self._run_blocking(lambda: self.why_not(driver)):
            raise ModprobeError(why)
        why = await self._run(driver)
        # What it says is not believed but looked at.
        bus_name = await self._run_blocking(lambda: modules.loaded(self._root, driver))
        if bus_name is not None:
            return bus_name
        why = why or f"modprobe {driver} succeeded, but the driver is not there: see the kernel's log"
        self._failed[driver] = (self._now() + MODPROBE_AGAIN_S, why)
        raise ModprobeError(why)

    async def _run(self, driver: str) -> str:
        """Run modprobe; return why it failed, as a sentence, or an empty text."""
        path = await self._run_blocking(self._path)
        if not path:
            return _OFF
        program = self._programs.setdefault(
            driver, AskedProgram((*self._chroot(), path, "--", driver), "modprobe", self._deadline_s)
        )
        try:
            answer = await program.ask()
        except OSError as error:
            if (short := shortage(error)) is not None:
                raise HostShortError(f"{path} could not be run: {short}") from error
            return f"{path} cannot be run ({error.strerror}): load {driver} yourself"
        if isinstance(answer, Late):
            return f"modprobe {driver} has not ended within {self._deadline_s:g} s: {answer.what}; see the kernel's log"
        if answer.status:
            words = quoted((answer.error_output or answer.output).decode(errors="replace")) or "nothing"
            return (
                f"modprobe {driver} ended with status {answer.status} and says {words}: see the kernel's log; in a pod "
                "it needs SYS_MODULE, SYS_CHROOT and SYS_PTRACE (deploy/overlays/load-modules)"
            )
        return ""

    def _path(self) -> str:
        """Return the path of modprobe on the host; empty if the kernel may load no module, or does not name it."""
        try:
            with open(self._root.real(MODPROBE), "rb") as file:
                path = file.read(MODPROBE_PATH_MAX_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return ""
        return path if path.startswith("/") and "\0" not in path else ""

    def _chroot(self) -> tuple[str, ...]:
        """Return the prefix that runs a program in the host's file system; empty where that is this process's own."""
        return () if self._root.prefix == "/" else ("chroot", self._root.real(FIRST_PROCESS_ROOT))
