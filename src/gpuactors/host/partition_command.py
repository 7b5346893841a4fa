"""The operator's command for the partitions of the fabric manager (`--partition-command FILE`).

`FILE query` prints what NVIDIA's `fmpm -l` prints: which partitions there are, of which GPUs, and which are active. It
is started without a shell, with a deadline, and killed after it. Implements `ports.node.SetsReader`. Must not judge the
list: that is `core/kinds/set_sources.py`.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final, final

from gpuactors.core.kinds.set_sources import partitions
from gpuactors.core.kinds.sets import LISTED_BY, KnownSets
from gpuactors.core.values.quote import quoted
from gpuactors.decoding import UndecodableError, decode_json
from gpuactors.host.asked import AskedProgram, Ended
from gpuactors.ports.errors import HostError, HostShortError
from gpuactors.process.resource_exhaustion import shortage

PARTITIONS_QUERY_S: Final = 5.0
"""Deadline of a query, 5 s. It asks a daemon on this node, which takes milliseconds."""

QUERY: Final = "query"


@final
class PartitionCommand:
    """One command, by its path as this process sees it."""

    def __init__(self, path: Path, *, deadline_s: float = PARTITIONS_QUERY_S) -> None:
        self._query = f"{path} {QUERY}"
        self._deadline_s = deadline_s
        self._program = AskedProgram((str(path), QUERY), "partitions", deadline_s)

    async def read(self) -> KnownSets:
        """Implement `ports.node.SetsReader.read`."""
        try:
            answer = await self._program.ask()
        except OSError as error:
            if (short := shortage(error)) is not None:
                raise HostShortError(f"{self._query} could not be run: {short}") from error
            name = errno.errorcode.get(error.errno or 0, "")
            raise HostError(
                f"{self._query} cannot be run: {error.strerror} ({name}); correct the command or --partition-command"
            ) from None
        if not isinstance(answer, Ended):
            raise HostError(
                f"{self._query} has not ended within {self._deadline_s:g} s: {answer.what}; look whether the fabric "
                "manager runs"
            )
        if answer.status != 0:
            words = quoted((answer.error_output or answer.output).decode(errors="replace")) or "nothing"
            raise HostError(
                f"{self._query} ends with status {answer.status}, and says {words}; see the log of the fabric manager"
            )
        try:
            listed, problems = partitions(LISTED_BY, decode_json(answer.output, object))
        except UndecodableError as error:
            raise HostError(
                f"{self._query} prints no JSON: {quoted(str(error))}; have it print what fmpm -l prints"
            ) from None
        return KnownSets(partitions=listed, problems=problems)
