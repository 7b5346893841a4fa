"""What stays different between a fake and the original, each with its reason.

A difference that is no longer there fails the test, and so does one that is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Difference:
    """One value of one step that differs."""

    fake: str
    """`shipped` or `grpcio`."""
    group: str
    step: str
    key: str
    reason: str


_DEADLINE: Final = (
    "kubelet passes the caller's deadline on; grpclib's handlers cannot see it, and end with the caller"
)
_DIAL: Final = "grpc-go dials again for the call, and words the failure its own way; the code is the same"

KNOWN_DIFFERENCES: Final = (
    Difference("shipped", "registration", "register", "calls", _DEADLINE),
    Difference("shipped", "registration", "its end is not noticed", "pod", _DIAL),
    Difference("grpcio", "registration", "its end is not noticed", "pod", _DIAL),
)

NOT_PLAYED: Final[Mapping[tuple[str, str], str]] = {
    ("grpcio", "odd_frames"): "the stand-in keeps one health per ID, and no empty topology",
    ("grpcio", "empty_answer"): "the stand-in counts what the ledger has, so it cannot lose a device",
    ("grpcio", "readmission"): "the stand-in has no containers, and admits no pod anew",
    ("grpcio", "crash"): "the stand-in notes the crash and goes on",
    **{
        ("grpcio", group): "the stand-in has no DRA manager"
        for group in ("dra_registration", "dra_restart", "dra_claims", "dra_errors")
    },
}
"""Fake and group: why the group is not played on that fake."""
