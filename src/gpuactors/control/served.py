"""The file `served.json`: the resources that this node's gpuactors has served, with the models of each:
`{"resources": {"nvidia.com/GH100_H100_SXM5_80GB": ["10de:2330"]}}`. Models that are no ids, the profiles of vGPUs, are
apart, where a daemon that knows only ids does not look: `{"resources": {"nvidia.com/NVIDIA_L40S-1Q": []}, "profiles":
{"nvidia.com/NVIDIA_L40S-1Q": ["NVIDIA L40S-1Q"]}}`. Implements `ports.node.ServedResources`.

It is in the directory of the node's control socket, for a daemon with another state directory, and in the state
directory, for an older daemon, and for kubelet's directory being made anew.

Only with it can a daemon that was started with other selectors, or with a newer pci.ids, know that a GPU was allocated
by an earlier daemon under another name, and not by another plugin; and that the device at a GPU's address now is not
the one that was allocated.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, final

import trio

from gpuactors.core.values.model import ResourceName
from gpuactors.core.values.text import encodable
from gpuactors.decoding import decode_json
from gpuactors.ports.errors import StateFileError
from gpuactors.process.plain_files import read_plain, replace_own

SERVED_FILE_MAX_BYTES: Final = 1 << 20
"""The maximum length of the file: it has names of 63 characters, each with a few models of GPU."""

SERVED_READ_S: Final = 2.0
"""The deadline of a read, at the start and before the daemon serves: kubelet waits for its plugin as long."""

FILE_NAME: Final = "served.json"

_MODE: Final = 0o644

_IDS: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{4}")
"""Vendor and device ID, as of `core.inventory.ids_of`."""

_PROFILE: Final = re.compile(r"[\x20-\x7e]{1,128}")
"""The name of a profile, as a driver prints it."""


@final
class ServedFile:
    """The file, in each of these directories. The first one is made where it is missing."""

    def __init__(self, *directories: str) -> None:
        self._directories: Final = directories

    async def read(self) -> Mapping[ResourceName, frozenset[str]]:
        """Implement `ports.node.ServedResources.read` in a thread, as a disk that hangs must not stop the daemon."""
        with trio.move_on_after(SERVED_READ_S):
            return await trio.to_thread.run_sync(self._read, abandon_on_cancel=True)
        paths = " and ".join(os.path.join(directory, FILE_NAME) for directory in self._directories)
        raise StateFileError(f"cannot read {paths}: no answer within {SERVED_READ_S:g} s")

    def _read(self) -> Mapping[ResourceName, frozenset[str]]:
        """Return the contents of all the files together. Raises `StateFileError` if none can be read."""
        served, problems = dict[ResourceName, frozenset[str]](), list[StateFileError]()
        for directory in self._directories:
            try:
                of_file = _read_file(os.path.join(directory, FILE_NAME))
            except StateFileError as exc:
                problems.append(exc)
            else:
                served |= {name: served.get(name, frozenset()) | models for name, models in of_file.items()}
        if len(problems) == len(self._directories):
            raise problems[0]
        return served

    async def write(self, served: Mapping[ResourceName, frozenset[str]]) -> None:
        """Implement `ports.node.ServedResources.write`: a new file replaces the old one, so it is whole at any
        moment. One of the places is enough."""
        text = json.dumps(_content(served)).encode()
        if problem := await trio.to_thread.run_sync(self._write, text):
            raise StateFileError(problem)

    def _write(self, text: bytes) -> str:
        """Write the file in each directory. Return why it could be written in none, as a sentence; empty if it
        could."""
        with suppress(OSError):
            os.mkdir(self._directories[0], 0o700)
        problems = []
        for directory in self._directories:
            path = os.path.join(directory, FILE_NAME)
            try:
                replace_own(path, text, _MODE, durable=True)
            except OSError as exc:
                problems.append(f"cannot write {path}: {exc.strerror}; it is tried again")
        return problems[0] if len(problems) == len(self._directories) else ""


def _read_file(path: str) -> Mapping[ResourceName, frozenset[str]]:
    try:
        text = read_plain(path, SERVED_FILE_MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise StateFileError(f"cannot read {path}: {exc.strerror}") from None
    try:
        content = decode_json(text, dict[str, Any])
        profiles = {name: _models(value, _PROFILE) for name, value in content.get("profiles", {}).items()}
        return {
            ResourceName(encodable(name)): _models(value, _IDS) | profiles.get(name, frozenset())
            for name, value in content["resources"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise StateFileError(
            f"{path} is no list of resources ({type(exc).__name__}: {str(exc)[:100]}); it is written again"
        ) from None


def _content(served: Mapping[ResourceName, frozenset[str]]) -> Mapping[str, Mapping[ResourceName, list[str]]]:
    """Return the content of the file."""
    ids = {name: sorted(filter(_IDS.fullmatch, served[name])) for name in sorted(served)}
    profiles = {name: sorted(served[name].difference(ids[name])) for name in ids}
    profiles = {name: of_resource for name, of_resource in profiles.items() if of_resource}
    return {"resources": ids, "profiles": profiles} if profiles else {"resources": ids}


def _models(value: Any, form: re.Pattern[str]) -> frozenset[str]:
    """Return the models of one resource. Raises `TypeError` or `ValueError` for a value that is no list of models: they
    are compared with every allocated GPU of the resource."""
    if not isinstance(value, list):
        raise TypeError("models that are no list")
    if not all(form.fullmatch(model) for model in value):
        raise ValueError("a model that is neither vendor and device nor a profile")
    return frozenset(value)
