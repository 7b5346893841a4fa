"""A fake kubelet with a fake API server and the CDI files that the daemon writes."""

from __future__ import annotations

import json

import pytest
import trio
from trio.testing import MockClock

from gpuactors.core.claims.cdi import device_file
from gpuactors.core.kinds.pci_function import PCI_FUNCTION
from gpuactors.core.values.claim import AllocatedDevice, BoundFunction, ClaimName, ClaimUid
from gpuactors.core.values.model import PciAddress
from gpuactors.core.values.vfio import VfioConfig
from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.kubelet.dra.surroundings import nodes_of, surroundings_of
from gpuactors_simulation.kubelet.dra.values import ApiAwayError, ClaimObject
from gpuactors_simulation.kubelet.fake import open_fake_kubelet
from gpuactors_simulation.kubelet.transport import MemoryTransport

DRIVER = "gpu.nvidia.com"
CLAIM = ClaimName("default", "gpu", ClaimUid("4a1d77c0-0f1e-4a53-9a2b-6f1c0d9e8b7a"))
REQUEST = {"name": "gpu", "exactly": {"deviceClassName": "vfio.gpu.nvidia.com"}}


def result(driver: str) -> dict[str, str]:
    return {"driver": driver, "pool": "node-1", "device": "gpu-0000-01-00-0", "request": "gpu"}


def cluster() -> FakeApiServer:
    api = FakeApiServer()
    api.add_node("node-1")
    api.add_claim(
        {
            "metadata": {"namespace": "default", "name": "gpu", "uid": CLAIM.uid},
            "spec": {"devices": {"requests": [REQUEST]}},
        }
    )
    return api


def test_a_claim_is_read_with_the_drivers_of_its_allocation() -> None:
    api = cluster()
    node = surroundings_of(api)
    found = node.claim("default", "gpu")
    assert found is not None
    uid = found.uid
    assert found == ClaimObject("default", "gpu", uid)
    results = [result(DRIVER), result("nic.example"), result(DRIVER)]
    api.set_claim_status("default", "gpu", {"allocation": {"devices": {"results": results}}})
    assert node.claim("default", "gpu") == ClaimObject("default", "gpu", uid, (DRIVER, "nic.example"))
    assert node.claim("default", "other") is None
    api.away = True
    with pytest.raises(ApiAwayError):
        node.claim("default", "gpu")


async def test_a_kubelet_that_starts_deletes_the_slices_of_its_node_and_later_those_of_a_driver_that_is_gone(
    autojump_clock: MockClock,
) -> None:
    api = cluster()
    wiped: list[str | None] = []
    api.delete_slices = wiped.append  # type: ignore[method-assign,assignment]
    api.away = True
    async with open_fake_kubelet(MemoryTransport(), dra=surroundings_of(api)) as kubelet:
        await kubelet.start()
        await trio.sleep(10)
        assert not wiped
        api.away = False
        await trio.sleep(10)
        assert wiped == [None]


def cdi_file() -> bytes:
    function = BoundFunction(PciAddress("0000:01:00.0"), "vfio-pci", 51, None)
    allocated = AllocatedDevice("gpu", "node-1", "gpu-0000-01-00-0")
    edits = PCI_FUNCTION.edits(allocated, None, (function,), VfioConfig())
    return json.dumps(device_file(DRIVER, CLAIM, [edits])).encode()


def test_the_nodes_of_a_cdi_id_are_those_of_the_daemons_own_files() -> None:
    nodes = nodes_of(lambda: [b'{"kind": "other.example/thing", "devices": []}', cdi_file()])
    name = f"k8s.{DRIVER}/claim={CLAIM.uid}-gpu-0000-01-00-0"
    assert set(nodes([name])) == {"/dev/vfio/51", "/dev/vfio/vfio"}
    assert len(nodes([name, name])) == 2
    assert nodes([]) == ()
    with pytest.raises(LookupError, match=r"k8s\.x/claim=gone"):
        nodes([name, "k8s.x/claim=gone"])


NO_CDI_FILES = (
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 100_000,
    b"[]",
    b"1",
    b'{"devices": 1}',
    b'{"kind": "k8s.x/claim"}',
    b'{"kind": "k8s.x/claim", "devices": null}',
    b'{"kind": "k8s.x/claim", "devices": [1]}',
    b'{"kind": "k8s.x/claim", "devices": [{}]}',
    b'{"devices": [{"name": "gpu"}]}',
)


@pytest.mark.parametrize("content", NO_CDI_FILES, ids=lambda content: repr(content[:40]))
def test_a_file_that_is_no_cdi_file_is_skipped_and_hides_no_other(content: bytes) -> None:
    nodes = nodes_of(lambda: [content, cdi_file(), content])
    assert nodes([f"k8s.{DRIVER}/claim={CLAIM.uid}-gpu-0000-01-00-0"])
    with pytest.raises(LookupError):
        nodes(["k8s.x/claim=gpu"])
