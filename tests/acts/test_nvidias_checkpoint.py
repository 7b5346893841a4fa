"""The checkpoint of NVIDIA's DRA driver: the fake's is the original's, and of the original's each claim is read.

`recorded/nvidias-checkpoints.json` has what its kubelet plugins (95932046, 0.5.0-dev) had written on the real node,
with the claims of the API server then: `tests/node/test_nvidias_checkpoint.py` makes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from gpuactors.acts.theirs import TheirClaims
from gpuactors.core.state.claims import DomainReservation, StoredEntry, gpus_of
from gpuactors.core.values.domain import DomainDevice, device_of
from tests.memory.disk import FakeDisk
from tests.support.nvidia_checkpoint import (
    ABORTED,
    COMPLETED,
    DOMAINS,
    GPUS,
    STARTED,
    Object,
    Release,
    TheirClaim,
    channel,
    daemon,
    gpu,
    mig,
    prepared,
    started,
    their_checkpoint,
    vfio,
    written,
)

RECORDED: Final[list[Any]] = json.loads(
    (Path(__file__).parent / "recorded" / "nvidias-checkpoints.json").read_text()
)
FILES: Final = [pytest.param(one, id=f"{one['driver']}: {one['what']}") for one in RECORDED]

UID = "0f1e2d3c-0000-4000-8000-000000000001"
DOMAIN = "0f1e2d3c-0000-4000-8000-00000000000d"
ADDRESS = "0000:23:00.0"


def read(driver: str, content: bytes, boot: str) -> dict[str, StoredEntry]:
    """Each claim that is taken over, by UID, on a disk where each one's CDI file is there."""
    disk = FakeDisk()
    for uid in json.loads(content)["v1"].get("preparedClaims", ()):
        disk.put(f"/cdi/k8s.{driver}-claim_{uid}.yaml", b"devices: []")
    found = TheirClaims(disk, driver=driver, cdi_dir="/cdi", places=None).read(content, boot)
    return {entry.name.uid: entry for entry in found.claims}


def test_a_file_of_each_kind_was_recorded() -> None:
    """What the following ones compare: each kind of device that the mock of NVML has, and each state of a prepare."""
    states = {(one["driver"], claim["state"]) for one in RECORDED for claim in one["claims"]}
    assert states == {
        (GPUS, COMPLETED), (GPUS, STARTED), (DOMAINS, COMPLETED), (DOMAINS, STARTED), (DOMAINS, ABORTED),
    }  # fmt: skip
    devices = {
        d.rstrip("0123456789")
        for one in RECORDED
        for c in one["claims"]
        for d in devices_of(c, one["driver"])
    }
    assert devices == {"gpu-", "gpu-vfio-", "channel-", "daemon-"}
    assert [] in [one["claims"] for one in RECORDED]


@pytest.mark.parametrize("original", FILES)
def test_the_fake_writes_what_the_original_had_written(original: Object) -> None:
    """The checksums are right as well: NVIDIA's plugin takes a file with others for corrupt."""
    made = written(original["driver"], original["boot"], original["claims"], original["attributes"])
    assert made.decode() == original["content"]


@pytest.mark.parametrize("original", FILES)
def test_each_claim_of_the_original_is_read(original: Object) -> None:
    """Every claim that is prepared, and no other, with its devices as they were allocated."""
    driver = original["driver"]
    found = read(driver, original["content"].encode(), original["boot"])
    claims = {c["claim"]["metadata"]["uid"]: c for c in original["claims"] if c["state"] == COMPLETED}
    assert found.keys() == claims.keys()
    for uid, claim in claims.items():
        entry, names = found[uid], devices_of(claim, driver)
        assert [device.device for device in entry.given] == names
        assert [device.cdi_ids[-1] for device in entry.given] == [
            f"k8s.{driver}/claim={uid}-{n}" for n in names
        ]
        if driver == DOMAINS:
            (name,) = names
            (config,) = claim["claim"]["status"]["allocation"]["devices"]["config"]
            assert domain_of(entry) == (config["opaque"]["parameters"]["domainID"], (device_of(name),))
            meta = claim["claim"]["metadata"]
            assert str(entry.name) == f"{meta['namespace']}/{meta['name']}"
        else:
            attributes = [original["attributes"][name] for name in names]
            on_vfio = [
                a["resource.kubernetes.io/pciBusID"]["string"]
                for a in attributes
                if a["type"]["string"] == "vfio"
            ]
            assert [held.key for held in gpus_of(entry).gpus] == on_vfio
            # Of a GPU on NVIDIA's driver the file has the UUID alone, and nobody here knows where that is.
            assert list(entry.unplaced) == ([] if on_vfio else names)
        assert read(driver, original["content"].encode(), "another boot") == {}


def domain_of(entry: StoredEntry) -> tuple[str, tuple[DomainDevice, ...]]:
    """The UID of the domain that a claim is for, and the channel or daemon that it has."""
    assert isinstance(entry.reservation, DomainReservation)
    assert entry.reservation.domain is not None
    return entry.reservation.domain.uid, entry.reservation.domain.devices


def devices_of(claim: Object, driver: str) -> list[str]:
    """The names of the devices that a recorded claim has of a driver."""
    results = claim["claim"]["status"]["allocation"]["devices"]["results"]
    return [result["device"] for result in results if result["driver"] == driver]


EACH_KIND: Final = {
    "gpu": (GPUS, prepared(gpu(UID, "node-1", 0, "GPU-1"))),
    "mig": (GPUS, prepared(mig(UID, "node-1", "GPU-1", parent_address=ADDRESS))),
    "vfio": (GPUS, prepared(vfio(UID, "node-1", 0, ADDRESS))),
    "channel": (DOMAINS, prepared(channel(UID, "node-1"), domain=DOMAIN, namespace="default", name="c")),
    "daemon": (DOMAINS, prepared(daemon(UID, "node-1"), domain=DOMAIN, namespace="nvidia", name="d")),
}


OF_RELEASES: Final = [
    pytest.param(kind, release, id=f"{kind} of {release.name}")
    for kind in EACH_KIND
    for release in Release
    if kind != "vfio" or release >= Release.R25_12
]


@pytest.mark.parametrize(("kind", "release"), OF_RELEASES)
def test_each_kind_is_read_from_each_release(kind: str, release: Release) -> None:
    """A part of a GPU is the whole one's. Where the file does not say which GPU it is, nobody gets any that may be."""
    driver, claim = EACH_KIND[kind]
    beside: dict[str, TheirClaim] = {UID: claim, UID.replace("0f", "1f"): started("default", "begun")}
    entry = read(driver, their_checkpoint("b1", beside, release=release), "b1")
    assert entry.keys() == {UID}
    (device,) = claim.devices
    assert [given.device for given in entry[UID].given] == [device.name]
    if driver == DOMAINS:
        assert domain_of(entry[UID]) == (DOMAIN, (device_of(device.name),))
        assert bool(entry[UID].name.name) is (release >= Release.R0_4)
    else:
        has_address = kind != "gpu" and release >= Release.R0_4
        assert [held.key for held in gpus_of(entry[UID]).gpus] == ([ADDRESS] if has_address else [])
        assert bool(entry[UID].unplaced) is not has_address
