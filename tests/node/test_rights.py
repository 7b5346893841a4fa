"""The rights of the daemon's account on a real API server: each is used, no other one is needed, and the admission
policies limit the writes to the pod's own node."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.manifests import DEPLOY
from tests.deploy.rights import Right, rights_of
from tests.deploy.test_admission import (
    NAMELESS,
    NO_LABEL,
    OTHERS_EVENT,
    OTHERS_LABEL,
    OTHERS_NODE,
    OTHERS_SLICE,
)  # fmt: skip
from tests.node import daemonset, domains, pods
from tests.node.books import DRIVER
from tests.node.claims import ClaimNode
from tests.node.cluster import NODES, SLICES, Api, ApiError, Object, eventually, kubectl
from tests.node.daemonset import NAMESPACE
from tests.node.fake_host import H100_RESOURCE
from tests.node.node import Node
from tests.node.rights import (
    ACCOUNT,
    CLAIMS_OF,
    DOMAIN_LABEL,
    IDLE,
    NVIDIA_NAMESPACE,
    events_of,
    imex_host,
    nvidias_definitions,
    open_group,
)  # fmt: skip
from tests.support.patience import patient

H: Final = H100_RESOURCE
VALUES: Final[Mapping[str, Any]] = {
    "dra": {"enabled": True},
    "events": {"enabled": True},
    "computeDomains": {"enabled": True},
}

ROLES: Final = ("ClusterRole", "Role")
POLICIES: Final = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
DOMAINS_OF: Final = "/apis/resource.nvidia.com/v1beta1/namespaces/{}/computedomains"
CLIQUES_OF: Final = "/apis/resource.nvidia.com/v1beta1/namespaces/{}/computedomaincliques"
EVENTS_OF: Final = "/api/v1/namespaces/{}/events"

CLIQUE: Final = "c0ffee00-0000-4000-8000-000000000001.7"
CLIQUE_FILE: Final = Path("/etc/kubernetes/node-feature-discovery/features.d/gfd")
CHANNEL: Final = Path("/dev/nvidia-caps-imex-channels/channel0")

AGAIN_S: Final = patient(120.0)
"""Above kubelet's pause of 60 to 90 s before it prepares a claim again. It may need a second call: the API server's
node authorizer refuses it the claim (`no relationship found between node …`) until it has seen that the pod is on the
node. Meanwhile the daemon does not know of the claim, and kubelet could give its GPU to a pod."""

AUDIT_POLICY: Final = f"""\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {{level: Metadata, users: ["{ACCOUNT}"]}}
- {{level: None}}
"""


# --- the audit log --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Audit:
    """What the API server has written down about the requests of the daemon's account."""

    path: Path
    ready_at: datetime
    """When the server was ready. Before that it refuses what roles grant, as it has not read them: 403."""

    def entries(self, addresses: set[str]) -> list[Object]:
        """The requests that came from these addresses since the server was ready."""
        entries = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [
            entry
            for entry in entries
            if set(entry["sourceIPs"]) & addresses
            and datetime.fromisoformat(entry["requestReceivedTimestamp"]) >= self.ready_at
        ]


def _used(entries: list[Object]) -> set[tuple[str, Right]]:
    """The rights that these requests needed, each with the namespace of the Role that grants it."""
    found = set()
    for entry in entries:
        ref = entry["objectRef"]
        reason = entry["annotations"]["authorization.k8s.io/reason"]
        assert 'Binding "gpuactors-' in reason, reason
        namespace = "" if "ClusterRoleBinding" in reason else ref["namespace"]
        found.add((namespace, (ref.get("apiGroup", ""), ref["resource"], entry["verb"])))
    return found


# --- what is done with the rights -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(whole_node: Node) -> Iterator[None]:
    """The chart's installation, with what claims and compute domains need on the host and in the cluster."""
    with ExitStack() as stack:
        stack.enter_context(nvidias_definitions(whole_node.api))
        stack.enter_context(imex_host())
        stack.enter_context(domains.toolkit())
        CLIQUE_FILE.write_text(f"nvidia.com/gpu.clique={CLIQUE}\n")
        CHANNEL.parent.mkdir(exist_ok=True)
        if not CHANNEL.exists():
            subprocess.run(("mknod", str(CHANNEL), "c", "505", "0"), check=True)
        for example in ("dra/device-class.yaml", "compute-domains/device-classes.yaml"):
            kubectl("apply", "-f", str(DEPLOY / "examples" / example))
        # Every mode that uses the API server, at once: only the chart has that.
        whole_node.switch(lambda: daemonset.install_chart(VALUES))
        yield
        whole_node.uninstall()
    CLIQUE_FILE.unlink()


@pytest.fixture(scope="module")
def audit(whole_node: Node, everything: None) -> Audit:
    """The API server writes an audit log from now on. It goes on with that after these tests: nobody minds.
    The daemon runs before that, and finds the server again. A controller that goes on as well may ask the server again
    only a minute later, and takes the end of a pod for the end of its claim's reservation only then."""
    directory = Path(os.environ["K8S_DIR"])
    policy, log = directory / "run/audit-policy.yaml", directory / "log/audit.log"
    policy.write_text(AUDIT_POLICY)
    words = f"--audit-policy-file={policy} --audit-log-path={log} --audit-log-mode=blocking"
    with whole_node.without("api", "cm", environment={"K8S_APISERVER_ARGS": words}):
        log.unlink(missing_ok=True)
    return Audit(log, datetime.now(UTC))


def _claim(api: Api, namespace: str, name: str, device_class: str, config: Object | None = None) -> None:
    devices: Object = {"requests": [{"name": "it", "exactly": {"deviceClassName": device_class}}]}
    if config is not None:
        opaque = {"driver": "compute-domain.nvidia.com", "parameters": config}
        devices["config"] = [{"requests": ["it"], "opaque": opaque}]
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}}
    api.create(CLAIMS_OF.format(namespace), {**body, "spec": {"devices": devices}})


def _pod(api: Api, namespace: str, name: str) -> None:
    """A pod that uses the claim of its name."""
    entry = {"name": "it", "resourceClaimName": name}
    body = pods.tenant(name, claims=[entry], command=IDLE)
    api.create(f"/api/v1/namespaces/{namespace}/pods", body)


def _runs(api: Api, namespace: str, name: str) -> bool:
    pod = api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
    assert pods.phase(pod) == "Running", pods.told(pod)
    return True


def _use_slices_and_claims(node: Node) -> None:
    """Slices are made, changed and deleted; a claim is prepared and released."""
    api = node.api
    first, second = node.host.plug(0x21), node.host.plug(0x22)
    eventually(lambda: node.books.look().offered == {first, second}, "the slice with two GPUs")
    stray = _slice("stray", node.name, driver=DRIVER)
    api.create(SLICES, stray)
    eventually(lambda: api.find(f"{SLICES}/stray") is None, "the end of a slice that nobody has asked for")
    # Scheduler and kubelet may ask the API server again only a minute after its restart. Until kubelet does, it could
    # give the GPU of a claim that is reserved already to another pod.
    pods.create(api, pods.tenant("first", command=IDLE))
    pods.wait_running(api, "first", AGAIN_S)
    pods.stop(api, "first", within_s=AGAIN_S)
    _claim(api, "default", "gpu", "vfio.gpu.nvidia.com")
    _pod(api, "default", "gpu")
    ClaimNode(node).comes_to("gpu", "Running", AGAIN_S)
    pods.stop(api, "gpu")
    claim = f"{CLAIMS_OF.format('default')}/gpu"
    api.delete(claim)
    eventually(lambda: api.find(claim) is None, "the end of the claim", AGAIN_S)


@contextmanager
def _domain_in_use(node: Node) -> Iterator[None]:
    """A channel and a daemon of a ComputeDomain, with NVIDIA's controller and daemon played here."""
    api = node.api
    kind = {"apiVersion": "resource.nvidia.com/v1beta1"}
    domain = {**kind, "kind": "ComputeDomain", "metadata": {"name": "training"}, "spec": {"numNodes": 1}}
    uid = api.create(DOMAINS_OF.format("default"), domain)["metadata"]["uid"]
    clique = {**kind, "kind": "ComputeDomainClique", "metadata": {"name": f"{uid}.{CLIQUE}"}}
    api.create(
        CLIQUES_OF.format(NVIDIA_NAMESPACE),
        {**clique, "daemons": [{"nodeName": node.name, "status": "Ready"}]},
    )
    config = {**kind, "domainID": uid}
    channel = {**config, "kind": "ComputeDomainChannelConfig", "allocationMode": "Single"}
    _claim(api, "default", "channel", "compute-domain-default-channel.nvidia.com", channel)
    daemon = {**config, "kind": "ComputeDomainDaemonConfig"}
    _claim(api, NVIDIA_NAMESPACE, "daemon", "compute-domain-daemon.nvidia.com", daemon)
    _pod(api, "default", "channel")

    def label() -> object:
        return node.node_object()["metadata"]["labels"].get(DOMAIN_LABEL)

    try:
        eventually(lambda: label() == uid, "the label of the domain", AGAIN_S)
        _pod(api, NVIDIA_NAMESPACE, "daemon")
        ClaimNode(node).comes_to("channel", "Running", AGAIN_S)
        eventually(lambda: _runs(api, NVIDIA_NAMESPACE, "daemon"), "the daemon of the domain", AGAIN_S)
        yield
    finally:
        pods.stop(api, "channel")
        api.delete(f"/api/v1/namespaces/{NVIDIA_NAMESPACE}/pods/daemon", 1)
    eventually(lambda: label() is None, "the end of the label")


@pytest.mark.long
def test_each_right_of_every_role_is_used_and_no_other_one(
    node: Node, everything: None, audit: Audit
) -> None:
    daemon = node.daemon()
    addresses = {daemon.address}
    held = node.host.plug(0x23)
    with open_group(0x23) as pid:
        _use_slices_and_claims(node)

        def about_it() -> list[Object]:
            return events_of(node.api, "HeldByOther", node.name, f"process {pid} ")

        (told,) = eventually(about_it, "an event about the GPU")
        assert held in told["message"], told
        node.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{daemon.name}", 1)
        eventually(lambda: node.daemon().uid != daemon.uid, "another pod")
        addresses.add(node.daemon().address)
        with _domain_in_use(node):
            pass
        before = told["lastTimestamp"]
        eventually(lambda: about_it()[0]["lastTimestamp"] > before, "the same event, renewed")
        assert len(about_it()) == 1
    node.settled({H: 3})
    _check_audit(node, audit.entries(addresses))


def _check_audit(node: Node, entries: list[Object]) -> None:
    """None of these requests was refused, and together they needed exactly what the roles grant."""
    refused = [e for e in entries if e["annotations"]["authorization.k8s.io/decision"] != "allow"]
    assert not refused, refused[:3]
    assert not [e for e in entries if e["responseStatus"]["code"] in (401, 403)]
    nodes = [e for e in entries if e["objectRef"]["resource"] == "nodes"]
    assert all(e["objectRef"].get("name") == node.name for e in nodes), nodes
    assert _used(entries) == set(rights_of(_roles(node)))


def _roles(node: Node) -> list[Object]:
    """The roles of the installation, as the API server has them."""
    group = "/apis/rbac.authorization.k8s.io/v1"
    found = node.api.items(f"{group}/clusterroles", labelSelector=daemonset.LABEL)
    found += node.api.items(f"{group}/roles", labelSelector=daemonset.LABEL)
    assert len(found) == 3, [role["metadata"]["name"] for role in found]
    return found


# --- policies -------------------------------------------------------------------------------------------------------


OTHER: Final = "node-2"
"""There is a Node of this name while the policies are tried; nothing runs on it."""

BOUND: Final = ("--bound-object-kind", "Pod", "--bound-object-name")
INVALID: Final = 422
DRY: Final = {"dryRun": "All"}


def _slice(name: str, node: str | None, *, driver: str = "tests.example") -> Object:
    pool = {"name": node or "all", "generation": 1, "resourceSliceCount": 1}
    where: Object = {"allNodes": True} if node is None else {"nodeName": node}
    spec = {"driver": driver, "pool": pool, **where, "devices": [{"name": "one"}]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": spec,
    }


def _event(name: str, host: str | None) -> Object:
    about = {"kind": "Node", "name": "vm", "namespace": ""}
    source = {"source": {"component": "gpuactors", "host": host}} if host is not None else {}
    body = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": "default"}}
    return {
        **body,
        "involvedObject": about,
        "reason": "Tried",
        "message": "tried",
        "type": "Warning",
        **source,
    }


@dataclass(frozen=True, slots=True)
class Try:
    """One request: what it is, and whether it is a policy's to deny, in which words."""

    method: str
    path: str
    body: Object | None
    said: str | None = None

    def by(self, api: Api) -> str:
        """Makes it as a dry run: what the policy said; empty if it was admitted. Raises ApiError for anything else."""
        kind = {"PATCH": "application/merge-patch+json"}.get(self.method, "application/json")
        try:
            api.call(self.method, self.path, self.body, content_type=kind, query=DRY)
        except ApiError as error:
            _, found, words = error.message.partition(" denied request: ")
            if not found or error.status != INVALID:
                raise
            return words
        return ""


def _tries(own: str) -> list[Try]:
    """All that a token of the daemon on `own` may do, and may not. `set up` has made what is changed here."""
    slices, events = SLICES, EVENTS_OF.format("default")
    mine, others = f"{NODES}/{own}", f"{NODES}/{OTHER}"
    owner = {"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "y"}
    domain = {"metadata": {"labels": {DOMAIN_LABEL: "some"}}}
    return [
        Try("POST", slices, _slice("a", own)),
        Try("DELETE", f"{slices}/own", None),
        Try("POST", slices, _slice("a", OTHER), OTHERS_SLICE),
        Try("POST", slices, _slice("a", None), OTHERS_SLICE),
        Try("DELETE", f"{slices}/others", None, OTHERS_SLICE),
        Try("DELETE", f"{slices}/all", None, OTHERS_SLICE),
        Try("PATCH", mine, domain),
        Try("PATCH", others, domain, OTHERS_NODE),
        Try("PATCH", mine, {"metadata": {"labels": {"zone": "b"}}}, OTHERS_LABEL),
        Try("PATCH", mine, {"metadata": {"labels": {"kubernetes.io/hostname": "b"}}}, OTHERS_LABEL),
        Try("PATCH", mine, {"metadata": {"labels": {"kubernetes.io/hostname": None}}}, OTHERS_LABEL),
        Try("PATCH", mine, {"metadata": {"annotations": {"a": "b"}}}, NO_LABEL),
        Try("PATCH", mine, {"metadata": {"finalizers": ["tests.example/a"]}}, NO_LABEL),
        Try("PATCH", mine, {"metadata": {"ownerReferences": [owner]}}, NO_LABEL),
        Try("PATCH", mine, {"spec": {"unschedulable": True}}, NO_LABEL),
        Try("PATCH", mine, {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}, NO_LABEL),
        Try("POST", events, _event("a", own)),
        Try("PATCH", f"{events}/own", {"count": 2}),
        Try("POST", events, _event("a", OTHER), OTHERS_EVENT),
        Try("POST", events, _event("a", None), OTHERS_EVENT),
        Try("PATCH", f"{events}/own", {"source": {"host": OTHER}}, OTHERS_EVENT),
        Try("PATCH", f"{events}/others", {"count": 2}, OTHERS_EVENT),
        Try("PATCH", f"{events}/others", {"source": {"host": own}}, OTHERS_EVENT),
        Try("PATCH", f"{events}/none", {"source": {"host": own}}, OTHERS_EVENT),
    ]


@contextmanager
def _others(node: Node) -> Iterator[None]:
    """Another node, and objects of both."""
    api, events = node.api, EVENTS_OF.format("default")
    api.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": OTHER}})
    slices = {"own": node.name, "others": OTHER, "all": None}
    hosts = {"own": node.name, "others": OTHER, "none": None}
    try:
        for name, where in slices.items():
            api.create(SLICES, _slice(name, where))
        for name, where in hosts.items():
            api.create(events, _event(name, where))
        yield
    finally:
        for path in (*(f"{SLICES}/{name}" for name in slices), *(f"{events}/{name}" for name in hosts)):
            api.delete(path)
        api.delete(f"{NODES}/{OTHER}")


def _token(*words: str) -> Api:
    return Api(token=kubectl("create", "token", "gpuactors", "-n", NAMESPACE, *words).strip())


def test_each_policy_admits_and_denies_with_its_message(node: Node, everything: None) -> None:
    """Each request with the token of the daemon's pod; by a token that names no node; and by an administrator."""
    node.host.plug(0x21)
    node.settled({H: 1})
    daemon = node.daemon()
    with _others(node):
        pods_own, nameless = _token(*BOUND, daemon.name), _token()
        tries = _tries(node.name)
        for one in tries:
            _expect(one, pods_own)
        for one in tries:
            policy = {"slices": "slices", "nodes": "node", "events": "events"}
            (kind,) = (policy[word] for word in policy if word in one.path)
            assert one.by(nameless) == NAMELESS[f"gpuactors-own-{kind}"], one
        for one in tries:
            assert one.by(node.api) == "", one
    by_name = {
        one["metadata"]["name"]: one for one in node.api.items(POLICIES, labelSelector=daemonset.LABEL)
    }
    assert by_name.keys() == NAMELESS.keys()
    eventually(lambda: all(_type_checked(node.api, name) for name in by_name), "the policies' type check")


def _expect(one: Try, api: Api) -> None:
    """Waits for the answer: a policy counts a moment after it was made."""

    def look() -> bool:
        said = one.by(api)
        assert said == (one.said or ""), (one, said)
        return True

    eventually(look, "a policy's answer", 10)


def _type_checked(api: Api, name: str) -> bool:
    found = api.get(f"{POLICIES}/{name}")
    status = found.get("status", {})
    assert status.get("observedGeneration") == found["metadata"]["generation"], status
    assert not status.get("typeChecking", {}).get("expressionWarnings"), status
    return True


def test_a_role_and_no_policy_refuses_every_other_request(node: Node, everything: None) -> None:
    """What a token of the daemon may not even ask: others' objects, secrets, the same event by its other group."""
    node.host.plug(0x21)
    node.settled({H: 1})
    pods_own = _token(*BOUND, node.daemon().name)
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "a", "namespace": "default"},
    }
    for method, path, body in (
        ("GET", "/api/v1/pods", None),
        ("GET", "/api/v1/namespaces/gpuactors/secrets", None),
        ("GET", NODES, None),
        ("GET", f"/api/v1/namespaces/{NAMESPACE}/events", None),
        ("GET", "/apis/resource.k8s.io/v1/resourceclaims", None),
        ("GET", CLIQUES_OF.format("default"), None),
        ("POST", "/apis/events.k8s.io/v1/namespaces/default/events", event),
        ("PATCH", f"{NODES}/{node.name}/status", {"status": {}}),
    ):
        with pytest.raises(ApiError) as refused:
            pods_own.call(
                method,
                path,
                body,
                content_type="application/merge-patch+json" if method == "PATCH" else "application/json",
                query=DRY if body else None,
            )
        assert (refused.value.status, refused.value.reason) == (403, "Forbidden"), (method, path)
