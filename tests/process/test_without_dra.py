"""A daemon without DRA and without HTTP endpoints loads none of their adaptors, and none of the libraries of these."""

from __future__ import annotations

from typing import Final

from tests.process.node import H100, HEALTHY, address, open_node

REFUSED: Final = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        ours = ("kube", "ports.kube", "http", "ports.http", "daemon.endpoints")
        theirs = ("httpcore", "h11", "certifi", "prometheus_client")
        if name in theirs or name in [f"gpuactors.{one}" for one in ours]:
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuses())
"""


def test_with_dra_and_endpoints_off_nothing_of_theirs_is_imported() -> None:
    """It starts, serves, allocates and answers `inspect`, and would have died of the import."""
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon("--dra=off", "--http-address=off", planted=REFUSED) as daemon:
            node.wait_device_lists({H100: {address(0x23): HEALTHY}})
            node.kubelet.allocate(H100, [address(0x23)], pod="vm")
            node.assert_sound(daemon)
