"""The settings to judge: those of the running daemon, overridden by those of this command.

In a pod the daemon has its settings as arguments, which `kubectl exec POD -- gpuactors doctor` does not repeat.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gpuactors.config import DECLARATIONS, Config, ConfigError, Resolved, resolve
from gpuactors.control.client import Running
from gpuactors.decoding import decode_json


class Judged(Struct, frozen=True):
    """The settings, and their source in words."""

    config: Config
    source: str


OWN = "of this command: flags, environment, file and defaults"


def own(resolved: Resolved) -> Judged:
    """Return the settings of the command."""
    return Judged(resolved.config, OWN)


def of_daemon(resolved: Resolved, running: Running) -> Judged:
    """Return the daemon's settings; a flag, a variable or the file of the command wins. Return the command's own where
    the daemon reports none, or one that this version does not take."""
    if not running.about.settings:
        return own(resolved)
    overrides = {
        key: getattr(resolved.config, key)
        for key, source in resolved.provenance.items()
        if source.kind != "default"
    }
    try:
        reported = _reported(running)
        unchanged, config = _config(reported), _config(reported | overrides)
    except (ConfigError, ValueError):
        return own(resolved)
    differing = sorted(key for key, value in overrides.items() if value != getattr(unchanged, key))
    but = f", but for {', '.join(differing)} of this command" if differing else ""
    return Judged(config, f"of the running daemon{but}")


def _config(values: Mapping[str, object]) -> Config:
    """Resolve the values. None is a default that is no value of its own. Raises `ConfigError`."""
    return resolve({key: value for key, value in values.items() if value is not None}, {}).config


def _reported(running: Running) -> dict[str, object]:
    """Return the daemon's settings, by key. Raises ValueError for what is no JSON."""
    return {
        s.key: decode_json(s.value.encode(), object) for s in running.about.settings if s.key in DECLARATIONS
    }
