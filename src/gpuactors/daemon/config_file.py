"""The configuration file of a running daemon, looked at again and compared with the settings in use; imported with
`--reload on` only.

All or nothing: of a file that is wrong, or has a change that needs a restart, nothing is used. No inotify: a watch on a
file is lost when kubelet replaces the link `..data` above it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, final

import trio

from gpuactors.concurrency.jitter import shorter
from gpuactors.config import Config, ConfigError, Resolved
from gpuactors.config.reload import changed
from gpuactors.control.about import About
from gpuactors.core.events.daemon import ConfigEvent, ConfigUnused, ConfigUsed
from gpuactors.daemon.about import about
from gpuactors.host.threads import OneByOne

SETTLE_S: Final = 1.0
"""How long a changed file must stay as it is before it is read, in seconds: an editor may write it in place, in
parts."""

REFUSED_BACKOFF_S: Final = (10.0, 20.0, 40.0, 80.0, 160.0, 300.0)
"""The waits between two reads of a refused file that stays as it is, in seconds; the last one repeats. Its entries may
depend on labels that could not be read. Each read asks the API server for the Node, and a wrong file is on all of
them: 5,000 ask 17 times a second after ten minutes."""

REFUSED_BACKOFF_JITTER: Final = 0.5
"""The share of such a wait that is random: all nodes get a wrong file within a minute or two."""

Status: TypeAlias = tuple[int, int, int, int] | str
"""Device, inode, time of change in ns and size of what the path leads to; or why it leads to nothing."""


@final
class ConfigFile:
    """Implements `ports.node.ConfigSource`."""

    def __init__(self, resolved: Resolved, again: Callable[[], Resolved]) -> None:
        """`resolved`: the settings at the start. `again` resolves them as at the start, in a thread; raises
        ConfigError."""
        self._in_use = resolved
        self._again = again
        self._thread = OneByOne("configuration file")
        self._seen: Status | None = None
        """The status of the file when it was read last; None before the first look."""
        self._refusals = 0
        """The reads in a row that refused the file as it is; 0 if the last one did not."""
        self._again_at = math.inf
        """When a file that does not change is read again, by trio's clock."""
        self._last: ConfigUnused | None = None
        """The last event, where it was one of these."""

    def about(self) -> About:
        """Return the settings in use, as `daemon.about.about`."""
        return about(self._in_use.config, sources_of(self._in_use))

    async def look(self) -> ConfigEvent | None:
        """Implement `ports.node.ConfigSource.look`."""
        status = await self._thread(self._status)
        if status != self._seen:
            self._refusals = 0
        elif trio.current_time() < self._again_at:
            return None
        await trio.sleep(SETTLE_S)
        if await self._thread(self._status) != status:
            return None
        try:
            read = await self._thread(self._again)
        except ConfigError as error:
            self._refused(status)
            return self._unused(ConfigUnused(str(error)))
        if await self._thread(self._status) != status:
            return None
        self._seen, self._refusals, self._again_at = status, 0, math.inf
        keys = changed(self._in_use.config, read.config)
        if keys.restart:
            return self._unused(ConfigUnused("", keys.restart))
        return self._used(read, keys.followed)

    def _refused(self, status: Status) -> None:
        """Count the refusal of the file with this status, and plan its next read."""
        plain_s = REFUSED_BACKOFF_S[min(self._refusals, len(REFUSED_BACKOFF_S) - 1)]
        self._seen, self._refusals = status, self._refusals + 1
        self._again_at = trio.current_time() + shorter(plain_s, REFUSED_BACKOFF_JITTER)

    def _unused(self, event: ConfigUnused) -> ConfigUnused | None:
        """Return the event, once for each reason."""
        if event == self._last:
            return None
        self._last = event
        return event

    def _used(self, read: Resolved, keys: tuple[str, ...]) -> ConfigUsed | None:
        """Return the event; None where the file only has other comments."""
        is_same = not keys and self._last is None
        self._in_use, self._last = read, None
        config: Config = read.config
        return None if is_same else ConfigUsed(keys, config.selectors, config.vgpu_types)

    def _status(self) -> Status:
        try:
            found = os.stat(self._in_use.file)
        except OSError as error:
            return str(error)
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def sources_of(resolved: Resolved) -> Mapping[str, str]:
    """Return the source of each setting, in words."""
    return {key: str(source) for key, source in resolved.provenance.items()}
