"""A stream that says it is a terminal, and keeps what is written to it."""

from __future__ import annotations

import io
from typing import final


@final
class WrittenTerminal(io.StringIO):
    """Has no size that can be asked for, so 80 columns."""

    def isatty(self) -> bool:
        return True
