"""The served keeper: writes the resources that this daemon serves, and their models, for its successor. A daemon that
does not serve writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.values.model import ResourceName
from gpuactors.ports.errors import StateFileError
from gpuactors.ports.node import ServedResources

SERVED_RETRY_S: Final = 10.0
"""The wait after a failed write of the file of served resources."""


async def run(
    wanted: LatestReader[Mapping[ResourceName, frozenset[str]] | None],
    file: ServedResources,
    on_problem: Callable[[str], None],
) -> None:
    """Run for ever. `wanted`: the served resources with their models; None while this daemon does not serve. A problem
    is logged once while it lasts; meanwhile the write is retried."""
    written: Mapping[ResourceName, frozenset[str]] | None = None
    logged = ""
    async for _ in wanted:
        while (served := wanted.value) != written:
            if served is None:
                written = None  # the serving daemon writes it
                continue
            try:
                with raises_only(StateFileError, "served_keeper"):
                    await file.write(served)
            except StateFileError as exc:
                if logged != str(exc):
                    on_problem(logged := str(exc))
                await trio.sleep(SERVED_RETRY_S)
            else:
                written, logged = served, ""
