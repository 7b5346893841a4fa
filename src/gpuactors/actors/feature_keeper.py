"""The feature keeper: writes the file of node features when they change, and renews it before it expires.

It is not removed when the daemon ends: at an update the labels would go and come. What nobody renews expires. Must not
decide which features there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import trio
from msgspec import Struct

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.reports.node_features import node_features
from gpuactors.core.state import NodeState
from gpuactors.ports.errors import StateFileError
from gpuactors.ports.node import FeatureFile

FEATURES_REST_S: Final = 5.0
"""The minimum interval between two looks at the state, in seconds; NFD itself looks once a minute, or when a file
changes."""

FEATURES_EXPIRE_S: Final = 3600.0
"""How long after their last renewal the labels expire, in seconds. A node without a daemon keeps them until then."""

FEATURES_RENEW_S: Final = 1800.0
"""The interval between two renewals of an unchanged file, in seconds."""

FEATURES_RETRY_S: Final = 60.0
"""The wait after a failed write, in seconds."""

assert FEATURES_RENEW_S + FEATURES_RETRY_S < FEATURES_EXPIRE_S


class FeaturePorts(Struct, frozen=True):
    file: FeatureFile
    on_problem: Callable[[str], None]
    """Called once per outage with the reason why the file cannot be written; must not raise."""
    now: Callable[[], float]
    """The time of day in seconds since 1970."""


async def run(state: LatestReader[NodeState], ports: FeaturePorts) -> None:
    """Run for ever."""
    written: Mapping[str, str] | None = None
    renew_at, rest_until, logged = math.inf, -math.inf, ""
    while True:
        with trio.move_on_at(renew_at):
            await state.receive()
        await trio.sleep_until(rest_until)
        rest_until = trio.current_time() + FEATURES_REST_S
        wanted = node_features(state.value)
        if wanted is None:
            written, renew_at = None, math.inf  # the serving daemon writes it
        elif wanted != written or trio.current_time() >= renew_at:
            try:
                with raises_only(StateFileError, "feature_keeper"):
                    await ports.file.write(wanted, ports.now() + FEATURES_EXPIRE_S)
            except StateFileError as exc:
                if logged != str(exc):
                    ports.on_problem(logged := str(exc))
                renew_at = trio.current_time() + FEATURES_RETRY_S
            else:
                written, logged = wanted, ""
                renew_at = trio.current_time() + FEATURES_RENEW_S
