"""Every decoder of bytes from outside: real inputs, what is made of them, and the errors that it may raise."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, cast

import betterproto2
import msgspec
import trio
from grpclib import GRPCError

from gpuactors.acts import writes
from gpuactors.acts.checkpoint import FILE_NAME as CHECKPOINT
from gpuactors.acts.checkpoint import OLD_FILE_NAME as OLD_CHECKPOINT
from gpuactors.acts.checkpoint import CheckpointFile, _encoded
from gpuactors.acts.files import ClaimFiles
from gpuactors.acts.theirs import TheirClaims
from gpuactors.cli.doctor.settings import of_daemon
from gpuactors.config import Config, ConfigError, resolve
from gpuactors.control.about import About
from gpuactors.control.client import running, understood
from gpuactors.control.dead_signs import FILE_NAME as DEAD_SIGNS
from gpuactors.control.dead_signs import dead_signs_json
from gpuactors.control.messages import Answer, Request, line_of, request_of
from gpuactors.control.node_view import view_of
from gpuactors.control.partition_intents import FILE_NAME as PARTITIONS
from gpuactors.control.partition_intents import partition_intents_json
from gpuactors.control.served import FILE_NAME as SERVED
from gpuactors.control.served import ServedFile
from gpuactors.control.vgpu_types import FILE_NAME as VGPU_TYPES
from gpuactors.control.vgpu_types import vgpu_types_json
from gpuactors.control.view import DaemonStatus
from gpuactors.core.claims.checkpoint import Checkpoint, encoded
from gpuactors.core.claims.opaque_config import API_VERSION
from gpuactors.core.domains import config as domain_config
from gpuactors.core.gpus import config as gpu_config
from gpuactors.core.values.claim import Claim, ClaimName, ClaimUid
from gpuactors.core.values.domain import DomainUid
from gpuactors.daemon import node_labels
from gpuactors.grpc_trio.protobuf import decode
from gpuactors.host import pci_ids
from gpuactors.host.sets_file import SetsFile
from gpuactors.http.exchange import exchange
from gpuactors.kube import errors
from gpuactors.kube.claims import KubeClaims
from gpuactors.kube.client import ApiClient, Call
from gpuactors.kube.config import AccessError, FileAccess, Server, from_kubeconfig
from gpuactors.kube.device_classes import KubeDeviceClasses
from gpuactors.kube.domains import KubeDomains
from gpuactors.kube.events import KubeEvents
from gpuactors.kube.nodes import KubeNode
from gpuactors.kube.slices import KubeSlices
from gpuactors.kube.tls import tls_context
from gpuactors.kube.watch import Watch, _Place
from gpuactors.kubelet import translate
from gpuactors.kubelet.ledger import Answers, checkpoint_contents
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as plugin_pb
from gpuactors.kubelet.pb.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1 as dra_pb
from gpuactors.kubelet.pb.podresources import v1 as resources_pb
from gpuactors.observe.journal_format import (
    FORMAT,
    AgainLine,
    Header,
    LineWriter,
    StateLine,
    StepLine,
    header_line,
)
from gpuactors.ports.errors import ControlError, HostError, PortError, StateFileError
from gpuactors.ports.http import HttpAnswer, HttpRequest
from gpuactors.ports.kube import ApiError, EventNote, ObjectRef
from gpuactors.ports.node import LedgerError
from gpuactors.replay.journal_lines import EventReader, FormatError, read_line, read_state
from gpuactors.replay.play import _effects
from tests.core.builders import Core, audio, gpu
from tests.fuzz_decoders.damage import of_bytes, of_json
from tests.fuzz_decoders.decoder import Decoder, Stream, at_once, sentence
from tests.fuzz_decoders.grpc import of_grpc
from tests.fuzz_decoders.host import of_host
from tests.memory.disk import FakeDisk
from tests.observe.recording import story
from tests.support import nvidia_checkpoint as nvidia

RECORDED: Final = Path(__file__).parents[1] / "kube" / "recorded"
UID: Final = "0f1e2d3c-0000-4000-8000-000000000001"
DRIVER, NODE, SERVER = "gpu.nvidia.com", "node-1", "https://192.0.2.1:6443"


def decoders(directory: Path) -> tuple[Decoder, ...]:
    """All of them; those of a file's content have the file in `directory`."""
    return (
        *_api_server(),
        *_kubelet(),
        *_own_files(directory),
        *_settings(directory),
        *of_host(directory),
        *_callers(),
        *of_grpc(),
    )


# --- the API server -------------------------------------------------------------------------------------------


class _Answers:
    """A client whose answer is the input."""

    server = SERVER
    decoded = ApiClient.decoded

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def ask(self, call: Call) -> bytes:
        return self._body


def _client(body: bytes) -> ApiClient:
    return cast("ApiClient", _Answers(body))


def _recorded(*names: str) -> tuple[bytes, ...]:
    found = [json.loads((RECORDED / f"{name}.json").read_text())["response"] for name in names]
    return tuple(
        json.dumps(one).encode() for answer in found for one in answer.get("lines") or [answer["body"]]
    )


_NAME: Final = ClaimName("default", "gpus", ClaimUid(UID))
_RESULT: Final = {"request": "main", "driver": DRIVER, "pool": NODE, "device": "gpu-0000-23-00-0"}
_VFIO: Final = {
    "apiVersion": API_VERSION,
    "kind": gpu_config.KIND,
    "iommu": {"backendPolicy": "PreferIommuFD", "enableAPIDevice": True},
}
_CHANNEL: Final = {
    "apiVersion": API_VERSION,
    "kind": domain_config.CHANNEL_CONFIG,
    "domainID": UID,
    "allocationMode": "Single",
}


def _claim_object(parameters: object, *, device: str = _RESULT["device"]) -> bytes:
    opaque = {"driver": DRIVER, "parameters": parameters}
    found = {
        "metadata": {"namespace": _NAME.namespace, "name": _NAME.name, "uid": UID, "generation": 1},
        "status": {
            "allocation": {
                "devices": {
                    "results": [{**_RESULT, "device": device}],
                    "config": [
                        {"source": "FromClass", "requests": ["main"], "opaque": opaque},
                        {"source": "FromClaim", "opaque": {**opaque, "driver": "other.example"}},
                    ],
                }
            },
            "reservedFor": [{"resource": "pods", "name": "vm", "uid": UID}],
        },
    }
    return json.dumps(found).encode()


def _claim(body: bytes) -> None:
    claims = KubeClaims(_client(body), DRIVER, NODE)
    found = at_once(claims.read(_NAME))
    if isinstance(found, Claim):
        sentence(gpu_config.chosen(found))
        sentence(domain_config.chosen(found))
        repr(found).encode()
    at_once(claims.reserved_for(_NAME))


def _parameters(content: bytes) -> None:
    """Within a claim that is right, so that more of them come through."""
    body = _claim_object("@here", device="channel-0").replace(b'"@here"', content)
    _claim(body)


def _slices(body: bytes) -> None:
    at_once(KubeSlices(_client(body), DRIVER, NODE)._list())


def _slice(body: bytes) -> None:
    at_once(KubeSlices(_client(body), DRIVER, NODE)._stored(Call("read a slice", "GET", "/")))


def _watched(line: bytes) -> None:
    slices = KubeSlices(_client(line), DRIVER, NODE)
    change = Watch(_client(line), "watch", "/")._change(line, _Place(""))
    if change is not None:
        slices._event(change)
        KubeNode(_client(line), NODE)._metadata(change.object, "watch")


def _refused(body: bytes) -> None:
    for status in (403, 500):
        sentence(errors.refused("read", SERVER, errors.refusal(status, body, body)))


def _event(body: bytes) -> None:
    about = ObjectRef("Pod", "default", "vm", UID)
    assert at_once(KubeEvents(_client(body), NODE).tell(EventNote(about, "R", "m", 2, 0.0, 1.0))) > 0


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


_DOMAINS: Final = _json(
    {
        "items": [
            {
                "metadata": {"name": "d", "namespace": "default", "uid": UID},
                "status": {"nodes": [{"name": NODE, "status": "Ready", "cliqueID": ""}]},
            }
        ]
    }
)
_CLASSES: Final = _json(
    {
        "items": [
            {
                "metadata": {"name": "counted"},
                "spec": {"extendedResourceName": "example.com/gpu", "selectors": []},
            }
        ]
    }
)
_CLIQUE: Final = _json({"metadata": {"name": "c"}, "daemons": [{"nodeName": NODE, "status": "Ready"}]})


def _api_server() -> tuple[Decoder, ...]:
    own = (ApiError,)
    return (
        Decoder("claim", (_claim_object(_VFIO), _claim_object(_CHANNEL, device="channel-0")), _claim, own),
        Decoder("opaque config", (_json(_VFIO), _json(_CHANNEL)), _parameters, own),
        Decoder("slices", _recorded("slices-list", "slices-list-two-selectors"), _slices, own),
        Decoder("slice", _recorded("slice-create", "slice-create-list-attribute"), _slice, own),
        Decoder(
            "watch event",
            _recorded("watch-edit-and-delete", "watch-node-metadata-only", "watch-too-old"),
            _watched,
            own,
        ),
        Decoder(
            "node",
            _recorded("node-get-metadata-only"),
            lambda b: at_once(KubeNode(_client(b), NODE).read()),
            own,
        ),
        Decoder(
            "compute domains",
            (_DOMAINS,),
            lambda b: at_once(KubeDomains(_client(b)).find_domain(DomainUid(UID))),
            own,
        ),
        Decoder(
            "clique",
            (_CLIQUE,),
            lambda b: at_once(KubeDomains(_client(b)).read_clique(DomainUid(UID), "c.1", "n")),
            own,
        ),
        Decoder(
            "device classes",
            (_CLASSES,),
            lambda b: at_once(KubeDeviceClasses(_client(b)).list_classes()),
            own,
        ),
        Decoder("error body", _recorded("claim-missing", "forbidden-anonymous", "slice-put-stale"), _refused),
        Decoder("answer to an Event", (_json({"kind": "Event", "count": 3}),), _event, own),
    )


# --- kubelet --------------------------------------------------------------------------------------------------


_DEVICES: Final = plugin_pb.ContainerAllocateResponse(
    devices=[plugin_pb.DeviceSpec(container_path="/dev/vfio/51", host_path="/dev/vfio/51", permissions="mrw")]
)


def _kubelet_file() -> bytes:
    entry = {
        "PodUID": UID,
        "ContainerName": "c",
        "ResourceName": "nvidia.com/H100",
        "DeviceIDs": {"0": ["0000:23:00.0"]},
        "AllocResp": base64.b64encode(bytes(_DEVICES)).decode(),
    }
    data = {"PodDeviceEntries": [entry, {**entry, "DeviceIDs": ["a"]}], "RegisteredDevices": {}}
    return _json({"Data": data, "Checksum": 1})


_LISTED: Final = resources_pb.ListPodResourcesResponse(
    pod_resources=[
        resources_pb.PodResources(
            name="vm",
            namespace="default",
            containers=[
                resources_pb.ContainerResources(
                    name="c",
                    devices=[resources_pb.ContainerDevices("nvidia.com/H100", ["0000:23:00.0"])],
                    dynamic_resources=[
                        resources_pb.DynamicResource(
                            claim_name="gpus",
                            claim_namespace="default",
                            claim_resources=[
                                resources_pb.ClaimResource(
                                    driver_name=DRIVER, pool_name=NODE, device_name="gpu-0"
                                )
                            ],
                        )
                    ],
                )
            ],
        )
    ]
)


def _of_request(name: str, request: betterproto2.Message, use: Callable[[Any], object]) -> Decoder:
    """Of a call by gRPC: what makes something of this request, and of others of its kind."""

    def decoded(content: bytes) -> None:
        use(decode(content, type(request), fields_max=100_000))

    return Decoder(name, (bytes(request),), decoded, (ValueError, GRPCError), of_bytes)


def _kubelet() -> tuple[Decoder, ...]:
    ids = ["0000:23:00.0", "0000:24:00.0"]
    allocate = plugin_pb.AllocateRequest([plugin_pb.ContainerAllocateRequest(ids)])
    prefer = plugin_pb.PreferredAllocationRequest(
        [plugin_pb.ContainerPreferredAllocationRequest(ids, ids[:1], 1)]
    )
    start = plugin_pb.PreStartContainerRequest(ids)
    prepare = dra_pb.NodePrepareResourcesRequest([dra_pb.Claim(namespace="default", uid=UID, name="gpus")])
    return (
        Decoder("kubelet's file", (_kubelet_file(),), lambda b: checkpoint_contents(b, "/f"), (LedgerError,)),
        Decoder("PodResources", (bytes(_LISTED),), lambda b: Answers().listed(b), (GRPCError,), of_bytes),
        _of_request("Allocate", allocate, translate.allocate_requests),
        _of_request("GetPreferredAllocation", prefer, translate.preference_requests),
        _of_request("PreStartContainer", start, translate.pre_start_devices),
        _of_request("NodePrepareResources", prepare, lambda found: found.claims),
    )


# --- our own files --------------------------------------------------------------------------------------------


_STORED: Final = _json(
    {
        "version": 1,
        "bootID": "boot",
        "claims": {
            UID: {
                "name": "gpus",
                "namespace": "default",
                "state": "Prepared",
                "devices": [
                    {"request": "main", "pool": NODE, "device": "gpu-0", "functions": ["0000:23:00.0"]}
                ],
            }
        },
    }
)


def _checkpoint(body: bytes) -> None:
    """With a checksum that is right: else nothing comes further."""
    for content in (
        b'{"checksum":"sha256:%s","checkpoint":%s}\n' % (sha256(body).hexdigest().encode(), body),
        body,
    ):
        disk = FakeDisk()
        disk.make_directory("/p")
        disk.write(f"/p/{CHECKPOINT}", content)
        _checkpoint_on(disk).read(touches=False)


def _checkpoint_on(disk: FakeDisk) -> CheckpointFile:
    theirs = TheirClaims(disk, driver=DRIVER, cdi_dir="/c", places=None)
    return CheckpointFile(disk, "/p", "boot", theirs)


_THEIRS: Final = (
    nvidia.their_checkpoint(
        "boot",
        {
            UID: nvidia.prepared(
                nvidia.vfio(UID, "n", 0, "0000:23:00.0"),
                nvidia.gpu(UID, "n", 1, "GPU-1"),
                nvidia.mig(UID, "n", "GPU-2"),
            )
        },
    ),
    nvidia.their_checkpoint(
        "boot",
        {UID: nvidia.prepared(nvidia.channel(UID, "n"), nvidia.daemon(UID, "n"), domain=UID, admin=True)},
    ),
)


def _nvidias_checkpoint(content: bytes) -> None:
    disk = FakeDisk()
    disk.make_directory("/p")
    disk.write(f"/p/{OLD_CHECKPOINT}", content)
    _checkpoint_on(disk).read(touches=False)


def _cdi(content: bytes) -> None:
    disk = FakeDisk()
    for directory in ("/c", "/p", "/p/metadata", f"/p/metadata/{UID}"):
        disk.make_directory(directory)
    disk.write(f"/c/k8s.{DRIVER}-claim_{UID}.json", content)
    disk.write(f"/p/metadata/{UID}/main.json", content)
    ClaimFiles(disk, driver=DRIVER, cdi_dir="/c", plugin_dir="/p").found()


_CDI: Final = _json(
    {
        "cdiVersion": "0.5.0",
        "kind": f"k8s.{DRIVER}/claim",
        "devices": [
            {
                "name": f"{UID}-gpu-0",
                "containerEdits": {"deviceNodes": [{"path": "/dev/vfio/51"}], "env": ["A=0000:23:00.0"]},
            }
        ],
    }
)
_METADATA: Final = _json(
    {
        "kind": "DeviceMetadata",
        "metadata": {"name": "gpus", "namespace": "default", "uid": UID},
        "requests": [{"name": "main", "devices": [{"name": "gpu-0", "driver": DRIVER, "pool": NODE}]}],
    }
)


def _own_files(directory: Path) -> tuple[Decoder, ...]:
    def served(content: bytes) -> None:
        (directory / SERVED).write_bytes(content)
        ServedFile(str(directory))._read()

    def vgpu_types(content: bytes) -> None:
        (directory / VGPU_TYPES).write_bytes(content)
        vgpu_types_json(str(directory), "boot").read_here()

    def dead_signs(content: bytes) -> None:
        (directory / DEAD_SIGNS).write_bytes(content)
        dead_signs_json(str(directory), "boot").read_here()

    def labels(content: bytes) -> None:
        (directory / node_labels.FILE_NAME).write_bytes(content)
        node_labels._kept(Config(node_name=NODE, state_dir=directory))

    kept = _json({"node": NODE, "labels": {"example.com/kind": "l40s"}})

    def sets(content: bytes) -> None:
        (directory / "sets.json").write_bytes(content)
        SetsFile(directory / "sets.json")._read()

    pair = _json({"sets": {"2": [["0000:3b:00.0", "5e:00.0"]]}, "gpuModuleIDs": {"0000:3b:00.0": 1}})

    def partitions(content: bytes) -> None:
        (directory / PARTITIONS).write_bytes(content)
        partition_intents_json(str(directory), "boot").read_here()

    intents = _json(
        {"boot": "boot", "partitions": [{"id": "7", "goal": "activate", "devices": ["0000:3b:00.0"]}]}
    )
    signs = _json({"boot": "boot", "functions": {"0000:3b:00.0": {"presence": 4711, "sign": "silent"}}})
    types = _json(
        {"boot": "boot", "cards": {"0000:3b:00.0": {"driverBind": 7, "names": {"1147": "NVIDIA L40S-1Q"}}}}
    )
    return (
        Decoder(node_labels.FILE_NAME, (kept,), labels, ()),
        Decoder("operator's sets", (pair,), sets, (HostError,)),
        Decoder("partitions.json", (intents,), partitions, (StateFileError,)),
        Decoder("vgpu-types.json", (types,), vgpu_types, (StateFileError,)),
        Decoder("dead-signs.json", (signs,), dead_signs, (StateFileError,)),
        Decoder("gpuactors-checkpoint.json", (_STORED, *_real_checkpoints()), _checkpoint, (StateFileError,)),
        Decoder("NVIDIA's checkpoint.json", _THEIRS, _nvidias_checkpoint, (StateFileError,)),
        Decoder("CDI file", (_CDI, _METADATA), _cdi, (StateFileError,)),
        Decoder("served.json", (_json({"resources": {"n/H100": ["10de:2330"]}}),), served, (StateFileError,)),
        Decoder("journal", _lines(), _journal, (FormatError,), weight=5),
        Decoder(
            "lock of a write", (b"1795348800 write 2f7379732f78 3030", b"17 read 2f73"), _noted, (), of_bytes
        ),
    )


def _journal(content: bytes) -> None:
    """A line of a journal, as a replay reads it after a state."""
    line = read_line(content)
    if isinstance(line, StateLine):
        read_state(line)
    elif isinstance(line, StepLine):
        EventReader().event(line)
        _effects(bytes(line.effects))
    elif isinstance(line, AgainLine):
        max(line.times())


def _lines() -> tuple[bytes, ...]:
    """Of each kind one that the daemon's own code has written."""
    steps, writer = story(events=60).steps, LineWriter()
    by_event = {type(step.event): step for step in steps}
    header = Header(FORMAT, "0.1.0", "f00d", 1, "boot", 4711, "2026-11-21T06:15:57+00:00", 12.5, NODE)
    again = AgainLine(12.6, "TPT", (0.0011, 1.9994), "0011223344556677")
    return (
        header_line(header),
        writer.state_line(steps[-1].before, 1.0, 0),
        msgspec.json.encode(again),
        *(LineWriter().step_line(step) for step in by_event.values()),
    )


def _noted(content: bytes) -> None:
    writes._noted(content.decode(errors="replace"))


def _real_checkpoints() -> tuple[bytes, ...]:
    """One that the daemon's own code has written."""
    return (_encoded(encoded(Checkpoint(), "boot")),)


# --- settings -------------------------------------------------------------------------------------------------


_CA: Final = b"""\
-----BEGIN CERTIFICATE-----
MIIBjzCCATWgAwIBAgIUOsYnu8/yG/IJYmNnMpcPXUwgo7kwCgYIKoZIzj0EAwIw
IzESMBAGA1UECgwJZ3B1YWN0b3JzMQ0wCwYDVQQLDARmdXp6MCAXDTAwMDEwMTAw
MDAwMFoYDzMwMDAwMTAxMDAwMDAwWjAjMRIwEAYDVQQKDAlncHVhY3RvcnMxDTAL
BgNVBAsMBGZ1enowWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAS5Om6jUG4Yrevr
MYJUJnVUbfPZ+USv7tM7eVhEHsQjJ9P9YhR5vFRz/hikIy3GKlD3mh1xiaRknoov
T1wbXQGwo0UwQzAdBgNVHQ4EFgQUrJh5TzLJs3mAa6Mk91WOwvYNlnYwEgYDVR0T
AQH/BAgwBgEB/wIBCTAOBgNVHQ8BAf8EBAMCAYYwCgYIKoZIzj0EAwIDSAAwRQIh
AMTbg8FbH8r4u6jQ4h0/KmAoKY+8YBK7cAKGfVguoPymAiABdHwe5GQy3Nfy1214
HyaYeAuYdNT5ktDcnfD/V8BRmw==
-----END CERTIFICATE-----
"""
"""Of nobody."""


def _settings(directory: Path) -> tuple[Decoder, ...]:
    def config(suffix: str) -> Callable[[bytes], None]:
        def resolved(content: bytes) -> None:
            path = directory / f"c.{suffix}"
            path.write_bytes(content)
            resolve({"config": str(path)}, {})

        return resolved

    def kubeconfig(content: bytes) -> None:
        (directory / "kubeconfig").write_bytes(content)
        from_kubeconfig(directory / "kubeconfig")

    def credentials(content: bytes) -> None:
        (directory / "pem").write_bytes(content)
        pem = directory / "pem"
        server = Server("https", "a", 1)
        tls_context(replace(FileAccess(server, ca=pem).read(), certificate=None))
        with suppress(AccessError):  # a certificate is no token
            FileAccess(server, token=pem).read()

    def packed_ids(content: bytes) -> None:
        (directory / "pci.ids.gz").write_bytes(content)
        pci_ids.PciIds(directory / "pci.ids.gz").lookup("10de", "2330")

    def value(key: str) -> Callable[[bytes], None]:
        def resolved(content: bytes) -> None:
            resolve({key: content.decode(errors="surrogateescape")}, {})

        return resolved

    yaml = b"host_root: /host\nselect:\n  - vendor=10de,class=03\n  - '!address=0000:23:00.0'\nresync_interval_s: 60\n"
    toml = b'host_root = "/host"\nselect = ["vendor=10de,class=03"]\nresync_interval_s = 60\njournal = true\n'
    cluster = b"clusters: [{name: a, cluster: {server: 'https://192.0.2.1:6443', certificate-authority-data: YQ==}}]\n"
    names = b"# c\n10de  NVIDIA\n\t2330  GH100 [H100]\n\t\t10de 1  x\n10df  O\n"
    user = b"users: [{name: a, user: {token: x}}]\ncontexts: [{name: a, context: {cluster: a, user: a}}]\n"
    return (
        Decoder(
            "YAML", (yaml, yaml.replace(b"/host", b"!!str /x")), config("yaml"), (ConfigError,), of_bytes, 1
        ),
        Decoder(
            "YAML of JSON",
            (_json({"select": ["vendor=10de"], "journal": True}),),
            config("yaml"),
            (ConfigError,),
            of_json,
            1,
        ),
        Decoder("TOML", (toml,), config("toml"), (ConfigError,), of_bytes, 3),
        Decoder(
            "kubeconfig", (cluster + user + b"current-context: a\n",), kubeconfig, (PortError,), of_bytes, 1
        ),
        Decoder("token and CA", (_CA,), credentials, (AccessError,), of_bytes, 1),
        Decoder(
            "selector",
            (b"vendor=10de,class=03,device=2330", b"!address=0000:23:00.0"),
            value("select"),
            (ConfigError,),
            of_bytes,
            3,
        ),
        Decoder(
            "a model's name",
            (b"10de:2330=example.com/h100",),
            value("resource_name"),
            (ConfigError,),
            of_bytes,
            3,
        ),
        Decoder(
            "address",
            (b"127.0.0.1:9400", b"[::1]:80", b"unix:/x"),
            value("http_address"),
            (ConfigError,),
            of_bytes,
            3,
        ),
        Decoder(
            "pci.ids",
            (names,),
            lambda b: pci_ids._names(pci_ids._section(b, "10de")),
            (),
            of_bytes,
            3,
        ),
        Decoder(
            "pci.ids.gz",
            (gzip.compress(names),),
            packed_ids,
            (HostError,),
            of_bytes,
            3,
        ),
    )


# --- who calls us ---------------------------------------------------------------------------------------------


async def _page(request: HttpRequest) -> HttpAnswer:
    return HttpAnswer(200 if request.is_from_here else 403, request.path.encode("utf-8"))


def _waits(*, for_us: bool) -> None: ...


def _head(content: bytes) -> None:
    stream = Stream(content)
    at_once(exchange(_page, cast("trio.abc.Stream", stream), "127.0.0.1", _waits))
    assert stream.sent.startswith((b"", b"HTTP/1.1 "))


def _status() -> bytes:
    core = Core(gpu("23:00.0", numa_node=1), audio("23:00.1", 0x23, driver=None))
    status = DaemonStatus(About("node-1"), view_of(core.state, core.at))
    return line_of(Answer(1, "1", msgspec.Raw(msgspec.json.encode(status))))


def _shown(content: bytes) -> None:
    of_daemon(resolve({}, {}), running("/s", understood("/s", content)))


def _callers() -> tuple[Decoder, ...]:
    head = b"GET /debug/state?x=1 HTTP/1.1\r\nHost: 127.0.0.1:9400\r\nAccept: */*\r\n\r\n"
    body = b"HEAD / HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    return (
        Decoder("HTTP head", (head, body), _head, (), of_bytes),
        Decoder("status", (_status(),), _shown, (ControlError,), of_bytes, 5),
        Decoder("control request", (line_of(Request("status")),), request_of, (), of_bytes, 2),
    )
