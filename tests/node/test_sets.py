"""Sets of devices on a real node: the GPUs of one partition of an NVLink fabric, by a claim and by Allocate.

Four GPUs in two pairs, of which no pair is neighbours by address: whoever takes the first two GPUs has no set.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.node import pods
from tests.node.books import key_of
from tests.node.claims import IDLE, ClaimNode, by_address, from_template, request, serving_claims, slices_of
from tests.node.cluster import eventually
from tests.node.fake_host import H100_RESOURCE, address
from tests.node.node import Node
from tests.support.patience import patient

H: Final = H100_RESOURCE

A, B, C, D = (address(slot) for slot in (0x21, 0x22, 0x23, 0x24))
E: Final = address(0x25)
"""A GPU that a selector excludes."""

PAIRS: Final = ((A, C), (B, D))
SETS: Final = {
    "sets": {"1": [(A,), (B,), (C,), (D,)], "2": PAIRS, "4": [(A, B, C, D)]},
    "gpuModuleIDs": {A: 1, C: 2, B: 3, D: 4},
}

DIRECTORY: Final = Path("/var/lib/gpuactors")
"""The daemon's state directory, at the same path in its container."""

SETS_FILE: Final = DIRECTORY / "sets.json"
COMMAND: Final = DIRECTORY / "partitions"

FROM_FILE: Final = {"GPUACTORS_SETS_FILE": str(SETS_FILE)}
FROM_FABRIC: Final = {
    "GPUACTORS_PARTITION_COMMAND": str(COMMAND),
    "GPUACTORS_SELECT": f"vendor=10de,class=03;!address={E}",
}
REQUIRED: Final = {**FROM_FILE, "GPUACTORS_SETS": "require"}

REREAD_S: Final = patient(25.0)
"""The file is read every 10 s, and slices are written after that."""


@contextmanager
def written(path: Path, content: str, mode: int = 0o644) -> Iterator[None]:
    """A file of the operator's in the daemon's directory."""
    path.write_text(content)
    path.chmod(mode)
    try:
        yield
    finally:
        path.unlink()


@pytest.fixture
def sets_file() -> Iterator[None]:
    with written(SETS_FILE, json.dumps(SETS)):
        yield


@pytest.fixture
def claims(node: Node, sets_file: None) -> Iterator[ClaimNode]:
    """The node serves claims, and has the operator's file."""
    with serving_claims(node, FROM_FILE) as found:
        yield found


def plugged(node: Node) -> None:
    """The four GPUs are there."""
    for slot in (0x21, 0x22, 0x23, 0x24):
        node.host.plug(slot)
    node.settled({H: 4})


def attributes(claims: ClaimNode, name: str) -> dict[str, Any]:
    """An attribute of each device of the slices that has it."""
    devices = (device for spec in slices_of(claims.api) for device in spec.get("devices", ()))
    return {key_of(d["name"]): d["attributes"][name]["int"] for d in devices if name in d["attributes"]}


def wait_attributes(claims: ClaimNode, wanted: Mapping[str, Mapping[str, int]]) -> None:
    """Waits until the slices have exactly these values, by attribute and device."""

    def look() -> bool:
        found = {name: attributes(claims, name) for name in wanted}
        assert found == wanted, found
        return True

    eventually(look, "the attributes of the sets", REREAD_S)


# --- claims -----------------------------------------------------------------------------------------------------------


def test_a_claim_gets_a_partition_by_match_attribute(claims: ClaimNode) -> None:
    """Two claims for two GPUs each have a pair, and the third one waits until a pair is free, not two GPUs."""
    plugged(claims.node)
    claims.offered(A, B, C, D)
    wait_attributes(
        claims,
        {
            "partition1": {A: 1, B: 2, C: 3, D: 4},
            "partition2": {A: 1, B: 2, C: 1, D: 2},
            "partition4": dict.fromkeys((A, B, C, D), 1),
            "gpuModuleID": {A: 1, B: 3, C: 2, D: 4},
        },
    )
    claims.template("pair", request(count=2), match="gpu.nvidia.com/partition2")
    claims.create("vm-1", from_template("pair"))
    claims.create("vm-2", from_template("pair"))
    of_pods = {}
    for name in ("vm-1", "vm-2"):
        claims.comes_to(name, "Running")
        of_pods[name] = tuple(sorted(map(key_of, claims.devices_of(name))))
        claims.runs(name, *of_pods[name])
    assert sorted(of_pods.values()) == sorted(PAIRS)
    claims.create("vm-3", from_template("pair"))
    assert "cannot allocate all claims" in claims.waits("vm-3")
    pods.stop(claims.api, "vm-1")
    claims.runs("vm-3", *of_pods["vm-1"])
    pods.stop(claims.api, "vm-2")
    pods.stop(claims.api, "vm-3")
    claims.nothing_is_left(dict.fromkeys((A, B, C, D), "vfio-pci"))
    claims.settled({H: 4})


def test_a_claim_gets_all_eight_gpus_of_a_board(claims: ClaimNode) -> None:
    gpus = [claims.host.plug(slot) for slot in range(0x21, 0x29)]
    SETS_FILE.write_text(json.dumps({"sets": {"8": [gpus]}}))
    wait_attributes(claims, {"partition8": dict.fromkeys(gpus, 1)})
    claims.template("eight", request(count=8), match="gpu.nvidia.com/partition8")
    claims.create("vm-1", from_template("eight"))
    claims.runs("vm-1", *gpus)
    pods.stop(claims.api, "vm-1")
    claims.nothing_is_left(dict.fromkeys(gpus, "vfio-pci"))


def test_a_changed_file_of_sets_is_in_the_slices_without_a_restart(claims: ClaimNode) -> None:
    plugged(claims.node)
    wait_attributes(claims, {"partition2": {A: 1, B: 2, C: 1, D: 2}})
    before = claims.node.daemon()
    SETS_FILE.write_text(json.dumps({"sets": {"2": [(A, B)]}}))
    wait_attributes(claims, {"partition2": {A: 1, B: 1}, "partition4": {}, "gpuModuleID": {}})
    SETS_FILE.write_text("{")
    eventually(lambda: claims.logged("sets.unread"), "a file that cannot be read", REREAD_S, 0.5)
    wait_attributes(claims, {"partition2": {A: 1, B: 1}})
    assert claims.node.daemon() == before
    claims.settled({H: 4})


def test_a_claim_of_no_set_is_refused_where_sets_are_required(node: Node, sets_file: None) -> None:
    """The first two GPUs by address are no pair. Nothing of the claim is left, and a claim for a pair is prepared."""
    with serving_claims(node, REQUIRED) as claims:
        plugged(node)
        claims.offered(A, B, C, D)
        wait_attributes(claims, {"partition2": {A: 1, B: 2, C: 1, D: 2}})
        claims.template("none", request("first", by_address(A)), request("second", by_address(B)))
        claims.create("vm-1", from_template("none"))
        uid = claims.uid_of("vm-1")
        said = claims.says("vm-1", f"{A}, {B} are not exactly one partition of this node")
        assert f"request one of its partitions of 2 ({A}, {C}; {B}, {D})" in said, said
        pods.stop(claims.api, "vm-1")
        claims.is_released(uid)
        claims.template("pair", request("first", by_address(A)), request("second", by_address(C)))
        claims.create("vm-2", from_template("pair"))
        claims.runs("vm-2", A, C)
        pods.stop(claims.api, "vm-2")
        claims.nothing_is_left(dict.fromkeys((A, B, C, D), "vfio-pci"))


# --- the fabric manager -----------------------------------------------------------------------------------------------


def listing(*partitions: tuple[int, int, tuple[str, ...]]) -> str:
    """What `fmpm -l` prints of partitions: number, whether it is active, the addresses of its GPUs."""
    return json.dumps(
        {
            "partitionInfo": [
                {
                    "partitionId": number,
                    "isActive": is_active,
                    "gpuInfo": [{"physicalId": 0, "uuid": "", "pciBusId": f"0000{gpu}"} for gpu in gpus],
                }
                for number, is_active, gpus in partitions
            ]
        }
    )


def test_the_partitions_of_the_fabric_manager_are_those_of_the_operators_command(node: Node) -> None:
    """It runs in the daemon's container. Of pairs that are as good the active one is preferred. A partition with a GPU
    that a selector excludes is left out, and the log says so."""
    partitions = listing((3, 0, (A, C)), (5, 1, (B, D)), (7, 0, (A, E)))
    program = f"""\
        #!/opt/gpuactors/bin/python
        import sys
        assert sys.argv[1:] == ["query"], sys.argv
        print('{partitions}')
        """
    with written(COMMAND, textwrap.dedent(program), 0o755), serving_claims(node, FROM_FABRIC) as claims:
        node.host.plug(0x25)
        plugged(node)
        wait_attributes(claims, {"partition2": {A: 3, B: 5, C: 3, D: 5}})
        refused = [line["reason"] for line in claims.logged("sets.refused")]
        assert refused, "nothing was left out"
        assert f"partition 7: the GPU at {E} is not selected, or is not on this node" in refused[-1], refused
        pods.start(claims.api, "vm-1", {H: 2}, command=IDLE)
        assert node.devices_of("vm-1") == {B, D}
        claims.template("pair", request(count=2), match="gpu.nvidia.com/partition2")
        claims.create("vm-2", from_template("pair"))
        claims.runs("vm-2", A, C)
        pods.stop(claims.api, "vm-2")
        pods.stop(claims.api, "vm-1")
        claims.nothing_is_left(dict.fromkeys((A, B, C, D), "vfio-pci"))


# --- the device plugin ------------------------------------------------------------------------------------------------


def test_a_pod_gets_the_partition_that_breaks_up_least(node: Node, sets_file: None) -> None:
    """Kubelet asks for the preference: the second pod of one GPU gets the rest of the pair that the first one has
    broken up, and the pod of two GPUs the other pair."""
    node.install("base", FROM_FILE)
    plugged(node)
    pods.start(node.api, "vm-1", {H: 1})
    (first,) = node.devices_of("vm-1")
    (broken,) = (pair for pair in PAIRS if first in pair)
    (whole,) = (pair for pair in PAIRS if pair != broken)
    pods.start(node.api, "vm-2", {H: 1})
    assert node.devices_of("vm-2") == {*broken} - {first}
    pods.start(node.api, "vm-3", {H: 2})
    assert node.devices_of("vm-3") == {*whole}
    assert pods.variables_in("vm-3") == {"PCI_RESOURCE_NVIDIA_COM_GH100_H100_SXM5_80GB": ",".join(whole)}
    node.check_open("vm-1", "vm-2", "vm-3")
    pods.stop(node.api, "vm-2")
    pods.stop(node.api, "vm-3")
    pods.start(node.api, "vm-4", {H: 3})  # no set, and allowed
    assert node.devices_of("vm-4") == {A, B, C, D} - {first}
    node.settled({H: 4}, {H: 4})


def refused_admission(node: Node, pod: str) -> str:
    """Waits until kubelet has not admitted a pod: its message in the pod's status."""
    found = pods.wait_phase(node.api, pod, "Failed")
    assert found["status"]["reason"] == "UnexpectedAdmissionError", pods.told(found)
    return str(found["status"]["message"])


def test_what_is_no_set_is_refused_where_sets_are_required(node: Node, sets_file: None) -> None:
    """Three GPUs are none, and two of different pairs are none. A pair is one, while another one is broken up."""
    node.install("base", REQUIRED)
    plugged(node)
    pods.create(node.api, pods.tenant("vm-1", {H: 3}))
    said = refused_admission(node, "vm-1")
    assert "are not exactly one partition of this node: it has none of 3; request 1, 2, 4 GPUs" in said, said
    for name in ("vm-2", "vm-3", "vm-4"):
        pods.start(node.api, name, {H: 1})
    one, partner, other = (next(iter(node.devices_of(name))) for name in ("vm-2", "vm-3", "vm-4"))
    assert (one, partner) in PAIRS
    (last,) = {A, B, C, D} - {one, partner, other}
    pods.stop(node.api, "vm-3")
    node.settled({H: 4}, {H: 4})
    pods.create(node.api, pods.tenant("vm-5", {H: 2}))
    said = refused_admission(node, "vm-5")
    assert f"{', '.join(sorted((partner, last)))} are not exactly one partition of this node" in said, said
    assert f"request one of its partitions of 2 ({A}, {C}; {B}, {D})" in said, said
    refusals = [line["causes"] for line in node.daemon().log() if line["event"] == "call.refused"]
    assert refusals == [["NotASet"], ["NotASet"]], refusals
    pods.stop(node.api, "vm-4")
    pods.start(node.api, "vm-6", {H: 2})
    assert node.devices_of("vm-6") == {other, last}
    node.check_open("vm-2", "vm-6")
    node.settled({H: 4}, {H: 4})
