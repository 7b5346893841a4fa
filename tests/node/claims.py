"""Claims on the real node: classes, templates, claims, the pods that use them, and what they leave on the host.

The class is the one of deploy/examples. `ClaimNode` checks that the ResourceSlices of the pool are consistent, and
that nothing of a claim is left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, final

import pytest
import yaml
from msgspec import Struct
from msgspec.structs import replace

from gpuactors_simulation.host.kernel import Planned
from tests.node import daemonset, pods
from tests.node.books import DRIVER
from tests.node.cluster import (
    CLASSES,
    EVENTS,
    SLICES,
    Api,
    ApiError,
    Object,
    eventually,
    kubectl,
    kubelet_dir,
)
from tests.node.daemonset import CHECKOUT, Daemon
from tests.node.node import Node
from tests.node.rules import Look
from tests.support.patience import patient

EXAMPLES: Final = CHECKOUT / "deploy" / "examples" / "dra"
CLASS: Final = "vfio.gpu.nvidia.com"
NAMESPACE: Final = pods.NAMESPACE
TEMPLATES_OF: Final = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaimtemplates"
CLAIMS_OF: Final = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims"

CDI: Final = Path("/var/run/cdi")
ON_DISK: Final = ("Reserved", "Prepared", "Releasing")
"""The states of a claim that the checkpoint keeps."""

IDLE: Final = "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done"
"""A program that opens nothing."""

RETRY_S: Final = patient(150.0)
"""A claim's pod may need kubelet's second try, after 60 to 90 s."""

METADATA: Final = "/var/run/kubernetes.io/dra-device-attributes"
"""In the container (KEP-5304)."""


def device_name(key: str) -> str:
    """The name in the slices of a PCI address or UUID: `gpu-0000-23-00-0`, `mdev-83b8f4f2-…`."""
    return "gpu-" + key.replace(":", "-").replace(".", "-") if ":" in key else f"mdev-{key}"


def by_address(address: str) -> str:
    """A CEL expression that selects one GPU."""
    return f'device.attributes["resource.kubernetes.io"].pciBusID == "{address}"'


def by_id(device: str) -> str:
    """A CEL expression that selects a model."""
    return f'device.attributes["gpu.nvidia.com"].deviceID == "0x{device}"'


def exactly(
    selector: str | None = None,
    *,
    admin: bool = False,
    count: int | None = None,
    device_class: str = CLASS,
) -> Object:
    """What one request asks for."""
    found: Object = {"deviceClassName": device_class}
    if selector is not None:
        found["selectors"] = [{"cel": {"expression": selector}}]
    if admin:
        found |= {"adminAccess": True, "allocationMode": "All"}
    if count is not None:
        found |= {"allocationMode": "ExactCount", "count": count}
    return found


def request(name: str = "gpu", selector: str | None = None, **options: Any) -> Object:
    """A request for one GPU, or for as many as `count` says."""
    return {"name": name, "exactly": exactly(selector, **options)}


def from_template(template: str, name: str = "gpu") -> Object:
    """An entry of a pod's `spec.resourceClaims`: a claim of its own."""
    return {"name": name, "resourceClaimTemplateName": template}


def by_name(claim: str, name: str = "gpu") -> Object:
    """An entry of a pod's `spec.resourceClaims`: a claim that is there."""
    return {"name": name, "resourceClaimName": claim}


# --- what the daemon keeps ----------------------------------------------------------------------------------


def checkpoint() -> Mapping[str, str]:
    """The state of each claim in the driver's checkpoint, by UID."""
    try:
        content = json.loads((kubelet_dir() / "plugins" / DRIVER / "gpuactors-checkpoint.json").read_text())
    except FileNotFoundError:
        return {}
    return dict(_states(content))


def _states(content: object) -> Iterator[tuple[str, str]]:
    """An entry is an object with a state, under the claim's UID, however deep it is."""
    if isinstance(content, dict):
        for name, value in content.items():
            if isinstance(value, dict) and value.get("state") in ON_DISK:
                yield name, value["state"]
            else:
                yield from _states(value)


def files_of(uid: str | None = None) -> list[str]:
    """The CDI files and metadata directories of a claim, or of all."""
    found = [path.name for path in CDI.glob(f"*{DRIVER}*.json")]
    metadata = kubelet_dir() / "plugins" / DRIVER / "metadata"
    found += [f"metadata/{path.name}" for path in metadata.glob("*")]
    return [name for name in found if uid is None or uid in name]


def forget_everything() -> None:
    """Removes the checkpoint, and the CDI files and metadata of all claims. Nobody may serve claims meanwhile."""
    state = kubelet_dir() / "plugins" / DRIVER
    (state / "gpuactors-checkpoint.json").unlink()
    shutil.rmtree(state / "metadata")
    for path in CDI.glob(f"*{DRIVER}*.json"):
        path.unlink()


def generation(api: Api) -> int:
    """The newest generation of the pool."""
    return max((spec["pool"]["generation"] for spec in slices_of(api)), default=0)


def daemon_process(uid: str) -> int:
    """The first process of the container of a daemon's pod: the host's processes are visible here."""
    own = f"/pod{uid}/"
    mine = []
    for name in (entry for entry in os.listdir("/proc") if entry.isdigit()):
        try:
            cgroup = Path(f"/proc/{name}/cgroup").read_text()
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if own in cgroup and b"run" in words and b"-S" not in words:
            mine.append(int(name))
    assert mine, f"there is no process of {uid}"
    return min(mine)


def kill(daemon: Daemon) -> None:
    """SIGKILL to the daemon itself; what it has started lives on."""
    kill_in(daemon.uid)


def kill_in(uid: str) -> None:
    """The same by the UID of its pod."""
    os.kill(daemon_process(uid), signal.SIGKILL)


class KubeletCall(Struct, frozen=True):
    """A call of kubelet to the driver, as kubelet's log has it."""

    uid: str
    """The claim."""
    method: str
    """`Prepare` or `Unprepare`."""
    began: float
    """Seconds of the day."""
    ended: float | None = None


_CALL: Final = re.compile(
    r"^I\d{4} (\d\d):(\d\d):(\d\d\.\d+) .*\"(Calling|Done calling) Node(Prepare|Unprepare)Resources? rpc\""
)
_UID: Final = re.compile(r'(?:uid|key):\\"([0-9a-f-]{36})\\"')


def kubelet_calls(method: str = "Prepare") -> list[KubeletCall]:
    """The calls that this kubelet has made since it started, in the order of their beginnings."""
    found: list[KubeletCall] = []
    with (Path(os.environ["K8S_DIR"]) / "log" / "kubelet.log").open(errors="replace") as log:
        for line in log:
            if (match := _CALL.match(line)) is None or match[5] != method:
                continue
            at = int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3])
            for uid in dict.fromkeys(_UID.findall(line)):
                if match[4] == "Calling":
                    found.append(KubeletCall(uid, method, at))
                    continue
                for index in reversed(range(len(found))):
                    if found[index].uid == uid and found[index].ended is None:
                        found[index] = replace(found[index], ended=at)
                        break
    return found


# --- the slices ---------------------------------------------------------------------------------------------


def slices_of(api: Api) -> list[Object]:
    """The specs of the driver's slices."""
    return [item["spec"] for item in api.items(SLICES) if item["spec"]["driver"] == DRIVER]


def slice_versions(api: Api) -> Mapping[str, str]:
    """The resourceVersion of each of the driver's slices: each write is another one."""
    mine = (item["metadata"] for item in api.items(SLICES) if item["spec"]["driver"] == DRIVER)
    return {meta["name"]: meta["resourceVersion"] for meta in mine}


def inconsistent(specs: Collection[Object]) -> list[str]:
    """Why the scheduler would leave out devices of the pools of these slices, as sentences."""
    wrong: list[str] = []
    for pool in {spec["pool"]["name"] for spec in specs}:
        mine = [spec for spec in specs if spec["pool"]["name"] == pool]
        generations = {spec["pool"]["generation"] for spec in mine}
        if len(generations) > 1:
            wrong.append(f"the pool {pool} has slices of the generations {sorted(generations)}")
        newest = [spec["pool"] for spec in mine if spec["pool"]["generation"] == max(generations)]
        if any(one["resourceSliceCount"] != len(newest) for one in newest):
            wrong.append(
                f"{len(newest)} slices of {pool} say {[one['resourceSliceCount'] for one in newest]}"
            )
        names = [device["name"] for spec in mine for device in spec.get("devices", ())]
        if len(names) != len(set(names)):
            wrong.append(f"a device is in {pool} twice: {sorted(names)}")
    return wrong


def taints_of(api: Api) -> Mapping[str, list[Object]]:
    """The taints of each device of the slices."""
    return {d["name"]: d.get("taints", []) for spec in slices_of(api) for d in spec.get("devices", ())}


# --- a scenario with claims ---------------------------------------------------------------------------------


def refusals(found: Iterable[Object]) -> list[str]:
    """Those of some events in which the API server's node authorizer has refused a claim to kubelet itself."""
    return [
        f"{event['metadata']['uid']} {event.get('count')}"
        for event in found
        if "fetch ResourceClaim" in event.get("message", "") and "forbidden" in event["message"]
    ]


@final
class ClaimNode:
    """The node with the driver for claims installed: what a scenario does with claims, and what it checks."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.api = node.api
        self.host = node.host
        self._templates: list[str] = []

    # --- making -------------------------------------------------------------------------------------------

    def template(
        self, name: str, *requests: Object, config: Iterable[Object] = (), match: str | None = None
    ) -> None:
        """A ResourceClaimTemplate; it is deleted at the end. `match`: the attribute that all its devices have alike."""
        self._templates.append(name)
        spec = _spec(requests, config)
        if match is not None:
            spec["devices"]["constraints"] = [{"matchAttribute": match}]
        body = {"kind": "ResourceClaimTemplate", "metadata": {"name": name}, "spec": {"spec": spec}}
        self.api.create(TEMPLATES_OF.format(NAMESPACE), _of_group(body))

    def claim(self, name: str, *requests: Object, config: Iterable[Object] = ()) -> str:
        """A ResourceClaim; its UID."""
        body = {"kind": "ResourceClaim", "metadata": {"name": name}, "spec": _spec(requests, config)}
        return str(self.api.create(CLAIMS_OF.format(NAMESPACE), _of_group(body))["metadata"]["uid"])

    def create(self, pod: str, *entries: Object, **options: Any) -> None:
        """A pod that uses claims, as `pods.tenant` makes it."""
        pods.create(self.api, pods.tenant(pod, claims=entries, **options))

    def forget(self) -> None:
        """Deletes the templates."""
        for name in self._templates:
            self.api.delete(f"{TEMPLATES_OF.format(NAMESPACE)}/{name}")
        self._templates.clear()

    # --- looking ------------------------------------------------------------------------------------------

    def claims(self) -> list[Object]:
        """All claims of the namespace."""
        return self.api.items(CLAIMS_OF.format(NAMESPACE))

    def claim_of(self, pod: str, entry: str = "gpu") -> Object:
        """The claim that a pod uses. Raises AssertionError until it is there."""
        found = pods.get(self.api, pod) or {}
        for one in found.get("spec", {}).get("resourceClaims", ()):
            if one["name"] == entry and "resourceClaimName" in one:
                return self.api.get(f"{CLAIMS_OF.format(NAMESPACE)}/{one['resourceClaimName']}")
        for status in found.get("status", {}).get("resourceClaimStatuses", ()):
            if status["name"] == entry:
                return self.api.get(f"{CLAIMS_OF.format(NAMESPACE)}/{status['resourceClaimName']}")
        raise AssertionError(f"the pod {pod} has no claim {entry} yet")

    def uid_of(self, pod: str, entry: str = "gpu") -> str:
        """The UID of the claim that a pod uses; waits until there is one."""
        return str(eventually(lambda: self.claim_of(pod, entry), f"the claim of {pod}")["metadata"]["uid"])

    def devices_of(self, pod: str, entry: str = "gpu") -> list[str]:
        """The names of the allocated devices."""
        allocation = self.claim_of(pod, entry).get("status", {}).get("allocation", {})
        return [result["device"] for result in allocation.get("devices", {}).get("results", ())]

    def metadata(self, pod: str) -> dict[str, list[Object]]:
        """The metadata files in the pod's container: path below the directory of all → the first document's
        requests. Raises AssertionError unless both versions are in each file."""
        text = kubectl("exec", "-n", NAMESPACE, pod, "--", "sh", "-c",
                       f"cd {METADATA} && for f in */*/*/*; do echo \"= $f\"; cat $f; done")  # fmt: skip
        found: dict[str, list[Object]] = {}
        for part in text.split("= ")[1:]:
            path, _, content = part.partition("\n")
            documents = _stream(content)
            versions = [str(document["apiVersion"]).rpartition("/")[2] for document in documents]
            assert versions == ["v1beta1", "v1alpha1"], versions
            found[path] = documents[0]["requests"]
        return found

    def addresses(self, pod: str) -> dict[str, list[str]]:
        """What a virtual machine would be given, by request, from the metadata files."""
        name = "resource.kubernetes.io/pciBusID"
        return {
            request["name"]: [device["attributes"][name]["string"] for device in request["devices"]]
            for requests in self.metadata(pod).values()
            for request in requests
        }

    def events_of(self, pod: str) -> list[Object]:
        """The events of a pod; none if there is no such pod."""
        uid = (pods.get(self.api, pod) or {}).get("metadata", {}).get("uid", "")
        return self.api.items(EVENTS, fieldSelector=f"involvedObject.uid={uid}") if uid else []

    def refused(self, pod: str) -> list[str]:
        """The errors of prepares in the events of a pod."""
        messages = [str(event.get("message", "")) for event in self.events_of(pod)]
        return [message for message in messages if "prepare dynamic resources" in message]

    def told(self, pod: str) -> str:
        """Why a pod does not run: kubelet's or the scheduler's words, or the last error of a prepare."""
        found = pods.get(self.api, pod) or {}
        status = found.get("status", {})
        unschedulable = [
            c["message"] for c in status.get("conditions", ()) if c.get("reason") == "Unschedulable"
        ]
        return " ".join(filter(None, (status.get("message", ""), *unschedulable, *self.refused(pod)[-1:])))

    def refusals(self, pod: str) -> list[str]:
        """As above, of one pod."""
        return refusals(self.events_of(pod))

    # --- checking -----------------------------------------------------------------------------------------

    def settled(self, allocatable: Mapping[str, int] | None = None) -> Look:
        """Waits until the books are true and the slices consistent."""
        found = self.node.settled(allocatable)
        self.consistent()
        return found

    def consistent(self) -> None:
        """Waits until the slices of the pool are of one generation, and as many as they say."""

        def look() -> bool:
            specs = slices_of(self.api)
            assert specs, "there is no slice"
            assert not inconsistent(specs), inconsistent(specs)
            return True

        eventually(look, "consistent slices")

    def offered(self, *addresses: str) -> None:
        """Waits until exactly these GPUs are in the slices without a taint."""

        def look() -> bool:
            offered = self.node.books.look().offered
            assert offered == set(addresses), f"offered: {sorted(offered)}"
            return True

        eventually(look, f"an offer of {addresses}")
        self.consistent()

    def runs(self, pod: str, *keys: str, within_s: float = RETRY_S, driver: str | None = "vfio-pci") -> str:
        """Waits until a pod alone has these devices open, on a vfio driver, or on another `driver` that makes vfio
        devices; None: they are no PCI functions. Its UID."""
        uid = str(self.comes_to(pod, "Running", within_s)["metadata"]["uid"])

        def look() -> bool:
            owners = self.host.owners()
            for key in keys:
                assert owners.get(self.host.group_of(key), frozenset()) == {f"pod {uid}"}, owners
                assert self.host.drivers().get(key) == driver, self.host.drivers()
            return True

        eventually(look, f"{pod} to have {keys} open")
        return uid

    def waits(self, pod: str) -> str:
        """Waits until the scheduler finds no GPU for a pod: its words."""

        def look() -> str:
            found = pods.get(self.api, pod)
            assert found is not None, f"there is no pod {pod}"
            assert not pods.is_scheduled(found), pods.told(found)
            conditions = found.get("status", {}).get("conditions", ())
            return next((c.get("message", "") for c in conditions if c.get("reason") == "Unschedulable"), "")

        return eventually(look, f"{pod} to be unschedulable")

    def shows_health(self, pod: str, health: str) -> None:
        """Waits until the pod's status shows the devices of its claim so."""

        def look() -> bool:
            (container,) = (pods.get(self.api, pod) or {})["status"]["containerStatuses"]
            shown = container.get("allocatedResourcesStatus", ())
            found = [r["health"] for one in shown if one["name"] == "claim:gpu" for r in one["resources"]]
            assert found == [health], shown
            return True

        eventually(look, f"{pod} to show {health}", patient(60.0))

    def comes_to(self, pod: str, phase: str, within_s: float = RETRY_S) -> Object:
        """Waits until a pod is in a phase. Kubelet tries again at once where the API server refused it the claim."""
        seen: set[str] = set()
        beginning = time.monotonic()

        def look() -> Object | None:
            found = pods.get(self.api, pod)
            assert found is not None, f"there is no pod {pod}"
            if pods.phase(found) != phase and time.monotonic() > beginning + 3:
                self._nudge_refused(pod, seen)
            assert pods.phase(found) == phase, pods.told(found)
            return found

        found = eventually(look, f"pod {pod} to be {phase}", within_s, 0.1)
        assert found is not None
        return found

    def says(self, pod: str, words: str) -> str:
        """Waits until the error of a prepare has these words: it. Kubelet tries again as in `comes_to`."""
        seen: set[str] = set()

        def look() -> str:
            self._nudge_refused(pod, seen)
            return next((said for said in self.refused(pod) if words in said), "")

        return eventually(look, f"a refusal of {pod} with {words!r}")

    def _nudge_refused(self, pod: str, seen: set[str]) -> None:
        if new := set(self.refusals(pod)) - seen:
            seen.update(new)
            self.nudge(pod)

    def is_prepared(self, uid: str) -> None:
        """Waits until a claim is prepared: in the checkpoint, with both its CDI files and its metadata."""

        def look() -> bool:
            assert checkpoint().get(uid) == "Prepared", checkpoint()
            assert len(files_of(uid)) == 3, files_of(uid)
            return True

        eventually(look, f"the claim {uid} to be prepared")

    def is_released(self, uid: str, within_s: float | None = None) -> None:
        """Waits until nothing of a claim is left on the node."""

        def look() -> bool:
            assert uid not in checkpoint(), checkpoint()
            assert not files_of(uid), files_of(uid)
            return True

        eventually(look, f"the release of {uid}", *(() if within_s is None else (within_s,)))

    def on(self, drivers: Mapping[str, str]) -> None:
        """Waits until functions are on these drivers, without a `driver_override`."""

        def look() -> bool:
            have = self.host.drivers()
            assert {a: have[a] for a in drivers} == drivers, have
            with self.host.lock:
                overrides = {a: self.host.kernel.override(a) for a in drivers}
            assert not any(overrides.values()), overrides
            return True

        eventually(look, f"the drivers {drivers}")

    def nothing_is_left(self, drivers: Mapping[str, str]) -> None:
        """Waits until no claim has anything on the node, and functions are on these drivers."""

        def look() -> bool:
            assert not checkpoint(), checkpoint()
            assert not files_of(), files_of()
            return True

        eventually(look, "a node without a claim")
        self.on(drivers)
        self.consistent()

    @contextmanager
    def admin_namespace(self) -> Iterator[None]:
        """Claims with admin access may be made in the pods' namespace while the context is open."""
        path, label = f"/api/v1/namespaces/{NAMESPACE}", "resource.kubernetes.io/admin-access"
        self.api.merge(path, {"metadata": {"labels": {label: "true"}}})
        try:
            yield
        finally:
            self.api.merge(path, {"metadata": {"labels": {label: None}}})

    @contextmanager
    def device_class(self, example: Path) -> Iterator[None]:
        """The DeviceClass of an example is there while the context is open."""
        documents = [one for one in yaml.safe_load_all(example.read_text()) if one["kind"] == "DeviceClass"]
        for one in documents:
            self.api.create(CLASSES, one)
        try:
            yield
        finally:
            for one in documents:
                self.api.delete(f"{CLASSES}/{one['metadata']['name']}")

    # --- faults -------------------------------------------------------------------------------------------

    def hang(self, path_end: str) -> None:
        """The next write to a path that ends so hangs, until `go_on`."""
        with self.host.lock:
            self.host.kernel.plan(Planned(path_end, hangs=True))

    def go_on(self) -> None:
        """Every write that hangs goes on, and no other one hangs."""
        with self.host.lock:
            self.host.kernel.forget_plans()
            self.host.kernel.release()
        self.host.wake()

    def asleep(self, address: str) -> None:
        """Waits until a write for a function hangs."""

        def look() -> bool:
            with self.host.lock:
                return self.host.kernel.sleeps(address)

        eventually(look, f"a write for {address} that hangs")

    def restarted(self, before: Daemon) -> None:
        """Waits until kubelet has started the daemon's container again and it is ready."""

        def look() -> bool:
            now = self.node.daemon()
            assert (now.uid, now.restarts) != (before.uid, before.restarts), f"{now.restarts} restarts"
            return True

        eventually(look, "a daemon after the kill")
        self.registered()

    def registered(self) -> None:
        """Waits until kubelet has accepted the driver of the ready daemon: a call before that fails."""
        eventually(lambda: self.logged("claims.registered"), "the driver at kubelet", poll_s=0.3)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The lines of the ready daemon's log with an event."""
        return [line for line in self.node.daemon().log() if line.get("event") == event]

    def awaits(self) -> str:
        """What the last claim that waited in its call has waited for."""
        return "".join(str(line["reason"]) for line in self.logged("claim.waiting")[-1:])

    def restarts(self) -> int:
        """How often the container of the DaemonSet's pod has ended."""
        return max((daemonset.daemon_of(pod).restarts for pod in daemonset.pods_of(self.api)), default=0)

    def nudge(self, pod: str) -> None:
        """Changes a pod, so that kubelet tries again at once what it would try again after 60 to 90 s."""
        with suppress(ApiError):  # it is gone
            self.api.merge(
                f"{pods.PATH}/{pod}", {"metadata": {"annotations": {"nudged": str(time.monotonic())}}}
            )

    def renew_daemon(self) -> Daemon:
        """Another pod of the DaemonSet: kubelet starts its container again without a pause."""
        # Nobody can register meanwhile: kubelet has no Healthy device then, and posts so each second here.
        self.node.excuse_no_plugin()
        before = self.node.daemon()
        self.api.delete(f"/api/v1/namespaces/{daemonset.NAMESPACE}/pods/{before.name}", 1)
        eventually(lambda: self.node.daemon().uid != before.uid, "another pod of the DaemonSet")
        self.registered()
        return self.node.daemon()


def _of_group(body: Object) -> Object:
    return {"apiVersion": "resource.k8s.io/v1", **body}


def _spec(requests: Iterable[Object], config: Iterable[Object]) -> Object:
    devices: Object = {"requests": list(requests)}
    if configs := list(config):
        devices["config"] = configs
    return {"devices": devices}


def _stream(text: str) -> list[Object]:
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text):
        document, end = decoder.raw_decode(text, at)
        found.append(document)
        at = end + len(text[end:]) - len(text[end:].lstrip())
    return found


@pytest.fixture
def claims(node: Node) -> Iterator[ClaimNode]:
    """The node with the overlay `dra`, and the class of the examples."""
    with serving_claims(node) as found:
        yield found


@contextmanager
def serving_claims(
    node: Node, settings: Mapping[str, str] | None = None, overlay: str = "dra"
) -> Iterator[ClaimNode]:
    """The same, with settings of the daemon as variables, or another overlay that serves claims."""
    node.install(overlay, settings)
    for example in yaml.safe_load_all((EXAMPLES / "device-class.yaml").read_text()):
        if node.api.find(f"{CLASSES}/{example['metadata']['name']}") is None:
            node.api.create(CLASSES, example)
    found = ClaimNode(node)
    try:
        yield found
    finally:
        # While the driver is there: without it no pod with a claim would end.
        found.go_on()
        pods.clear(node.api)
        found.forget()
