"""The entries of a checkpoint as JSON: the bytes that are written, those of older daemons, and what is no entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import pytest

from gpuactors.acts.theirs import frozen_json
from gpuactors.core.claims.checkpoint import Checkpoint, MalformedError
from gpuactors.core.claims.stored import (
    decoded_entry,
    decoded_return,
    encoded_entry,
    encoded_return,
    models_of,
)
from gpuactors.core.state.claims import (
    ClaimedGpu,
    DomainReservation,
    GpuReservation,
    OwedReturn,
    StoredEntry,
    domain_of,
    gpus_of,
)
from gpuactors.core.values.claim import (
    AllocatedDevice,
    BoundFunction,
    Claim,
    ClaimName,
    ClaimUid,
    Json,
    OpaqueConfig,
    OriginalDriver,
    PreparedDevice,
)
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import (
    ClaimedDomain,
    DeviceKind,
    DomainDevice,
    DomainUid,
    ImexFacts,
)
from gpuactors.core.values.model import PciAddress, device_key

UID = ClaimUid("8b3f0c52-0000-4000-8000-000000000001")
NAME = ClaimName("default", "one", UID)
GPU, AUDIO = PciAddress("0000:23:00.0"), PciAddress("0000:23:00.1")
DOMAIN = DomainUid("8b3f0c52-0000-4000-8000-00000000000b")
CHANNEL = DomainDevice(DeviceKind.CHANNEL, 0)

FUNCTIONS = (
    OriginalDriver(GPU, "nvidia", False, 3, was_bound=True, persistence=True, ids="10de:2330"),
    OriginalDriver(AUDIO, None),
)
CLAIM = Claim(
    NAME,
    "gpu",
    2,
    (
        AllocatedDevice("gpu/any", "node-1", "gpu-0000-23-00-0"),
        AllocatedDevice("look", "node-1", "gpu-0000-24-00-0", "s1", admin_access=True),
    ),
    (OpaqueConfig(True, ("gpu",), {"kind": "VfioDeviceConfig", "iommu": {"backendPolicy": (1, None)}}),),
)
IMEX = ImexFacts(
    channel_major=501,
    caps_major=502,
    mgmt_minor=7,
    clique_id="c0ffee.1",
    clique_source="the driver",
    channels=4,
    management="management.nvidia.com/gpu=all",
)

PREPARED = StoredEntry(
    NAME,
    ClaimState.PREPARED,
    CLAIM,
    GpuReservation(
        (ClaimedGpu(device_key(GPU), FUNCTIONS, "it was on vfio-pci"),),
        {
            GPU: BoundFunction(GPU, "vfio-pci", 51, "vfio3", True, 3, persistence=True),
            AUDIO: BoundFunction(AUDIO, None, None, None),
        },
    ),
)
OF_A_MODEL = StoredEntry(
    NAME,
    ClaimState.PREPARED,
    None,
    GpuReservation((ClaimedGpu(device_key(GPU), (), model="NVIDIA L40S-1Q"),)),
)
"""Of a device that no act binds."""
TAKEN_OVER = StoredEntry(
    ClaimName("", "", UID),
    ClaimState.TAKEN_OVER,
    Claim(ClaimName("", "", UID), None, 0, ()),
    None,
    given=(PreparedDevice(("gpu",), "node-1", "gpu-0", ("nvidia.com/gpu=0",), "s1"),),
    unplaced=("gpu-0",),
)
FOUND_BY_FILES = StoredEntry(NAME, ClaimState.RELEASING, None, None)
OF_A_DOMAIN = StoredEntry(
    NAME,
    ClaimState.RESERVED,
    Claim(NAME, None, 1, None),
    DomainReservation(domain=ClaimedDomain(DOMAIN, "blue", "team", (CHANNEL,), IMEX, every=True)),
)
OF_A_DOMAIN_WITHOUT_FACTS = StoredEntry(
    NAME,
    ClaimState.RESERVED,
    None,
    DomainReservation(domain=ClaimedDomain(DOMAIN, "blue", "team", (CHANNEL,), None)),
)


def read(text: str) -> Mapping[str, Json]:
    """The content as the core has it: arrays are tuples."""
    content = frozen_json(json.loads(text))
    assert isinstance(content, Mapping)
    return content


def as_bytes(content: Json) -> str:
    return json.dumps(content, separators=(",", ":"))


RECORDED: Final[Mapping[str, tuple[StoredEntry, str]]] = {
    "of GPUs": (
        PREPARED,
        '{"namespace":"default","name":"one","state":"Prepared","gpus":[{"address":"0000:23:00.0",'
        '"stays":"it was on vfio-pci","functions":[{"address":"0000:23:00.0","driver":"nvidia",'
        '"vfio":false,"presence":3,"wasBound":true,"ids":"10de:2330","persistence":true},'
        '{"address":"0000:23:00.1","driver":null,"vfio":false,"presence":0,"wasBound":false,"ids":"",'
        '"persistence":false}]}],"bound":[{"address":"0000:23:00.0","driver":"vfio-pci","iommuGroup":51,'
        '"cdev":"vfio3","vfio":true,"presence":3,"persistence":true},{"address":"0000:23:00.1",'
        '"driver":null,"iommuGroup":null,"cdev":null,"vfio":false,"presence":0,"persistence":false}],'
        '"podClaimName":"gpu","generation":2,"results":[{"request":"gpu/any","pool":"node-1",'
        '"device":"gpu-0000-23-00-0","shareId":null,"adminAccess":false},{"request":"look",'
        '"pool":"node-1","device":"gpu-0000-24-00-0","shareId":"s1","adminAccess":true}],'
        '"configs":[{"fromClass":true,"requests":["gpu"],"parameters":{"kind":"VfioDeviceConfig",'
        '"iommu":{"backendPolicy":[1,null]}}}]}',
    ),
    "of a device that no act binds": (
        OF_A_MODEL,
        '{"namespace":"default","name":"one","state":"Prepared","gpus":[{"address":"0000:23:00.0","stays":"",'
        '"functions":[],"model":"NVIDIA L40S-1Q"}],"bound":[]}',
    ),
    "taken over": (
        TAKEN_OVER,
        '{"namespace":"","name":"","state":"TakenOver","gpus":[],"bound":[],"given":[{"requests":["gpu"],'
        '"pool":"node-1","device":"gpu-0","cdiIds":["nvidia.com/gpu=0"],"shareId":"s1"}],'
        '"unplaced":["gpu-0"],"podClaimName":null,"generation":0,"results":[],"configs":[]}',
    ),
    "found by files": (
        FOUND_BY_FILES,
        '{"namespace":"default","name":"one","state":"Releasing","gpus":[],"bound":[]}',
    ),
    "of a domain": (
        OF_A_DOMAIN,
        '{"namespace":"default","name":"one","state":"Reserved","gpus":[],"bound":[],'
        '"domain":{"uid":"8b3f0c52-0000-4000-8000-00000000000b","name":"blue","namespace":"team",'
        '"devices":["channel-0"],"imex":{"channelMajor":501,"capsMajor":502,"mgmtMinor":7,'
        '"cliqueId":"c0ffee.1","channels":4,"management":"management.nvidia.com/gpu=all"},"every":true},'
        '"podClaimName":null,"generation":1,"results":[],"configs":[]}',
    ),
    "of a domain without facts": (
        OF_A_DOMAIN_WITHOUT_FACTS,
        '{"namespace":"default","name":"one","state":"Reserved","gpus":[],"bound":[],'
        '"domain":{"uid":"8b3f0c52-0000-4000-8000-00000000000b","name":"blue","namespace":"team",'
        '"devices":["channel-0"],"imex":null,"every":false}}',
    ),
}

RETURN: Final = (
    '{"namespace":"default","name":"one","uid":"8b3f0c52-0000-4000-8000-000000000001",'
    '"address":"0000:23:00.0","stays":"it was on vfio-pci","functions":[{"address":"0000:23:00.0",'
    '"driver":"nvidia","vfio":false,"presence":3,"wasBound":true,"ids":"10de:2330",'
    '"persistence":true},{"address":"0000:23:00.1","driver":null,"vfio":false,"presence":0,'
    '"wasBound":false,"ids":"","persistence":false}]}'
)


@pytest.mark.parametrize(("entry", "recorded"), RECORDED.values(), ids=RECORDED)
def test_an_entry_is_written_in_the_bytes_of_the_daemons_before(entry: StoredEntry, recorded: str) -> None:
    assert as_bytes(encoded_entry(entry)) == recorded


@pytest.mark.parametrize("recorded", [recorded for _, recorded in RECORDED.values()], ids=RECORDED)
def test_what_is_read_is_written_again_in_the_same_bytes(recorded: str) -> None:
    assert as_bytes(encoded_entry(decoded_entry(UID, read(recorded)))) == recorded


@pytest.mark.parametrize(
    "entry", [PREPARED, OF_A_MODEL, TAKEN_OVER, FOUND_BY_FILES, OF_A_DOMAIN_WITHOUT_FACTS]
)
def test_an_entry_is_read_as_it_was(entry: StoredEntry) -> None:
    assert decoded_entry(UID, encoded_entry(entry)) == entry


def test_a_return_that_is_owed_is_written_and_read_as_before() -> None:
    owed = OwedReturn(gpus_of(PREPARED).gpus[0], NAME)
    assert as_bytes(encoded_return(owed)) == RETURN
    assert decoded_return(read(RETURN)) == owed


# --- older and newer daemons ------------------------------------------------------------------------------------------

FIRST_OF_GPUS: Final = (
    '{"namespace":"default","name":"one","state":"Prepared","gpus":[{"address":"0000:23:00.0","stays":"",'
    '"functions":[{"address":"0000:23:00.0","driver":"nvidia","vfio":false}]}],"bound":[{"address":'
    '"0000:23:00.0","driver":"vfio-pci","iommuGroup":51,"cdev":null,"vfio":true}],"podClaimName":null,'
    '"generation":1,"results":[],"configs":[]}'
)
"""As the first daemon with claims wrote it."""

FIRST_OF_DOMAINS: Final = (
    '{"namespace":"default","name":"one","state":"Prepared","gpus":[],"bound":[],"domain":{"uid":'
    '"8b3f0c52-0000-4000-8000-00000000000b","name":"blue","namespace":"team","devices":["channel-0"],'
    '"absent":"","channelMajor":501,"capsMajor":502,"mgmtMinor":7,"cliqueId":"c0ffee.1"}}'
)
"""As the first daemon with compute domains wrote it: without `imex` and `every`."""


def test_what_the_first_daemons_wrote_is_read() -> None:
    bound = {GPU: BoundFunction(GPU, "vfio-pci", 51, None, vfio=True)}
    gpus = (ClaimedGpu(device_key(GPU), (OriginalDriver(GPU, "nvidia"),)),)
    entry = StoredEntry(NAME, ClaimState.PREPARED, Claim(NAME, None, 1, ()), GpuReservation(gpus, bound))
    assert decoded_entry(UID, read(FIRST_OF_GPUS)) == entry
    own = ClaimedDomain(DOMAIN, "blue", "team", (CHANNEL,), None)
    assert domain_of(decoded_entry(UID, read(FIRST_OF_DOMAINS))).domain == own


def test_imex_of_before_its_channels_were_counted_has_the_driver_s_default() -> None:
    content = json.loads(RECORDED["of a domain"][1])
    del content["domain"]["imex"]["channels"], content["domain"]["imex"]["management"]
    own = domain_of(decoded_entry(UID, read(json.dumps(content)))).domain
    assert own is not None
    assert own.imex == ImexFacts(channel_major=501, caps_major=502, mgmt_minor=7, clique_id="c0ffee.1")


def test_the_models_of_an_earlier_boot_are_those_of_functions_and_of_devices_that_no_act_binds() -> None:
    entries = {ClaimUid("one"): PREPARED, ClaimUid("two"): OF_A_MODEL, ClaimUid("three"): FOUND_BY_FILES}
    models = models_of(Checkpoint({uid: encoded_entry(entry) for uid, entry in entries.items()}))
    key = device_key(GPU)
    assert models == {"one": {key: "10de:2330"}, "two": {key: "NVIDIA L40S-1Q"}}


def test_fields_of_a_newer_daemon_are_no_mistake() -> None:
    content = json.loads(RECORDED["of GPUs"][1])
    for part in (content, content["gpus"][0], content["bound"][0], content["results"][0]):
        part["newer"] = {"quota": [1]}
    assert decoded_entry(UID, read(json.dumps(content))) == PREPARED


# --- what is no entry -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("state",), "Bound", r"the claim \S+: Invalid enum value 'Bound' - at `\$\.state`"),
        (("state",), "Fetching", "the claim default/one has the state 'Fetching'"),
        (("namespace",), None, r"Expected `str`, got `null` - at `\$\.namespace`"),
        (("gpus",), {}, r"Expected `array`, got `object` - at `\$\.gpus`"),
        (("gpus", 0), 7, r"Expected `object`, got `int` - at `\$\.gpus\[0\]`"),
        (("gpus", 0, "address"), "../..", r"'\.\./\.\.' is no key of a device - at `\$\.gpus\[0\]`"),
        (("gpus", 0, "stays"), None, r"Expected `str`, got `null` - at `\$\.gpus\[0\]\.stays`"),
        (("gpus", 0, "functions", 1, "vfio"), 1, r"Expected `bool`, got `int` - at `\$\.gpus\[0\]\.functions"),
        (("bound", 0, "iommuGroup"), True, r"Expected `int \| null`, got `bool` - at `\$\.bound\[0\]\.iommuGroup`"),
        (("generation",), 1.5, r"the claim default/one: Expected `int`, got `float` - at `\$\.generation`"),
        (("results", 0, "adminAccess"), "no", r"Expected `bool`, got `str` - at `\$\.results\[0\]\.adminAccess`"),
        (("domain",), {"uid": "x", "name": "", "namespace": "", "devices": ["channel-0"]}, "'x', which is no UUID"),
        (("domain",), {"uid": DOMAIN, "name": "", "namespace": "", "devices": ["gpu-0"]}, "no names of devices"),
        (("domain",), {"uid": DOMAIN, "name": "", "namespace": "", "devices": []}, "no names of devices"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place(path: tuple[str | int, ...], value: object, reason: str) -> None:
    content = json.loads(RECORDED["of GPUs"][1])
    part: Any = content
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(MalformedError, match=reason):
        decoded_entry(UID, read(json.dumps(content)))


def test_an_entry_without_a_field_is_none() -> None:
    content = json.loads(RECORDED["of GPUs"][1])
    del content["bound"]
    with pytest.raises(MalformedError, match="Object missing required field `bound`"):
        decoded_entry(UID, read(json.dumps(content)))
