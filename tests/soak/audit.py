"""What the daemon asks of the API server, by the API server's own audit log: that counts each client by its name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, final

ACCOUNT: Final = "system:serviceaccount:gpuactors:gpuactors"

POLICY: Final = f"""\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    users: ["{ACCOUNT}"]
  - level: None
"""

_WATCH_BEGAN: Final = "ResponseStarted"
"""A watch has an entry when it begins and one when it ends; of these two the first one counts."""


def arguments(directory: Path) -> str:
    """Of the API server, so that it writes the log into a directory; the policy is written there."""
    (directory / "audit-policy.yaml").write_text(POLICY)
    return f"--audit-policy-file={directory / 'audit-policy.yaml'} --audit-log-path={directory / 'audit.log'}"


def kinds(lines: Iterable[str]) -> Mapping[str, int]:
    """How many requests of each kind, such as `PATCH resourceslices` or `get nodes/status`."""
    found: Counter[str] = Counter()
    for line in lines:
        entry = json.loads(line)
        if (entry["verb"] == "watch") != (entry["stage"] == _WATCH_BEGAN):
            continue
        thing = entry.get("objectRef", {})
        resource = "/".join(filter(None, (thing.get("resource", ""), thing.get("subresource", ""))))
        found[f"{entry['verb']} {resource or entry['requestURI'].partition('?')[0]}"] += 1
    return found


@final
class Requests:
    """Counts what is new in the log at each look."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = 0
        self._rest = b""
        self.total: Counter[str] = Counter()

    def look(self) -> Mapping[str, int]:
        """All requests since the beginning, by kind."""
        if self._log.exists():
            with self._log.open("rb") as log:
                log.seek(self._at)
                new = log.read()
            self._at += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            self.total.update(kinds(line.decode() for line in lines))
        return dict(self.total)
