"""Whose settings are judged: the running daemon's, but for those that this command was given itself.

In a pod the daemon has its settings as arguments, which `kubectl exec POD -- gpuactors doctor` does not repeat.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from gpuactors.config import DECLARATIONS, Config, ConfigError, Resolved, resolve
from gpuactors.control.client import Running


@dataclass(frozen=True, slots=True)
class Judged:
    """The settings, and whose they are in words."""

    config: Config
    source: str


OWN = "of this command: flags, environment, file and defaults"


def own(resolved: Resolved) -> Judged:
    """Those of the command."""
    return Judged(resolved.config, OWN)


def of_daemon(resolved: Resolved, running: Running) -> Judged:
    """Those of the daemon; what the command was given by flag, environment or file wins. The command's own where the
    daemon reports none, or one that this version does not take."""
    given = sorted(key for key, source in resolved.provenance.items() if source.kind != "default")
    try:
        values = _reported(running) | {key: getattr(resolved.config, key) for key in given}
        config = resolve({key: value for key, value in values.items() if value is not None}, {}).config
    except (ConfigError, ValueError):
        return own(resolved)
    if not running.about.settings:
        return own(resolved)
    but = f", but for {', '.join(given)} of this command" if given else ""
    return Judged(config, f"of the running daemon{but}")


def _reported(running: Running) -> dict[str, object]:
    """What the daemon has, by key. Raises ValueError for what is no JSON."""
    return {s.key: json.loads(s.value) for s in running.about.settings if s.key in DECLARATIONS}
