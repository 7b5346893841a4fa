"""The content of a claim's files, from the claim and its devices' bindings.

A file of its own: it joins the CDI file and the metadata, which do not know each other.
"""

from __future__ import annotations

from gpuactors.core.claims.cdi import DeviceEdits, device_file
from gpuactors.core.claims.files import ClaimContents, PlacedFile
from gpuactors.core.claims.metadata import PCI_BUS_ID, Attribute, metadata_files
from gpuactors.core.ledger.identity import claimed_address
from gpuactors.core.values.claim import Claim


def contents_of(
    driver: str,
    claim: Claim,
    devices: tuple[DeviceEdits, ...],
    directories: tuple[str, ...] = (),
    placed: tuple[PlacedFile, ...] = (),
) -> ClaimContents:
    """The contents of a claim's files. `devices` has one for each of its results. Raises `ValueError` if a name from
    outside is no part of a path."""
    attributes = {device.result.device: _attributes(device.result.device) for device in devices}
    return ClaimContents(
        claim.name,
        device_file(driver, claim.name, devices),
        metadata_files(driver, claim, attributes),
        directories,
        placed,
    )


def _attributes(device: str) -> dict[str, Attribute]:
    """Those that a container needs: KubeVirt takes the PCI address (pkg/dra/utils.go)."""
    address = claimed_address(device)
    return {PCI_BUS_ID: address} if address is not None else {}
