"""Kubelet's ledger over a real socket and from a real file: what each of them says. Which counts: the core's tests."""

from __future__ import annotations

import base64
import dataclasses
import errno
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from grpclib import GRPCError, Status
from msgspec import Struct
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.values.model import (
    CachedAnswer,
    ClaimedDevice,
    DeviceId,
    LedgerEntry,
    LedgerFile,
    Pod,
    PodClaim,
    PodLife,
    ResourceName,
    RunningKubelet,
    SeenPods,
)
from gpuactors.core.values.quote import QUOTED_TEXT_CHARS_MAX
from gpuactors.grpc_trio import Server, SocketFile, bind_unix, connect_unix
from gpuactors.grpc_trio.protobuf import decode
from gpuactors.grpc_trio.unix import UnixStream
from gpuactors.kubelet import ledger as kubelet_ledger
from gpuactors.kubelet.ledger import Answers, KubeletLedger, checkpoint_contents
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as plugin_pb
from gpuactors.kubelet.pb.podresources import v1 as pb
from gpuactors.ports.errors import KubeletError
from gpuactors.ports.node import LedgerContents, LedgerError, LedgerQuestion
from tests.support.patience import patient

GPU = "nvidia.com/GH100_H100_SXM5_80GB"
ODD = "\x1b[2J\x9b\u202e"
"""A terminal's control sequences, and a mark that turns the direction of writing."""

WITHIN_S = patient(10.0)
LISTS = LedgerQuestion(lists=True)


def entry(device: str, pod: Pod, resource: str = GPU) -> LedgerEntry:
    return LedgerEntry(ResourceName(resource), DeviceId(device), pod)


def named(name: str, namespace: str = "default") -> Pod:
    return Pod(namespace, name, "")


def by_uid(uid: str) -> Pod:
    return Pod("", "", uid)


# --- what List says ---------------------------------------------------------------------------------------------


def devices(*ids: str, resource: str = GPU, numa: int | None = None) -> pb.ContainerDevices:
    topology = None if numa is None else pb.TopologyInfo(nodes=[pb.NumaNode(id=numa)])
    return pb.ContainerDevices(resource_name=resource, device_ids=list(ids), topology=topology)


def pod(name: str, *containers: pb.ContainerResources) -> pb.PodResources:
    return pb.PodResources(name=name, namespace="default", containers=list(containers))


def container(
    *given: pb.ContainerDevices, dynamic: tuple[pb.DynamicResource, ...] = ()
) -> pb.ContainerResources:
    return pb.ContainerResources(name="compute", devices=list(given), dynamic_resources=list(dynamic))


DAEMONS = (pod("kube-proxy-x7k2p"), pod("cni-9qz4d"))
"""Pods that any node has, as kubelet lists all."""


def listed_contents(response: pb.ListPodResourcesResponse) -> LedgerContents:
    return Answers().listed(bytes(response))


def test_a_device_counts_once_however_often_list_names_it() -> None:
    """Once per NUMA node, and again for each container that has it (an init container's devices are reused)."""
    response = pb.ListPodResourcesResponse(
        pod_resources=[
            pod("idle", container()),
            pod(
                "vm",
                container(devices("a", numa=0), devices("a", numa=1)),
                container(devices("a"), devices("b", "c"), devices("d", resource="example.org/nic")),
            ),
        ]
    )
    contents = listed_contents(response)
    vm = named("vm")
    assert contents.listed == (
        entry("d", vm, "example.org/nic"),
        entry("a", vm),
        entry("b", vm),
        entry("c", vm),
    )
    assert contents.claims == ()


def test_pods_in_another_order_are_the_same_ledger() -> None:
    """Kubelet goes through a map of pods: what differs each time would fill the journal (issue 10, 23)."""
    dynamic = pb.DynamicResource(
        claim_name="one",
        claim_namespace="ml",
        claim_resources=[
            pb.ClaimResource(driver_name="gpu.example", pool_name="node-1", device_name="gpu-0")
        ],
    )
    pods = [
        pod("vm-1", container(devices("b", "a"))),
        pod("vm-2", container(devices("c", resource="example.org/nic"), dynamic=(dynamic,))),
        pod("vm-3", container(devices("d"), dynamic=(dynamic,))),
    ]
    turned = pb.ListPodResourcesResponse(pod_resources=pods[::-1])
    assert listed_contents(turned) == listed_contents(pb.ListPodResourcesResponse(pod_resources=pods))


def test_devices_of_claims_are_listed_with_their_claim() -> None:
    names, uid = ("gpu-0000-23-00-0", "gpu-0000-3b-00-0"), "8b3f0c52-0000-4000-8000-000000000001"
    ids = (f"gpu.example/metadata={uid}_gpu", f"k8s.gpu.example/claim={uid}-{names[0]}")
    resources = [
        pb.ClaimResource(
            cdi_devices=[pb.CdiDevice(name=cdi_id) for cdi_id in ids],
            driver_name="gpu.example",
            pool_name="node-1",
            device_name=name,
            share_id=None,
        )
        for name in names
    ]
    dynamic = pb.DynamicResource(claim_name="two", claim_namespace="ml", claim_resources=resources)
    waits = pb.DynamicResource(claim_name="three", claim_namespace="ml")
    contents = listed_contents(
        pb.ListPodResourcesResponse(
            pod_resources=[
                pod("vm", container(dynamic=(dynamic, waits)), container(dynamic=(dynamic, waits)))
            ]
        )
    )
    assert contents.waiting == (PodClaim("ml/three", named("vm")),)
    assert contents.listed == ()
    assert contents.claims == tuple(
        ClaimedDevice("gpu.example", "node-1", name, "ml/two", named("vm"), found, ids)
        for name, found in zip(names, (uid, ""), strict=True)
    ), "the CDI id of another device says nothing of this one"


@pytest.mark.parametrize(
    ("names", "end"),
    [
        ((), None),
        (("kube-proxy-node1.example",), "kube-proxy-node1.example"),
        (("nginx-proxy-node1.example", "kube-proxy-node1.example"), "-proxy-node1.example"),
        (("nginx-proxy-node1.example", "kube-proxy-node1.example", "etcd-node1.example"), "-node1.example"),
        (("nginx-proxy-node1.example", "cni-9qz4d"), ""),
        (("node1.example", "etcd-node1.example"), "node1.example"),
        (("vm", "vm"), "vm"),
        (("vm", ""), ""),
    ],
)
def test_of_the_names_of_all_pods_it_is_read_what_they_end_in(
    names: tuple[str, ...], end: str | None
) -> None:
    """By that alone static pods are known, and unlike the names it stays what it is as pods come and go."""
    for ordered in (names, names[::-1]):
        response = pb.ListPodResourcesResponse(pod_resources=[pod(name) for name in ordered])
        assert listed_contents(response).names_end == end


def test_only_what_the_last_read_did_not_say_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = list[type]()

    def counted(payload: bytes, kind: type[Any]) -> Any:
        decoded.append(kind)
        return decode(payload, kind)

    def times(pods: list[pb.PodResources]) -> int:
        decoded.clear()
        response = pb.ListPodResourcesResponse(pod_resources=pods)
        assert answers.listed(bytes(response)) == listed_contents(response)
        return len(decoded) - len(pods)

    monkeypatch.setattr("gpuactors.kubelet.ledger.decode", counted)
    answers = Answers()
    pods = [pod(f"vm-{i}", container(devices(f"{i}"))) for i in range(20)]
    new = pod("vm-0", container(devices("0", "20")))
    assert [times(p) for p in (pods, pods[::-1], [new, *pods[1:]], pods[1:], [])] == [20, 0, 1, 0, 0]
    assert times(pods) == 20, "of the last read only"


def test_of_the_file_only_answers_that_are_new_are_decoded() -> None:
    decoded, real = list[str](), kubelet_ledger._nodes

    def counted(answer: str) -> Any:
        decoded.append(answer)
        return real(answer)

    response = plugin_pb.ContainerAllocateResponse(devices=[plugin_pb.DeviceSpec(host_path="/dev/vfio/81")])
    known = kubelet_ledger.DecodeCache(counted)
    given = base64.b64encode(bytes(response)).decode()
    for content in (file_with(["a"]), file_with(["a"]), file_with(["a"], AllocResp=given)):
        assert checkpoint_contents(content, "/f", known) == checkpoint_contents(content, "/f")
    assert decoded == ["Ch8KFk5WSURJ", given]


# --- what the file says -----------------------------------------------------------------------------------------


def file_with(device_ids: Any, **more: Any) -> bytes:
    written = {
        "PodUID": "uid-1",
        "ContainerName": "compute",
        "ResourceName": GPU,
        "DeviceIDs": device_ids,
        "AllocResp": "Ch8KFk5WSURJ",
    }
    data = {"PodDeviceEntries": [written | more], "RegisteredDevices": {GPU: ["a", "b"]}}
    return json.dumps({"Data": data, "Checksum": 1}).encode()


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        pytest.param(file_with({"-1": ["a"]}), ["a"], id="no topology"),
        pytest.param(file_with({"0": ["a"], "1": ["b"]}), ["a", "b"], id="by NUMA node"),
        pytest.param(file_with({"0": ["a"], "1": ["a"]}), ["a"], id="a device with two NUMA nodes"),
        pytest.param(file_with(["a", "b"]), ["a", "b"], id="before Kubernetes 1.20"),
        pytest.param(file_with({"0": None, "1": ["b"]}), ["b"], id="a slice that was never made"),
        pytest.param(file_with(None), [], id="a map that was never made"),
        pytest.param(file_with({"0": ["a"]}, ShareID="x", Extra={"y": []}), ["a"], id="unknown fields"),
        pytest.param(
            b'{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}', [], id="empty"
        ),
        pytest.param(
            b'{"Data":{"PodDeviceEntries":[]},"BootID":"z"}', [], id="no checksum, and a later field"
        ),
    ],
)
def test_every_form_of_the_file_is_read(content: bytes, ids: list[str]) -> None:
    contents = checkpoint_contents(content, "/the/file")
    assert contents.exists
    assert contents.entries == tuple(entry(device, by_uid("uid-1")) for device in ids)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty, as after a crash of the node"),
        pytest.param(b"\x00" * 100, id="zeros"),
        pytest.param(file_with(["a"])[:-30], id="cut off"),
        pytest.param(b"{}", id="no data"),
        pytest.param(b'{"Data":{"RegisteredDevices":{}}}', id="no entries"),
        pytest.param(file_with(7), id="a number for the devices"),
        pytest.param(file_with({"0": [7]}), id="a number for a device"),
        pytest.param(file_with(["a"], PodUID=None), id="no pod"),
        pytest.param(b'{"Data":{"PodDeviceEntries":[{"PodUID":"\xff"}]}}', id="not UTF-8"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it_and_the_remedy(content: bytes) -> None:
    with pytest.raises(KubeletError, match=r"^/the/file is damaged .*: start kubelet, which lists it over"):
        checkpoint_contents(content, "/the/file")


# --- which of the two counts ------------------------------------------------------------------------------------


@dataclass
class Lister(pb.PodResourcesListerBase):
    """Kubelet's side of PodResources."""

    pods: list[pb.PodResources] = dataclasses.field(default_factory=list)
    error: GRPCError | None = None
    hang: bool = False
    asked: int = 0
    healthy: list[pb.ContainerDevices] = dataclasses.field(default_factory=list)
    list_error: GRPCError | None = None
    asked_for_list: int = 0

    async def list(self, message: pb.ListPodResourcesRequest) -> pb.ListPodResourcesResponse:
        self.asked += 1
        if self.hang:
            await trio.sleep_forever()
        if self.error is not None:
            raise self.error
        return pb.ListPodResourcesResponse(pod_resources=self.pods)

    async def get_allocatable_resources(
        self, message: pb.AllocatableResourcesRequest
    ) -> pb.AllocatableResourcesResponse:
        self.asked_for_list += 1
        if self.list_error is not None:
            raise self.list_error
        return pb.AllocatableResourcesResponse(devices=self.healthy)


@dataclass
class Node:
    """A kubelet directory."""

    kubelet_dir: Path

    @property
    def socket(self) -> Path:
        return self.kubelet_dir / "pod-resources/kubelet.sock"

    @property
    def file(self) -> Path:
        return self.kubelet_dir / "device-plugins/kubelet_internal_checkpoint"

    def ledger(self) -> KubeletLedger:
        return KubeletLedger(str(self.kubelet_dir), str(self.file.parent))

    @asynccontextmanager
    async def kubelet(self, lister: Lister, age_s: float = limits.LEDGER_SETTLE_S * 2) -> AsyncIterator[None]:
        """Kubelet answers; its socket has been there for so long."""
        self.socket.parent.mkdir(exist_ok=True)
        async with trio.open_nursery() as nursery:
            server = Server([lister], drain_s=0.1)
            await nursery.start(server.serve, bind_unix(str(self.socket)))
            made_at = time.time() - age_s
            os.utime(self.socket, (made_at, made_at))
            yield
            nursery.cancel_scope.cancel()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    found = Node(tmp_path)
    found.file.parent.mkdir()
    return found


def in_file(contents: LedgerContents) -> tuple[LedgerEntry, ...]:
    """What only the file names."""
    assert contents.file is not None
    return contents.file.entries


@pytest.mark.trio
async def test_what_list_names_and_what_the_file_names_are_both_given(node: Node) -> None:
    """The file has the UIDs of the pods that List names."""
    node.file.write_bytes(file_with({"0": ["a", "b"], "1": ["c"]}))
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(Lister([*DAEMONS, pod("vm", container(devices("b", "d")))])):
            contents = await node.ledger().read(LISTS)
    assert contents.listed == (entry("b", named("vm")), entry("d", named("vm")))
    assert in_file(contents) == tuple(entry(device, by_uid("uid-1")) for device in "abc")


@pytest.mark.trio
@pytest.mark.parametrize("left_behind", [False, True], ids=["no socket", "a dead kubelet's socket"])
async def test_without_a_kubelet_only_the_file_says_anything(node: Node, left_behind: bool) -> None:
    node.file.write_bytes(file_with({"0": ["a"]}))
    if left_behind:
        node.socket.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(node.socket))
    with trio.fail_after(WITHIN_S):
        contents = await node.ledger().read(LISTS)
    assert contents == LedgerContents(file=LedgerFile((entry("a", by_uid("uid-1")),)))


@pytest.mark.trio
async def test_no_file_in_kubelets_directory_is_an_empty_one_that_says_why(node: Node) -> None:
    with trio.fail_after(WITHIN_S):
        contents = await node.ledger().read(LISTS)
    assert contents == LedgerContents(file=LedgerFile(exists=False))


@pytest.mark.trio
async def test_no_kubelet_directory_is_an_error(tmp_path: Path) -> None:
    with trio.fail_after(WITHIN_S), pytest.raises(KubeletError, match="does not exist: is kubelet installed"):
        await KubeletLedger(str(tmp_path / "no"), str(tmp_path / "no/device-plugins")).read(LISTS)


@pytest.mark.trio
async def test_something_else_by_the_files_name_is_an_error(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trio.fail_after(WITHIN_S):
        node.file.write_bytes(b"{")
        with pytest.raises(KubeletError, match=f"^{node.file} is damaged"):
            await node.ledger().read(LISTS)
        node.file.write_bytes(file_with(["a"]))
        monkeypatch.setattr(kubelet_ledger, "CHECKPOINT_MAX_BYTES", 100)
        with pytest.raises(KubeletError, match="more than 100 bytes, so it is not kubelet's ledger"):
            await node.ledger().read(LISTS)
        node.file.unlink()
        node.file.mkdir()
        with pytest.raises(KubeletError, match=r"cannot read .*it is a directory.*: check that disk"):
            await node.ledger().read(LISTS)


@pytest.mark.trio
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            Status.RESOURCE_EXHAUSTED,
            "rejected by rate limit.*a client of PodResources on this node calls too",
        ),
        (Status.UNIMPLEMENTED, "has no PodResources v1"),
        (Status.UNAVAILABLE, "it is asked again"),
        (Status.INTERNAL, "see kubelet's log"),
    ],
)
async def test_a_kubelet_that_refuses_is_a_failed_read_and_no_reason_to_believe_the_file(
    node: Node, status: Status, words: str
) -> None:
    node.file.write_bytes(file_with({"0": ["a"]}))
    lister = Lister(error=GRPCError(status, "rejected by rate limit"))
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(lister, age_s=0):
            with pytest.raises(
                KubeletError, match=f"{status.name}.*the last contents stay in effect.*"
            ) as failed:
                await node.ledger().read(LISTS)
            assert lister.asked == 1
    failed.match(words)


@pytest.mark.trio
async def test_what_kubelet_says_of_its_refusal_is_quoted(node: Node) -> None:
    lister = Lister(error=GRPCError(Status.INTERNAL, ODD + "x" * 5000))
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(lister):
            with pytest.raises(KubeletError) as failed:
                await node.ledger().read(LISTS)
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) < 2 * QUOTED_TEXT_CHARS_MAX


@pytest.mark.trio
async def test_a_kubelet_that_hangs_is_a_failed_read(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.file.write_bytes(file_with({"0": ["a"]}))
    monkeypatch.setattr(kubelet_ledger, "LEDGER_LIST_DEADLINE_S", 0.1)
    lister = Lister([*DAEMONS], hang=True)
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(lister):
            with pytest.raises(KubeletError, match=r"did not answer PodResources List on .* within 0\.1 s"):
                await node.ledger().read(LISTS)
            lister.hang = False
            monkeypatch.setattr(kubelet_ledger, "LEDGER_LIST_DEADLINE_S", WITHIN_S)
            assert (await node.ledger().read(LISTS)).kubelet is not None


@pytest.mark.trio
async def test_something_else_on_the_socket_is_a_failed_read(node: Node) -> None:
    node.file.write_bytes(file_with({"0": ["a"]}))
    node.socket.parent.mkdir()
    async with trio.open_nursery() as nursery:
        listener = bind_unix(str(node.socket))

        async def hang_up() -> None:
            await (await listener.accept()).aclose()

        nursery.start_soon(hang_up)
        with (
            trio.fail_after(WITHIN_S),
            pytest.raises(KubeletError, match=r"^cannot ask kubelet for its ledger"),
        ):
            await node.ledger().read(LISTS)
        await listener.aclose()
    node.socket.touch()
    with trio.fail_after(WITHIN_S):
        # A file that is no socket refuses as a dead kubelet's socket does.
        assert (await node.ledger().read(LISTS)).kubelet is None


# --- a kubelet that has just started ----------------------------------------------------------------------------


@pytest.mark.trio
@pytest.mark.parametrize("content", [None, b"{"], ids=["no file", "a damaged file"])
async def test_beside_a_young_kubelet_a_file_that_says_nothing_is_no_error(
    node: Node, content: bytes | None
) -> None:
    if content is not None:
        node.file.write_bytes(content)
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(Lister([pod("vm", container(devices("a")))]), age_s=0):
            contents = await node.ledger().read(LISTS)
    assert contents.listed == (entry("a", named("vm")),)
    assert contents.file == (LedgerFile(exists=False) if content is None else None)


class OnePod:
    """One pod has come, of whatever kind."""

    def look(self, uids: Collection[str]) -> SeenPods:
        return SeenPods(dict.fromkeys(uids, PodLife.RUNNING), 1)


@pytest.mark.trio
@pytest.mark.parametrize("content", [None, b"{"], ids=["no file", "a damaged file"])
async def test_pods_are_seen_where_the_file_says_nothing(node: Node, content: bytes | None) -> None:
    """Else no pod that comes would lead to a List."""
    if content is not None:
        node.file.write_bytes(content)
    ledger = KubeletLedger(str(node.kubelet_dir), str(node.file.parent), pods=OnePod())
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(Lister([]), age_s=60):
            contents = await ledger.read(LedgerQuestion())
    assert contents.pods == SeenPods({}, 1)


def aged(ledger: KubeletLedger, age_s: float, kubelet: str = "kubelet") -> KubeletLedger:
    """As if kubelet had been started so long ago."""
    ledger._io = replace(ledger._io, socket_file=lambda _path: SocketFile(kubelet, age_s))
    return ledger


@pytest.mark.trio
async def test_who_answered_is_read_with_the_age_of_its_socket(node: Node) -> None:
    lister, ledger = Lister(list(DAEMONS)), node.ledger()
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(lister):
            assert (await aged(ledger, 7.5, "x").read(LISTS)).kubelet == RunningKubelet("x", 7.5)
            assert (await aged(ledger, 7.6, "y").read(LISTS)).kubelet == RunningKubelet("y", 7.6)
            ledger._io = replace(ledger._io, socket_file=lambda _path: None)
            gone = (await ledger.read(LISTS)).kubelet
            assert gone == RunningKubelet("", limits.LEDGER_SETTLE_S), "its socket was removed meanwhile"


@pytest.mark.trio
async def test_an_unchanged_ledger_is_read_the_same_however_old_its_kubelet_is(node: Node) -> None:
    """The journal folds reads that say the same. Nothing is kept between reads either: any reader would say so."""
    node.file.write_bytes(file_with({"0": ["a", "b"]}))
    lister = Lister([*DAEMONS, pod("vm", container(devices("b")))])
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(lister):
            first = await aged(node.ledger(), limits.LEDGER_SETTLE_S).read(LISTS)
            ledger = aged(node.ledger(), 3600)
            assert await ledger.read(LISTS) == first
            lister.pods = [*DAEMONS[::-1], pod("cni-aaaaa"), pod("vm", container(devices("b")))]
            assert await aged(ledger, 100_000).read(LISTS) == first


# --- kubelet's own list ---------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_of_kubelets_own_list_only_what_was_asked_about_is_kept_each_device_once(node: Node) -> None:
    """Kubelet names a device once per NUMA node, and other plugins' devices as well."""
    ours, others = ResourceName("nvidia.com/X"), ResourceName("example.org/thing")
    healthy = [
        pb.ContainerDevices(resource_name=ours, device_ids=["b"]),
        pb.ContainerDevices(resource_name=ours, device_ids=["a", "b"]),
        *(pb.ContainerDevices(resource_name=others, device_ids=[str(n)]) for n in range(1000)),
    ]
    lister = Lister(healthy=healthy)
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(lister):
            contents = await node.ledger().read(LedgerQuestion([ours], lists=True))
            assert contents.healthy == {ours: (DeviceId("a"), DeviceId("b"))}
            assert (
                await node.ledger().read(LedgerQuestion([ResourceName("nvidia.com/Y")], lists=True))
            ).healthy == {}
            assert lister.asked_for_list == 2
            assert (await node.ledger().read(LISTS)).healthy is None
            assert lister.asked_for_list == 2, "nobody asked"


@pytest.mark.trio
@pytest.mark.parametrize(
    "error",
    [
        GRPCError(Status.UNIMPLEMENTED, "unknown method"),
        GRPCError(Status.UNKNOWN, "PodResources API GetAllocatableResources disabled"),
        GRPCError(Status.UNAVAILABLE, "going"),
        GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit"),
    ],
    ids=lambda error: error.status.name,
)
async def test_a_kubelet_that_does_not_say_what_it_has_is_no_failed_read(
    node: Node, error: GRPCError
) -> None:
    lister = Lister([pod("vm", container(devices("b")))], list_error=error)
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(lister):
            contents = await node.ledger().read(LedgerQuestion([ResourceName("nvidia.com/X")], lists=True))
    assert contents.healthy is None
    assert contents.listed == (entry("b", named("vm")),)


@pytest.mark.trio
async def test_the_file_says_nothing_of_kubelets_list(node: Node) -> None:
    node.file.write_bytes(file_with({"0": ["a"]}))
    assert (
        await node.ledger().read(LedgerQuestion([ResourceName("nvidia.com/X")], lists=True))
    ).healthy is None


# --- a kubelet that is started anew during a read ---------------------------------------------------------------


@pytest.mark.trio
async def test_a_kubelet_that_starts_while_it_is_asked_is_not_taken_for_the_one_before(node: Node) -> None:
    """Else its first answer, which names no pod yet, would count as that of one who knows them all."""
    node.file.write_bytes(file_with({"0": ["a"]}))
    lister, ledger = Lister([*DAEMONS, pod("vm", container(devices("a")))]), node.ledger()
    kubelets = ["before"]

    def socket_file(_path: str) -> SocketFile:
        kubelet = kubelets.pop(0) if len(kubelets) > 1 else kubelets[0]
        return SocketFile(kubelet, 0.0 if kubelet == "new" else 3600.0)

    ledger._io = replace(ledger._io, socket_file=socket_file)
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(lister):
            assert (await ledger.read(LISTS)).kubelet == RunningKubelet("before", limits.LEDGER_SETTLE_S)
            lister.pods = []
            kubelets[:] = ["before", "new"]
            with pytest.raises(LedgerError, match="restarted while its ledger was read"):
                await ledger.read(LISTS)
            contents = await ledger.read(LISTS)
            assert contents.kubelet == RunningKubelet("new", 0.0)
            assert (contents.listed, in_file(contents)) == ((), (entry("a", by_uid("uid-1")),))


# --- what Allocate answered (issue 10, item 12) -----------------------------------------------------------------


def answered(*nodes: str) -> str:
    specs = [plugin_pb.DeviceSpec(container_path=n, host_path=n, permissions="mrw") for n in nodes]
    response = plugin_pb.ContainerAllocateResponse(envs={"GPUS": "x"}, devices=specs)
    return base64.b64encode(bytes(response)).decode()


@pytest.mark.trio
async def test_what_allocate_answered_is_read_beside_list(node: Node) -> None:
    given = answered("/dev/vfio/vfio", "/dev/vfio/81", "/dev/nvidia0")
    node.file.write_bytes(file_with({"0": ["a"], "1": ["b"]}, AllocResp=given))
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(Lister([*DAEMONS, pod("vm", container(devices("a", "b")))])):
            contents = await node.ledger().read(LISTS)
    nodes = ("/dev/vfio/81", "/dev/vfio/vfio")
    cached = tuple(CachedAnswer(ResourceName(GPU), DeviceId(d), nodes) for d in ("a", "b"))
    assert contents.file is not None
    assert contents.file.cached == cached


def test_an_init_containers_answer_counts_beside_that_of_the_container_after_it() -> None:
    """Kubelet gives a pod's init containers the devices of the next one, and keeps an answer for each: whichever comes
    last in the file, the pod's containers get the nodes of both."""
    init, main = (
        json.loads(file_with(["a"], ContainerName=name, AllocResp=answered(node)))["Data"]["PodDeviceEntries"]
        for name, node in (("init", "/dev/vfio/81"), ("compute", "/dev/vfio/82"))
    )
    both = (CachedAnswer(ResourceName(GPU), DeviceId("a"), ("/dev/vfio/81", "/dev/vfio/82")),)
    for entries in ([*init, *main], [*main, *init]):
        content = json.dumps({"Data": {"PodDeviceEntries": entries}, "Checksum": 1}).encode()
        assert checkpoint_contents(content, "/f").cached == both


class Failing(Struct, frozen=True):
    """A way for List to fail, and what the error says of it."""

    words: str
    error: GRPCError | None = None


LIMITED = Failing("rejected by rate limit", GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit"))
HANGING = Failing("did not answer PodResources List on .* check whether kubelet hangs")


async def failed_read(node: Node, how: Failing) -> LedgerError:
    """What a read raises where List fails so."""
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(Lister(error=how.error, hang=how.error is None)):
            with pytest.raises(LedgerError, match=how.words) as failed:
                await node.ledger().read(LISTS)
    return failed.value


@pytest.mark.trio
@pytest.mark.parametrize("how", [LIMITED, HANGING], ids=["refused", "hangs"])
async def test_what_allocate_answered_is_read_where_list_fails(
    node: Node, monkeypatch: pytest.MonkeyPatch, how: Failing
) -> None:
    """After a reboot this is all that tells what a container would get, and kubelet's rate limit is for all clients
    together."""
    if how is HANGING:
        monkeypatch.setattr(kubelet_ledger, "LEDGER_LIST_DEADLINE_S", 0.5)
    node.file.write_bytes(file_with(["a"], AllocResp=answered("/dev/vfio/81")))
    failed = await failed_read(node, how)
    assert failed.file is not None
    assert failed.file.cached == (CachedAnswer(ResourceName(GPU), DeviceId("a"), ("/dev/vfio/81",)),)
    assert failed.file.damaged == ""


@pytest.mark.trio
async def test_where_list_fails_a_damaged_answer_is_told_and_a_damaged_file_says_nothing(node: Node) -> None:
    none = (await failed_read(node, LIMITED)).file
    assert none == LedgerFile(exists=False), "no file: nothing was ever answered"
    node.file.write_bytes(file_with(["a"], AllocResp="%%%"))
    damaged = (await failed_read(node, LIMITED)).file
    assert damaged is not None
    assert damaged.cached == ()
    assert "the answer to Allocate (AllocResp)" in damaged.damaged
    node.file.write_bytes(b"{")
    assert (await failed_read(node, LIMITED)).file is None


@pytest.mark.trio
async def test_what_allocate_answered_is_read_where_no_descriptor_was_left_for_list(
    node: Node,
) -> None:
    node.file.write_bytes(file_with(["a"], AllocResp=answered("/dev/vfio/81")))
    ledger = node.ledger()

    async def short(path: str, *, deadline_s: float) -> trio.abc.Stream:
        raise OSError(errno.EMFILE, "Too many open files")

    ledger._io = replace(ledger._io, dial=short)
    with trio.fail_after(WITHIN_S), pytest.raises(LedgerError, match="no file descriptors left") as failed:
        await ledger.read(LISTS)
    assert failed.value.file is not None
    assert failed.value.file.cached == (CachedAnswer(ResourceName(GPU), DeviceId("a"), ("/dev/vfio/81",)),)


@pytest.mark.trio
async def test_list_and_a_disk_that_hang_together_are_a_failed_read_that_names_list(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubelet_ledger, "LEDGER_LIST_DEADLINE_S", 0.1)
    monkeypatch.setattr(limits, "CHECKPOINT_DEADLINE_S", 0.1)
    go = threading.Event()
    ledger = node.ledger()
    monkeypatch.setattr(ledger, "_read_file", go.wait)
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(Lister(hang=True)):
            with pytest.raises(LedgerError, match=HANGING.words) as failed:
                await ledger.read(LISTS)
            go.set()
    assert failed.value.file is None


@pytest.mark.trio
async def test_without_a_kubelet_a_disk_that_hangs_is_what_the_error_names(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEDGER_DEADLINE_S", 0.1)
    go = threading.Event()
    ledger = node.ledger()
    monkeypatch.setattr(ledger, "_read_file", go.wait)
    with trio.fail_after(WITHIN_S):
        with pytest.raises(LedgerError, match=rf"^{node.file} could not be read within 0\.1 s"):
            await ledger.read(LISTS)
        go.set()


@pytest.mark.parametrize(
    "given",
    [
        pytest.param("%%%", id="no base64"),
        pytest.param("a", id="cut base64"),
        pytest.param(7, id="a number"),
        pytest.param({"x": 1}, id="an object"),
        pytest.param(base64.b64encode(b"\x1a\xff/dev/vfio/81").decode(), id="a cut message"),
        pytest.param(base64.b64encode(b"\xff\xff\xff/dev/vfio/").decode(), id="no message"),
        pytest.param("²", id="no ASCII"),
    ],
)
def test_a_damaged_answer_is_left_out_with_a_word_and_the_rest_of_the_file_counts(given: object) -> None:
    contents = checkpoint_contents(file_with(["a"], AllocResp=given), "/the/file")
    assert contents.entries == (entry("a", by_uid("uid-1")),)
    assert contents.cached == ()
    assert contents.damaged.startswith(
        f"in /the/file the answer to Allocate (AllocResp) for {GPU} of pod uid-1 is"
    )


def test_whose_answer_is_damaged_is_quoted() -> None:
    content = file_with(["a"], AllocResp="%%%", PodUID=ODD, ResourceName="x" * 5000)
    damaged = checkpoint_contents(content, "/the/file").damaged
    assert damaged.isprintable()
    assert len(damaged) < 2 * QUOTED_TEXT_CHARS_MAX


@pytest.mark.parametrize("given", [None, "", "Ch8KFk5WSURJ"], ids=["null", "empty", "nothing of ours in it"])
def test_an_answer_that_says_nothing_of_vfio_says_nothing(given: object) -> None:
    contents = checkpoint_contents(file_with(["a"], AllocResp=given), "/the/file")
    assert (contents.cached, contents.damaged) == ((), "")


@pytest.mark.trio
async def test_a_disk_that_hangs_holds_no_read_of_list_up(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHECKPOINT_DEADLINE_S", 0.05)
    go = threading.Event()
    ledger = node.ledger()
    monkeypatch.setattr(ledger, "_read_file", go.wait)
    with trio.fail_after(WITHIN_S):
        async with node.kubelet(Lister([*DAEMONS, pod("vm", container(devices("a")))])):
            for _ in range(50):  # more than trio has threads
                contents = await ledger.read(LISTS)
                assert (contents.listed, contents.file) == ((entry("a", named("vm")),), None)
            go.set()
            await trio.to_thread.run_sync(lambda: None)


# --- the connection that is kept --------------------------------------------------------------------------------


class Dials:
    """Counts the connections, and has them."""

    def __init__(self, node: Node) -> None:
        self.streams: list[UnixStream] = []
        io = replace(kubelet_ledger._io_of_the_node(None), dial=self.dial)
        self.ledger = KubeletLedger(str(node.kubelet_dir), str(node.file.parent), io)

    async def dial(self, path: str, *, deadline_s: float) -> trio.abc.Stream:
        stream = await connect_unix(path, deadline_s=deadline_s)
        self.streams.append(stream)
        return stream

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[KubeletLedger]:
        """The daemon's ledger, while it keeps connections."""
        with trio.fail_after(WITHIN_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.ledger.keep)
                await trio.testing.wait_all_tasks_blocked()
                yield self.ledger
                nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_connection_is_kept_for_the_next_read_which_asks_anew(node: Node) -> None:
    dials, lister = Dials(node), Lister(pods=[*DAEMONS], healthy=[devices("a")])
    async with node.kubelet(lister), dials.kept() as ledger:
        for i in range(3):
            lister.pods.append(pod(f"vm-{i}", container(devices(f"{i}"))))
            contents = await ledger.read(LedgerQuestion([ResourceName(GPU)], lists=True))
            assert contents.listed == tuple(entry(f"{n}", named(f"vm-{n}")) for n in range(i + 1))
            assert contents.healthy == {GPU: ("a",)}
        assert (len(dials.streams), lister.asked) == (1, 3)
    assert dials.streams[0]._socket.fileno() == -1, "closed with the daemon"


@pytest.mark.trio
async def test_a_kept_connection_that_broke_is_made_again_at_once(node: Node) -> None:
    dials, lister = Dials(node), Lister(pods=[*DAEMONS])
    async with node.kubelet(lister), dials.kept() as ledger:
        await ledger.read(LISTS)
        dials.streams[0]._socket.shutdown(socket.SHUT_RDWR)  # nobody has seen it when the read begins
        assert (await ledger.read(LISTS)).kubelet is not None
        await ledger.read(LISTS)
        assert len(dials.streams) == 2


@pytest.mark.trio
async def test_another_kubelet_is_asked_over_another_connection(node: Node) -> None:
    """Whether the former one has closed its own by then or not."""
    dials = Dials(node)
    async with dials.kept() as ledger:
        async with node.kubelet(Lister(pods=[pod("old", container(devices("a")))])):
            assert (await ledger.read(LISTS)).listed == (entry("a", named("old")),)
            node.socket.rename(node.kubelet_dir / "former")
            async with node.kubelet(Lister(pods=[pod("new", container(devices("a")))])):
                assert (await ledger.read(LISTS)).listed == (entry("a", named("new")),)
        node.socket.unlink(missing_ok=True)
        node.file.write_bytes(file_with({"0": ["a"]}))
        contents = await ledger.read(LISTS)
        assert contents.kubelet is None, "none runs"
        assert len(dials.streams) == 2


@pytest.mark.trio
async def test_a_connection_over_which_no_answer_came_is_not_kept(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    dials, lister = Dials(node), Lister(pods=[*DAEMONS])
    async with node.kubelet(lister), dials.kept() as ledger:
        await ledger.read(LISTS)
        monkeypatch.setattr(kubelet_ledger, "LEDGER_LIST_DEADLINE_S", 0.05)
        lister.hang = True
        with pytest.raises(LedgerError, match="did not answer PodResources List"):
            await ledger.read(LISTS)
        lister.hang = False
        monkeypatch.undo()
        assert (await ledger.read(LISTS)).kubelet is not None
        assert (len(dials.streams), lister.asked) == (2, 3)
        assert [stream._socket.fileno() == -1 for stream in dials.streams] == [True, False]


@pytest.mark.trio
async def test_a_read_that_failed_leaves_no_connection_behind(node: Node) -> None:
    """Each is a descriptor here and a stream in kubelet, and a kubelet that refuses does so every few seconds."""
    dials, lister = Dials(node), Lister(pods=[*DAEMONS], error=GRPCError(Status.INTERNAL, "no"))
    async with node.kubelet(lister), dials.kept() as ledger:
        for _ in range(3):
            with pytest.raises(LedgerError, match="did not return its ledger"):
                await ledger.read(LISTS)
        await trio.testing.wait_all_tasks_blocked()
        assert [stream._socket.fileno() for stream in dials.streams] == [-1, -1, -1]
        lister.error = None
        assert (await ledger.read(LISTS)).kubelet is not None
        assert len(dials.streams) == 4
