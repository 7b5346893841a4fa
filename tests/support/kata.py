"""How Kata resolves the devices of a pod (kata-containers, `device_cold_plug.go` and the CDI library that it uses).

When a sandbox is made, each device-plugin resource of each container becomes `<resource>=<device ID>`, by kubelet's
PodResources, and is looked up in the CDI directories. The files are read here as the CDI library reads them, without
anything of the daemon: one file that is no CDI file, one name that is in two files of a directory, or one that is in
none, and the sandbox is not made.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LETTERS, ALNUM = set(string.ascii_letters), set(string.ascii_letters + string.digits)


class SandboxError(Exception):
    """Kata does not make the sandbox."""


def sandbox_nodes(directories: Iterable[Path], allocated: Mapping[str, Iterable[str]]) -> set[str]:
    """The device nodes that Kata passes to the virtual machine of a pod with these devices, by resource. `directories`:
    the last one wins, as /var/run/cdi over /etc/cdi."""
    known: dict[str, tuple[str, ...]] = {}
    for directory in directories:
        paths = sorted(directory.iterdir()) if directory.is_dir() else ()
        known |= devices_of({path.name: path.read_bytes() for path in paths if path.is_file()})
    names = [f"{resource}={device}" for resource, devices in allocated.items() for device in devices]
    return {node for nodes in nodes_of(known, names).values() for node in nodes}


def nodes_of(known: Mapping[str, tuple[str, ...]], names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """The device nodes of each of these names. `known`: the devices of the directories. Raises `SandboxError`."""
    wanted = tuple(names)
    if missing := [name for name in wanted if name not in known]:
        raise SandboxError(f"unresolvable CDI devices {missing}")
    return {name: known[name] for name in wanted}


def devices_of(files: Mapping[str, bytes]) -> dict[str, tuple[str, ...]]:
    """The devices of a directory with these files, by name, with the nodes of each; without those that two files have.
    Raises `SandboxError`."""
    found: dict[str, tuple[str, ...]] = {}
    twice = set[str]()
    for name, content in sorted(files.items()):
        if not name.endswith((".json", ".yaml")):
            continue
        of_file = devices_of_file(name, content)
        twice |= found.keys() & of_file.keys()
        found |= of_file
    return {name: nodes for name, nodes in found.items() if name not in twice}


def devices_of_file(file: str, content: bytes) -> dict[str, tuple[str, ...]]:
    """Each device of a file, with its nodes. Raises `SandboxError` for what the CDI library refuses."""
    try:
        spec: Any = json.loads(content)
        assert set(spec) <= {"cdiVersion", "kind", "devices", "annotations", "containerEdits"}, (
            "unknown fields"
        )
        vendor, separator, cdi_class = spec["kind"].partition("/")
        assert separator
        assert is_word(vendor, LETTERS, "_-."), f"vendor {vendor!r}"
        assert is_word(cdi_class, LETTERS, "_-."), f"class {cdi_class!r}"
        assert tuple(map(int, spec["cdiVersion"].split("."))) >= (0, 6, 0) or "." not in cdi_class
        devices = {device["name"]: _nodes(device) for device in spec["devices"]}
        assert devices, "no devices"
        assert len(devices) == len(spec["devices"]), "a name twice"
        assert all(is_word(name, ALNUM, "_-.:") for name in devices), "a name"
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise SandboxError(f"{file}: {error}") from None
    return {f"{spec['kind']}={name}": nodes for name, nodes in devices.items()}


def is_word(text: str, first: set[str], between: str) -> bool:
    """Whether CDI's parser takes this as a vendor, a class or a device's name."""
    return bool(text) and text[0] in first and text[-1] in ALNUM and set(text) <= ALNUM | set(between)


def _nodes(device: Any) -> tuple[str, ...]:
    edits = device["containerEdits"]
    assert any(edits.values()), "empty edits"
    assert all(set(node["permissions"]) <= set("rwm") for node in edits["deviceNodes"])
    return tuple(node["path"] for node in edits["deviceNodes"])
