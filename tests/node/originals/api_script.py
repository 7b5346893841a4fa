"""One script of calls to an API server, as data: all that the daemon asks, and all that is recorded in shared/evidence.

A step that asks what a recording asks has its name. Must not know which server answers.
"""

from __future__ import annotations

from typing import Any, Final

from gpuactors.core.values.domain import LABEL
from gpuactors.kube.client import JSON_PATCH, MERGE_PATCH, METADATA_ONLY
from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.kube.status import Object
from tests.node.originals.api_steps import Arrange, Ask, Client, Edited, Overload, Raw, Step, Until, Watch

DRIVER: Final = "script.example.com"
NODE: Final = "script-node"
"""A Node of the script's own: kubelet deletes the slices of its node, and changes its labels."""
UID: Final = "11111111-2222-3333-4444-555555555555"
NO_UID: Final = "00000000-0000-0000-0000-000000000000"

_SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"
_CLAIMS: Final = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
_CLASSES: Final = "/apis/resource.k8s.io/v1/deviceclasses"
_NODES: Final = "/api/v1/nodes"
_NODE: Final = f"{_NODES}/{NODE}"
_PODS: Final = "/api/v1/namespaces/default/pods"
_EVENTS: Final = "/api/v1/namespaces/default/events"
_DOMAINS: Final = "/apis/resource.nvidia.com/v1beta1"
_OURS: Final = f"{_SLICES}?fieldSelector=spec.driver%3D{DRIVER}"
_OURS_HERE: Final = f"{_OURS}%2Cspec.nodeName%3D{NODE}"
_THIS_NODE: Final = f"{_NODES}?fieldSelector=metadata.name%3D{NODE}"

LEFTOVERS: Final = (
    _OURS,
    f"{_SLICES}?fieldSelector=spec.driver%3Dother.example.com",
    *(f"{_CLAIMS}/{name}" for name in ("script-plain", "script-template", "script-first")),
    f"{_CLASSES}/script-class",
    f"{_EVENTS}/script-vm.1",
    f"{_EVENTS}/script-node.1",
    f"{_EVENTS}/script_vm",
    f"{_DOMAINS}/namespaces/default/computedomains/script",
    f"{_DOMAINS}/namespaces/default/computedomaincliques/script.1",
    f"{_PODS}/script-pod",
    _NODE,
)
"""What the script makes: by a path, or all that a list selects."""


# --- what is sent -----------------------------------------------------------------------------------------


def _device(index: int, **more: Any) -> Object:
    address = f"0000:{index:02x}:00.0"
    attributes = {
        "type": {"string": "vfio"},
        "index": {"int": index},
        "iommuFDEnabled": {"bool": False},
        "resource.kubernetes.io/pciBusID": {"string": address},
    }
    return {"name": f"gpu-{index:04}", "attributes": attributes} | more


_DEVICES: Final = [_device(1), _device(2), _device(3)]
_TAINT: Final = {"key": "gpuactors.example.com/held", "value": "yes", "effect": "NoSchedule"}
_COUNTERS: Final = {"vf-slots": {"value": "2"}}
_CONSUMES: Final = {"counterSet": "card", "counters": _COUNTERS}
_SETS: Final = [{"name": "card", "counters": _COUNTERS}]
_TAINTED: Final = [_device(1, taints=[_TAINT]), _device(2), _device(3)]


def _slice(
    devices: list[Object], *, metadata: Object | None = None, driver: str = DRIVER, sets: Any = None
) -> Object:
    owner = {
        "apiVersion": "v1",
        "kind": "Node",
        "name": NODE,
        "uid": "{node:metadata.uid}",
        "controller": True,
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": metadata or {"generateName": f"{NODE}-{driver}-", "ownerReferences": [owner]},
        "spec": {
            "driver": driver,
            "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
        }
        | ({"devices": devices} if devices or sets is None else {})
        | ({} if sets is None else {"sharedCounters": sets}),
    }


def _refused(name: str, body: Any, query: str = "?dryRun=All") -> Ask:
    return Ask(name=name, method="POST", path=f"{_SLICES}{query}", body=body)


def _label_patch(name: str, *operations: Object, accept: str = METADATA_ONLY) -> Ask:
    path = f"/metadata/labels/{LABEL.replace('/', '~1')}"
    patch = [{"path": path} | operation for operation in operations]
    return Ask(name=name, method="PATCH", path=_NODE, body=patch, content_type=JSON_PATCH, accept=accept)


def _claim(name: str, *requests: Object, metadata: Object | None = None, config: Any = None) -> Object:
    devices: Object = {"requests": list(requests)} | ({"config": config} if config else {})
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name} | (metadata or {}),
        "spec": {"devices": devices},
    }


def _allocated(request: str, **more: Any) -> Object:
    result = {"request": request, "driver": DRIVER, "pool": NODE, "device": "gpu-0001"}
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}
    return {
        "allocation": {
            "devices": {"results": [result]} | more,
            "nodeSelector": {"nodeSelectorTerms": [term]},
        },
        "reservedFor": [{"resource": "pods", "name": "script-pod", "uid": "{pod:metadata.uid}"}],
    }


_PLAIN: Final = {"name": "gpu", "exactly": {"deviceClassName": DRIVER}}
_PARAMETERS: Final = {
    "apiVersion": "resource.nvidia.com/v1beta1",
    "kind": "VfioDeviceConfig",
    "iommu": {"backendPolicy": "LegacyOnly", "enableAPIDevice": True},
}
_CONFIG: Final = {"requests": ["gpu/any"], "opaque": {"driver": DRIVER, "parameters": _PARAMETERS}}
_FIRST_OF: Final = {
    "name": "gpu",
    "firstAvailable": [
        {"name": "none", "deviceClassName": DRIVER, "count": 9},
        {"name": "any", "deviceClassName": DRIVER},
    ],
}
_FINALIZER: Final = {"metadata.finalizers": ["resource.kubernetes.io/delete-protection"]}


def _event(name: str, about: Object, namespace: str = "default") -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": about,
        "reason": "HeldByOther",
        "message": "held",
        "source": {"component": "gpuactors", "host": NODE},
        "firstTimestamp": "2026-11-22T12:00:00Z",
        "lastTimestamp": "2026-11-22T12:00:00Z",
        "count": 1,
        "reportingComponent": "gpuactors",
        "reportingInstance": NODE,
        "type": "Warning",
    }


_POD: Final = {
    "kind": "Pod",
    "name": "script-vm",
    "namespace": "default",
    "uid": "d3f0c9f4-4f6e-4f0e-8f4b-7f9c0a4b8e11",
    "apiVersion": "v1",
}


# --- what others do ---------------------------------------------------------------------------------------


def _pod(server: FakeApiServer) -> Object:
    """The fake has no pods; the script needs the UID of one."""
    return {"metadata": {"uid": server.store.uid()}}


def _joined(server: FakeApiServer) -> Object:
    return server.add_node(NODE)


def _account(name: str) -> Ask:
    path = "/api/v1/namespaces/default/serviceaccounts"
    return Ask(name=name, method="POST", path=path, body={"metadata": {"name": "default"}})


_NODE_OBJECT: Final = {
    "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}},
    "spec": {"unschedulable": True},
}
_POD_OBJECT: Final = {
    "metadata": {"name": "script-pod"},
    "spec": {
        "nodeName": NODE,
        "automountServiceAccountToken": False,
        "containers": [{"name": "c", "image": "never-run"}],
    },
}

_ARRANGED: Final[tuple[Step, ...]] = (
    Arrange(
        name="node",
        original=(Ask(name="node", method="POST", path=_NODES, body=_NODE_OBJECT),),
        fake=_joined,
    ),
    Arrange(
        name="pod",
        original=(_account("account"), Ask(name="pod", method="POST", path=_PODS, body=_POD_OBJECT)),
        fake=_pod,
    ),
)


# --- the script -------------------------------------------------------------------------------------------

_BUS: Final = "spec.devices.0.attributes"

_SLICE_STEPS: Final[tuple[Step, ...]] = (
    Ask(name="slices-list-empty", path=_OURS),
    Ask(
        name="slices-list-empty-metadata-only",
        path=_OURS,
        accept=METADATA_ONLY.replace("Metadata", "MetadataList"),
    ),
    Ask(name="slice-get-missing", path=f"{_SLICES}/nope"),
    Ask(name="slice-create", method="POST", path=_SLICES, body=_slice(_DEVICES)),
    Ask(name="slice-get", path=f"{_SLICES}/{{slice-create:metadata.name}}"),
    Ask(name="slices-list", path=_OURS),
    Ask(name="slices-list-two-selectors", path=_OURS_HERE),
    Ask(name="slices-list-another-node", path=f"{_OURS}%2Cspec.nodeName%3Delsewhere"),
    Ask(name="slices-list-metadata-only", path=_OURS, accept=METADATA_ONLY.replace("Metadata", "MetadataList")),
    Ask(name="slices-unknown-selector", path=f"{_SLICES}?fieldSelector=spec.pool.name%3Dx"),
    _refused("slice-create-no-devices", _slice([])),
    _refused("slice-create-dry-run", _slice(_DEVICES)),
    _refused("slice-create-129-devices", _slice([_device(index) for index in range(129)])),
    _refused(
        "slice-create-33-attributes",
        _slice([_device(1, attributes={f"a{index}": {"int": index} for index in range(33)})]),
    ),
    _refused("slice-create-bad-device-name", _slice([_device(1, name="0000:23:00.0")])),
    _refused("slice-create-device-name-of-64", _slice([_device(1, name="a" * 64)])),
    _refused("slice-create-same-device-twice", _slice([*_DEVICES, _device(1)])),
    _refused("slice-create-string-of-65", _slice([_device(1, attributes={"x": {"string": "y" * 65}})])),
    _refused("slice-create-version-of-65", _slice([_device(1, attributes={"x": {"version": "1" * 65}})])),
    _refused("slice-create-two-values", _slice([_device(1, attributes={"x": {"string": "y", "int": 1}})])),
    _refused("slice-create-list-attribute", _slice([_device(1, attributes={"numa": {"ints": [0, 1]}})])),
    _refused(
        "slice-create-two-faults",
        _slice([_device(1, name="A"), _device(2, attributes={"x": {"string": "y" * 65}})]),
    ),
    _refused("slice-create-unknown-field", _slice(_DEVICES) | {"bogus": 1}, "?dryRun=All&fieldValidation=Strict"),
    _refused("slice-create-unknown-field-warn", _slice(_DEVICES) | {"bogus": 1}),
    _refused("slice-create-unknown-field-below", _slice([_device(1, bogus=1)])),
    _refused("slice-create-not-json", "not an object", ""),
    _refused("slice-create-broken-json", b'{"spec": ', ""),
    Ask(
        name="slice-create-wrong-content-type",
        method="POST",
        path=_SLICES,
        body=_slice(_DEVICES),
        content_type="text/plain",
    ),
    _refused("slice-create-name-taken", _slice(_DEVICES, metadata={"name": "{slice-create:metadata.name}"})),
)  # fmt: skip


def _put(name: str, answer: str, changes: Object | None = None, without: tuple[str, ...] = ()) -> Ask:
    path = f"{_SLICES}/{{slice-create:metadata.name}}"
    return Ask(name=name, method="PUT", path=path, body=Edited(answer, changes or {}, without))


_CHANGED: Final = "slice-put-changed"

_PUT_STEPS: Final[tuple[Step, ...]] = (
    _put("slice-put-same", "slice-create"),
    _put("slice-put-changed", "slice-create", {f"{_BUS}.index.int": 77}),
    _put("slice-put-stale", "slice-create", {f"{_BUS}.index.int": 78}),
    _put("slice-put-other-driver", _CHANGED, {"spec.driver": "other.example.com"}),
    _put("slice-put-other-node", _CHANGED, {"spec.nodeName": "elsewhere"}),
    _put("slice-put-other-pool", _CHANGED, {"spec.pool.name": "other"}),
    _put("slice-put-other-uid", _CHANGED, {"metadata.uid": NO_UID}),
    _put("slice-put-other-name", _CHANGED, {"metadata.name": "other"}),
    _put("slice-put-without-version", _CHANGED, without=("metadata.resourceVersion",)),
    _put("slice-put-pool-generation", _CHANGED, {"spec.pool.generation": 2}),
    _put("slice-put-owner-only", "slice-put-pool-generation", {"metadata.ownerReferences.0.controller": False}),
    Ask(name="slice-put-missing", method="PUT", path=f"{_SLICES}/nope",
        body=Edited(_CHANGED, {"metadata.name": "nope"})),
)  # fmt: skip


def _delete(name: str, what: str, **conditions: str) -> Ask:
    path = f"{_SLICES}/{{{what}:metadata.name}}"
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": conditions}
    return Ask(name=name, method="DELETE", path=path, body=options if conditions else None)


_VERSION: Final = "{slice-create-doomed:metadata.resourceVersion}"
_DOOMED_UID: Final = "{slice-create-doomed:metadata.uid}"

_DELETE_STEPS: Final[tuple[Step, ...]] = (
    Ask(name="slice-create-doomed", method="POST", path=_SLICES, body=_slice([])),
    _delete("slice-delete-wrong-uid", "slice-create-doomed", uid=NO_UID),
    _delete("slice-delete-wrong-version", "slice-create-doomed", uid=_DOOMED_UID, resourceVersion="1"),
    _delete("slice-delete", "slice-create-doomed", uid=_DOOMED_UID, resourceVersion=_VERSION),
    _delete("slice-delete-again", "slice-create-doomed"),
)


def _watch_path(timeout_s: int, *more: str, selector: str = f"spec.driver%3D{DRIVER}") -> str:
    query = ["watch=true", f"timeoutSeconds={timeout_s}", *more]
    return f"{_SLICES}?{'&'.join(query)}" + (f"&fieldSelector={selector}" if selector else "")


_BOOKMARKS: Final = "allowWatchBookmarks=true"
_SEEN: Final = "{slices-list-before-watch:metadata.resourceVersion}"

_WATCH_STEPS: Final[tuple[Step, ...]] = (
    # Not of ResourceSlices: a server that began with an empty etcd has all their events.
    Watch(
        name="watch-too-old",
        path=f"{_DOMAINS}/computedomains?watch=true&timeoutSeconds=2&resourceVersion=1",
    ),
    Watch(name="watch-future-version", path=_watch_path(1, "resourceVersion=99999999", selector="")),
    Watch(name="watch-not-a-version", path=_watch_path(1, "resourceVersion=abc")),
    Watch(name="watch-unknown-selector", path=_watch_path(1, selector="spec.pool.name%3Dx")),
    Watch(name="watch-from-nothing", path=_watch_path(1, _BOOKMARKS)),
    Watch(name="watch-from-zero", path=_watch_path(1, "resourceVersion=0")),
    Watch(
        name="watch-initial-events",
        path=_watch_path(1, _BOOKMARKS, "sendInitialEvents=true", "resourceVersionMatch=NotOlderThan"),
    ),
    Ask(name="slices-list-before-watch", path=_OURS_HERE),
    Watch(
        name="watch-edit-and-delete",
        path=_watch_path(4, _BOOKMARKS, f"resourceVersion={_SEEN}"),
        during=(
            _put("watched-put", "slice-put-owner-only", {f"{_BUS}.index.int": 78}),
            _put("watched-put-same", "watched-put"),
            _put("watched-put-again", "watched-put", {f"{_BUS}.index.int": 79}),
            Ask(name="watched-create-another-driver", method="POST", path=_SLICES,
                body=_slice(_DEVICES, driver="other.example.com")),
            _delete("watched-delete", "slice-create"),
            _delete("watched-delete-another-driver", "watched-create-another-driver"),
            Ask(name="watched-create", method="POST", path=_SLICES, body=_slice([])),
        ),
    ),
    Watch(name="watch-from-the-past", path=_watch_path(1, f"resourceVersion={_SEEN}")),
)  # fmt: skip

_NODE_STEPS: Final[tuple[Step, ...]] = (
    Ask(name="node-get", path=_NODE),
    Ask(name="node-get-metadata-only", path=_NODE, accept=METADATA_ONLY),
    Ask(name="node-get-missing", path=f"{_NODES}/script-nowhere", accept=METADATA_ONLY),
    _label_patch("label-remove-when-absent", {"op": "remove"}, accept="application/json"),
    _label_patch("label-test-absent", {"op": "test", "value": None}),
    _label_patch("label-test-empty", {"op": "test", "value": ""}),
    _label_patch("label-add-when-absent", {"op": "test", "value": None}, {"op": "add", "value": UID}),
    _label_patch("label-add-when-present", {"op": "test", "value": None}, {"op": "add", "value": "other"}),
    _label_patch("label-remove-other-value", {"op": "test", "value": "other"}, {"op": "remove"}),
    _label_patch("label-test-present", {"op": "test", "value": UID}),
    _label_patch("label-replace", {"op": "test", "value": UID}, {"op": "replace", "value": "other"}),
    _label_patch("label-remove", {"op": "test", "value": "other"}, {"op": "remove"}),
    _label_patch("label-replace-when-absent", {"op": "replace", "value": "other"}),
    _label_patch("label-bad-value", {"op": "add", "value": "not a label"}),
    _label_patch("label-unknown-operation", {"op": "put", "value": "other"}),
    Ask(
        name="label-patch-missing-node",
        method="PATCH",
        path=f"{_NODES}/script-nowhere",
        body=[{"op": "test", "path": "/metadata/labels/x", "value": None}],
        content_type=JSON_PATCH,
    ),
    Ask(name="label-patch-not-json", method="PATCH", path=_NODE, body=b"[{", content_type=JSON_PATCH),
    Ask(name="label-patch-not-a-list", method="PATCH", path=_NODE, body={"x": 1}, content_type=JSON_PATCH),
    Ask(
        name="label-patch-wrong-content-type", method="PATCH", path=_NODE, body=[], content_type="text/plain"
    ),
    Ask(
        name="label-patch-resource-version-conflict",
        method="PATCH",
        path=_NODE,
        body={"metadata": {"labels": {"x": "y"}, "resourceVersion": "1"}},
        content_type=MERGE_PATCH,
    ),
    _label_patch("label-add-before-watch", {"op": "add", "value": UID}),
    Watch(
        name="watch-node-metadata-only",
        path=f"{_THIS_NODE}&watch=true&timeoutSeconds=2",
        accept=METADATA_ONLY,
        during=(_label_patch("watched-label-remove", {"op": "test", "value": UID}, {"op": "remove"}),),
        after=1,
    ),
    Watch(
        name="watch-node-with-bookmarks",
        path=f"{_THIS_NODE}&watch=true&timeoutSeconds=1&{_BOOKMARKS}",
        accept=METADATA_ONLY,
    ),
)


def _status_put(name: str, answer: str, status: Object) -> Ask:
    path = f"{_CLAIMS}/{{{answer}:metadata.name}}/status"
    return Ask(name=name, method="PUT", path=path, body=Edited(answer, {"status": status}))


def _finalizer_put(name: str, answer: str) -> Ask:
    path = f"{_CLAIMS}/{{{answer}:metadata.name}}"
    return Ask(name=name, method="PUT", path=path, body=Edited(answer, _FINALIZER))


_OF_TEMPLATE: Final = {
    "annotations": {"resource.kubernetes.io/pod-claim-name": "c"},
    "ownerReferences": [
        {"apiVersion": "v1", "kind": "Pod", "name": "script-pod", "uid": "{pod:metadata.uid}", "controller": True}
    ],
}  # fmt: skip

_CLASS_OBJECT: Final = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": "script-class"},
    "spec": {"extendedResourceName": "example.com/script"},
}

_CLASS: Final = Arrange(
    name="class",
    original=(Ask(name="class", method="POST", path=_CLASSES, body=_CLASS_OBJECT),),
    fake=lambda server: server.add_class("script-class", "example.com/script"),
)

_CLASS_STEPS: Final[tuple[Step, ...]] = (
    _CLASS,
    Ask(name="classes-list", path=f"{_CLASSES}?fieldSelector=metadata.name%3Dscript-class"),
    Ask(name="classes-list-none", path=f"{_CLASSES}?fieldSelector=metadata.name%3Dscript-none"),
)

_CLAIM_STEPS: Final[tuple[Step, ...]] = (
    Ask(name="claim-missing", path=f"{_CLAIMS}/nope"),
    Ask(
        name="claim-other-namespace-missing",
        path="/apis/resource.k8s.io/v1/namespaces/nowhere/resourceclaims/x",
    ),
    Ask(name="claim-create", method="POST", path=_CLAIMS, body=_claim("script-plain", _PLAIN)),
    Ask(name="claim-unallocated", path=f"{_CLAIMS}/script-plain"),
    _finalizer_put("claim-put-finalizer", "claim-create"),
    _status_put("claim-allocate", "claim-put-finalizer", _allocated("gpu")),
    Ask(name="claim-allocated", path=f"{_CLAIMS}/script-plain"),
    _status_put("claim-put-status-stale", "claim-create", {}),
    Ask(name="claim-put-status-not-there", method="PUT", path=f"{_CLAIMS}/script-plain",
        body=Edited("claim-allocate", {"status": {}})),
    _status_put("claim-deallocate", "claim-allocate", {}),
    Ask(
        name="claim-finalizer-gone",
        method="PATCH",
        path=f"{_CLAIMS}/script-plain",
        body={"metadata": {"finalizers": None}},
        content_type=MERGE_PATCH,
    ),
    Ask(name="claim-after-its-pod", path=f"{_CLAIMS}/script-plain"),
    Ask(name="claim-template-create", method="POST", path=_CLAIMS,
        body=_claim("script-template", _PLAIN, metadata=_OF_TEMPLATE)),
    _finalizer_put("claim-template-finalizer", "claim-template-create"),
    _status_put("claim-template-allocate", "claim-template-finalizer", _allocated("gpu")),
    Ask(name="claim-from-template", path=f"{_CLAIMS}/script-template"),
    Ask(name="claim-create-prioritized", method="POST", path=_CLAIMS,
        body=_claim("script-first", _FIRST_OF, config=[_CONFIG | {"requests": ["gpu"]}, _CONFIG])),
    _finalizer_put("claim-prioritized-finalizer", "claim-create-prioritized"),
    _status_put(
        "claim-prioritized-allocate",
        "claim-prioritized-finalizer",
        _allocated("gpu/any", config=[_CONFIG | {"source": "FromClaim"}]),
    ),
    Ask(name="claim-prioritized-allocated", path=f"{_CLAIMS}/script-first"),
    Ask(name="claims-list", path=f"{_CLAIMS}?fieldSelector=metadata.name%3Dscript-first"),
)  # fmt: skip

_EVENT: Final = f"{_EVENTS}/script-vm.1"

_EVENT_STEPS: Final[tuple[Step, ...]] = (
    Ask(name="event-patch-missing", method="PATCH", path=_EVENT, body={"count": 2}, content_type=MERGE_PATCH),
    Ask(name="event-create", method="POST", path=_EVENTS, body=_event("script-vm.1", _POD)),
    Ask(name="event-create-again", method="POST", path=_EVENTS, body=_event("script-vm.1", _POD)),
    Ask(
        name="event-patch",
        method="PATCH",
        path=_EVENT,
        body={"count": 2, "lastTimestamp": "2026-11-22T12:01:00Z"},
        content_type=MERGE_PATCH,
    ),
    Ask(
        name="event-patch-same",
        method="PATCH",
        path=_EVENT,
        body={"count": 2, "lastTimestamp": "2026-11-22T12:01:00Z"},
        content_type=MERGE_PATCH,
    ),
    Ask(
        name="event-of-node",
        method="POST",
        path=_EVENTS,
        body=_event("script-node.1", {"kind": "Node", "name": NODE, "uid": NODE}),
    ),
    Ask(
        name="event-about-another-namespace",
        method="POST",
        path=_EVENTS,
        body=_event("script-vm.2", _POD | {"namespace": "kube-system"}),
    ),
    Ask(
        name="event-of-another-namespace",
        method="POST",
        path=_EVENTS,
        body=_event("script-vm.2", _POD, namespace="kube-system"),
    ),
    Ask(
        name="event-in-missing-namespace",
        method="POST",
        path="/api/v1/namespaces/script-nowhere/events",
        body=_event("script-vm.2", _POD | {"namespace": "script-nowhere"}, namespace="script-nowhere"),
    ),
    Ask(name="event-name-of-no-dns", method="POST", path=_EVENTS, body=_event("script_vm", _POD)),
)

_DOMAIN: Final = f"{_DOMAINS}/namespaces/default/computedomains"
_CLIQUE: Final = f"{_DOMAINS}/namespaces/default/computedomaincliques"
_READY: Final = {"name": NODE, "ipAddress": "192.0.2.1", "cliqueID": "c.1", "index": 0, "status": "Ready"}
_DAEMON: Final = {"nodeName": NODE, "ipAddress": "192.0.2.1", "cliqueID": "c.1", "index": 0}


def _custom(kind: str, name: str, **more: Any) -> Object:
    return {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, "metadata": {"name": name}} | more


_SPEC: Final = {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": "script-channel"}}}

_DOMAIN_STEPS: Final[tuple[Step, ...]] = (
    Ask(name="domain-get-missing", path=f"{_DOMAIN}/nope"),
    Ask(name="clique-get-missing", path=f"{_CLIQUE}/nope"),
    # Of none the server answers the metadata with `"items": null`, and whole objects with an empty list.
    Ask(name="domains-list-none", path=f"{_DOMAINS}/computedomains"),
    Ask(
        name="domains-list-none-metadata-only",
        path=f"{_DOMAINS}/computedomains",
        accept=METADATA_ONLY.replace("Metadata", "MetadataList"),
    ),
    Ask(
        name="domain-create",
        method="POST",
        path=_DOMAIN,
        body=_custom("ComputeDomain", "script", spec=_SPEC),
    ),
    Ask(
        name="domain-put-status",
        method="PUT",
        path=f"{_DOMAIN}/script/status",
        body=Edited("domain-create", {"status": {"status": "NotReady", "nodes": [_READY]}}),
    ),
    Ask(name="domains-list", path=f"{_DOMAINS}/computedomains"),
    Watch(
        name="watch-domains",
        path=f"{_DOMAINS}/computedomains?watch=true&timeoutSeconds=4&{_BOOKMARKS}",
        accept=METADATA_ONLY,
        during=(
            Ask(
                name="watched-domain-status",
                method="PUT",
                path=f"{_DOMAIN}/script/status",
                body=Edited("domain-put-status", {"status.status": "Ready"}),
            ),
        ),
        after=2,
    ),
    Ask(
        name="clique-create",
        method="POST",
        path=_CLIQUE,
        body=_custom("ComputeDomainClique", "script.1", daemons=[_DAEMON]),
    ),
    Ask(
        name="clique-put-ready",
        method="PUT",
        path=f"{_CLIQUE}/script.1",
        body=Edited("clique-create", {"daemons.0.status": "Ready"}),
    ),
    Ask(name="clique-get", path=f"{_CLIQUE}/script.1"),
    Ask(name="domain-delete", method="DELETE", path=f"{_DOMAIN}/script"),
    Ask(name="clique-delete", method="DELETE", path=f"{_CLIQUE}/script.1"),
)

_RIGHTS_STEPS: Final[tuple[Step, ...]] = (
    Ask(name="forbidden-anonymous", path=_OURS, client=Client.ANONYMOUS),
    Ask(
        name="forbidden-anonymous-create",
        method="POST",
        path=_SLICES,
        body={"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "x"}, "spec": {}},
        client=Client.ANONYMOUS,
    ),
    Ask(name="unauthorized-bad-token", path=_OURS, client=Client.BAD),
    Ask(name="unauthorized-expired-token", path=_OURS, client=Client.EXPIRED),
    Ask(name="unauthorized-token-for-another", path=_OURS, client=Client.ELSEWHERE),
    Ask(name="unauthorized-deleted-account", path=_OURS, client=Client.DELETED),
    Ask(name="forbidden-list", path=_OURS, client=Client.STRANGER),
    Ask(name="forbidden-watch", path=f"{_OURS}&watch=true", client=Client.STRANGER),
    Ask(name="forbidden-get-node", path=_NODE, client=Client.STRANGER),
    Ask(
        name="forbidden-patch-node",
        method="PATCH",
        path=_NODE,
        body=[],
        content_type=JSON_PATCH,
        client=Client.STRANGER,
    ),
    Ask(name="forbidden-get-claim", path=f"{_CLAIMS}/script-plain", client=Client.STRANGER),
    Ask(name="forbidden-create-event", method="POST", path=_EVENTS, body=_event("x", _POD), client=Client.STRANGER),
    Ask(name="forbidden-put", method="PUT", path=f"{_SLICES}/x", body={}, client=Client.STRANGER),
    Ask(name="forbidden-delete", method="DELETE", path=f"{_SLICES}/x", client=Client.STRANGER),
    Ask(name="forbidden-list-domains", path=f"{_DOMAINS}/computedomains", client=Client.STRANGER),
    Ask(name="forbidden-get-clique", path=f"{_CLIQUE}/x", client=Client.STRANGER),
    Overload(name="overloaded", ask=Ask(name="overloaded", path=_OURS, client=Client.STRANGER)),
)  # fmt: skip

_HTTP_STEPS: Final[tuple[Step, ...]] = (
    Ask(name="not-served-version", path="/apis/resource.k8s.io/v1beta9/resourceslices"),
    Ask(name="not-served-group", path="/apis/resource.example.com/v1/computedomains"),
    Ask(name="not-served-resource", path="/apis/resource.k8s.io/v1/gpus"),
    Ask(name="not-served-path", path="/nope"),
    Ask(name="method-not-allowed", method="POST", path=_NODE, body={}),
    Ask(name="not-acceptable", path=_OURS, accept="text/html"),
    Raw(name="not-http", data=b"garbage\r\n\r\n"),
    Raw(name="no-host", data=b"GET /version HTTP/1.1\r\n\r\n"),
    Raw(name="bad-length", data=b"GET /version HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n"),
    Raw(name="bad-header", data=b"GET /version HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n"),
    Raw(name="another-http", data=b"GET /version HTTP/9.9\r\nHost: x\r\n\r\n"),
)

GATE_OFF: Final[tuple[Step, ...]] = (
    *_ARRANGED,
    Ask(name="api-group", path="/apis/resource.k8s.io"),
    *_SLICE_STEPS,
    _refused("slice-create-tainted-dry-run-gate-off", _slice(_TAINTED)),
    _refused("slice-create-consuming-dry-run-gate-off", _slice([_device(1, consumesCounters=[_CONSUMES])])),
    _refused("slice-create-sets-dry-run-gate-off", _slice([], sets=_SETS)),
    *_PUT_STEPS,
    *_DELETE_STEPS,
    *_WATCH_STEPS,
    *_NODE_STEPS,
    *_CLASS_STEPS,
    *_CLAIM_STEPS,
    *_EVENT_STEPS,
    *_DOMAIN_STEPS,
    *_RIGHTS_STEPS,
    *_HTTP_STEPS,
)
"""With Kubernetes' default gates: set A of the node."""

_TIME_ADDED: Final = "spec.devices.0.taints.0.timeAdded"
_TAINTED_PATH: Final = f"{_SLICES}/{{gate-on-slice-create-tainted:metadata.name}}"

GATE_ON: Final[tuple[Step, ...]] = (
    *_ARRANGED,
    _CLASS,
    Ask(name="gate-on-classes-list", path=f"{_CLASSES}?fieldSelector=metadata.name%3Dscript-class"),
    _refused("gate-on-slice-create-tainted-dry-run", _slice(_TAINTED)),
    Ask(name="gate-on-slice-create-tainted", method="POST", path=_SLICES, body=_slice(_TAINTED)),
    Ask(name="gate-on-slice-put-same", method="PUT", path=_TAINTED_PATH,
        body=Edited("gate-on-slice-create-tainted")),
    Until(
        name="another-second",
        ask=_refused("another-second", _slice(_TAINTED)),
        path=_TIME_ADDED,
        unlike=f"{{gate-on-slice-create-tainted:{_TIME_ADDED}}}",
    ),
    Ask(name="gate-on-slice-put-without-time-added", method="PUT", path=_TAINTED_PATH,
        body=Edited("gate-on-slice-create-tainted", without=(_TIME_ADDED,))),
    Ask(name="gate-on-slice-put-untainted", method="PUT", path=_TAINTED_PATH,
        body=Edited("gate-on-slice-put-without-time-added", without=("spec.devices.0.taints",))),
    _refused(
        "gate-on-slice-create-bad-effect",
        _slice([_device(1, taints=[_TAINT | {"effect": "Nope"}])]),
    ),
    _refused(
        "gate-on-slice-create-65-devices-one-taint",
        _slice([_device(index, taints=[_TAINT] * (index == 0)) for index in range(65)]),
    ),
    _refused("gate-on-slice-create-effect-none", _slice([_device(1, taints=[_TAINT | {"effect": "None"}])])),
    _refused("gate-on-slice-create-bad-key", _slice([_device(1, taints=[_TAINT | {"key": "a b"}])])),
    _refused("gate-on-slice-create-17-taints",
             _slice([_device(1, taints=[_TAINT | {"key": f"a/b{index}"} for index in range(17)])])),
    _refused("gate-on-slice-create-consuming", _slice([_device(1, consumesCounters=[_CONSUMES]), _device(2)])),
    _refused("gate-on-slice-create-sets", _slice([], sets=_SETS)),
    _refused("gate-on-slice-create-sets-and-devices", _slice(_DEVICES, sets=_SETS)),
    _refused("gate-on-slice-create-set-twice", _slice([], sets=_SETS * 2)),
    _refused("gate-on-slice-create-set-without-counters", _slice([], sets=[{"name": "card"}])),
    _refused("gate-on-slice-create-set-without-name", _slice([], sets=[{"counters": _COUNTERS}])),
    _refused("gate-on-slice-create-set-bad-name", _slice([], sets=[{"name": "a b", "counters": _COUNTERS}])),
    _refused("gate-on-slice-create-9-sets",
             _slice([], sets=[{"name": f"card-{index}", "counters": _COUNTERS} for index in range(9)])),
    _refused("gate-on-slice-create-65-devices-one-consuming",
             _slice([_device(index, **({} if index else {"consumesCounters": [_CONSUMES]})) for index in range(65)])),
    _refused("gate-on-slice-create-3-consumed",
             _slice([_device(1, consumesCounters=[_CONSUMES | {"counterSet": f"card-{i}"} for i in range(3)])])),
    _refused("gate-on-slice-create-consumed-twice", _slice([_device(1, consumesCounters=[_CONSUMES] * 2)])),
    _refused("gate-on-slice-create-consumes-no-counter",
             _slice([_device(1, consumesCounters=[{"counterSet": "card"}])])),
)  # fmt: skip
"""With the gates DRADeviceTaints, DRAPartitionableDevices and DRAExtendedResource: set B of the node."""


def played(script: tuple[Step, ...]) -> tuple[str, ...]:
    """The names of the steps that are compared, those during a watch among them, in the order of their answers."""
    names: list[str] = []
    for step in script:
        if isinstance(step, Watch):
            names += [inner.name for inner in step.during]
        if not isinstance(step, Arrange | Until):
            names.append(step.name)
    return tuple(names)


def requests(script: tuple[Step, ...]) -> tuple[tuple[str, str], ...]:
    """Method and path of each request that an administrator makes."""
    found: list[tuple[str, str]] = []
    for step in script:
        if isinstance(step, Watch):
            found += [("GET", step.path), *((inner.method, inner.path) for inner in step.during)]
        if isinstance(step, Ask) and step.client is Client.ADMIN:
            found.append((step.method, step.path))
    return tuple(found)
