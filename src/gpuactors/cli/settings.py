"""The settings of a command, or its end where one is wrong. A file of its own: `start.py` and `commands.py` need it.

In a pod `gpuactors explain` and the like have the configuration file of the daemon. A running daemon that does not use
a wrong one says so, and the command must not end before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial

from gpuactors.cli.ending import EX_CONFIG, fail, tell
from gpuactors.config import (
    CONFIG_FILE_VARIABLE,
    Config,
    ConfigError,
    Resolved,
    SourcedLabels,
    resolve,
)
from gpuactors.config.declaration import CONFIG_FILE_KEY


def resolved(flags: Mapping[str, object], *, starts: bool = False) -> Resolved:
    """Resolve the settings, of a daemon that starts or of a command beside it; end the process if one is wrong."""
    try:
        return resolve(flags, os.environ, _labels_of_start if starts else _labels_of_command)
    except ConfigError as exc:
        if starts or (beside := _without_file(flags)) is None:
            fail(str(exc), EX_CONFIG)
        tell(f"{exc}. A daemon runs without this file: the settings are its own")
        return beside


def _without_file(flags: Mapping[str, object]) -> Resolved | None:
    """Resolve the settings without the configuration file, if they lead to a daemon that runs. None if they do not, or
    there is no file."""
    from gpuactors.control.client import read_status  # for a wrong file alone
    from gpuactors.control.path import socket_path
    from gpuactors.ports.errors import ControlError

    plain = {key: value for key, value in flags.items() if key != CONFIG_FILE_KEY}
    environ = {key: value for key, value in os.environ.items() if key != CONFIG_FILE_VARIABLE}
    if flags.get(CONFIG_FILE_KEY) is None and len(environ) == len(os.environ):
        return None
    try:
        found = resolve(plain, environ)
        read_status(socket_path(str(found.config.state_dir)))
    except (ConfigError, ControlError):
        return None
    return found


def resolving(flags: Mapping[str, object]) -> Callable[[], Resolved]:
    """Return a function that resolves the settings as they were at the start of this daemon, from the file as it is
    then. Raises ConfigError."""
    return partial(resolve, flags, dict(os.environ), _labels_of_start)


def _labels_of_start(config: Config) -> SourcedLabels:
    from gpuactors.daemon import node_labels  # with the client of the API server

    return node_labels.read(config)


def _labels_of_command(config: Config) -> SourcedLabels:
    from gpuactors.daemon import node_labels  # as above

    return node_labels.read_kept(config)
