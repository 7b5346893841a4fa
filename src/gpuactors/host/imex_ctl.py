"""Asks the IMEX daemon that the operator runs on the host whether it is ready, by NVIDIA's nvidia-imex-ctl. Must not
decide what follows from the answer."""

from __future__ import annotations

import errno
from typing import Final, final

from gpuactors.core.values.quote import quoted
from gpuactors.host.asked import AskedProgram, Ended
from gpuactors.ports.errors import HostShortError
from gpuactors.process.resource_exhaustion import shortage

IMEX_CTL_S: Final = 5.0
"""Deadline of an answer of the host's nvidia-imex-ctl, 5 s. It asks a daemon on this node, which takes milliseconds."""

_READY: Final = b"READY"
"""The whole answer for a daemon that is ready. It is compared as a whole: another answer is NOT_READY."""


@final
class ImexCtl:
    """One control tool, by its path as this process sees it."""

    def __init__(self, path: str, *, deadline_s: float = IMEX_CTL_S) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._tool = AskedProgram((path, "-q"), "imex-ctl", deadline_s)

    async def problem(self) -> str:
        """Return why the host's IMEX daemon is not ready, as a sentence; empty if it is. Raises `HostShortError`."""
        try:
            answer = await self._tool.ask()
        except OSError as error:
            if (short := shortage(error)) is not None:
                raise HostShortError(f"{self._path} -q could not be run: {short}") from error
            name = errno.errorcode.get(error.errno or 0, "")
            return (
                f"{self._path} cannot be run: {error.strerror} ({name}); install NVIDIA's nvidia-imex on the host, and "
                "set --imex-ctl to where its nvidia-imex-ctl is"
            )
        if isinstance(answer, Ended):
            return self._judged(answer)
        return (
            f"{self._path} -q has not answered within {self._deadline_s:g} s: {answer.what}; look whether nvidia-imex "
            "runs on the host"
        )

    def _judged(self, answer: Ended) -> str:
        if answer.status == 0 and answer.output == _READY:
            return ""
        words = quoted((answer.output or answer.error_output).decode(errors="replace")) or "nothing"
        status = "" if answer.status == 0 else f" and ends with status {answer.status}"
        return (
            f"the host's IMEX daemon is not ready: {self._path} -q says {words}{status}, and not READY; see the log of "
            "nvidia-imex on the host"
        )
