"""The checks, in the order of the report: each file is a group, a pure function of the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from msgspec import Struct

from gpuactors.cli.doctor.checks import (
    claims,
    daemon,
    gpus,
    grace,
    iommu,
    kubelet,
    kubevirt,
    model_names,
    preflight,
    runtime,
    state,
    vfio,
    way_back,
)
from gpuactors.cli.doctor.facts import Facts, offers_gpus
from gpuactors.cli.doctor.finding import Finding


class Group(Struct, frozen=True):
    """The findings of one group."""

    name: str
    findings: tuple[Finding, ...]


GROUPS: Final[tuple[tuple[str, Callable[[Facts], Iterator[Finding]]], ...]] = (
    ("IOMMU", iommu.check),
    ("GPUs", gpus.check),
    ("names", model_names.check),
    ("vfio", vfio.check),
    ("Grace", grace.check),
    ("host", preflight.check),
    ("kubelet", kubelet.check),
    ("daemon", daemon.check),
    ("claims", claims.check),
    ("runtime", runtime.check),
    ("KubeVirt", kubevirt.check),
    ("way back", way_back.check),
    ("state", state.check),
)

_GPU_GROUPS: Final = frozenset({"IOMMU", "GPUs", "names", "vfio", "Grace", "host"})
"""The groups that are left out where no GPU is offered: they are the host's own business."""


def examine(facts: Facts) -> tuple[Group, ...]:
    """Run all checks; leave out a group without a finding."""
    left_out = frozenset[str]() if offers_gpus(facts.config) else _GPU_GROUPS
    groups = (Group(name, tuple(check(facts))) for name, check in GROUPS if name not in left_out)
    return tuple(group for group in groups if group.findings)
