"""Another DRA driver on the node: the claims that it has prepared, and the CDI files in which it says so.

Its devices have names that say nothing of where they are. Nobody on the node but its files knows which card a claim
has; kubelet lists the claim for its pod, with the CDI ids that the driver gave it.
"""

from __future__ import annotations

from typing import Final, final

from msgspec import Struct

from gpuactors.core.values.cdi import CdiSpec, CdiSpecs
from gpuactors_simulation.kubelet.values import Claim

DRIVER: Final = "gpu.vendor.example"
CDI_DIR: Final = "/var/run/cdi"


class PreparedClaim(Struct, frozen=True):
    """A claim that the driver has prepared and not unprepared."""

    uid: str
    card: str
    """The PCI address, which only the driver knows."""
    group: int
    has_file: bool

    @property
    def cdi_id(self) -> str:
        return f"k8s.{DRIVER}/claim={self.uid}-vgpu-{self.uid[:4]}"

    @property
    def listed(self) -> Claim:
        """As kubelet lists it."""
        return Claim(f"claim-{self.uid[:8]}", DRIVER, "node-1", f"vgpu-{self.uid[:4]}", (self.cdi_id,))


@final
class OtherDriver:
    """The driver, and the directory of its files. Implements `ports.node.CdiReader`."""

    def __init__(self) -> None:
        self.claims: dict[str, PreparedClaim] = {}
        """By the name of the pod that has it, or is to have it."""
        self._made = 0

    def prepare(self, pod: str, card: str, group: int, *, has_file: bool) -> Claim:
        """Gives a card to a claim, and writes its file; `has_file` false: somebody removes that."""
        self._made += 1
        uid = f"{self._made:08x}-93f0-4f8e-9d3a-0f5f6a1c7e21"
        claim = self.claims[pod] = PreparedClaim(uid, card, group, has_file)
        return claim.listed

    def unprepare(self, pod: str) -> None:
        """The claim ends, and its file goes."""
        del self.claims[pod]

    async def read(self) -> CdiSpecs:
        """Implement `CdiReader.read`."""
        specs = (
            CdiSpec(f"{CDI_DIR}/k8s.{DRIVER}-claim_{c.uid}.yaml", (c.cdi_id,), (f"/dev/vfio/{c.group}",))
            for c in self.claims.values()
            if c.has_file
        )
        return CdiSpecs(tuple(sorted(specs, key=lambda spec: spec.path)))
