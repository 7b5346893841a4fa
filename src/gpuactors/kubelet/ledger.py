"""Kubelet's ledger: which devices it has given to which pods. Implements `ports.node.LedgerReader`.

Each read reads the ledger *file*: it names the pods, by their UIDs, and only it has the answers to Allocate, which
kubelet gives every container that it makes. Whether these pods live is read of the kernel. PodResources is then asked
what the core wants to know, List as seldom as can be (`core/host/asking.py`). A kubelet that runs and does not answer
List (rate limit, timeout) is a failed read; the file and the lives of its pods are passed on all the same. The other
questions may stay without an answer: then nothing follows.

The file is read before List is asked: kubelet has inserted what the file names, so a device that List lacks then was
released.

On a full node nearly all that a read says is what the last one said, and to decode it took most of a read's time. So
what was decoded of the last read is kept, by the very bytes that it was decoded of.

Must not decide which entries count (`core/ledger/kubelet_startup.py`), nor what one means for a device.
"""

from __future__ import annotations

import base64
import errno
import itertools
import os
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Final, Generic, TypeVar, final

import msgspec
import trio
from grpclib import GRPCError, Status
from msgspec import Struct
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.deviceplugin.listing import comparable
from gpuactors.core.values.model import (
    NO_PODS,
    CachedAnswer,
    ClaimedDevice,
    DeviceId,
    LedgerEntry,
    LedgerFile,
    LedgerSource,
    Pod,
    PodAnswer,
    PodClaim,
    ResourceName,
    RunningKubelet,
    SeenPods,
)
from gpuactors.core.values.names import uid_in_cdi_id
from gpuactors.core.values.quote import quoted
from gpuactors.decoding import UndecodableError, decode_json
from gpuactors.grpc_trio import (
    Channel,
    ConnectError,
    Dial,
    SocketError,
    SocketFile,
    connect_unix,
    open_unix_channel,
    socket_file,
)
from gpuactors.grpc_trio.limits import GRPC_CLOSE_S
from gpuactors.grpc_trio.messages import not_valid
from gpuactors.grpc_trio.protobuf import decode, parts
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import ContainerAllocateResponse
from gpuactors.kubelet.pb.podresources import v1 as pb
from gpuactors.ports.node import LedgerContents, LedgerError, LedgerQuestion, PodsSeen
from gpuactors.process.plain_files import read_plain
from gpuactors.process.resource_exhaustion import shortage

LEDGER_LIST_DEADLINE_S: Final = 3.0
"""Deadline of PodResources' part of a read of kubelet's ledger, in seconds; List answers within milliseconds. The rest
of `limits.LEDGER_DEADLINE_S` is for the file, which has the only copy of Allocate's answers: a List that hangs must not
keep a read from it."""

CHECKPOINT_MAX_BYTES: Final = 16 * 1024 * 1024
"""Limit on kubelet's ledger file: some 300 bytes a device. Another file by that name must not be read for ever."""

CHECKPOINT: Final = str(LedgerSource.FILE)
"""The file name of kubelet's ledger (pkg/kubelet/cm/devicemanager/manager.go)."""

_VFIO: Final = b"/dev/vfio/"

_LIST: Final = "/v1.PodResourcesLister/List"
_GET: Final = "/v1.PodResourcesLister/Get"
_GET_IS_OFF: Final = "Get method disabled"
"""The part of kubelet's error if the feature gate KubeletPodResourcesGet is off (server_v1.go)."""
_ALLOCATABLE: Final = "/v1.PodResourcesLister/GetAllocatableResources"

_DAMAGED_MAX: Final = 4
"""The number of damaged entries that are named."""

# A List that hangs, its connection's end, and the file after it fit into one read.
assert LEDGER_LIST_DEADLINE_S + GRPC_CLOSE_S + limits.CHECKPOINT_DEADLINE_S < limits.LEDGER_DEADLINE_S


class LedgerIo(Struct, frozen=True):
    """How a ledger's reader reaches kubelet and its files: the node's, or a simulation's."""

    dial: Dial
    socket_file: Callable[[str], SocketFile | None]
    read_file: Callable[[str, int], bytes | None]
    """Reads at most so many bytes of a file; None if an existing directory has no such file. May block; raises
    `OSError`."""
    run_blocking: Callable[[Callable[[], FileAndPods]], Awaitable[FileAndPods]]
    """Runs blocking code apart from the event loop. A cancelled call is no longer awaited."""
    pods: PodsSeen | None = None
    """See `ports.node.PodsSeen`; None if pods cannot be seen."""


@final
class KubeletLedger:
    """The ledger of one kubelet: PodResources below its root, and the file in its directory of device plugins."""

    def __init__(
        self,
        kubelet_dir: str,
        device_plugin_dir: str,
        io: LedgerIo | None = None,
        pods: PodsSeen | None = None,
    ) -> None:
        self._io = io or _io_of_the_node(pods)
        self._socket = os.path.join(kubelet_dir, "pod-resources", "kubelet.sock")
        self._directory = device_plugin_dir
        self._file = os.path.join(self._directory, CHECKPOINT)
        self._keeper: trio.Nursery | None = None
        self._kept: _Kept | None = None
        self._answers = Answers()
        self._nodes = DecodeCache(_nodes)

    async def read(self, question: LedgerQuestion) -> LedgerContents:
        """Implement `ports.node.LedgerReader.read`; take at most `LEDGER_DEADLINE_S`."""
        try:
            with trio.fail_after(limits.LEDGER_DEADLINE_S):
                return await self._read(question)
        except (OSError, RuntimeError) as exc:
            raise _of_error(exc) from exc
        except trio.TooSlowError as exc:  # List has a deadline of its own, and the file beside it
            raise LedgerError(
                f"{self._file} could not be read within {limits.LEDGER_DEADLINE_S:g} s; the last contents stay "
                "in effect: check that disk"
            ) from exc

    async def keep(self) -> None:
        """Keep the connection of a read for the next one, for ever. Making one takes longer than asking over it.
        Without this each read makes its own connection."""
        async with trio.open_nursery() as nursery:
            self._keeper = nursery
            try:
                await trio.sleep_forever()
            finally:
                self._keeper = self._kept = None

    async def _read(self, question: LedgerQuestion) -> LedgerContents:
        socket = self._io.socket_file(self._socket)
        file, pods = await self._file_of_running()
        try:
            answered = await self._answered(question, socket)
            if answered is not None and self._is_another(socket):
                raise LedgerError(
                    "kubelet restarted while its ledger was read; the last contents stay in effect: it is read again"
                )
        except LedgerError as exc:
            # Owners are not taken from the file then: it still names pods that have ended.
            raise LedgerError(str(exc), file, pods) from exc
        if answered is None:
            # Not what was read before: a kubelet may have written it and ended meanwhile.
            last_file, pods = await self._file_and_pods()
            if isinstance(last_file, LedgerError):
                raise last_file
            return LedgerContents(file=last_file, pods=pods)
        return replace(answered, kubelet=_running(socket), file=file, pods=pods)

    def _is_another(self, before: SocketFile | None) -> bool:
        """Return whether another kubelet's socket is there than before: which of the two answered is unknown, and a new
        one may not know its pods yet. False if the socket is gone."""
        now = self._io.socket_file(self._socket)
        return now is not None and (before is None or now.identity != before.identity)

    async def _file_of_running(self) -> tuple[LedgerFile | None, SeenPods]:
        """Read the file of a running kubelet, and its pods. A file that cannot be read soon counts as absent."""
        with trio.move_on_after(limits.CHECKPOINT_DEADLINE_S):
            file, pods = await self._file_and_pods()
            return None if isinstance(file, LedgerError) else file, pods
        return None, NO_PODS

    # --- PodResources -------------------------------------------------------------------------------------

    async def _answered(self, question: LedgerQuestion, socket: SocketFile | None) -> LedgerContents | None:
        """Ask kubelet; return None if none runs."""
        try:
            with trio.fail_after(LEDGER_LIST_DEADLINE_S):
                return await self._asked(question, socket)
        except trio.TooSlowError as exc:
            raise LedgerError(
                f"kubelet did not answer PodResources {'List ' if question.lists else ''}on {self._socket} within "
                f"{LEDGER_LIST_DEADLINE_S:g} s; the last contents stay in effect: check whether kubelet hangs"
            ) from exc
        except ConnectError as exc:
            if _is_not_running(exc):
                return None
            raise LedgerError(f"cannot ask kubelet for its ledger: {exc}") from exc
        except SocketError as exc:
            raise LedgerError(f"cannot ask kubelet for its ledger: {exc}") from exc
        except (OSError, RuntimeError) as exc:
            raise _of_error(exc) from exc

    async def _asked(self, question: LedgerQuestion, socket: SocketFile | None) -> LedgerContents:
        was_kept = self._kept is not None
        async with self._connected(socket) as channel:
            try:
                return await self._over(channel, question)
            except GRPCError as exc:
                if not (was_kept and channel.lost.is_set()):
                    raise LedgerError(_refusal(exc)) from exc
        return await self._asked(question, socket)  # that connection is not kept any more

    @asynccontextmanager
    async def _connected(self, socket: SocketFile | None) -> AsyncIterator[Channel]:
        """Yield a channel to the kubelet of this socket: that of the last read, while connections are kept."""
        if self._keeper is None:
            async with self._dialled() as channel:
                yield channel
            return
        kept, self._kept = self._kept, None
        if kept is not None and not kept.is_to(socket):
            kept.over.set()
            kept = None
        if kept is None:
            kept = await self._keeper.start(self._hold, socket)
        try:
            yield kept.channel
        except BaseException:
            kept.over.set()
            raise
        if kept.is_to(socket):
            self._kept = kept
        else:
            kept.over.set()

    async def _hold(self, socket: SocketFile | None, *, task_status: trio.TaskStatus[_Kept]) -> None:
        async with self._dialled() as channel:
            kept = _Kept(channel, socket)
            task_status.started(kept)
            await kept.over.wait()

    def _dialled(self) -> AbstractAsyncContextManager[Channel]:
        return open_unix_channel(
            self._socket, connect_deadline_s=limits.KUBELET_CONNECT_DEADLINE_S, dial=self._io.dial
        )

    async def _over(self, channel: Channel, question: LedgerQuestion) -> LedgerContents:
        """Ask the question over an open channel to kubelet. Raises `GRPCError` if kubelet refuses List.

        Kubelet may not answer the rest: it is too old, the feature is switched off, its rate limit is reached, it is
        stopping. Nothing follows from that."""
        contents = LedgerContents(passive=True)
        if question.lists:
            contents = self._answers.listed(await channel.encoded(_LIST, pb.ListPodResourcesRequest()))
        if question.resources:
            with suppress(GRPCError):
                allocatable = await channel.encoded(_ALLOCATABLE, pb.AllocatableResourcesRequest())
                contents = replace(contents, healthy=self._answers.healthy(allocatable, question.resources))
        answers = list[PodAnswer]()
        for pod in question.pods:
            try:
                answers += await _pod_answer(channel, pod)
            except _GetIsOffError:
                return replace(contents, has_get=False)
        return replace(contents, answers=tuple(answers))

    # --- the file -----------------------------------------------------------------------------------------

    async def _file_and_pods(self) -> FileAndPods:
        return await self._io.run_blocking(self._read_file_and_pods)

    def _read_file_and_pods(self) -> FileAndPods:
        seen, uids = self._io.pods, set[str]()
        try:
            content = self._read_file()
            file: LedgerFile | LedgerError = LedgerFile(exists=False)
            if content is not None:
                file = checkpoint_contents(content, self._file, self._nodes)
                uids = {entry.pod.uid for entry in file.entries}
        except LedgerError as exc:
            file = exc
        return file, NO_PODS if seen is None else seen.look(uids)

    def _read_file(self) -> bytes | None:
        """Read the ledger file; None if an existing directory has none."""
        try:
            content = self._io.read_file(self._file, CHECKPOINT_MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise LedgerError(
                f"no kubelet answers on {self._socket}, and the directory {self._directory} does not exist: "
                "is kubelet installed, and is --device-plugin-dir its directory?"
            ) from exc
        except PermissionError as exc:
            raise LedgerError(f"may not read {self._file} ({exc.strerror}): run as root") from exc
        except OSError as exc:
            if shortage(exc) is not None:
                raise
            raise LedgerError(f"cannot read {self._file} ({exc.strerror}): check that disk") from exc
        if content is not None and len(content) > CHECKPOINT_MAX_BYTES:
            raise LedgerError(
                f"{self._file} has more than {CHECKPOINT_MAX_BYTES} bytes, so it is not kubelet's ledger: "
                "is --kubelet-dir kubelet's directory?"
            )
        return content


@final
class _Kept:
    """An open connection to kubelet. It is closed when it is `over`."""

    def __init__(self, channel: Channel, socket: SocketFile | None) -> None:
        self.channel = channel
        self.over = trio.Event()
        self._socket = socket

    def is_to(self, socket: SocketFile | None) -> bool:
        """Return whether it is to the kubelet that made this socket, as far as is known."""
        if socket is None or self._socket is None or self.channel.lost.is_set():
            return False
        return self._socket.identity == socket.identity


FileAndPods = tuple[LedgerFile | LedgerError, SeenPods]
"""The file, or the error of its read; and the pods that are seen."""


class _GetIsOffError(Exception):
    """This kubelet does not answer Get, whatever pod is asked for."""


async def _pod_answer(channel: Channel, asked: Pod) -> tuple[PodAnswer, ...]:
    """Return kubelet's answer to Get; empty if it has none now. Raises `_GetIsOffError`."""
    request = pb.GetPodResourcesRequest(pod_name=asked.name, pod_namespace=asked.namespace)
    pod = Pod(asked.namespace, asked.name, "")
    try:
        encoded = await channel.encoded(_GET, request)
        with _valid("GetPodResourcesResponse"):
            listed = decode(encoded, pb.GetPodResourcesResponse).pod_resources
    except GRPCError as exc:
        if exc.status is Status.UNIMPLEMENTED or _GET_IS_OFF in (exc.message or ""):
            raise _GetIsOffError from exc
        # Kubelet has no status of its own for a pod that it does not know (server_v1.go).
        if exc.status in (Status.UNKNOWN, Status.NOT_FOUND) and "not found" in (exc.message or ""):
            return (PodAnswer(pod),)
        return ()
    if listed is None or (listed.namespace, listed.name) != (pod.namespace, pod.name):
        return ()
    devices = {(e.resource, e.device) for container in listed.containers for e in _devices(container, pod)}
    claims = {claim for container in listed.containers for claim in _claims(container, pod)}
    return (PodAnswer(pod, tuple(sorted(devices)), tuple(sorted(claims, key=_claim_order))),)


def _io_of_the_node(pods: PodsSeen | None) -> LedgerIo:
    # A limiter of its own: on a disk that hangs the threads of given-up reads must not block other threads.
    threads = trio.CapacityLimiter(2)

    async def in_thread(function: Callable[[], FileAndPods]) -> FileAndPods:
        """Run it in a thread: a disk that hangs must not stop the daemon."""
        return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=threads)

    return LedgerIo(connect_unix, socket_file, _read_file, in_thread, pods)


def _read_file(path: str, max_bytes: int) -> bytes | None:
    try:
        return read_plain(path, max_bytes)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.isdir(os.path.dirname(path)):
            return None
        raise


def _running(socket: SocketFile | None) -> RunningKubelet:
    """Return the kubelet that answered at this socket; if the socket was gone by then, that kubelet counts as old."""
    if socket is None:
        return RunningKubelet("", limits.LEDGER_SETTLE_S)
    return RunningKubelet(socket.identity, min(socket.age_s, limits.LEDGER_SETTLE_S))


Encoded = TypeVar("Encoded", bound=Hashable)
Decoded = TypeVar("Decoded")


class DecodeCache(Generic[Encoded, Decoded]):
    """The parts of the last read, each with what it was decoded to."""

    def __init__(self, decoded: Callable[[Encoded], Decoded]) -> None:
        self._decoded = decoded
        self._cached: Mapping[Encoded, Decoded] = {}

    def of(self, read: Iterable[Encoded]) -> Mapping[Encoded, Decoded]:
        """Decode each part; return the same object if the parts are those of the last read, in whatever order."""
        now, cached = {*read}, self._cached
        if now != cached.keys():
            cached = self._cached = {e: cached[e] if e in cached else self._decoded(e) for e in now}
        return cached


class _OfPod(Struct, frozen=True):
    """One pod in the answer of List, with each device once: kubelet names it once per container and NUMA node."""

    name: str
    entries: frozenset[LedgerEntry]
    claims: frozenset[ClaimedDevice]
    waiting: frozenset[PodClaim]


def _of_pod(encoded: bytes) -> _OfPod:
    listed = decode(encoded, pb.PodResources)
    pod = Pod(namespace=listed.namespace, name=listed.name, uid="")
    return _OfPod(
        listed.name,
        frozenset(e for container in listed.containers for e in _devices(container, pod)),
        frozenset(c for container in listed.containers for c in _claims(container, pod)),
        frozenset(c for container in listed.containers for c in _waiting(container, pod)),
    )


def _of_devices(encoded: bytes) -> tuple[ResourceName, tuple[str, ...]]:
    listed = decode(encoded, pb.ContainerDevices)
    return ResourceName(listed.resource_name), tuple(listed.device_ids)


@final
class Answers:
    """Decodes the answers of PodResources, which have pods and devices in another order each time."""

    def __init__(self) -> None:
        self._pods = DecodeCache(_of_pod)
        self._devices = DecodeCache(_of_devices)
        self._listed: tuple[Mapping[bytes, _OfPod] | None, LedgerContents] = (None, LedgerContents())

    def listed(self, encoded: bytes) -> LedgerContents:
        """Decode the answer of List; return the same object if it says the same as the last one. Raises GRPCError for a
        malformed answer."""
        with _valid("ListPodResourcesResponse"):
            pods = self._pods.of(parts(encoded, 1))
        if self._listed[0] is not pods:
            self._listed = pods, _contents(pods.values())
        return self._listed[1]

    def healthy(
        self, encoded: bytes, resources: Collection[ResourceName]
    ) -> Mapping[ResourceName, tuple[DeviceId, ...]]:
        """Decode the answer of GetAllocatableResources about `resources`; other plugins' devices are dropped. Raises
        GRPCError for a malformed answer."""
        ids_by_resource: dict[ResourceName, set[str]] = {}
        with _valid("AllocatableResourcesResponse"):
            for resource, ids in self._devices.of(parts(encoded, 1)).values():
                if resource in resources:
                    ids_by_resource.setdefault(resource, set()).update(ids)
        return {resource: comparable(ids) for resource, ids in sorted(ids_by_resource.items())}


@contextmanager
def _valid(message: str) -> Iterator[None]:
    try:
        yield
    except ValueError as exc:
        raise not_valid(message, exc) from exc


def _contents(pods: Iterable[_OfPod]) -> LedgerContents:
    pods = tuple(pods)
    names = [pod.name for pod in pods]
    waiting = {claim for pod in pods for claim in pod.waiting}
    return LedgerContents(
        listed=_ordered({entry for pod in pods for entry in pod.entries}),
        claims=tuple(sorted({claim for pod in pods for claim in pod.claims}, key=_claim_order)),
        waiting=tuple(sorted(waiting, key=lambda waited: (waited.claim, str(waited.pod)))),
        names_end=_common_end(names) if names else None,
    )


def _common_end(names: Iterable[str]) -> str:
    ends = [name[::-1] for name in names]
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(ends), max(ends), strict=False))
    return "".join(letter for letter, _ in shared)[::-1]


def _ordered(entries: Iterable[LedgerEntry]) -> tuple[LedgerEntry, ...]:
    return tuple(
        sorted(entries, key=lambda e: (e.resource, e.device, e.pod.namespace, e.pod.name, e.pod.uid))
    )


def _claim_order(claim: ClaimedDevice) -> tuple[str, ...]:
    return claim.driver, claim.pool, claim.device, claim.claim, str(claim.pod), claim.uid


def _devices(container: pb.ContainerResources, pod: Pod) -> Iterable[LedgerEntry]:
    for devices in container.devices:
        for device in devices.device_ids:
            yield LedgerEntry(ResourceName(devices.resource_name), DeviceId(device), pod)


def _claims(container: pb.ContainerResources, pod: Pod) -> Iterable[ClaimedDevice]:
    for dynamic in container.dynamic_resources:
        claim = f"{dynamic.claim_namespace}/{dynamic.claim_name}"
        for resource in dynamic.claim_resources:
            driver, device = resource.driver_name, resource.device_name
            ids = tuple(cdi.name for cdi in resource.cdi_devices)
            uid = next(filter(None, (uid_in_cdi_id(cdi_id, driver, device) for cdi_id in ids)), "")
            yield ClaimedDevice(driver, resource.pool_name, device, claim, pod, uid, ids)


def _waiting(container: pb.ContainerResources, pod: Pod) -> Iterable[PodClaim]:
    for dynamic in container.dynamic_resources:
        if not dynamic.claim_resources:
            yield PodClaim(f"{dynamic.claim_namespace}/{dynamic.claim_name}", pod)


class _Entry(msgspec.Struct, rename="pascal"):
    """PodDevicesEntry of pkg/kubelet/cm/devicemanager/checkpoint."""

    resource_name: str
    pod_uid: str = msgspec.field(name="PodUID")
    device_ids: dict[str, list[str] | None] | list[str] | None = msgspec.field(name="DeviceIDs")
    """The devices by NUMA node; before Kubernetes 1.20 a plain list. A device with two nodes is there twice."""
    answer: object = msgspec.field(name="AllocResp", default="")
    """The container's part of AllocateResponse, in base64. If it is anything else, the rest of the file still
    counts."""


class _Data(msgspec.Struct):
    entries: list[_Entry] | None = msgspec.field(name="PodDeviceEntries")
    """The entries; null (Go's empty slice) while nothing is allocated."""


class _Checkpoint(msgspec.Struct):
    data: _Data = msgspec.field(name="Data")


def checkpoint_contents(
    content: bytes, path: str, cache: DecodeCache[str, frozenset[str] | None] | None = None
) -> LedgerFile:
    """Decode the contents of the ledger file. Unknown fields and the checksum are not checked; of a pod only the UID is
    known.

    Raises `LedgerError`, which names `path`, for contents that kubelet cannot have written.
    """
    try:
        checkpoint = decode_json(content, _Checkpoint)
    except UndecodableError as exc:
        raise LedgerError(
            f"{path} is damaged ({quoted(str(exc))}), so it is not known which pods have which GPUs: start kubelet, "
            "which lists it over PodResources and rewrites the file; if it is damaged while kubelet runs, check "
            "that disk"
        ) from exc
    entries: dict[LedgerEntry, None] = {}
    allocated: dict[tuple[str, str], set[str]] = {}
    texts = (e.answer for e in checkpoint.data.entries or () if isinstance(e.answer, str))
    answers = (cache or DecodeCache(_nodes)).of(texts)
    damaged: list[str] = []
    for entry in checkpoint.data.entries or ():
        pod = Pod(namespace="", name="", uid=entry.pod_uid)
        nodes = (
            answers[entry.answer] if isinstance(entry.answer, str) else None if entry.answer else _NO_NODES
        )
        if nodes is None:
            damaged.append(quoted(f"{entry.resource_name} of pod {entry.pod_uid}"))
        for device in _ids(entry):
            entries[LedgerEntry(ResourceName(entry.resource_name), DeviceId(device), pod)] = None
            if nodes:
                # An init container's devices are the next one's as well, each with an answer of its own.
                allocated.setdefault((entry.resource_name, device), set()).update(nodes)
    cached = (
        CachedAnswer(ResourceName(resource), DeviceId(device), tuple(sorted(nodes)))
        for (resource, device), nodes in sorted(allocated.items())
    )
    return LedgerFile(_ordered(entries), tuple(cached), _damage(damaged, path))


_NO_NODES: Final = frozenset[str]()


def _nodes(answer: str) -> frozenset[str] | None:
    """Return the nodes below /dev/vfio that an AllocResp gives the container; None if it is none that kubelet can have
    written."""
    try:
        content = base64.b64decode(answer, validate=True)
        if _VFIO not in content:  # most devices of a node are other plugins', and parsing takes time
            return _NO_NODES
        response = decode(content, ContainerAllocateResponse)
    except ValueError:
        return None
    return frozenset(d.host_path for d in response.devices if d.host_path.startswith(_VFIO.decode()))


def _damage(damaged: list[str], path: str) -> str:
    """Return the value of `LedgerFile.damaged`."""
    if not damaged:
        return ""
    more = f" and of {len(damaged) - _DAMAGED_MAX} more" if len(damaged) > _DAMAGED_MAX else ""
    return (
        f"in {path} the answer to Allocate (AllocResp) for {', '.join(damaged[:_DAMAGED_MAX])}{more} is damaged, so it "
        "is not known which device nodes these containers get; check that disk"
    )


def _ids(entry: _Entry) -> Iterable[str]:
    if isinstance(entry.device_ids, dict):
        return (device for ids in entry.device_ids.values() for device in ids or ())
    return entry.device_ids or ()


def _of_error(error: OSError | RuntimeError) -> LedgerError:
    """Return the error of a failed read. Raises `error` itself if it is neither of the system nor a shortage."""
    if (problem := shortage(error)) is not None:
        return LedgerError(f"kubelet's ledger cannot be read: {problem}")
    if isinstance(error, OSError):
        return LedgerError(
            f"kubelet's ledger cannot be read ({error.strerror}); the last contents stay in effect: check "
            "--kubelet-dir and, in a pod, its mount; it is read again"
        )
    raise error


def _is_not_running(error: ConnectError) -> bool:
    """Return whether there is no socket, or none that a kubelet listens on."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED)


def _refusal(error: GRPCError) -> str:
    match error.status:
        case Status.RESOURCE_EXHAUSTED:
            remedy = (
                "a client of PodResources on this node calls too often, or the answer is over 4 MiB: find it"
            )
        case Status.UNIMPLEMENTED:
            remedy = "this kubelet has no PodResources v1 (Kubernetes 1.20 or later has): upgrade it"
        case Status.UNAVAILABLE:
            remedy = "kubelet is stopping or restarting: it is asked again"
        case _:
            remedy = "see kubelet's log"
    return (
        f"kubelet did not return its ledger (PodResources List: {error.status.name}: {quoted(error.message or '')}); "
        f"the last contents stay in effect: {remedy}"
    )
