"""The served keeper: writes the resources that this daemon serves, and their models, for its successor. A daemon that
does not serve writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from gpuactors import limits
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import ResourceName, Role
from gpuactors.ports.node import ServedResources, StateFileError


async def run(
    state: LatestReader[NodeState], file: ServedResources, on_problem: Callable[[str], None]
) -> None:
    """Runs for ever. A problem is logged once while it lasts; meanwhile the write is retried."""
    written: Mapping[ResourceName, frozenset[str]] | None = None
    logged = ""
    async for now in state:
        if now.daemon.role is not Role.SERVING:
            written = None  # the serving daemon writes it
        if now.daemon.role is not Role.SERVING or now.published.served == written:
            continue
        try:
            with raises_only(StateFileError, "served_keeper"):
                await file.write(now.published.served)
        except StateFileError as exc:
            if logged != str(exc):
                on_problem(logged := str(exc))
            await trio.sleep(limits.SERVED_RETRY_S)
        else:
            written, logged = now.published.served, ""
