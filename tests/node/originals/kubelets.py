"""Kubelets behind one face: the original on its node, the shipped fake, and the grpcio stand-in.

The script uses sockets and the ledger's file for all that they show. Here is the rest: pods, the process, the counts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, final

import trio

from gpuactors_simulation.kubelet.dra.values import ClaimObject, Surroundings
from gpuactors_simulation.kubelet.fake import FakeKubelet, open_fake_kubelet
from gpuactors_simulation.kubelet.transport import UnixTransport
from gpuactors_simulation.kubelet.values import KubeletView, Phase, Pod
from tests.node import versions
from tests.node.originals.node import STATUS_EVERY, WITHIN_S, Api, Machine, until
from tests.support.admission_grpcio import UnexpectedAdmissionError, admit
from tests.support.kubelet_grpcio import KubeletStandIn

Counts = tuple[int, int]
"""Capacity and allocatable, as the node's status has them."""

PODS: Final = "/api/v1/namespaces/default/pods"
CLAIMS: Final = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"
RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"
READER: Final = "script-reads-claims"
EVENTS: Final = "/api/v1/namespaces/default/events"
KUBELET_DIR: Final = "KUBELET"
"""Kubelet's directory in an observation."""

_GO_VALUE: Final = re.compile(r"&\{\{\{\} \{0 0\}\} (\S+) 0x[0-9a-f]+ \{[^}]*\} <nil>\}")
"""An endpoint as Go prints it, addresses and times included; the resource's name is the part that stays."""

CONTAINER: Final = "compute"
PREFIX: Final = "script-"
"""Of the names of the script's pods and claims."""


NO_LISTENER_S: Final = 2.0
"""How long a fake dials an endpoint without a listener, in place of kubelet's 10 s."""

CDI_FILE: Final = Path("/etc/cdi/script.json")
CDI: Final = {
    "cdiVersion": "0.6.0",
    "kind": "script.example/gpu",
    "devices": [{"name": "one", "containerEdits": {"env": ["SCRIPT=1"]}}],
}
"""What the container runtime finds for the claims' CDI id."""

ENDS_AT_ONCE: Final = "trap 'exit 0' TERM; sleep 100000 & wait"
IGNORES_SIGTERM: Final = "trap '' TERM; while :; do sleep 1; done"

_REFUSALS: Final = {"UnexpectedAdmissionError": "Failed", "FailedPrepareDynamicResources": "Pending"}
"""The phase of a pod with such an event."""

_WAITING: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


@dataclass(frozen=True, slots=True)
class PodState:
    """A pod as the API server shows it; its reason is that of its container where that waits."""

    phase: str
    reason: str = ""
    message: str = ""


class Kubelet(Protocol):
    """What the script does with a kubelet besides calling it."""

    directory: Path
    """Kubelet's, of which `device-plugins` is one."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def died(self) -> bool:
        """Kubelet's process ended by a crash."""
        ...

    def lose_api_server(self) -> None: ...

    def find_api_server(self) -> None: ...

    def create(self, pod: str, resource: str, size: int, *, ignores_sigterm: bool = False) -> None:
        """Creates a pod that is bound to the node already, so that kubelet decides alone."""
        ...

    def state(self, pod: str) -> PodState | None:
        """None if there is no such pod."""
        ...

    def uid(self, pod: str) -> str: ...

    def delete(self, pod: str) -> None:
        """Deletes a pod as usual."""
        ...

    def force_delete(self, pod: str) -> None:
        """Deletes a pod by force; one that ignores SIGTERM lives on for a while."""
        ...

    def counts(self, resource: str) -> Counts:
        """What the node's status has."""
        ...


class DraKubelet(Kubelet, Protocol):
    """A kubelet with a DRA manager."""

    def create_claim(self, claim: str, *drivers: str) -> None:
        """A ResourceClaim with a device of each driver; not allocated if none is named."""
        ...

    def create_with_claims(self, pod: str, *claims: str) -> None:
        """A pod whose container has these claims, which are reserved for it; bound to the node."""
        ...

    def create_slice(self, driver: str) -> None:
        """A ResourceSlice of this node."""
        ...

    def slices(self) -> set[str]:
        """The drivers that have slices of this node."""
        ...


# --- the original -----------------------------------------------------------------------------------------------


@final
class Original:
    """The node's kubelet. It starts without a ledger."""

    def __init__(self, machine: Machine, api: Api) -> None:
        self.directory = machine.kubelet_dir
        self._machine = machine
        self._api = api
        self._uids: dict[str, str] = {}
        self._claims: dict[str, str] = {}

    def start(self) -> None:
        """Starts kubelet, which posts its node's status more often than by default."""
        given = os.environ.get("K8S_KUBELET_ARGS", "")
        self._machine.up("kubelet", K8S_KUBELET_ARGS=f"{given} --node-status-update-frequency={STATUS_EVERY}")

    def stop(self) -> None:
        self._machine.down("kubelet")

    def died(self) -> bool:
        return not self._machine.runs("kubelet") and "nil pointer dereference" in self._machine.log("kubelet")

    def lose_api_server(self) -> None:
        self._machine.down("kube-apiserver")

    def find_api_server(self) -> None:
        self._machine.up("kube-apiserver")

    def create(self, pod: str, resource: str, size: int, *, ignores_sigterm: bool = False) -> None:
        container = {
            "name": CONTAINER,
            "image": self._machine.image,
            "imagePullPolicy": "Never",
            "command": ["sh", "-c", IGNORES_SIGTERM if ignores_sigterm else ENDS_AT_ONCE],
            "resources": {"limits": {resource: str(size)}},
        }
        self.create_pod(pod, {"containers": [container]})

    def create_pod(self, pod: str, spec: Mapping[str, Any]) -> None:
        """Creates a pod with these fields besides the usual ones."""
        usual = {
            "nodeName": self._machine.name,
            "hostNetwork": True,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [{"operator": "Exists"}],
        }
        found = self._api.call(
            "POST",
            PODS,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": pod},
                "spec": {**usual, **spec},
            },
        )
        self._uids[pod] = found["metadata"]["uid"]

    def state(self, pod: str) -> PodState | None:
        found = self._api.find(f"{PODS}/{pod}")
        if found is None:
            return None
        status = found.get("status", {})
        if (refusal := self._refusal(pod, found)) is not None:
            return refusal
        for container in status.get("containerStatuses", ()):
            waiting = container.get("state", {}).get("waiting", {})
            if waiting.get("reason") in _WAITING:
                return PodState(status["phase"], waiting["reason"], waiting.get("message", ""))
        return PodState(status.get("phase", "Pending"), status.get("reason", ""), status.get("message", ""))

    def _refusal(self, pod: str, found: Mapping[str, Any]) -> PodState | None:
        """Why kubelet does not admit or start a pod, by its event: the status has the same, after "Pod was rejected:",
        but up to 10 s later, and a kubelet that started less than 2 s ago leaves the phase Pending (podsSynced)."""
        if found.get("status", {}).get("phase") in ("Running", "Succeeded"):
            return None
        events = self._api.call("GET", f"{EVENTS}?fieldSelector=involvedObject.uid={self._uids[pod]}")
        for event in events["items"]:
            if event["reason"] in _REFUSALS:
                return PodState(_REFUSALS[event["reason"]], event["reason"], self._stable(event["message"]))
        return None

    def _stable(self, text: str) -> str:
        """Without what is of this machine or this process."""
        for name, uid in (*self._claims.items(), *self._uids.items()):
            text = text.replace(uid, f"UID-of-{name}")
        return _GO_VALUE.sub(r"\1", text).replace(str(self.directory), KUBELET_DIR)

    def uid(self, pod: str) -> str:
        return self._uids[pod]

    def delete(self, pod: str) -> None:
        self._api.delete(f"{PODS}/{pod}")

    def force_delete(self, pod: str) -> None:
        self._api.delete(f"{PODS}/{pod}", grace_s=0)

    def counts(self, resource: str) -> Counts:
        status = self._api.call("GET", f"/api/v1/nodes/{self._machine.name}")["status"]
        return int(status["capacity"].get(resource, 0)), int(status["allocatable"].get(resource, 0))

    def create_claim(self, claim: str, *drivers: str) -> None:
        requests = [
            {"name": f"gpu-{n}", "exactly": {"deviceClassName": "script"}} for n in range(len(drivers) or 1)
        ]
        found = self._api.call(
            "POST",
            CLAIMS,
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": claim},
                "spec": {"devices": {"requests": requests}},
            },
        )
        self._claims[claim] = found["metadata"]["uid"]
        results = [
            {"request": f"gpu-{n}", "driver": driver, "pool": "pool", "device": f"of-{claim}"}
            for n, driver in enumerate(drivers)
        ]
        if results:
            status = {"status": {"allocation": {"devices": {"results": results}}}}
            self._api.call("PATCH", f"{CLAIMS}/{claim}/status", status)

    def create_with_claims(self, pod: str, *claims: str) -> None:
        container = {
            "name": CONTAINER,
            "image": self._machine.image,
            "imagePullPolicy": "Never",
            "command": ["sh", "-c", ENDS_AT_ONCE],
            "resources": {"claims": [{"name": claim} for claim in claims]},
        }
        self.create_pod(
            pod,
            {
                "nodeName": None,
                "schedulerName": "nobody",
                "resourceClaims": [{"name": claim, "resourceClaimName": claim} for claim in claims],
                "containers": [container],
            },
        )
        for claim in claims:
            found = self._api.find(f"{CLAIMS}/{claim}")
            if found is not None and "allocation" in found.get("status", {}):
                reserved = found["status"].get("reservedFor", [])
                reserved.append({"resource": "pods", "name": pod, "uid": self._uids[pod]})
                self._api.call("PATCH", f"{CLAIMS}/{claim}/status", {"status": {"reservedFor": reserved}})
        self._api.call(
            "POST",
            f"{PODS}/{pod}/binding",
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": pod},
                "target": {"apiVersion": "v1", "kind": "Node", "name": self._machine.name},
            },
        )

    def create_slice(self, driver: str) -> None:
        self._api.call(
            "POST",
            SLICES,
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceSlice",
                "metadata": {"generateName": "script-"},
                "spec": {
                    "driver": driver,
                    "nodeName": self._machine.name,
                    "pool": {"name": "pool", "generation": 1, "resourceSliceCount": 1},
                    "devices": [{"name": "one"}],
                },
            },
        )

    def slices(self) -> set[str]:
        return {found["spec"]["driver"] for found in self._api.call("GET", SLICES)["items"]}

    def adopt(self) -> None:
        """Takes the pods and claims that an earlier run has left for its own."""
        self._uids.update(self._left(PODS))
        self._claims.update(self._left(CLAIMS))

    def _left(self, path: str) -> dict[str, str]:
        found = (item["metadata"] for item in self._api.call("GET", path)["items"])
        return {item["name"]: item["uid"] for item in found if item["name"].startswith(PREFIX)}

    def allow(self) -> None:
        """Lets kubelet read every claim. The API server learns which pods are bound to a node a moment after kubelet
        may, and a claim that is refused is asked for again after a minute only."""
        name = {"metadata": {"name": READER}}
        rule = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]}
        nodes = {"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": "system:nodes"}
        role = {"kind": "ClusterRole", "apiGroup": "rbac.authorization.k8s.io", "name": READER}
        self.disallow()
        self._api.call("POST", f"{RBAC}/clusterroles", {**name, "rules": [rule]})
        self._api.call("POST", f"{RBAC}/clusterrolebindings", {**name, "subjects": [nodes], "roleRef": role})

    def disallow(self) -> None:
        """Undoes `allow`."""
        self._api.delete(f"{RBAC}/clusterrolebindings/{READER}")
        self._api.delete(f"{RBAC}/clusterroles/{READER}")

    def clear(self) -> None:
        """Removes the pods and claims that are left."""
        for pod in self._uids:
            self.force_delete(pod)
        until(lambda: not any(self._api.find(f"{PODS}/{pod}") for pod in self._uids))
        for claim in self._claims:
            self._api.delete(f"{CLAIMS}/{claim}")


@contextmanager
def original(machine: Machine, api: Api) -> Iterator[Original]:
    """The node's kubelet, started anew without a ledger, and without the script's pods afterwards."""
    kubelet = Original(machine, api)
    kubelet.adopt()
    kubelet.clear()
    kubelet.allow()
    machine.down("kubelet")
    (machine.kubelet_dir / "dra_manager_state").unlink(missing_ok=True)
    directory = machine.kubelet_dir / "device-plugins"
    (directory / "kubelet_internal_checkpoint").unlink(missing_ok=True)
    for left in directory.glob("script-*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    CDI_FILE.write_text(json.dumps(CDI), encoding="utf-8")
    kubelet.start()
    try:
        yield kubelet
    finally:
        CDI_FILE.unlink(missing_ok=True)
        if not machine.runs("kube-apiserver"):
            machine.up("kube-apiserver")
        if not machine.runs("kubelet"):
            kubelet.start()
        kubelet.clear()
        kubelet.disallow()


# --- the shipped fake -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Objects:
    """What the API server has, as far as kubelet's DRA manager reads and deletes it."""

    claims: dict[str, ClaimObject] = field(default_factory=dict)
    slices: set[str] = field(default_factory=set)
    """Their drivers."""

    def claim(self, namespace: str, name: str) -> ClaimObject | None:
        """As `Surroundings.claim`."""
        return self.claims.get(name)

    def wipe(self, driver: str | None) -> None:
        """As `Surroundings.wipe`."""
        self.slices -= self.slices if driver is None else {driver}


_PHASES: Final = {
    Phase.PENDING: "Pending",
    Phase.ADMITTING: "Pending",
    Phase.STARTING: "Pending",
    Phase.TERMINATING: "Running",
}


@final
class Shipped:
    """The fake kubelet of `gpuactors_simulation`, in a thread of its own that runs trio."""

    def __init__(
        self, directory: Path, kubelet: FakeKubelet, token: trio.lowlevel.TrioToken, objects: _Objects
    ) -> None:
        self.directory = directory
        self.fake = kubelet
        self._objects = objects
        self._token = token
        self._ignores: set[str] = set()

    def on_trio(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Calls an asynchronous function in the fake's thread."""
        return trio.from_thread.run(function, *args, trio_token=self._token)

    def on_trio_sync(self, function: Callable[..., Any], *args: Any) -> Any:
        """As `on_trio`, for a synchronous function."""
        return trio.from_thread.run_sync(function, *args, trio_token=self._token)

    def _view(self) -> KubeletView:
        view: KubeletView = self.on_trio_sync(lambda: self.fake.view)
        return view

    def _pod(self, pod: str) -> Pod | None:
        return self._view().pods.get(pod)

    def start(self) -> None:
        self.on_trio(self.fake.start)

    def stop(self) -> None:
        self.on_trio(self.fake.stop)

    def died(self) -> bool:
        return bool(self.fake.panics) and not self._view().running

    def lose_api_server(self) -> None:
        self.on_trio_sync(self.fake.lose_api_server)

    def find_api_server(self) -> None:
        self.on_trio_sync(self.fake.find_api_server)

    def create(self, pod: str, resource: str, size: int, *, ignores_sigterm: bool = False) -> None:
        self.on_trio_sync(partial(self.fake.submit, pod, {resource: size}, bound=True))
        if ignores_sigterm:
            self._ignores.add(pod)

    def state(self, pod: str) -> PodState | None:
        found = self._pod(pod)
        if found is None:
            return None
        phase = _PHASES.get(found.phase, found.phase.value)
        reason, _, message = found.message.partition(": ")
        message = message.replace(found.uid, f"UID-of-{pod}").replace(str(self.directory), KUBELET_DIR)
        return PodState(phase, reason, message)

    def create_claim(self, claim: str, *drivers: str) -> None:
        self._objects.claims[claim] = ClaimObject("default", claim, f"UID-of-{claim}", drivers)

    def create_with_claims(self, pod: str, *claims: str) -> None:
        self.on_trio_sync(partial(self.fake.submit, pod, {}, uses=claims, bound=True))

    def create_slice(self, driver: str) -> None:
        self._objects.slices.add(driver)

    def slices(self) -> set[str]:
        return set(self._objects.slices)

    def uid(self, pod: str) -> str:
        found = self._pod(pod)
        assert found is not None
        return found.uid

    def delete(self, pod: str) -> None:
        self.on_trio_sync(partial(self.fake.delete, pod, dies_after_s=None if pod in self._ignores else 0.0))

    def force_delete(self, pod: str) -> None:
        dies_after_s = None if pod in self._ignores else 0.0
        with suppress(KeyError):
            self.on_trio_sync(partial(self.fake.force_delete, pod, dies_after_s=dies_after_s))

    def counts(self, resource: str) -> Counts:
        found = self._view().resources.get(resource)
        return (0, 0) if found is None else (found.capacity, found.allocatable)


@contextmanager
def shipped(directory: Path) -> Iterator[Shipped]:
    """A fake kubelet that runs."""
    made: list[Shipped] = []
    ready = threading.Event()
    over = trio.Event()
    objects = _Objects()
    dra = Surroundings(objects.claim, objects.wipe, release=versions.of_node().kubelet)

    async def live() -> None:
        async with open_fake_kubelet(
            UnixTransport(directory), seed=1, dial_deadline_s=NO_LISTENER_S, dra=dra
        ) as kubelet:
            await kubelet.start()
            made.append(Shipped(directory, kubelet, trio.lowlevel.current_trio_token(), objects))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=trio.run, args=(live,), daemon=True)
    thread.start()
    assert ready.wait(WITHIN_S)
    try:
        yield made[0]
    finally:
        made[0].on_trio_sync(over.set)
        thread.join(WITHIN_S)


# --- the grpcio stand-in ----------------------------------------------------------------------------------------


@final
class StandIn:
    """The stand-in has neither pods nor counts: an admission is a thread, counts are those of its lists."""

    def __init__(self, directory: Path, kubelet: KubeletStandIn) -> None:
        self.directory = directory
        self._kubelet = kubelet
        self._states: dict[str, PodState] = {}
        self._ignores: set[str] = set()
        self.start = kubelet.start
        self.lose_api_server = kubelet.lose_api_server
        self.find_api_server = kubelet.hear_of_pods

    def stop(self) -> None:
        self._kubelet.stop(leave_sockets=True)

    def died(self) -> bool:
        return bool(self._kubelet.panics)

    def create(self, pod: str, resource: str, size: int, *, ignores_sigterm: bool = False) -> None:
        self._states[pod] = PodState("Pending")
        if ignores_sigterm:
            self._ignores.add(pod)
        threading.Thread(target=self._admit, args=(pod, resource, size), daemon=True).start()

    def _admit(self, pod: str, resource: str, size: int) -> None:
        try:
            admit(self._kubelet, pod, resource, size)
        except UnexpectedAdmissionError as error:
            reason, _, message = str(error).partition(": ")
            message = message.replace(str(self.directory), KUBELET_DIR)
            self._states[pod] = PodState("Failed", reason, message)
        else:
            self._states[pod] = PodState("Running")

    def state(self, pod: str) -> PodState | None:
        return self._states.get(pod)

    def uid(self, pod: str) -> str:
        return self._kubelet.uid(pod)

    def delete(self, pod: str) -> None:
        if pod not in self._ignores:
            self._kubelet.end_pod(pod)
            self._states.pop(pod, None)

    def force_delete(self, pod: str) -> None:
        self._states.pop(pod, None)
        with suppress(KeyError):
            self._kubelet.force_delete(pod)

    def counts(self, resource: str) -> Counts:
        listed = self._kubelet.snapshot().get(resource, {})
        return len(listed), sum(health == "Healthy" for health in listed.values())


@contextmanager
def stand_in(directory: Path) -> Iterator[StandIn]:
    """A stand-in that runs."""
    with ExitStack() as stack:
        tells_ended = versions.of_node().kubelet.get_tells_ended
        kubelet = KubeletStandIn(directory, dial_timeout_s=NO_LISTENER_S, get_tells_ended=tells_ended)
        yield StandIn(directory, stack.enter_context(kubelet))
