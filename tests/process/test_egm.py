"""A node with Grace superchips: the daemon as a process gives the EGM with all its GPUs, by Allocate and by claims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.daemon import eventually
from tests.process.node import H100, HEALTHY, Node, address, open_node
from tests.process.test_claims import claims_node
from tests.process.test_claims import daemon_of as claims_daemon
from tests.support.claims import DRIVER, device_of, plugin_of, prepare
from tests.support.egm import Shape, make_egm, remove_egm

ONE, TWO, THREE = address(0x23), address(0x24), address(0x25)
EGM = "/dev/egm4"


def told(node: Node, action: str) -> None:
    """The kernel's uevent of an EGM."""
    path = "/devices/virtual/egm/egm4"
    fields = {"ACTION": action, "DEVPATH": path, "SUBSYSTEM": "egm", "SEQNUM": "1", "DEVNAME": "/dev/egm4"}
    lines = [f"{action}@{path}", *(f"{key}={value}" for key, value in fields.items())]
    node.tell_raw("".join(f"{line}\0" for line in lines).encode())


def gets_egm(node: Node, *ids: str) -> bool:
    return EGM in [device.host_path for device in node.kubelet.allocate(H100, ids).devices]


@pytest.mark.parametrize("shape", Shape)
def test_allocate_gives_the_egm_with_all_its_gpus_from_when_it_is_there(shape: Shape) -> None:
    with open_node() as node:
        for slot in (0x23, 0x24, 0x25):
            node.plug(slot, "2330", driver="vfio-pci")
        with node.daemon() as daemon:
            node.wait_device_lists({H100: {ONE: HEALTHY, TWO: HEALTHY, THREE: HEALTHY}})
            assert not gets_egm(node, ONE, TWO)
            make_egm(node.tree.root, "egm4", [ONE], shape)
            assert gets_egm(node, ONE, TWO), "read for this call, without a uevent"
            make_egm(node.tree.root, "egm4", [ONE, TWO], shape)
            assert (gets_egm(node, ONE, THREE), gets_egm(node, TWO, ONE)) == (False, True)
            assert node.kubelet.preferred(H100, [TWO, ONE, THREE], [], 2) == (ONE, TWO)
            remove_egm(node.tree.root, "egm4")
            assert not gets_egm(node, ONE, TWO)
            node.assert_sound(daemon)


def test_a_uevent_has_the_egms_read_at_once() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon() as daemon:
            node.wait_device_lists({H100: {ONE: HEALTHY}})
            make_egm(node.tree.root, "egm4", [ONE])
            told(node, "add")
            daemon.wait_event("sets.read", source="EGM")


def test_by_cdi_names_the_egm_is_the_only_node() -> None:
    with open_node(cdev=True) as node:
        make_egm(node.tree.root, "egm4", [ONE])
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon("--preset=kata", f"--cdi-dir={node.directory / 'cdi'}"):
            node.wait_device_lists({H100: {ONE: HEALTHY}})
            answer = node.kubelet.allocate(H100, [ONE])
            assert answer.cdi_devices == (f"{H100}={ONE}",)
            assert [device.host_path for device in answer.devices] == [EGM]


def nodes_of(cdi: Path, uid: str) -> dict[str, list[str]]:
    """The device nodes of each device in the claim's file."""
    (file,) = cdi.glob(f"k8s.{DRIVER}-claim_{uid}.json")
    devices = json.loads(file.read_text())["devices"]
    return {d["name"]: [n["path"] for n in d["containerEdits"]["deviceNodes"]] for d in devices}


def test_a_claim_of_all_gpus_has_the_egm_in_its_file_and_slices_name_it() -> None:
    with claims_node(g23="vfio-pci", g24="vfio-pci", g25="vfio-pci") as (node, api, cdi):
        make_egm(node.tree.root, "egm4", [ONE, TWO])
        with claims_daemon(node, cdi), plugin_of(node.kubelet_dir) as plugin:
            eventually(lambda: len(api.devices()) == 3, "the slice")
            egms = {
                device["name"]: device["attributes"].get("egm")
                for published in api.do(api.server.slices, DRIVER)
                for device in published["spec"].get("devices") or ()
            }
            assert egms == {
                device_of(ONE): {"string": "egm4"},
                device_of(TWO): {"string": "egm4"},
                device_of(THREE): None,
            }
            uid = api.claim("one", ONE, TWO)
            assert prepare(plugin, "one", uid).error == ""
            assert nodes_of(cdi, uid) == {
                f"{uid}-{device_of(ONE)}": ["/dev/vfio/35", "/dev/vfio/vfio", EGM],
                f"{uid}-{device_of(TWO)}": ["/dev/vfio/36", "/dev/vfio/vfio"],
            }
