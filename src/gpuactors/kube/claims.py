"""Reads ResourceClaims. Implements `ports.kube.ClaimApi`."""

from __future__ import annotations

from typing import final
from urllib.parse import quote

from gpuactors.core.values.claim import ClaimAbsent, ClaimAnswer, ClaimName, ClaimReplaced, ClaimUid
from gpuactors.core.values.quote import quoted_name
from gpuactors.decoding import without_deep
from gpuactors.kube import errors, objects
from gpuactors.kube.client import ApiClient, Call
from gpuactors.ports.kube import ApiRefused, ObjectRef


@final
class KubeClaims:
    """The claims, as far as they are allocated to one driver's devices of one node."""

    def __init__(self, client: ApiClient, driver: str, node: str) -> None:
        self._client = client
        self._driver = driver
        self._node = node

    async def read(self, claim: ClaimName) -> ClaimAnswer:
        stored = await self._stored(claim)
        if stored is None:
            return ClaimAbsent()
        current = objects.claim(stored, self._driver, self._node)
        if current.name.uid != claim.uid:
            return ClaimReplaced(ClaimUid(current.name.uid))
        return current

    async def reserved_for(self, claim: ClaimName) -> tuple[ObjectRef, ...]:
        stored = await self._stored(claim)
        if stored is None or stored.metadata.uid != claim.uid:
            return ()
        return tuple(objects.pods_of(stored))

    async def _stored(self, claim: ClaimName) -> objects.ClaimObject | None:
        """Return the claim of this name as the server has it; None if there is none. Raises `ApiError`."""
        what = f"read the claim {quoted_name(claim.namespace)}/{quoted_name(claim.name)}"
        # The names are kubelet's: whatever they are, they stay one part of the path each.
        namespace, name = quote(claim.namespace, safe=""), quote(claim.name, safe="")
        path = f"/apis/{objects.API}/namespaces/{namespace}/resourceclaims/{name}"
        try:
            body = await self._client.ask(Call(what, "GET", path))
        except ApiRefused as exc:
            if _is_absence(exc, claim):
                return None
            raise
        stored = errors.answered(what, self._client.server, without_deep(body), objects.ClaimObject)
        if (stored.metadata.namespace, stored.metadata.name) != (claim.namespace, claim.name):
            raise errors.malformed(what, self._client.server, "it is about another object")
        return stored


def _is_absence(refused: ApiRefused, claim: ClaimName) -> bool:
    """Return whether the server says of this very claim that it is not there. A server or proxy that does not serve
    claims answers 404 as well, and what is prepared must not be released for that."""
    refusal = refused.refusal
    return (
        refusal.code == 404
        and refusal.reason == "NotFound"
        and (refusal.kind, refusal.name) == ("resourceclaims", claim.name)
    )
