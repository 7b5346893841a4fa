"""The operator's command for the partitions of the fabric manager (`--partition-command FILE`).

`FILE query` prints what NVIDIA's `fmpm -l` prints: which partitions there are, of which GPUs, and which are active.
`FILE activate ID` and `FILE deactivate ID` change one, and end with status 0 if they could. It is started without a
shell, with a deadline, and killed after it. Implements `ports.node.SetsReader` and `ports.partitions.FabricManager`.
Must not judge the list: that is `core/kinds/set_sources.py`.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final, final

from gpuactors.core.kinds.set_sources import partitions
from gpuactors.core.kinds.sets import LISTED_BY, KnownSets
from gpuactors.core.values.partition import Goal, PartitionId
from gpuactors.core.values.quote import quoted
from gpuactors.decoding import UndecodableError, decode_json
from gpuactors.host.asked import AskedProgram, Ended
from gpuactors.ports.errors import HostError, HostShortError
from gpuactors.process.resource_exhaustion import shortage

PARTITIONS_QUERY_S: Final = 5.0
"""Deadline of a query, 5 s. It asks a daemon on this node, which takes milliseconds."""

PARTITION_ACT_S: Final = 30.0
"""Deadline of an activation or deactivation, 30 s. The fabric manager trains the links of up to eight GPUs, which takes
some seconds."""

QUERY: Final = "query"

LOCK_NAME: Final = "partitions.lock"
"""The file in the state directory that a running command has locked: the command of a daemon that was killed may not
have ended, and its act may come after a query of the next daemon."""


@final
class PartitionCommand:
    """One command, by its path as this process sees it."""

    def __init__(
        self,
        path: Path,
        *,
        state_dir: Path | None = None,
        deadline_s: float = PARTITIONS_QUERY_S,
        act_s: float = PARTITION_ACT_S,
    ) -> None:
        """`state_dir`: the directory of the lock; None for a command that is only asked."""
        self._path = path
        self._deadline_s = deadline_s
        self._act_s = act_s
        lock = str(state_dir / LOCK_NAME) if state_dir is not None else None
        self._program = AskedProgram((str(path),), "partitions", deadline_s, lock)

    async def act(self, goal: Goal, partition: PartitionId) -> None:
        """Implement `ports.partitions.FabricManager.act`."""
        await self._run(str(goal), partition, deadline_s=self._act_s)

    async def read(self) -> KnownSets:
        """Implement `ports.node.SetsReader.read`."""
        answer = await self._run(QUERY, deadline_s=self._deadline_s)
        try:
            listed, problems = partitions(LISTED_BY, decode_json(answer.output, object))
        except UndecodableError as error:
            raise HostError(
                f"{self._path} {QUERY} prints no JSON: {quoted(str(error))}; have it print what fmpm -l prints"
            ) from None
        return KnownSets(partitions=listed, problems=problems)

    async def _run(self, *arguments: str, deadline_s: float) -> Ended:
        """Run it with these arguments; it has ended with status 0. Raises `HostError`."""
        called = f"{self._path} {' '.join(arguments)}"
        try:
            answer = await self._program.ask(*arguments, deadline_s=deadline_s)
        except BlockingIOError:
            raise HostError(
                f"{called} was not run: the command that an earlier gpuactors has started has not ended; look whether "
                "the fabric manager runs"
            ) from None
        except OSError as error:
            if (short := shortage(error)) is not None:
                raise HostShortError(f"{called} could not be run: {short}") from error
            name = errno.errorcode.get(error.errno or 0, "")
            raise HostError(
                f"{called} cannot be run: {error.strerror} ({name}); correct the command or --partition-command"
            ) from None
        if not isinstance(answer, Ended):
            raise HostError(
                f"{called} has not ended within {deadline_s:g} s: {answer.what}; look whether the fabric manager runs"
            )
        if answer.status != 0:
            words = quoted((answer.error_output or answer.output).decode(errors="replace")) or "nothing"
            raise HostError(
                f"{called} ends with status {answer.status}, and says {words}; see the log of the fabric manager"
            )
        return answer
