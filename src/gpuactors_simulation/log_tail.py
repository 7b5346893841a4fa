"""Takes the daemon's log lines, which would spoil the table: keeps the last ones, and every error.

Must not decide what an error means; `world.py` counts each as a fault of the daemon.
"""

from __future__ import annotations

import io
import json
from collections import deque
from typing import Final, final

LINES_KEPT: Final = 200


@final
class LogTail(io.StringIO):
    """A stream for `observe.log.configure`, in its JSON format."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._complaints: deque[str] = deque(maxlen=LINES_KEPT)

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines of any level."""
        return tuple(self._lines)

    @property
    def complaints(self) -> tuple[str, ...]:
        """The last lines of level error."""
        return tuple(self._complaints)

    def write(self, text: str) -> int:
        """Take one or more whole lines."""
        for line in filter(None, text.splitlines()):
            self._lines.append(line)
            if _is_error(line):
                self._complaints.append(line)
        return len(text)


def _is_error(line: str) -> bool:
    try:
        fields = json.loads(line)
    except ValueError:
        return True  # not our format: a traceback that was printed
    return not isinstance(fields, dict) or fields.get("level") in {"error", "critical"}
