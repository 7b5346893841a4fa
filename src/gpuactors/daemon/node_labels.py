"""The labels of our Node, by which entries of a configuration file match it: from the API server, and, while that is
away, those that were read last, from the file `node-labels.json` in the state directory.

A file of its own: only nodes whose configuration matches by labels, and has none of its own, import it. It runs before
the daemon, as settings follow from it, and in a thread when a changed file is read. Must not try a request again:
kubelet starts the container again, and a refused file is read again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import msgspec
import trio
from msgspec import Struct

from gpuactors.config import Config, ConfigError, Provenance, SourcedLabels
from gpuactors.daemon.about import node_of
from gpuactors.daemon.api_client import client_of
from gpuactors.decoding import UndecodableError, decode_json
from gpuactors.kube.nodes import KubeNode
from gpuactors.ports.errors import PortError
from gpuactors.ports.kube import ApiAway, ApiRefused
from gpuactors.process.plain_files import read_plain, replace_own

FILE_NAME: Final = "node-labels.json"

FILE_MAX_BYTES: Final = 1 << 20
"""The most bytes of the file. A Node has some hundred labels, of at most 380 bytes each."""

_MODE: Final = 0o600

_OVERLOADED: Final = 429


class _File(Struct, frozen=True):
    """The content of the file."""

    node: str
    labels: dict[str, str]


def read(config: Config) -> SourcedLabels:
    """Return the labels for a daemon that starts, and keep them in the file. While the server is away, those that are
    kept. Raises ConfigError, with the remedy."""
    try:
        labels = trio.run(_ask, config)
    except PortError as error:
        if _is_away(error) and (kept := _kept(config)) is not None:
            return kept
        raise _unreadable(error) from None
    _keep(config, labels)
    return labels, Provenance("node", node_of(config))


def read_kept(config: Config) -> SourcedLabels:
    """Return the labels for a command: those that the daemon has kept, as it uses them; without any those of the API
    server. Raises ConfigError, with the remedy."""
    if (kept := _kept(config)) is not None:
        return kept
    try:
        return trio.run(_ask, config), Provenance("node", node_of(config))
    except PortError as error:
        raise _unreadable(error) from None


async def _ask(config: Config) -> Mapping[str, str]:
    return (await KubeNode(client_of(config), node_of(config)).read()).labels


def _is_away(error: PortError) -> bool:
    """Return whether the server does not answer now; it may later, with the same rights."""
    if isinstance(error, ApiRefused):
        return error.code >= 500 or error.code == _OVERLOADED
    return isinstance(error, ApiAway)


def _unreadable(error: PortError) -> ConfigError:
    reason = str(error).rstrip(".")
    return ConfigError(
        f"entries of nodes match by labels of the Node, which cannot be read: {reason}. Let the pod get its Node "
        "(component fleet), give the labels by node_labels, or match by names"
    )


def _path(config: Config) -> str:
    return os.path.join(config.state_dir, FILE_NAME)


def _kept(config: Config) -> SourcedLabels | None:
    """Return the labels in the file; None if it has none of this node."""
    path = _path(config)
    try:
        file = decode_json(read_plain(path, FILE_MAX_BYTES), _File)
    except (OSError, UndecodableError):
        return None
    return (file.labels, Provenance("file", path)) if file.node == node_of(config) else None


def _keep(config: Config, labels: Mapping[str, str]) -> None:
    """Write the file. A disk that refuses it must not end the daemon: the next start asks again."""
    content = msgspec.json.encode(_File(node_of(config), dict(labels)))
    with suppress(OSError):
        os.makedirs(config.state_dir, 0o700, exist_ok=True)
        replace_own(_path(config), content, _MODE, durable=True)
