"""The files of a claim of a compute domain."""

from __future__ import annotations

from typing import final

from gpuactors.core.claims.files import PlacedFile
from gpuactors.core.domains import template
from gpuactors.core.domains.cdi import edits_of
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimRecord, domain_of
from gpuactors.core.values.claim import Claim, DeviceEdits
from gpuactors.core.values.domain import ClaimedDomain, DeviceKind, device_of
from gpuactors.core.values.status import Conflict


@final
class DomainFiles:
    """A channel's CDI file, and the directory that a daemon has mounted."""

    def may_write(self, state: NodeState, entry: ClaimRecord) -> bool:
        return True

    def unmet(self, state: NodeState, entry: ClaimRecord) -> Conflict | None:
        return None

    def devices(self, state: NodeState, entry: ClaimRecord, claim: Claim) -> tuple[DeviceEdits, ...]:
        own = domain_of(entry).domain
        assert own is not None
        directory = _directory(state, own)
        named = ((result, device_of(result.device)) for result in claim.results or ())
        return tuple(DeviceEdits(r, edits_of(own, d, directory)) for r, d in named if d is not None)

    def directories(self, state: NodeState, entry: ClaimRecord) -> tuple[str, ...]:
        """Return the domain's directory, which a daemon's container mounts."""
        own = domain_of(entry).domain
        if own is None or all(device.kind is not DeviceKind.DAEMON for device in own.devices):
            return ()
        return (_directory(state, own),)

    def placed(self, state: NodeState, entry: ClaimRecord) -> tuple[PlacedFile, ...]:
        """Return the file from which NVIDIA's daemon makes IMEX's configuration."""
        return tuple(
            PlacedFile(f"{d}/{template.NAME}", template.TEXT) for d in self.directories(state, entry)
        )


def _directory(state: NodeState, own: ClaimedDomain) -> str:
    settings = state.domains.settings
    assert settings is not None
    return f"{settings.directory}/{own.uid}"
