"""Kubelet's cache of claims, as one plain object: which claim is prepared, for which pods, with which devices.

Plays cm/dra/manager.go and claiminfo.go of kubelet 1.36. Must not know of a clock, of tasks or of gRPC.

One claim of a name: a new UID is refused until the old one is unprepared. The first pod that uses a claim has it
prepared, the last one unprepared. A restart keeps everything but that it is prepared, so that the next pod which uses a
shared claim has it prepared again, and nothing happens for pods that run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from gpuactors_simulation.kubelet.dra.values import ClaimDevice, ClaimError, ClaimInfo, ClaimObject

Checkpoint = Mapping[tuple[str, str], ClaimInfo]
"""The content of `dra_manager_state`."""


class ClaimManager:
    """Owned by one fake kubelet. Every method is synchronous and leaves the state consistent.

    `unpatched`, `passes_over`: as in `Release`.
    """

    def __init__(self, *, unpatched: bool, passes_over: bool) -> None:
        self._unpatched = unpatched
        self._passes_over = passes_over
        self._claims: dict[tuple[str, str], ClaimInfo] = {}

    def boot(self) -> None:
        """Kubelet's process starts: what is on disk is known."""
        self._claims = {
            key: replace(info, prepared=False, unpreparing=False) for key, info in self._claims.items()
        }

    def forget(self) -> None:
        """The file is lost: no claim is known, and none is unprepared."""
        self._claims.clear()

    @property
    def claims(self) -> tuple[ClaimInfo, ...]:
        """Every claim that is known."""
        return tuple(self._claims.values())

    def of_pod(self, pod: str) -> tuple[ClaimInfo, ...]:
        """Return the claims that a pod uses, by its UID."""
        return tuple(info for info in self._claims.values() if pod in info.pods)

    # --- prepare ----------------------------------------------------------------------------------------------

    def use(self, pod: str, claims: Iterable[ClaimObject]) -> tuple[ClaimInfo, ...]:
        """The pod uses the claims from now on; returns those that are to be prepared. Raises `ClaimError`: the pod then
        uses the ones before that one."""
        unprepared = []
        for claim in claims:
            info = self._use(pod, claim)
            if not info.prepared:
                unprepared.append(info)
            elif self._passes_over:
                break
        return tuple(unprepared)

    def _use(self, pod: str, claim: ClaimObject) -> ClaimInfo:
        info = self._claims.get((claim.namespace, claim.name))
        if info is not None and info.uid != claim.uid:
            raise ClaimError(
                f"old ResourceClaim with same name {claim.name} and different UID {info.uid} still exists "
                "(previous pod force-deleted?!)"
            )
        if info is not None and info.unpreparing and not self._unpatched:
            raise ClaimError(f"ResourceClaim {claim.name} is being unprepared")
        if info is None:
            info = ClaimInfo(claim.namespace, claim.name, claim.uid, claim.drivers)
        if pod not in info.pods:
            info = replace(info, pods=(*info.pods, pod))
        self._claims[info.key] = info
        return info

    def answered(self, claim: ClaimInfo, driver: str, devices: Iterable[ClaimDevice]) -> None:
        """A driver has answered with these devices. Raises `ClaimError` if the claim is gone meanwhile."""
        info = self._same(claim)
        if info is None:
            raise ClaimError(f"internal error: unable to get claim info for ResourceClaim {claim.name}")
        kept = info.devices if self._unpatched else tuple(d for d in info.devices if d.driver != driver)
        self._claims[info.key] = replace(info, devices=(*kept, *devices))

    def prepared(self, claims: Iterable[ClaimInfo]) -> None:
        """Every driver has answered for all of a pod's claims. Raises as `answered`."""
        for claim in claims:
            info = self._same(claim)
            if info is None:
                raise ClaimError(f"internal error: unable to get claim info for ResourceClaim {claim.name}")
            self._claims[info.key] = replace(info, prepared=True)

    # --- unprepare --------------------------------------------------------------------------------------------

    def leave(self, pod: str, keys: Iterable[tuple[str, str]]) -> tuple[ClaimInfo, ...]:
        """A pod that ends names these claims. Returns those that no other pod uses, which are to be unprepared; of the
        others it is not a user any more."""
        last = []
        for key in keys:
            claim = self._claims.get(key)
            if claim is None or (pod not in claim.pods and not self._unpatched):
                continue
            if len(claim.pods) > 1:
                pods = tuple(user for user in claim.pods if user != pod)
                self._claims[key] = replace(claim, pods=pods)
            else:
                self._claims[key] = replace(claim, unpreparing=True)
                last.append(self._claims[key])
        return tuple(last)

    def unprepared(self, claims: Iterable[ClaimInfo]) -> None:
        """Every driver has let go of these claims; they are forgotten."""
        for claim in claims:
            if self._same(claim) is not None:
                del self._claims[claim.key]

    def without(self, active: Collection[str]) -> tuple[str, ...]:
        """Return the UIDs of pods that use a claim and are not active."""
        return tuple(
            dict.fromkeys(pod for info in self._claims.values() for pod in info.pods if pod not in active)
        )

    def _same(self, claim: ClaimInfo) -> ClaimInfo | None:
        info = self._claims.get(claim.key)
        return info if info is not None and info.uid == claim.uid else None
