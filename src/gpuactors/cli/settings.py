"""The settings of a command, or its end where one is wrong. A file of its own: `start.py` and `commands.py` need it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial

from gpuactors.cli.ending import EX_CONFIG, fail
from gpuactors.config import Config, ConfigError, Resolved, SourcedLabels, resolve


def resolved(flags: Mapping[str, object], *, starts: bool = False) -> Resolved:
    """Resolve the settings, of a daemon that starts or of a command beside it; end the process if one is wrong."""
    try:
        return resolve(flags, os.environ, _labels_of_start if starts else _labels_of_command)
    except ConfigError as exc:
        fail(str(exc), EX_CONFIG)


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
