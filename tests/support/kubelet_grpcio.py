"""A stand-in for kubelet's device manager, made with grpcio: the independent side of every test over real sockets.

It does what kubelet 1.36 was seen to do (pkg/kubelet/cm/devicemanager, plugin/v1beta1), its mistakes included: clients
are found by resource name when a stream ends, so that a plugin that registers while its old stream is open is cut
off; a Register that fails makes it forget the current client; it never dials again by itself. Threads and grpcio's
synchronous API throughout. Must not import gpuactors, and must not be kinder than kubelet.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final

import grpc

from tests.support.device_plugin_grpcio import add_service, message, stub
from tests.support.kubelet_seen import (
    Allocated,
    DeviceNode,
    Frame,
    ListedDevice,
    PluginOptions,
    Registration,
    Snapshot,
    StreamEnd,
)
from tests.support.patience import patient
from tests.support.pod_resources_grpcio import PROTO as POD_RESOURCES
from tests.support.pod_resources_grpcio import Nodes, PodLedger

SUPPORTED_VERSIONS: Final = ("v1beta1",)
HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"

DIAL_TIMEOUT_S: Final = patient(10.0)
"""Kubelet's own: it blocks in Register for so long where nobody listens at the endpoint."""

CALL_TIMEOUT_S: Final = patient(30.0)
"""Kubelet sets no deadline for Allocate; a test has to end."""

HOLD_POLL_S: Final = 0.01
"""How often a held Register checks whether its caller is still there."""

GAVE_UP: Final = "the caller gave up"
"""The error of a Register whose caller was gone before it was answered."""

WORKERS: Final = 64
"""Register calls that may be held at once."""

POD_RESOURCES_WORKERS: Final = 4

CLOSING: Final = "rpc error: code = Canceled desc = grpc: the client connection is closing"
"""What a call says when kubelet itself closes the connection meanwhile."""


class EndpointStopped(Exception):
    """Kubelet has no open connection to a plugin of that resource: it fails such a call itself."""


class EmptyAnswer(Exception):
    """Allocate was answered without a container."""


@dataclass(slots=True, eq=False)
class _Client:
    """Kubelet's `client`: one dialled endpoint, from its Register to the end of its stream."""

    number: int
    resource: str
    channel: grpc.Channel
    methods: Mapping[str, Any]
    connected: bool = False
    stream: Any = None


@dataclass(slots=True)
class _State:
    """Everything that is guarded by the stand-in's lock."""

    devices: dict[str, dict[str, str]] = field(default_factory=dict)
    numa_nodes: dict[str, dict[str, Nodes]] = field(default_factory=dict)
    clients: dict[str, _Client] = field(default_factory=dict)
    """By name, as kubelet keeps them: the cause of the re-registration race."""
    endpoints: dict[str, _Client] = field(default_factory=dict)
    """Whom Allocate asks: the client that connected last."""
    dialled: list[_Client] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    stream_ends: list[StreamEnd] = field(default_factory=list)
    registrations: list[Registration] = field(default_factory=list)
    panics: list[str] = field(default_factory=list)
    failures: list[tuple[grpc.StatusCode, str]] = field(default_factory=list)


class KubeletStandIn:
    """Kubelet's device manager on `<kubelet_dir>/device-plugins/kubelet.sock`, its ledger file beside that, and
    PodResources on `<kubelet_dir>/pod-resources/kubelet.sock`.

    `start` and `stop` may be repeated: a second start is a restarted kubelet, with empty device lists, but with its
    ledger and the history (`frames`, `registrations`, `stream_ends`) of its former life. All methods may be called from
    any
    thread.
    """

    def __init__(
        self,
        kubelet_dir: Path,
        *,
        dial_timeout_s: float = DIAL_TIMEOUT_S,
        synced: bool = False,
        get_tells_ended: bool = False,
    ) -> None:
        """`synced`, `get_tells_ended`: see PodLedger."""
        self.socket_dir = kubelet_dir / "device-plugins"
        self.socket = self.socket_dir / "kubelet.sock"
        self.pod_resources_socket = kubelet_dir / "pod-resources" / "kubelet.sock"
        self.checkpoint = self.socket_dir / "kubelet_internal_checkpoint"
        self._pods = PodLedger(
            self.checkpoint, healthy=self.healthy, synced=synced, get_tells_ended=get_tells_ended
        )
        self._kubelet_dir = kubelet_dir
        self._dial_timeout_s = dial_timeout_s
        self._changed = threading.Condition()
        self._state = _State()
        self._numbers = 0
        self._replies_go = threading.Event()
        self._replies_go.set()
        self._hears = True
        self.admission = threading.Lock()
        """Kubelet admits one pod after another (`admission_grpcio.py`)."""
        self._held: frozenset[str] = frozenset()
        self._appeared_ns = 0
        self._server: grpc.Server | None = None
        self._pod_resources: grpc.Server | None = None
        self._private_dir: Path | None = None
        self._streams: list[threading.Thread] = []

    # --- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Remove every socket directly in the directory, as kubelet does; serve PodResources, then Registration."""
        assert self._server is None, "the stand-in runs already"
        self.socket_dir.mkdir(parents=True, exist_ok=True)
        for entry in self.socket_dir.iterdir():
            if stat.S_ISSOCK(entry.lstat().st_mode):
                entry.unlink()
        with self._changed:
            self._state.devices.clear()
            self._state.numa_nodes.clear()
        self._pods.boot(hears=self._hears)
        # grpcio unlinks the path it listens on when it stops. Listening elsewhere and moving the socket here leaves
        # it to `stop` whether the socket stays behind.
        self._private_dir = Path(tempfile.mkdtemp(dir=self._kubelet_dir, prefix=".k"))
        self._pod_resources = grpc.server(ThreadPoolExecutor(POD_RESOURCES_WORKERS, "pod-resources"))
        POD_RESOURCES.add_service(self._pod_resources, "PodResourcesLister", self._pods)
        _listen(self._pod_resources, self._private_dir / "p", self.pod_resources_socket)
        server = grpc.server(ThreadPoolExecutor(WORKERS, "kubelet"))
        add_service(server, "Registration", _Registration(self))
        self._server = server
        _listen(server, self._private_dir / "s", self.socket)
        self._appeared_ns = time.monotonic_ns()

    def stop(self, *, leave_sockets: bool = False) -> None:
        """End as the process would: listener, connections and streams close, in no order that a plugin may rely on.

        `leave_sockets` is a kubelet that was killed: its sockets stay behind with nobody listening. Held answers to
        Register fail; the next life holds none.
        """
        assert self._server is not None, "the stand-in does not run"
        assert self._pod_resources is not None
        server, self._server = self._server, None
        stopped = server.stop(grace=None)
        self._pod_resources.stop(grace=None).wait()
        self.release_register_replies()
        with self._changed:
            dialled = list(self._state.dialled)
            self._state.dialled.clear()
            self._state.clients.clear()
            self._state.endpoints.clear()
        for client in dialled:
            client.channel.close()
        stopped.wait()
        for thread in tuple(self._streams):
            thread.join(timeout=CALL_TIMEOUT_S)
        self._streams.clear()
        if not leave_sockets:
            self.socket.unlink(missing_ok=True)
            self.pod_resources_socket.unlink(missing_ok=True)
        if self._private_dir is not None:
            shutil.rmtree(self._private_dir, ignore_errors=True)

    def __enter__(self) -> KubeletStandIn:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self.stop()

    # --- what it has seen ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The device lists now. A resource is there from its first frame on, also with an empty list."""
        with self._changed:
            return self._snapshot()

    def _snapshot(self) -> Snapshot:
        return MappingProxyType(
            {name: MappingProxyType(dict(devices)) for name, devices in self._state.devices.items()}
        )

    def healthy(self) -> dict[str, dict[str, Nodes]]:
        """The Healthy devices of each resource with their NUMA nodes, as GetAllocatableResources has them."""
        with self._changed:
            return {
                resource: self._topology(
                    resource, [device for device, health in devices.items() if health == HEALTHY]
                )
                for resource, devices in self._state.devices.items()
            }

    def _topology(self, resource: str, ids: Collection[str]) -> dict[str, Nodes]:
        nodes = self._state.numa_nodes.get(resource, {})
        return {device: nodes.get(device, ()) for device in ids}

    def begin_pod(self, pod: str) -> None:
        """A pod comes to the node: List names it, without a device."""
        self._pods.begin(pod)

    def fail_pod(self, pod: str) -> None:
        """A pod is not admitted: it leaves List, and Get still knows it."""
        self._pods.fail_pod(pod)

    def uid(self, pod: str) -> str:
        """The UID under which the ledger has a pod. Raises KeyError if there is no such pod."""
        return self._pods.uid(pod)

    def taken(self, resource: str) -> set[str]:
        """What kubelet's ledger has given to pods."""
        return self._pods.taken(resource)

    def wait_for(self, predicate: Callable[[Snapshot], bool], timeout_s: float, what: str = "") -> Snapshot:
        """The first snapshot for which `predicate` is true, at once if it is so now.

        The predicate is called after every change (also after a registration or a stream's end, so that it may read
        those too). Raises TimeoutError with the device lists and what was seen last.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not predicate(snapshot := self._snapshot()):
                if not self._changed.wait(timeout=deadline - time.monotonic()):
                    raise TimeoutError(self._complaint(what, timeout_s))
            return snapshot

    def _complaint(self, what: str, timeout_s: float) -> str:
        device_lists = {name: dict(devices) for name, devices in self._state.devices.items()}
        lines = [
            f"kubelet stand-in: {what or 'the condition'} did not come within {timeout_s:g} s",
            f"device lists: {device_lists}",
        ]
        for title, items in (
            ("registrations", self._state.registrations),
            ("frames", self._state.frames),
            ("stream ends", self._state.stream_ends),
        ):
            last: Sequence[object] = items[-5:]
            lines.append(f"{title}: {len(items)}{', the last:' if last else ''}")
            lines += [f"  {item}" for item in last]
        return "\n".join(lines)

    def frames(self, resource: str) -> tuple[Frame, ...]:
        """Every frame of a resource, of all its streams, in order of arrival."""
        with self._changed:
            return tuple(frame for frame in self._state.frames if frame.resource == resource)

    def stream_ends(self, resource: str) -> tuple[StreamEnd, ...]:
        """Every stream of a resource that is over, in order."""
        with self._changed:
            return tuple(end for end in self._state.stream_ends if end.resource == resource)

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """Every Register call that was answered, the failed ones included."""
        with self._changed:
            return tuple(self._state.registrations)

    @property
    def appeared_ns(self) -> int:
        """When kubelet.sock was there in this life or the last one (time.monotonic_ns), which a plugin may have seen a
        moment earlier."""
        return self._appeared_ns

    @property
    def panics(self) -> tuple[str, ...]:
        """Moments at which kubelet 1.36 would have died: a device was allocated that had left the list by then. A
        refusal does not read the list (allocateContainerResources, devicemanager/manager.go)."""
        with self._changed:
            return tuple(self._state.panics)

    def options(self, resource: str) -> PluginOptions:
        """What the current plugin of a resource answered to GetDevicePluginOptions. Raises EndpointStopped."""
        number = self._endpoint(resource).number
        with self._changed:
            options = next(r.options for r in self._state.registrations if r.client == number)
        assert options is not None
        return options

    # --- what it can be told to do ------------------------------------------------------------------------

    def allocate(
        self,
        resource: str,
        ids: Collection[str],
        *,
        pod: str | None = None,
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> Allocated:
        """Allocate for one container; with a pod's name, the ledger has it when it is answered. Kubelet has no
        deadline, as with None.

        Raises grpc.RpcError, EndpointStopped where nobody is connected, EmptyAnswer, ValueError where another pod has a
        device.
        """
        request = message("AllocateRequest")(
            container_requests=[message("ContainerAllocateRequest")(devices_ids=list(ids))]
        )
        client = self._endpoint(resource)
        picked = self._listed_of(resource, ids)
        answer = client.methods["Allocate"](request, timeout=timeout_s)
        if not answer.container_responses:
            raise EmptyAnswer("no containers return in allocation response ")  # and what was answered
        with self._changed:
            gone = sorted(picked - self._listed_of(resource, ids))
            self._state.panics += [
                f"{resource}: {device} left the list during its Allocate" for device in gone
            ]
        container = answer.container_responses[0]
        if pod is not None:
            with self._changed:
                devices = self._topology(resource, ids)
            self._pods.given(pod, resource, devices, container.SerializeToString())
        return Allocated(
            envs=MappingProxyType(dict(container.envs)),
            devices=tuple(
                DeviceNode(node.container_path, node.host_path, node.permissions)
                for node in container.devices
            ),
            mounts=tuple(
                (mount.host_path, mount.container_path, mount.read_only) for mount in container.mounts
            ),
            annotations=MappingProxyType(dict(container.annotations)),
            cdi_devices=tuple(device.name for device in container.cdi_devices),
        )

    def end_pod(self, pod: str) -> None:
        """A pod's process has ended: it leaves PodResources 0.1 s later. Raises KeyError if there is no such pod."""
        self._pods.end(pod)

    def force_delete(self, pod: str) -> None:
        """A pod is deleted by force: it leaves PodResources at once, whatever its process does. Raises KeyError."""
        self._pods.force_delete(pod)

    def restore_pods(self) -> None:
        """Before `start`, on a node that had a kubelet: its ledger's pods, which List names after `hear_of_pods` only.
        Their names are their UIDs. Raises OSError, ValueError."""
        self._pods.restore()
        self.lose_api_server()

    def lose_api_server(self) -> None:
        """A kubelet that starts from now on hears of no pod, and List names none, until `hear_of_pods`."""
        self._hears = False

    def hear_of_pods(self) -> None:
        """The API server has told kubelet which pods there are."""
        self._hears = True
        self._pods.hear_of_pods()

    def list_besides(self, pods: Sequence[Any]) -> None:
        """From now on PodResources List names these as well: whole `PodResources` messages, of other plugins' pods."""
        self._pods.list_besides(pods)

    def fail_lists(
        self,
        times: int,
        code: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED,
        details: str = "rejected by rate limit",
    ) -> None:
        """Refuse the next `times` calls of PodResources List."""
        self._pods.fail(times, code, details)

    def disable_allocatable(
        self,
        code: grpc.StatusCode = grpc.StatusCode.UNIMPLEMENTED,
        details: str = "unknown method GetAllocatableResources for service v1.PodResourcesLister",
    ) -> None:
        """Refuse GetAllocatableResources from now on."""
        self._pods.disable_allocatable(code, details)

    @property
    def lists(self) -> int:
        """How often PodResources List was called, in all its lives."""
        return self._pods.asked

    def preferred(
        self, resource: str, available: Collection[str], must: Collection[str], n: int,
        *, timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> tuple[str, ...]:  # fmt: skip
        """GetPreferredAllocation for one container: the plugin's answer, not intersected. Raises as `allocate`."""
        container = message("ContainerPreferredAllocationRequest")(
            available_deviceIDs=list(available), must_include_deviceIDs=list(must), allocation_size=n
        )
        request = message("PreferredAllocationRequest")(container_requests=[container])
        answer = self._endpoint(resource).methods["GetPreferredAllocation"](request, timeout=timeout_s)
        return tuple(device for response in answer.container_responses for device in response.deviceIDs)

    def prestart(self, resource: str, ids: Collection[str], *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """PreStartContainer. Raises as `allocate`."""
        request = message("PreStartContainerRequest")(devices_ids=list(ids))
        self._endpoint(resource).methods["PreStartContainer"](request, timeout=timeout_s)

    def cut_stream(self, resource: str) -> None:
        """End the current ListAndWatch stream of a resource from kubelet's side. Raises EndpointStopped."""
        stream = self._endpoint(resource).stream
        if stream is None:
            raise EndpointStopped(f"the plugin of {resource} has no open stream")
        stream.cancel()

    def hold_register_replies(self, *resources: str) -> None:
        """From now on Register dials and asks for options, but its answer waits for `release_register_replies`.

        Where resources are named, only theirs.
        """
        self._held = frozenset(resources)
        self._replies_go.clear()

    def release_register_replies(self) -> None:
        """Let held and later answers go."""
        self._replies_go.set()

    def _holds(self, resource: str) -> bool:
        return not self._replies_go.is_set() and (not self._held or resource in self._held)

    def fail_registers(
        self,
        times: int,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        details: str = "failed to dial device plugin",
    ) -> None:
        """Fail the next `times` calls of Register where kubelet fails when it cannot dial: as then, it also forgets
        the resource's current client, whose stream goes on and whose end is not noticed any more."""
        with self._changed:
            self._state.failures += [(code, details)] * times

    def _listed_of(self, resource: str, ids: Collection[str]) -> set[str]:
        """Those of the devices that are in the list now. A test may allocate others, which kubelet would not."""
        with self._changed:
            return set(ids) & self._state.devices.get(resource, {}).keys()

    def _endpoint(self, resource: str) -> _Client:
        with self._changed:
            client = self._state.endpoints.get(resource)
            if client is None or not client.connected:
                raise EndpointStopped(
                    f"no plugin of {resource} is connected; device lists: {self._snapshot()}"
                )
            return client

    # --- kubelet's inside: server.go and handler.go of plugin/v1beta1, manager.go -------------------------

    def _register(self, request: Any, context: grpc.ServicerContext) -> Any:
        received_ns = time.monotonic_ns()
        with self._changed:
            number = self._numbers
            self._numbers += 1
            failure = self._state.failures.pop(0) if self._state.failures else None
        options: PluginOptions | None = None
        client: _Client | None = None
        try:
            _check_request(request.version, request.resource_name)
            # filepath.Join: an absolute endpoint is below the directory as well.
            endpoint = self.socket_dir / request.endpoint.lstrip("/")
            client = self._new_client(number, request.resource_name, endpoint)
            if failure is not None:
                raise _RegisterFailed(*failure)
            options = self._connect(client, context.time_remaining())
            while self._holds(client.resource) and context.is_active():
                time.sleep(HOLD_POLL_S)
            if not context.is_active():
                raise _RegisterFailed(grpc.StatusCode.CANCELLED, GAVE_UP)
        except _RegisterFailed as error:
            self._forget(client)
            self._note(request, number, received_ns, options, str(error))
            context.abort(error.code, str(error))
        connected = client
        # ListAndWatch opens when Register has been answered.
        if not context.add_callback(lambda: self._start_stream(connected)):
            self._start_stream(connected)
        self._note(request, number, received_ns, options, None)
        return message("Empty")()

    def _new_client(self, number: int, resource: str, endpoint: Path) -> _Client:
        channel = grpc.insecure_channel(
            f"unix:{endpoint}",
            options=(
                ("grpc.default_authority", "localhost"),
                # Without it grpcio would share one connection among all registrations of an endpoint.
                ("grpc.use_local_subchannel_pool", 1),
            ),
        )
        client = _Client(number, resource, channel, stub(channel))
        with self._changed:
            self._state.dialled.append(client)
            self._state.clients[resource] = client
        return client

    def _connect(self, client: _Client, left_s: float | None) -> PluginOptions:
        """`left_s` is what is left of the caller's deadline."""
        try:
            grpc.channel_ready_future(client.channel).result(timeout=self._dial_timeout_s)
        except grpc.FutureTimeoutError:
            raise _RegisterFailed(
                grpc.StatusCode.UNKNOWN, "failed to dial device plugin: context deadline exceeded"
            ) from None
        except ValueError:  # grpcio's word for a channel that was closed meanwhile
            raise _RegisterFailed(grpc.StatusCode.UNAVAILABLE, "the client connection is closing") from None
        try:
            # Kubelet has no deadline of its own here, but passes on that of Register; ours only keeps a broken test
            # from hanging.
            answer = client.methods["GetDevicePluginOptions"](
                message("Empty")(), timeout=min(CALL_TIMEOUT_S, CALL_TIMEOUT_S if left_s is None else left_s)
            )
        except ValueError:
            raise _RegisterFailed(
                grpc.StatusCode.UNKNOWN, f"failed to get device plugin options: {CLOSING}"
            ) from None
        except grpc.RpcError as error:
            raise _RegisterFailed(
                grpc.StatusCode.UNKNOWN, f"failed to get device plugin options: {go_text(error)}"
            ) from None
        with self._changed:
            client.connected = True
            self._state.endpoints[client.resource] = client
        return PluginOptions(answer.pre_start_required, answer.get_preferred_allocation_available)

    def _forget(self, client: _Client | None) -> None:
        """A failed Register: whoever has the name is forgotten, the one that was current before included."""
        if client is None:
            return
        with self._changed:
            self._state.clients.pop(client.resource, None)
            self._changed.notify_all()
        if not client.connected:
            client.channel.close()

    def _note(
        self, request: Any, number: int, received_ns: int, options: PluginOptions | None, error: str | None
    ) -> None:
        registration = Registration(
            resource=request.resource_name, endpoint=request.endpoint, version=request.version, client=number,
            received_ns=received_ns, answered_ns=time.monotonic_ns(), options=options, error=error,
        )  # fmt: skip
        with self._changed:
            self._state.registrations.append(registration)
            self._changed.notify_all()

    def _start_stream(self, client: _Client) -> None:
        if self._server is None:
            return
        thread = threading.Thread(
            target=self._run, args=(client,), name=f"stream {client.resource}", daemon=True
        )
        self._streams.append(thread)
        thread.start()

    def _run(self, client: _Client) -> None:
        """One stream to its end, then what kubelet makes of it: the client *of that name* is disconnected."""
        code, details = "CANCELLED", "the connection was closed before the stream began"
        try:
            client.stream = client.methods["ListAndWatch"](message("Empty")())
            for response in client.stream:
                self._take_frame(client, response)
            code, details = client.stream.code().name, client.stream.details()
        except grpc.RpcError as error:
            status: Any = error
            code, details = status.code().name, status.details()
        except ValueError:  # the channel was closed before the call
            pass
        with self._changed:
            client.stream = None
            current = self._state.clients.pop(client.resource, None)
            noticed = current is not None
            self._state.stream_ends.append(
                StreamEnd(client.resource, time.monotonic_ns(), code, details or "", client.number, noticed)
            )
            if current is not None:
                current.connected = False
                for device_id in self._state.devices.get(client.resource, {}):
                    self._state.devices[client.resource][device_id] = UNHEALTHY
                self._pods.stream_ended(client.resource)
            self._changed.notify_all()
        if current is not None:
            current.channel.close()

    def _take_frame(self, client: _Client, response: Any) -> None:
        at_ns = time.monotonic_ns()
        devices = tuple(
            ListedDevice(
                id=device.ID,
                health=device.health,
                numa_nodes=tuple(node.ID for node in device.topology.nodes)
                if device.HasField("topology")
                else None,
            )
            for device in response.devices
        )
        with self._changed:
            listed = {device.id: device.health for device in devices}
            self._state.frames.append(Frame(client.resource, at_ns, devices, client.number))
            self._state.devices[client.resource] = listed
            self._state.numa_nodes[client.resource] = {
                device.id: device.numa_nodes or () for device in devices
            }
            self._pods.frame(client.resource, [i for i, health in listed.items() if health == HEALTHY])
            self._changed.notify_all()


def _listen(server: grpc.Server, private: Path, socket: Path) -> None:
    """Start `server` at `socket`, which stays behind when the server stops."""
    server.add_insecure_port(f"unix:{private}")
    server.start()
    socket.parent.mkdir(parents=True, exist_ok=True)
    private.rename(socket)


class _RegisterFailed(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class _Registration:
    """The gRPC service."""

    def __init__(self, kubelet: KubeletStandIn) -> None:
        self._kubelet = kubelet

    def Register(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._kubelet._register(request, context)


_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


def _check_request(version: str, resource: str) -> None:
    """Kubelet's own checks, with its own sentences (IsExtendedResourceName of pkg/apis/core/v1/helper)."""
    if version not in SUPPORTED_VERSIONS:
        raise _RegisterFailed(
            grpc.StatusCode.UNKNOWN,
            f"requested API version {_quoted(version)} is not supported by kubelet. "
            f"Supported version is [{' '.join(map(_quoted, SUPPORTED_VERSIONS))}]",
        )
    domain, slash, name = resource.partition("/")
    valid = (
        bool(slash)
        and not domain.endswith("kubernetes.io")
        and not resource.startswith("requests.")
        and len(f"requests.{domain}") <= 253
        and _SUBDOMAIN.fullmatch(domain) is not None
        and _NAME.fullmatch(name) is not None
    )
    if not valid:
        raise _RegisterFailed(grpc.StatusCode.UNKNOWN, f"the ResourceName {_quoted(resource)} is invalid")


def _quoted(text: str) -> str:
    """As Go's `%q`."""
    return json.dumps(text)


def go_text(error: Any) -> str:
    """A failed call in grpc-go's words: `rpc error: code = NotFound desc = …`. The call may end because kubelet closed
    the connection."""
    if error.code() is grpc.StatusCode.CANCELLED:
        return CLOSING
    code = "".join(part.capitalize() for part in error.code().name.split("_"))
    return f"rpc error: code = {code} desc = {error.details() or ''}"
