"""The virtual machine that a pod runs, by the pod's name, as kubelet names it: no other program is asked.

KubeVirt has the API server name the pod of a VirtualMachineInstance: `generateName` is `virt-launcher-`, the instance's
name and `-` (pkg/virt-controller/services/template.go). The API server cuts that to 58 characters and adds five random
ones (apiserver pkg/storage/names/generate.go, apimachinery pkg/util/rand). The pod's label `vm.kubevirt.io/name` says
less: it has the guest's host name (pkg/util/net/dns, SanitizeHostname). Nothing is decided by this: whoever makes a pod
also chooses its labels.
"""

from __future__ import annotations

from typing import Final

from gpuactors.core.values.names import is_subdomain

_PREFIX: Final = "virt-launcher-"

_BASE_CHARS_MAX: Final = 58
_RANDOM_CHARS: Final = 5
_RANDOM: Final = frozenset("bcdfghjklmnpqrstvwxz2456789")


def virtual_machine(pod: str) -> str:
    """Return the name of the VirtualMachineInstance of the pod with this name. Empty if it is no pod of KubeVirt's, or
    if its name may be cut: that of an instance with 43 characters or more."""
    base = _base(pod)
    if len(base) >= _BASE_CHARS_MAX or not base.endswith("-"):
        return ""
    name = base.removeprefix(_PREFIX)[:-1]
    return name if is_subdomain(name) else ""


def runs(pod: str, machine: str) -> bool:
    """Return whether the pod with this name is one of the VirtualMachineInstance `machine`. Instances that differ only
    behind the cut have pods that are not told apart."""
    return is_subdomain(machine) and _base(pod) == f"{_PREFIX}{machine}-"[:_BASE_CHARS_MAX]


def _base(pod: str) -> str:
    """Return the name without its random end; empty if it has none, or not KubeVirt's prefix."""
    base, end = pod[:-_RANDOM_CHARS], pod[-_RANDOM_CHARS:]
    is_generated = len(end) == _RANDOM_CHARS and _RANDOM.issuperset(end)
    return base if is_generated and base.startswith(_PREFIX) else ""
