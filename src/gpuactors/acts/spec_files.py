"""The CDI files of the device plugin: one of each resource, `<cdi-dir>/gpuactors-<domain>_<name>.json`.

What they have is the core's (`core/deviceplugin/specs.py`). Writing is healing: a file that is right is left, and one
that is missing, torn or another program's under that name is replaced; so it is done again at each start, and when
somebody has touched one. A reader of the directory sees the old file or the new one, whole, at any moment.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Set
from contextlib import suppress
from functools import partial
from typing import final

from gpuactors import limits
from gpuactors.acts.blocking_runner import BlockingRunner
from gpuactors.acts.cdi_watch import touches
from gpuactors.acts.disk import (
    Disk,
    KeptDirectory,
    content_of,
    is_temporary,
    json_text,
    put_unsynced,
    unlink_if_there,
)
from gpuactors.core.values.device_spec import DeviceSpec, DeviceSpecs, content, file_name, resource_of
from gpuactors.core.values.model import ResourceName


@final
class SpecFiles:
    """Those files of one CDI directory. Implements `ports.node.SpecDirectory`."""

    def __init__(self, disk: Disk, directory: str, run_blocking: BlockingRunner) -> None:
        """`directory`: the host's own path, at which the container runtime and Kata read it."""
        self._disk = disk
        self._directory = directory
        self._kept = KeptDirectory(disk, directory)
        self._run_blocking = run_blocking

    async def write(self, specs: DeviceSpecs) -> Mapping[ResourceName, str]:
        """Implement `ports.node.SpecDirectory.write`."""
        return await self._run_blocking(partial(self.write_now, specs))

    def write_now(self, specs: DeviceSpecs) -> Mapping[ResourceName, str]:
        """Write the files now. May block."""
        try:
            if specs:
                self._kept.ensure()
            problems = self._remove_others(specs)
            for resource, spec in sorted(specs.items()):
                path = os.path.join(self._directory, file_name(resource))
                try:
                    put_unsynced(self._disk, path, _text(resource, spec), limits.CLAIMS_FILE_MAX_BYTES)
                except OSError as error:
                    problems[resource] = _sentence(path, error)
            # Also where nothing was written now: a daemon that was killed may have written it and not synced.
            if specs:
                self._disk.sync_directory(self._directory)
        except OSError as error:
            return dict.fromkeys(specs, _sentence(self._directory, error))
        return problems

    async def find(self, specs: DeviceSpecs) -> Set[ResourceName]:
        """Implement `ports.node.SpecDirectory.find`."""
        return await self._run_blocking(partial(self.find_now, specs))

    def find_now(self, specs: DeviceSpecs) -> Set[ResourceName]:
        """Look for the files now. May block."""
        return {resource for resource, spec in specs.items() if self._is_there(resource, spec)}

    def _is_there(self, resource: ResourceName, spec: DeviceSpec) -> bool:
        """Return whether the file is there as it is here; also False if it cannot be read."""
        path = os.path.join(self._directory, file_name(resource))
        with suppress(OSError):
            return content_of(self._disk, path, limits.CLAIMS_FILE_MAX_BYTES) == _text(resource, spec)
        return False

    def _remove_others(self, specs: DeviceSpecs) -> dict[ResourceName, str]:
        """Remove the files of resources that have none, and temporary ones of a daemon that was killed. Return what
        could not be removed. Raises `OSError` if the directory cannot be read."""
        problems: dict[ResourceName, str] = {}
        for name in self._names():
            resource = resource_of(name[1:].removesuffix(".new") if is_temporary(name) else name)
            if resource is None or (resource in specs and not is_temporary(name)):
                continue
            path = os.path.join(self._directory, name)
            try:
                unlink_if_there(self._disk, path)
            except OSError as error:
                problems[resource] = _sentence(path, error)
        return problems

    def _names(self) -> tuple[str, ...]:
        try:
            return self._disk.names(self._directory)
        except FileNotFoundError:
            return ()

    def touches(self) -> AsyncGenerator[frozenset[ResourceName] | None, None]:
        """Implement `ports.node.SpecDirectory.touches`."""
        return touches(self._directory, resource_of)


def _text(resource: ResourceName, spec: DeviceSpec) -> bytes:
    return json_text(content(resource, spec))


def _sentence(path: str, error: OSError) -> str:
    what = f"{path} cannot be written or removed ({error.strerror})"
    return f"{what}: check the disk and this pod's mount; it is tried again"
