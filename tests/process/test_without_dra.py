"""A daemon without DRA is as small as it was: nothing of the API server's client is loaded."""

from __future__ import annotations

from typing import Final

from tests.process.node import H100, HEALTHY, address, open_node

REFUSED: Final = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        if parts[0] in ("httpcore", "h11", "certifi") or parts[1:2] in (["kube"], ["ports_kube"]):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuses())
"""


def test_with_dra_off_nothing_of_the_api_server_is_imported() -> None:
    """It starts, serves, allocates and answers `inspect`, and would have died of the import."""
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon("--dra=off", planted=REFUSED) as daemon:
            node.wait_device_lists({H100: {address(0x23): HEALTHY}})
            node.kubelet.allocate(H100, [address(0x23)], pod="vm")
            node.assert_sound(daemon)
