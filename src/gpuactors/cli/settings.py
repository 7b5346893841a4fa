"""The settings of a command, or its end where one is wrong. A file of its own: `start.py` and `commands.py` need it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gpuactors.cli.ending import EX_CONFIG, fail
from gpuactors.config import ConfigError, Resolved, resolve


def resolved(flags: Mapping[str, object]) -> Resolved:
    """Resolve the settings; end the process if one is wrong."""
    try:
        return resolve(flags, os.environ)
    except ConfigError as exc:
        fail(str(exc), EX_CONFIG)
