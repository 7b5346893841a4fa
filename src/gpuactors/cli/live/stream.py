"""Output without a terminal, or as JSON or YAML: everything once, then each change as a line or a document, flushed at
once. So it can be read by grep or jq, as with `kubectl get --watch`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, final

from gpuactors.cli.formats import Format, yaml_of
from gpuactors.cli.inspect.report import as_json, as_table, as_wide, utc
from gpuactors.cli.inspect.view import Inspected
from gpuactors.cli.live.watched import Row, Watched
from gpuactors.cli.output import UNFOLDED
from gpuactors.core.values.quote import printable_json

_DOCUMENT: Final = "---\n"


@final
class Stream:
    """Prints the changes. `aside` gets what is no part of a document: that the daemon is gone, and back."""

    def __init__(
        self,
        output: Format,
        echo: Callable[[str], None],
        aside: Callable[[str], None],
        columns: int = UNFOLDED,
    ) -> None:
        self._output = output
        self._echo = echo
        self._columns = columns
        self._aside = aside if output in (Format.JSON, Format.YAML) else echo
        self._is_first = True

    def changed(self, changes: tuple[Row, ...], inspected: Inspected, wall: float) -> None:
        """Print the view, or its changes."""
        is_first, self._is_first = self._is_first, False
        if self._output is Format.JSON:
            self._echo(printable_json(json.dumps(json.loads(as_json(inspected)), ensure_ascii=False)))
        elif self._output is Format.YAML:
            self._echo(_DOCUMENT + yaml_of(as_json(inspected)))
        elif is_first:
            table = as_wide if self._output is Format.WIDE else as_table
            self._echo(table(inspected, self._columns) + "\n")
        else:
            for change in changes:
                self._echo("  ".join((utc(wall), *filter(None, change))))

    def gone(self, watched: Watched, wall: float) -> None:
        """Print, once, that no daemon is there."""
        self._aside(f"{utc(wall)}  daemon  gone, still trying: {watched.why_gone}")

    def back(self, watched: Watched, wall: float) -> None:
        """Print that a daemon is there again."""
        assert watched.running is not None
        running = watched.running
        self._aside(f"{utc(wall)}  daemon  back: process {running.pid}, version {running.version}")
