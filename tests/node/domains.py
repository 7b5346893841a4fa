"""A compute domain on the real node: what the host says of IMEX, NVIDIA's controller, and a history of what happens.

`History` records the Node, the pods and the ComputeDomains by watches, in the order in which etcd has them: so it knows
each value that the label has had, and whether a workload has ever run without its domain's daemon.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from tests.node import pods
from tests.node.cluster import (
    EVENTS,
    NODES,
    PODS,
    Api,
    ApiError,
    Object,
    component,
    eventually,
    kubelet_dir,
    node_name,
)
from tests.node.fake_host import BACKING
from tests.support.background import in_background
from tests.support.patience import patient

LABEL: Final = "resource.nvidia.com/computeDomain"
DRIVER: Final = "compute-domain.nvidia.com"

NAMESPACE: Final = "dra-driver-nvidia-gpu"
"""Of NVIDIA's driver, as its documents have it today."""

BARE_IMAGE: Final = "registry.local/compute-domain-daemon:bare"
"""NVIDIA's daemon without nvidia-imex, as NVIDIA's own image has it: that comes from the host."""

MANAGEMENT: Final = Path("/var/run/cdi/management.nvidia.com-gpu.yaml")
"""Where NVIDIA's container toolkit writes the CDI device for management."""

API: Final = "/apis/resource.nvidia.com/v1beta1"
DOMAINS: Final = f"{API}/namespaces/{pods.NAMESPACE}/computedomains"
ALL_DOMAINS: Final = f"{API}/computedomains"
TENANTS_CLAIMS: Final = f"/apis/resource.k8s.io/v1/namespaces/{pods.NAMESPACE}/resourceclaims"
DAEMON_PODS: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"

CLIQUE: Final = "6e4e1f2a-3b5c-4d7e-8f90-0a1b2c3d4e5f.32766"
MGMT_MINOR: Final = 4323

NO_DAEMON: Final = "no daemon of its domain is ready"
"""What a workload lacks; else it is the label."""

DOMAIN_OF: Final = "tests.node/domain"
"""A label of the tests' pods: the UID of the domain that they use."""

WORKLOAD: Final = """\
for node in /dev/nvidia-caps-imex-channels/channel*; do
  echo "has $node: $(stat -c '%t:%T' $node 2>&1): $( (: < $node) 2>&1 && echo opened)"
done
echo "domain $COMPUTE_DOMAIN_UUID"
trap 'sleep {dies_after_s}; exit 0' TERM
while :; do sleep 1 & wait $!; done
"""
"""Says which channels it has, and what an open of them says."""

NOT_SEEN_YET: Final = "no relationship found between node"
"""Says the API server's node authorizer of a claim, when kubelet asks sooner than it has seen the pod's status."""

_POLL_S: Final = 0.05
_ASK_S: Final = 1.0
"""Between two changes of a pod: kubelet drops the events of a pod after 25."""

_WATCH_S: Final = "5"
"""After so many seconds the API server ends a watch, and it is started again from where it was."""


# --- the host -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Imex:
    """What the host says of IMEX."""

    channel_major: int
    caps_major: int


@contextmanager
def imex_loaded() -> Iterator[Imex]:
    """NVIDIA's driver is loaded, and GPU Feature Discovery has found the clique. The major numbers are of no driver
    of this machine: an open fails with ENXIO where the container may open the device, and else with EPERM."""
    devices = BACKING / "proc/devices"
    features = Path("/etc/kubernetes/node-feature-discovery/features.d/gfd")
    management = BACKING / "proc/driver/nvidia/capabilities/fabric-imex-mgmt"
    before = devices.read_text()
    taken = {words[0] for line in before.splitlines() if (words := line.split())}
    caps, channels = [number for number in range(400, 512) if str(number) not in taken][:2]
    characters, _, blocks = before.partition("\n\nBlock devices:")
    loaded = f"{caps} nvidia-caps\n{channels} nvidia-caps-imex-channels"
    # It is a bind mount: written in place, as another file would not be seen.
    devices.write_text(f"{characters}\n{loaded}\n\nBlock devices:{blocks}")
    management.parent.mkdir(parents=True, exist_ok=True)
    management.write_text(f"DeviceFileMinor: {MGMT_MINOR}\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
    features.write_text(f"nvidia.com/gpu.clique={CLIQUE}\nnvidia.com/gpu.count=4\n")
    try:
        yield Imex(channels, caps)
    finally:
        devices.write_text(before)
        management.unlink()
        features.unlink()


@contextmanager
def toolkit() -> Iterator[None]:
    """NVIDIA's container toolkit has written its CDI device for management: here it has the fake nvidia-imex."""
    fakes = Path(os.environ["K8S_DIR"], "domains", "fakes")
    mounts = "".join(
        f"    - hostPath: {fakes / name}\n      containerPath: /usr/bin/{name}\n      options: [ro, nodev, bind]\n"
        for name in ("nvidia-imex", "nvidia-imex-ctl")
    )
    MANAGEMENT.parent.mkdir(parents=True, exist_ok=True)
    MANAGEMENT.write_text(
        "cdiVersion: 0.5.0\nkind: management.nvidia.com/gpu\ndevices:\n- name: all\n  containerEdits:\n"
        f"    env: [NVIDIA_VISIBLE_DEVICES=void]\n    mounts:\n{mounts}"
    )
    try:
        yield
    finally:
        MANAGEMENT.unlink()


def domain_directories() -> Path:
    """Where the directory of each domain is, which its daemon's container has as /imexd."""
    return kubelet_dir() / "plugins" / DRIVER / "domains"


@final
class Steering:
    """Steers the fake IMEX daemon of each domain, from its start on."""

    def __init__(self) -> None:
        self._done: frozenset[str] = frozenset()
        self.words = ""
        """It writes this as fake-imex.conf; empty: no such file."""
        self.failed: list[str] = []

    @contextmanager
    def steering(self) -> Iterator[None]:
        """Looks for new directories while the context is open."""
        with in_background(self._run, "steering", end_s=patient(30)):
            yield

    def steer(self, uid: str, text: str) -> None:
        """Gives the fake IMEX daemon of a domain that is there other words."""
        (domain_directories() / uid / "fake-imex.conf").write_text(text)

    def _run(self, over: threading.Event) -> None:
        while not over.wait(_POLL_S):
            try:
                there = set(os.listdir(domain_directories()))
            except FileNotFoundError:
                there = set()
            # One that is gone and made anew is written again, one that is being removed is not.
            self._done = self._done & there
            for uid in there - self._done:
                self._done = self._done | {uid}
                if not self.words:
                    continue
                try:
                    self.steer(uid, self.words)
                except OSError as error:
                    self.failed.append(f"{uid}: {error}")


@contextmanager
def asking_again(after: str = NOT_SEEN_YET) -> Iterator[None]:
    """Has kubelet ask again at once after an event with these words: by default where the API server's node authorizer
    has not yet seen that a claim is of a pod of this node. Kubelet itself asks again after 60 to 90 s. Any change of a
    pod makes it look at the pod."""
    with in_background(partial(_ask_again, after), "asking again", end_s=patient(30)):
        yield


def _ask_again(after: str, over: threading.Event) -> None:
    api, version, asked = Api(), "", dict[str, float]()
    while not over.wait(_POLL_S):
        with suppress(OSError, http.client.HTTPException, ApiError, ValueError):  # half a line
            version = version or api.get(EVENTS, limit="1")["metadata"]["resourceVersion"]
            for event in api.watch(EVENTS, timeoutSeconds=_WATCH_S, resourceVersion=version):
                version = event["object"].get("metadata", {}).get("resourceVersion", "")  # an error has none
                if after in event["object"].get("message", ""):
                    pod = event["object"]["involvedObject"]
                    over.wait(asked.get(pod["uid"], 0.0) + _ASK_S - time.monotonic())
                    asked[pod["uid"]] = time.monotonic()
                    change = {"metadata": {"annotations": {"tests.node/asked-again": version}}}
                    Api().merge(f"/api/v1/namespaces/{pod['namespace']}/pods/{pod['name']}", change)


# --- NVIDIA's controller --------------------------------------------------------------------------------------------


_CONTROLLER: Final = {"DOMAINS_NAMESPACE": NAMESPACE, "DOMAINS_IMAGE": BARE_IMAGE}


@contextmanager
def controller() -> Iterator[None]:
    """NVIDIA's objects and its controller; all of it gone afterwards."""
    component("domains/up-domains.sh", environment=_CONTROLLER)
    try:
        yield
    finally:
        component("domains/down-domains.sh", "--wipe", environment=_CONTROLLER)


@contextmanager
def without_controller() -> Iterator[None]:
    """It is stopped while the context is open."""
    component("domains/down-domains.sh", "controller", environment=_CONTROLLER)
    try:
        yield
    finally:
        component("domains/up-domains.sh", "controller", environment=_CONTROLLER)


def create_domain(api: Api, name: str) -> str:
    """A ComputeDomain, and the template of its claims that the controller makes: its UID."""
    made = api.create(
        DOMAINS,
        {
            "apiVersion": "resource.nvidia.com/v1beta1", "kind": "ComputeDomain", "metadata": {"name": name},
            "spec": {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": f"{name}-channel"}}},
        },
    )  # fmt: skip
    uid = str(made["metadata"]["uid"])
    template = f"/apis/resource.k8s.io/v1/namespaces/{pods.NAMESPACE}/resourceclaimtemplates/{name}-channel"

    def is_there() -> bool:
        found = api.find(template)
        return found is not None and found["metadata"]["labels"].get(LABEL) == uid

    eventually(is_there, f"the template of the domain {name}")
    return uid


def delete_domain(api: Api, name: str) -> None:
    """Deletes a ComputeDomain, and does not wait."""
    api.delete(f"{DOMAINS}/{name}")


def workload(
    name: str, domain: str, uid: str, *, dies_after_s: float = 0, grace_s: int = 1,
    resources: Mapping[str, int] | None = None, **options: Any,
) -> Object:  # fmt: skip
    """A pod with a channel of a domain. `dies_after_s`: it goes on for so long after SIGTERM. `options`: those of any
    pod."""
    claim = {"name": "channel", "resourceClaimTemplateName": f"{domain}-channel"}
    command = WORKLOAD.replace("{dies_after_s}", str(dies_after_s))
    return pods.tenant(
        name, resources, claims=[claim], command=command, labels={DOMAIN_OF: uid}, grace_s=grace_s, **options
    )


def daemons(api: Api, uid: str, node: str | None = None) -> list[Object]:
    """The pods of a domain's daemon, those that are ending included; those of one node, if it is named."""
    found = api.items(DAEMON_PODS, labelSelector=f"{LABEL}={uid}")
    return [pod for pod in found if node in (None, pod["spec"].get("nodeName"))]


def ready_in_clique(api: Api, uid: str) -> bool:
    """A domain's clique has a daemon of this node that is ready."""
    found = api.find(f"{API}/namespaces/{NAMESPACE}/computedomaincliques/{uid}.{CLIQUE}") or {}
    return any(d["nodeName"] == node_name() and d["status"] == "Ready" for d in found.get("daemons", ()))


def ready_in_status(api: Api, uid: str) -> bool:
    """The status of a domain says that this node is ready. The controller makes it of the clique every 2 s."""
    return node_name() in ready_nodes(api, uid)


def ready_nodes(api: Api, uid: str) -> frozenset[str]:
    """The nodes that are ready by the status of a domain."""
    found = [domain for domain in api.items(ALL_DOMAINS) if domain["metadata"]["uid"] == uid]
    nodes = [node for domain in found for node in domain.get("status", {}).get("nodes", ())]
    return frozenset(node["name"] for node in nodes if node["status"] == "Ready")


# --- what happens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """An object as it came to be."""

    revision: int
    """Of etcd: one order of all kinds of objects."""
    at: float
    kind: str
    is_gone: bool
    thing: Object

    @property
    def uid(self) -> str:
        """The object's."""
        return str(self.thing["metadata"]["uid"])


@dataclass(frozen=True, slots=True)
class LabelValue:
    """A value that the label was given, None for its removal; and when, in seconds since the scenario's start."""

    value: str | None
    at: float


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A time in which a workload ran without the label of its domain, or without a ready daemon of it."""

    workload: str
    lacks: str
    at_s: float
    """Since the scenario's start."""
    for_s: float
    """Up to now, if it lasts."""
    lasts: bool = False

    def __str__(self) -> str:
        return f"{self.workload} runs while {self.lacks}, at {self.at_s:.2f} s for {self.for_s:.2f} s"


_WATCHED: Final = {"Node": NODES, "Pod": PODS, "ComputeDomain": ALL_DOMAINS}


@final
class History:
    """Every change of the Nodes, the pods and the ComputeDomains."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: list[Seen] = []
        self._now: dict[str, dict[str, Seen]] = {kind: {} for kind in _WATCHED}
        self._since = 0
        self._began = time.monotonic()
        self.failed: list[str] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watches while the context is open."""
        over = threading.Event()
        threads = [
            threading.Thread(target=self._watch, args=(kind, over), name=f"watch {kind}", daemon=True)
            for kind in _WATCHED
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(timeout=patient(30))

    def begin(self, api: Api) -> None:
        """A scenario begins."""
        self._catch_up(api)
        with self._lock:
            self._seen = [seen for now in self._now.values() for seen in now.values()]
            self._since = max((seen.revision for seen in self._seen), default=0)
            self._began = time.monotonic()

    # --- what is asked ----------------------------------------------------------------------------------------------

    def label(self, api: Api, node: str | None = None) -> list[LabelValue]:
        """Each value that the label of this node, or another one, was given since the scenario began, in order."""
        found: list[LabelValue] = []
        last: str | None = None
        for seen in self.of("Node", api):
            if seen.thing["metadata"]["name"] != (node or node_name()):
                continue
            value = label_of(seen.thing)
            if value != last and seen.revision > self._since:
                found.append(LabelValue(value, round(seen.at - self._began, 2)))
            last = value
        return found

    def of(self, kind: str, api: Api) -> list[Seen]:
        """All that was seen of a kind, in order."""
        return [seen for seen in self.all(api) if seen.kind == kind]

    def all(self, api: Api) -> list[Seen]:
        """All that was seen up to now, in order."""
        self._catch_up(api)
        with self._lock:
            return sorted(self._seen, key=lambda seen: seen.revision)

    def uncovered(self, api: Api) -> list[str]:
        """When a workload ran that was not being deleted, and its node's label was not its domain's, or no daemon of
        the domain was ready there; as sentences."""
        return [str(one) for one in self.uncovered_times(api)]

    def uncovered_times(self, api: Api) -> list[Uncovered]:
        """The same, for those who ask how long."""
        now = _Now()
        began: dict[tuple[str, str], float] = {}
        found: list[Uncovered] = []

        def end(wrong: tuple[str, str], at: float, *, lasts: bool = False) -> None:
            first = began.pop(wrong)
            found.append(Uncovered(*wrong, first - self._began, max(0.0, at - first), lasts))

        for seen in self.all(api):
            now.apply(seen)
            lacking = set(now.wrong())
            for wrong in began.keys() - lacking:
                end(wrong, seen.at)
            for wrong in lacking - began.keys():
                began[wrong] = seen.at
        for wrong in tuple(began):
            end(wrong, time.monotonic(), lasts=True)
        return sorted(found, key=lambda one: one.at_s)

    def told(self, api: Api) -> str:
        """The history in words, for the report of a failure."""
        lines: list[str] = []
        last: dict[str, str] = {}
        for seen in self.all(api):
            words = _words(seen)
            if words and last.get(seen.uid) != words:
                lines.append(f"{seen.at - self._began:8.2f} s  {seen.revision}  {words}")
            last[seen.uid] = words
        return "\n".join(lines)

    # --- watching ---------------------------------------------------------------------------------------------------

    def _catch_up(self, api: Api) -> None:
        def has_caught_up() -> bool:
            assert not self.failed, self.failed
            for kind, path in _WATCHED.items():
                there = {o["metadata"]["uid"]: _revision(o) for o in api.items(path)}
                with self._lock:
                    mine = {uid: seen.revision for uid, seen in self._now[kind].items()}
                # The watch may be ahead of the list.
                assert mine.keys() == there.keys(), (kind, mine, there)
                assert all(mine[uid] >= there[uid] for uid in there), (kind, mine, there)
            return True

        eventually(has_caught_up, "the watches")

    def _watch(self, kind: str, over: threading.Event) -> None:
        api, version = Api(), "0"
        while not over.is_set():
            query = {"timeoutSeconds": _WATCH_S, "resourceVersion": version, "allowWatchBookmarks": "true"}
            try:
                for event in api.watch(_WATCHED[kind], **query):
                    if event["type"] == "ERROR":
                        self.failed.append(f"{kind}: {event['object']}")
                        return
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._record(kind, event)
            except (OSError, http.client.HTTPException, ValueError, ApiError) as error:
                if not over.wait(_POLL_S):
                    api = Api()
                    self.failed.append(f"{kind}: {error!r}")

    def _record(self, kind: str, event: Object) -> None:
        thing = event["object"]
        seen = Seen(_revision(thing), time.monotonic(), kind, event["type"] == "DELETED", thing)
        with self._lock:
            self._seen.append(seen)
            if seen.is_gone:
                self._now[kind].pop(seen.uid, None)
            else:
                self._now[kind][seen.uid] = seen


@dataclass(slots=True)
class _Now:
    """The state after each change."""

    labels: dict[str, str | None] = field(default_factory=dict)
    """By node."""
    daemons: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Node and domain by UID of the pod, of those that are ready and not ending."""
    workloads: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """Name, node and domain by UID of the pod, of those that run and are not being deleted."""

    def apply(self, seen: Seen) -> None:
        if seen.kind == "Node":
            self.labels[seen.thing["metadata"]["name"]] = label_of(seen.thing)
        if seen.kind != "Pod":
            return
        self.daemons.pop(seen.uid, None)
        self.workloads.pop(seen.uid, None)
        meta = seen.thing["metadata"]
        if seen.is_gone or "deletionTimestamp" in meta:
            return
        labels, node = meta.get("labels", {}), seen.thing["spec"].get("nodeName", "")
        if meta["namespace"] == NAMESPACE and LABEL in labels and is_ready(seen.thing):
            self.daemons[seen.uid] = (node, labels[LABEL])
        if DOMAIN_OF in labels and pods.phase(seen.thing) == "Running":
            self.workloads[seen.uid] = (meta["name"], node, labels[DOMAIN_OF])

    def wrong(self) -> Iterator[tuple[str, str]]:
        """The workload, and what it lacks."""
        for name, node, domain in self.workloads.values():
            if (label := self.labels.get(node)) != domain:
                yield name, f"the label is {label}"
            if (node, domain) not in self.daemons.values():
                yield name, NO_DAEMON


def label_of(node: Object) -> str | None:
    """The label's value; None if the Node has none."""
    value = node["metadata"].get("labels", {}).get(LABEL)
    return None if value is None else str(value)


def is_ready(pod: Object) -> bool:
    """Kubelet says that it is."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _revision(thing: Object) -> int:
    return int(thing["metadata"]["resourceVersion"])


def _words(seen: Seen) -> str:
    meta = seen.thing["metadata"]
    name = f"{seen.kind} {meta.get('namespace', '')}/{meta['name']}"
    if seen.is_gone:
        return f"{name} gone"
    if seen.kind == "Node":
        return f"{name} label {label_of(seen.thing)}"
    ending = " ending" if "deletionTimestamp" in meta else ""
    if seen.kind == "Pod":
        return f"{name} {pods.phase(seen.thing)}{' ready' if is_ready(seen.thing) else ''}{ending}"
    return f"{name} {seen.thing.get('status')}{ending}"
