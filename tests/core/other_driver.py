"""Another DRA driver in a small world: a claim that it has prepared, and what kubelet and the CDI directory say of it.

The name of its device says nothing of where that is: its CDI file does, by the node of the IOMMU group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import pytest
from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.devices import holdings, others
from gpuactors.core.events import Event
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.values.cdi import CdiSpec, CdiSpecs
from gpuactors.core.values.model import Asking, ClaimedDevice, LedgerFile, Pod, PodAnswer, SeenPods
from tests.core.orders import Happening

N = TypeVar("N")

_DRIVER: Final = "gpu.vendor.example"


class OthersClaim(Struct, frozen=True):
    """The claim, from its prepare to its unprepare."""

    number: int
    """Which one it is."""
    group: int
    """The IOMMU group of its GPU when it was prepared, which its containers have whatever is in that group now."""
    is_listed: bool = True
    """Kubelet knows its pod. Deleted by force, that is gone before the unprepare."""
    has_file: bool = True
    """Its CDI file is there. Somebody may remove it."""

    @property
    def device(self) -> ClaimedDevice:
        """As kubelet lists it."""
        name = f"others-{self.number}"
        pod = Pod("default", name, "")
        return ClaimedDevice(_DRIVER, "node-1", "vgpu-1", f"default/{name}", pod, self._uid, (self._cdi_id,))

    @property
    def spec(self) -> CdiSpec:
        """Its file."""
        path = f"/var/run/cdi/k8s.{_DRIVER}-claim_{self._uid}.yaml"
        return CdiSpec(path, (self._cdi_id,), (f"/dev/vfio/{self.group}",))

    @property
    def _uid(self) -> str:
        return f"{self.number:08x}-93f0-4f8e-9d3a-0f5f6a1c7e21"

    @property
    def _cdi_id(self) -> str:
        return f"k8s.{_DRIVER}/claim={self._uid}-vgpu-1"


def listed(claim: OthersClaim | None) -> tuple[ClaimedDevice, ...]:
    """What kubelet lists of it."""
    return (claim.device,) if claim is not None and claim.is_listed else ()


def files(claim: OthersClaim | None) -> CdiSpecs:
    """The CDI directory, without the files of gpuactors."""
    return CdiSpecs((claim.spec,) if claim is not None and claim.has_file else ())


def as_asked(answer: LedgerRead, asking: Asking, claim: OthersClaim | None, came: int) -> LedgerRead:
    """The same read beside another driver: List is called only where the daemon asks for that. Else there are the file,
    and what kubelet says of the pods that it is asked for. `came` is the number of that driver's pods so far."""
    answer = replace(answer, cdi=files(claim), pods=SeenPods(came=came))
    if asking.lists:
        return answer
    answers = (
        PodAnswer(
            pod,
            tuple((e.resource, e.device) for e in answer.listed if e.pod.name == pod.name),
            tuple(c for c in answer.claims if c.pod == pod),
        )
        for pod in asking.pods
    )
    file = LedgerFile(tuple(replace(e, pod=Pod("", "", f"uid-{e.pod.name}")) for e in answer.listed))
    return replace(answer, passive=True, listed=(), claims=(), file=file, answers=tuple(answers))


class Told(Struct, frozen=True):
    """What the daemon has been told of a claim that is there."""

    by_list: bool = False
    """Kubelet has listed it."""
    by_file: bool = False
    """Its file has said which GPU it has. That is forgotten with the file, unless kubelet lists the claim."""

    def __bool__(self) -> bool:
        return self.by_list or self.by_file

    def after(self, read: Event, claim: OthersClaim | None) -> Told:
        """The same after an event, which may be a read of the ledger."""
        if claim is None or not isinstance(read, LedgerRead):
            return self
        by_list = self.by_list or claim.device in read.claims
        has_file = read.cdi is not None and claim.spec in read.cdi.specs
        return Told(by_list, has_file or (self.by_file and by_list))


NOTHING: Final = Told()


# --- what happens to it -----------------------------------------------------------------------------------------------


def losses(
    claim_of: Callable[[N], OthersClaim | None], with_claim: Callable[[N, OthersClaim], N]
) -> tuple[Happening[N], ...]:
    """Its file goes, or its pod: of a claim that has both."""

    def has_both(node: N) -> bool:
        claim = claim_of(node)
        return claim is not None and claim.is_listed and claim.has_file

    def changed(node: N, *, is_listed: bool = True, has_file: bool = True) -> N:
        claim = claim_of(node)
        assert claim is not None
        return with_claim(node, replace(claim, is_listed=is_listed, has_file=has_file))

    return (
        Happening("the other claim's file goes", has_both, lambda n: changed(n, has_file=False)),
        Happening(
            "the other claim's pod is deleted by force", has_both, lambda n: changed(n, is_listed=False)
        ),
    )


# --- planted bugs -----------------------------------------------------------------------------------------------------


def others_claims_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours once: a claim's device has no address in its name, so that it is none of ours."""
    by_claim = holdings._by_claim
    monkeypatch.setattr(
        holdings, "_by_claim", lambda claims, own, admin, ended, _: by_claim(claims, own, admin, ended, {})
    )


def a_name_without_a_file_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "_placed", lambda *_: ())
