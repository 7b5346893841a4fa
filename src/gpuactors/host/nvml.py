"""NVML's facts about the fabric of the host's GPUs, asked in a process of its own (`nvml_child.py`), with a
deadline."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Final, final

from gpuactors.core.domains.clique import GpuFabric, Said, of_gpus
from gpuactors.core.values.quote import quoted
from gpuactors.decoding import UndecodableError, decode_json
from gpuactors.host.asked import AskedProgram, Ended, Late
from gpuactors.ports.errors import HostShortError
from gpuactors.process.resource_exhaustion import shortage

NVML_S: Final = 5.0
"""Deadline of an answer of NVML for all GPUs of the host's driver, 5 s. A healthy driver takes less than a second."""

_SOURCE: Final = "NVML"
_CHILD: Final = "gpuactors.host.nvml_child"


@final
class NvmlClique:
    """Implements `host.imex.CliqueSource`."""

    def __init__(self, program: Sequence[str] = (), *, deadline_s: float = NVML_S) -> None:
        """`program`: the command line to run; by default this package's child, where nvidia-ml-py is installed."""
        self._deadline_s = deadline_s
        self._is_there = bool(program) or importlib.util.find_spec("pynvml") is not None
        self._program = AskedProgram(program or (sys.executable, "-m", _CHILD), "nvml", deadline_s)

    async def said(self) -> Said:
        """Implement `CliqueSource.said`. Raises `HostShortError`."""
        if not self._is_there:
            return Said(_SOURCE, why="is not used: nvidia-ml-py is not installed")
        try:
            answer = await self._program.ask()
        except OSError as error:
            if (short := shortage(error)) is not None:
                raise HostShortError(f"NVML could not be asked: {short}") from error
            return Said(_SOURCE, why=f"cannot be asked ({error.strerror})")
        if isinstance(answer, Late):
            return Said(_SOURCE, why=f"has not answered within {self._deadline_s:g} s: {answer.what}")
        return self._judged(answer)

    def _judged(self, answer: Ended) -> Said:
        if answer.status:
            words = quoted(answer.error_output.decode(errors="replace")) or f"status {answer.status}"
            return Said(_SOURCE, why=f"does not answer ({words})")
        try:
            return of_gpus(_SOURCE, decode_json(answer.output, list[GpuFabric]))
        except UndecodableError:
            return Said(_SOURCE, why="says nothing that can be read")
