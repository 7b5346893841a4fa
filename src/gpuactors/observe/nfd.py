"""The feature file of Node Feature Discovery (NFD), which makes labels of our node from it. Implements
`ports.node.FeatureFile`.

NFD's worker reads every file of /etc/kubernetes/node-feature-discovery/features.d/ (docs/usage/customization-guide of
NFD, "local feature source"): a label in each line, `PREFIX/NAME=VALUE`; files that begin with a dot are ignored, and
what follows `# +expiry-time=` is ignored after that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, final

import trio

from gpuactors.ports.errors import StateFileError
from gpuactors.process.plain_files import replace_plain

_MODE: Final = 0o644


@final
class NfdFile:
    """The file at one path; its directory is NFD's, and is not made."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    async def write(self, labels: Mapping[str, str], until: float) -> None:
        """Implement `ports.node.FeatureFile.write` in a thread, as a disk that hangs must not stop the daemon."""
        expiry = datetime.fromtimestamp(until, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines = [
            "# Written by gpuactors, and renewed while it runs.",
            f"# +expiry-time={expiry}",
            *(f"{name}={value}" for name, value in labels.items()),
        ]
        try:
            await trio.to_thread.run_sync(self._replace, "\n".join([*lines, ""]), abandon_on_cancel=True)
        except OSError as exc:
            raise StateFileError(
                f"cannot write {self._path}: {exc.strerror}; mount the directory of NFD's feature files there, "
                "writable (--nfd-file)"
            ) from None

    def _replace(self, text: str) -> None:
        replace_plain(self._path, text.encode("ascii"), _MODE)
