"""The served keeper: writes what this daemon knows of the resources that it serves, for its successor: their names and
models, and in a file of its own the names of vGPU types. A daemon that does not serve writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.ports.errors import StateFileError

SERVED_RETRY_S: Final = 1.0
"""The wait after a failed write of the file. Short, as a successor that comes meanwhile reads what is there."""

_Content = TypeVar("_Content")
_Written = TypeVar("_Written", contravariant=True)


class _File(Protocol[_Written]):
    """`ports.node.ServedResources`, or a file of this boot."""

    async def write(self, content: _Written, /) -> None: ...


async def run(
    wanted: LatestReader[_Content | None],
    file: _File[_Content],
    on_problem: Callable[[str], None],
) -> None:
    """Run for ever. `wanted`: the content of the file; None while this daemon does not serve. A problem is logged once
    while it lasts; meanwhile the write is retried."""
    written: _Content | None = None
    logged = ""
    async for _ in wanted:
        while (content := wanted.value) != written:
            if content is None:
                written = None  # the serving daemon writes it
                continue
            try:
                with raises_only(StateFileError, "served_keeper"):
                    await file.write(content)
            except StateFileError as exc:
                if logged != str(exc):
                    on_problem(logged := str(exc))
                await trio.sleep(SERVED_RETRY_S)
            else:
                written, logged = content, ""
