"""The opaque configurations of a claim: their order, their faults, and which requests each of them is for.

How one is decoded is the driver's to say (`gpus/config.py`, `domains/config.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from msgspec import Struct

from gpuactors.core.values.claim import Claim, Json
from gpuactors.core.values.quote import quoted

API_VERSION: Final = "resource.nvidia.com/v1beta1"
"""The version of NVIDIA's configurations for GPUs and for compute domains."""

Decoded = TypeVar("Decoded")


class ConfigFault(Struct, frozen=True, gc=False):
    """Why a configuration is refused, as a sentence for the claim's error."""

    sentence: str

    def __str__(self) -> str:
        return self.sentence


def all_decoded(
    claim: Claim, decode: Callable[[Json], Decoded | ConfigFault]
) -> list[tuple[tuple[str, ...], Decoded]] | ConfigFault:
    """Decode every configuration of the claim, with the requests that it is for; those of the device class first.

    Also one that no request uses: it is for this driver, and a mistake in it is the user's to know. Of those that cover
    a request the last one applies, whole.
    """
    configs: list[tuple[tuple[str, ...], Decoded]] = []
    # The scheduler writes them in this order (structured allocator); sorting is stable, so it costs nothing to be sure.
    for number, config in enumerate(sorted(claim.configs, key=lambda c: not c.from_class), start=1):
        decoded = (
            ConfigFault(f"the parameters cannot be read: {quoted(config.problem)}")
            if config.problem
            else decode(config.parameters)
        )
        if isinstance(decoded, ConfigFault):
            source = "the device class" if config.from_class else "the claim"
            return ConfigFault(f"configuration {number} ({source}'s): {decoded}")
        configs.append((config.requests, decoded))
    return configs


def covers(requests: tuple[str, ...], request: str) -> bool:
    """Return whether a configuration for `requests` (empty: for all) is for this request: `main` covers `main` and
    `main/sub`."""
    return not requests or request in requests or request.partition("/")[0] in requests
