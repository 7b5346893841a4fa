"""Kubelet's ledger file: two that real kubelets wrote, and ours there and back."""

from __future__ import annotations

import json

import pytest

from gpuactors.kubelet.pb.deviceplugin.v1beta1 import ContainerAllocateResponse, DeviceSpec
from gpuactors_simulation.kubelet.checkpoint import (
    CorruptCheckpointError,
    allocated_of,
    checksum,
    decode,
    encode,
)
from gpuactors_simulation.kubelet.values import Checkpoint, LedgerEntry

# Published by users of kind and of an eight-GPU server; the checksums are their kubelets'.
ONE_BOARD = (
    '{"Data":{"PodDeviceEntries":[{"PodUID":"bf52b2cd-b611-4e79-86b1-280b283185c3","ContainerName":"check",'
    '"ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["tegra"]},'
    '"AllocResp":"Ch8KFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSBXRlZ3Jh"}],'
    '"RegisteredDevices":{"nvidia.com/gpu":["tegra"]}},"Checksum":3660592824}'
)
TWO_ON_A_NUMA_NODE = (
    '{"Data":{"PodDeviceEntries":[{"PodUID":"9a15d2b5-c152-46b9-96e0-d57032629e1f","ContainerName":"app",'
    '"ResourceName":"nvidia.com/gpu","DeviceIDs":{"1":["GPU-9b341c59-f96b-ba85-c137-78c3652fea65",'
    '"GPU-c1e9f249-b37b-81c2-a8d9-ba5ca0294841"]},"AllocResp":"CmsKFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSUUdQVS1jMWU5ZjI0'
    "OS1iMzdiLTgxYzItYThkOS1iYTVjYTAyOTQ4NDEsR1BVLTliMzQxYzU5LWY5NmItYmE4NS1jMTM3LTc4YzM2NTJmZWE2NRokCg4vZGV2L252a"
    "WRpYWN0bBIOL2Rldi9udmlkaWFjdGwaAnJ3GiYKDy9kZXYvbnZpZGlhLXV2bRIPL2Rldi9udmlkaWEtdXZtGgJydxoyChUvZGV2L252aWRpYS"
    "11dm0tdG9vbHMSFS9kZXYvbnZpZGlhLXV2bS10b29scxoCcncaLgoTL2Rldi9udmlkaWEtbW9kZXNldBITL2Rldi9udmlkaWEtbW9kZXNldBo"
    'CcncaIAoML2Rldi9udmlkaWExEgwvZGV2L252aWRpYTEaAnJ3GiAKDC9kZXYvbnZpZGlhMhIML2Rldi9udmlkaWEyGgJydw=="}],'
    '"RegisteredDevices":{"nvidia.com/gpu":["GPU-77a702db-e37f-3a74-d46d-c5713f66058c",'
    '"GPU-9b341c59-f96b-ba85-c137-78c3652fea65","GPU-c1e9f249-b37b-81c2-a8d9-ba5ca0294841"]}},"Checksum":2530956716}'
)
H100 = "nvidia.com/GH100_H100_SXM5_80GB"


@pytest.mark.parametrize("text", [ONE_BOARD, TWO_ON_A_NUMA_NODE], ids=["one board", "two on a NUMA node"])
def test_a_real_files_checksum_is_ours(text: str) -> None:
    content = json.loads(text)
    assert checksum(content["Data"]) == content["Checksum"]


def test_a_real_file_is_understood() -> None:
    ((uid, resource), entry), *others = decode(ONE_BOARD).entries.items()
    assert not others
    assert (uid, resource) == ("bf52b2cd-b611-4e79-86b1-280b283185c3", "nvidia.com/gpu")
    assert (entry.devices, entry.numa_nodes) == (("tegra",), {"tegra": ()})
    assert entry.envs == {"NVIDIA_VISIBLE_DEVICES": "tegra"}
    ((_, two),) = decode(TWO_ON_A_NUMA_NODE).entries.items()
    assert set(two.numa_nodes.values()) == {(1,)}
    assert two.nodes[0] == "/dev/nvidiactl"


def entry(*devices: str, numa: dict[str, tuple[int, ...]]) -> LedgerEntry:
    response = ContainerAllocateResponse(
        envs={"PCI_RESOURCE_X": ",".join(devices)},
        devices=[
            DeviceSpec(container_path="/dev/vfio/51", host_path="/dev/vfio/51", permissions="mrw"),
        ],
    )
    allocated = allocated_of(response)
    return LedgerEntry(devices, numa, allocated.envs, allocated.nodes, allocated.response)


def test_what_was_written_is_read_back() -> None:
    written = Checkpoint(
        entries={
            ("uid-1", H100): entry("a", "b", numa={"a": (0,), "b": ()}),
            ("uid-2", H100): entry("c", numa={"c": (0, 1)}),
        },
        registered={H100: ("a", "c"), "nvidia.com/EMPTY": ()},
    )
    assert decode(encode(written)) == written
    entries = json.loads(encode(written))["Data"]["PodDeviceEntries"]
    assert [e["DeviceIDs"] for e in entries] == [{"-1": ["b"], "0": ["a"]}, {"0": ["c"], "1": ["c"]}]


def test_an_empty_ledger_is_null() -> None:
    assert json.loads(encode(Checkpoint()))["Data"] == {"PodDeviceEntries": None, "RegisteredDevices": {}}
    assert decode(encode(Checkpoint())) == Checkpoint()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        ONE_BOARD[:-20],
        ONE_BOARD.replace("tegra", "other"),
        ONE_BOARD.replace("3660592824", "0"),
        ONE_BOARD.replace('["tegra"]}},', "7}},"),
    ],
)
def test_a_damaged_file_is_refused(text: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="checkpoint is corrupted"):
        decode(text)
