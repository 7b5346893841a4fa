"""The API server: a request in, an answer out, whatever carries them.

`http.py` serves it on sockets and `memory/kube.py` in memory. A test changes the objects by `store`, or by the methods
that play kubelet, an operator or the scheduler; the daemon by requests only.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from enum import StrEnum
from typing import Any, Final, final
from urllib.parse import parse_qs, unquote, urlsplit

import trio
from msgspec import Struct, field

from gpuactors_simulation.kube import patch, rules, schema, status
from gpuactors_simulation.kube.status import (
    CLAIMS,
    CLASSES,
    CLIQUES,
    DOMAINS,
    EVENTS,
    KINDS,
    NODES,
    SLICES,
    Failure,
    Kind,
    Object,
)
from gpuactors_simulation.kube.store import ADDED, Store

BOOKMARK_S: Final = 60.0
"""How often a watch gets a bookmark (apiserver/pkg/storage/cacher, defaultBookmarkFrequency)."""

BOOKMARK_LAST_S: Final = 2.0
"""How long before its end it gets the last one."""

WATCH_DEFAULT_S: Final = 1800.0
"""How long a watch lasts if the client does not say (--min-request-timeout)."""

SLOW_S: Final = 2.0
"""How long a slow answer takes: much longer than a healthy one, well within a client's deadline."""

_REQUESTS_MAX: Final = 10_000
_SELECTABLE: Final = {
    SLICES: {"metadata.name", "spec.driver", "spec.nodeName"},
    CLAIMS: {"metadata.name", "metadata.namespace"},
    NODES: {"metadata.name"},
    CLASSES: {"metadata.name"},
    DOMAINS: {"metadata.name", "metadata.namespace"},
    CLIQUES: {"metadata.name", "metadata.namespace"},
    EVENTS: {"metadata.name", "metadata.namespace", "involvedObject.name", "involvedObject.uid", "reason"},
}
_CUSTOM: Final = frozenset({DOMAINS.group})
"""Groups of custom resources: the items of a list carry `apiVersion` and `kind`, as they are kept as JSON."""
_BUILT_IN: Final = ("/api/v1/", f"/apis/{SLICES.group}/")
"""Paths of groups that are no custom resources: a path that is not there has another answer."""
_METADATA_ONLY: Final = "as=PartialObjectMetadata"
_ACCEPTED: Final = frozenset({"*/*", "application/*", "application/json", "application/yaml"})
_JSON: Final = "application/json"
_PATCHES: Final = {"application/json-patch+json": patch.json_patch} | dict.fromkeys(
    ("application/merge-patch+json", "application/strategic-merge-patch+json"), patch.merge_patch
)
_VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_GO_HEADER: Final = (
    'struct { APIVersion string "json:\\"apiVersion,omitempty\\""; Kind string "json:\\"kind,omitempty\\"" }'
)
_GO_TYPES: Final = {str: "string", bool: "bool", int: "number", float: "number", list: "array"}


class ApiFault(StrEnum):
    """A fault of the API server for a request."""

    FORBIDDEN = "it is forbidden (403)"
    CONFLICT = "somebody was quicker (409)"
    OVERLOADED = "the server is overloaded (429)"
    THROTTLED = "priority and fairness refuses it (429, and not in JSON)"
    BROKEN = "the server fails (500)"
    UNAVAILABLE = "a proxy answers for it, and not in JSON (503)"
    SLOW = "it takes long"
    HANGS = "it is never answered"
    ANSWER_SLOW = "it is carried out at once, and answered late"
    ANSWER_LOST = "it is carried out, and the connection breaks before the answer"


_LATER: Final = frozenset({ApiFault.ANSWER_SLOW, ApiFault.ANSWER_LOST, ApiFault.UNAVAILABLE})
"""Those that do not strike before the request is carried out, or are not a failure of the server's own."""


class ConnectionLost(Exception):
    """The connection is to be broken instead of an answer."""


class ApiRequest(Struct, frozen=True):
    """A request."""

    method: str
    target: str
    """The path and the query."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: bytes = b""


class ApiAnswer(Struct, frozen=True):
    """An answer: one object, or the events of a watch."""

    status: int
    body: bytes = b""
    lines: AsyncIterator[Object] | None = None
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class _Target(Struct, frozen=True):
    """The object that a request is about."""

    kind: Kind
    namespace: str
    name: str
    query: Mapping[str, str]
    metadata_only: bool
    of_list: bool
    """It asks for the metadata of a list."""
    part: str = ""
    """`status`, or nothing for the whole object."""


@final
class FakeApiServer:
    """The API server of one cluster."""

    def __init__(
        self,
        *,
        device_taints: bool = True,
        partitionable_devices: bool = True,
        extended_resources: bool = True,
        tokens: frozenset[str] | None = None,
        strangers: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        """`device_taints`, `partitionable_devices`, `extended_resources`: the gates DRADeviceTaints,
        DRAPartitionableDevices and DRAExtendedResource. `tokens`: clients with these may do everything. `strangers`:
        the user names of clients that may do nothing, by token. Without `tokens` every client may do everything."""
        self.store = Store(seed)
        self.device_taints = device_taints
        self.partitionable_devices = partitionable_devices
        self.extended_resources = extended_resources
        self.tokens = tokens
        self.strangers = strangers or {}
        self.requests: deque[tuple[str, str]] = deque(maxlen=_REQUESTS_MAX)
        """Method and target of each request, watches among them."""
        self.kinds: Sequence[Kind] = KINDS
        """The kinds that it serves."""
        self.away = False
        """It accepts no connection; `go_away` breaks those there are as well."""
        self._faults: Counter[tuple[ApiFault, str]] = Counter()
        self._on_break: list[Callable[[], None]] = []

    # --- what others do -----------------------------------------------------------------------------------

    def add_node(self, name: str, labels: Mapping[str, str] | None = None) -> Object:
        """Add a node."""
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}
        return self.store.put(NODES, self.store.named(NODES, {"metadata": metadata, "spec": {}}))

    def add_class(self, name: str, extended_resource: str | None = None) -> Object:
        """An operator makes a DeviceClass, which pods may request as this extended resource. Without the gate the API
        server drops its name."""
        named = extended_resource is not None and self.extended_resources
        spec = {"extendedResourceName": extended_resource} if named else {}
        return self.store.put(CLASSES, self.store.named(CLASSES, {"metadata": {"name": name}, "spec": spec}))

    def add_claim(self, claim: Object) -> Object:
        """Somebody, or the controller of a pod, makes a claim."""
        return self.store.put(CLAIMS, self.store.named(CLAIMS, rules.defaulted_claim(deepcopy(claim))))

    def set_claim_status(self, namespace: str, name: str, new: Object) -> Object:
        """Set a claim's status, as the scheduler or the claim controller does."""
        claim = self.store.get(CLAIMS, namespace, name)
        return self.store.put(CLAIMS, claim | {"status": deepcopy(new)})

    def delete_claim(self, namespace: str, name: str) -> None:
        """Delete a claim, even while its pod exists."""
        self.store.delete(CLAIMS, namespace, name)

    def label_node(self, name: str, label: str, value: str | None) -> Object:
        """Set a label of a node, or remove it (None)."""
        node = self.store.get(NODES, "", name)
        labels = {key: old_value for key, old_value in node["metadata"]["labels"].items() if key != label}
        node["metadata"]["labels"] = labels | ({} if value is None else {label: value})
        return self.store.put(NODES, node)

    def add_domain(self, namespace: str, name: str) -> Object:
        """Add a ComputeDomain."""
        metadata = {"namespace": namespace, "name": name}
        spec = {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": f"{name}-channel"}}}
        domain = rules.defaulted(DOMAINS, {"metadata": metadata, "spec": spec})
        return self.store.put(DOMAINS, self.store.named(DOMAINS, domain))

    def set_domain_nodes(self, namespace: str, name: str, nodes: Mapping[str, str]) -> Object:
        """The controller of compute domains writes the status: by the name of each node `Ready` or `NotReady`."""
        domain = self.store.get(DOMAINS, namespace, name)
        members = [
            {"name": node, "ipAddress": "192.0.2.1", "cliqueID": "", "index": index, "status": readiness}
            for index, (node, readiness) in enumerate(nodes.items())
        ]
        domain["status"] = {"status": "NotReady", "nodes": members}
        return self.store.put(DOMAINS, domain)

    def delete_domain(self, namespace: str, name: str) -> None:
        """Delete a ComputeDomain, even while its pods exist."""
        self.store.delete(DOMAINS, namespace, name)

    def set_clique(self, namespace: str, domain: str, clique: str, nodes: Mapping[str, str]) -> Object:
        """The daemons of a domain's clique write that they are there, and whether they are ready, as above."""
        name = f"{domain}.{clique}"
        daemons = [
            {
                "nodeName": node,
                "ipAddress": "192.0.2.1",
                "cliqueID": clique,
                "index": index,
                "status": readiness,
            }
            for index, (node, readiness) in enumerate(nodes.items())
        ]
        clique_object = self.store.find(CLIQUES, namespace, name)
        if clique_object is None:
            clique_object = self.store.named(CLIQUES, {"metadata": {"namespace": namespace, "name": name}})
        return self.store.put(CLIQUES, clique_object | {"daemons": daemons})

    def reserve_claim(self, namespace: str, name: str, *pods: str) -> Object:
        """Reserve the claim for pods, as the scheduler does: `status.reservedFor`, with UIDs of their own."""
        claim = self.store.get(CLAIMS, namespace, name)
        consumers = [{"resource": "pods", "name": pod, "uid": self.store.uid()} for pod in pods]
        return self.set_claim_status(namespace, name, claim.get("status", {}) | {"reservedFor": consumers})

    def events(self) -> list[Object]:
        """Return the Events, by namespace and name."""
        return self.store.objects(EVENTS)

    def slices(self, driver: str | None = None) -> list[Object]:
        """Return the ResourceSlices, by name."""
        return [s for s in self.store.objects(SLICES) if driver in (None, s["spec"]["driver"])]

    def edit_slice(self, name: str, change: Callable[[Object], None]) -> Object:
        """Change a stored slice by `change`."""
        stored_slice = self.store.get(SLICES, "", name)
        change(stored_slice)
        return self.store.put(SLICES, stored_slice)

    def delete_slices(self, driver: str | None = None) -> None:
        """Kubelet wipes the node's slices at its start, or those of one driver 30 s after that is gone."""
        for stored_slice in self.slices(driver):
            self.store.delete(SLICES, "", stored_slice["metadata"]["name"])

    # --- what goes wrong ----------------------------------------------------------------------------------

    def order(self, fault: ApiFault, times: int = 1, method: str = "") -> None:
        """Let the fault strike the next `times` requests of this method, or of any (empty)."""
        self._faults[fault, method] = times

    def end_faults(self) -> None:
        """No ordered fault strikes any more."""
        self._faults.clear()

    def go_away(self) -> None:
        """Break every connection, and accept none until `away` is False again."""
        self.away = True
        self.break_connections()

    def break_connections(self) -> None:
        """Break every connection."""
        for break_one in tuple(self._on_break):
            break_one()

    def on_break(self, break_one: Callable[[], None]) -> Callable[[], None]:
        """A transport has a connection, to be broken by `break_one`; returns what it calls when that has ended."""
        self._on_break.append(break_one)

        def ended() -> None:
            with suppress(ValueError):
                self._on_break.remove(break_one)

        return ended

    async def _strike(self, request: ApiRequest) -> Failure | None:
        """Raises, waits or answers as the next ordered fault wants; a lost answer is for later."""
        for fault in ApiFault:
            if fault in _LATER or not self._strikes(fault, request.method):
                continue
            match fault:
                case ApiFault.FORBIDDEN:
                    return _forbidden(request, self.kinds, "system:serviceaccount:test")
                case ApiFault.CONFLICT:
                    return status.modified(SLICES, "planned")
                case ApiFault.OVERLOADED:
                    details = {"retryAfterSeconds": 1}
                    return Failure(
                        429, "TooManyRequests", "too many requests, please try again later", details
                    )
                case ApiFault.THROTTLED:
                    return status.throttled()
                case ApiFault.BROKEN:
                    return Failure(
                        500, "InternalError", "an error on the server has prevented the request", {}
                    )
                case ApiFault.SLOW:
                    await trio.sleep(SLOW_S)
                case ApiFault.HANGS:
                    await trio.sleep_forever()
                case _:
                    pass
        return None

    def _strikes(self, fault: ApiFault, method: str) -> bool:
        for key in ((fault, method), (fault, "")):
            if self._faults[key] > 0:
                self._faults[key] -= 1
                return True
        return False

    # --- requests -----------------------------------------------------------------------------------------

    async def answer(self, request: ApiRequest) -> ApiAnswer:
        """Answers. Raises `ConnectionLost` if the connection is to break."""
        self.requests.append((request.method, request.target))
        if self._strikes(ApiFault.UNAVAILABLE, request.method):
            return ApiAnswer(503, b"<html>upstream connect error</html>", content_type="text/html")
        try:
            if (failure := await self._strike(request)) is not None:
                raise failure
            answer = self._carried_out(request)
        except Failure as exc:
            answer = _failed(exc)
        if self._strikes(ApiFault.ANSWER_SLOW, request.method):
            await trio.sleep(SLOW_S)
        if self._strikes(ApiFault.ANSWER_LOST, request.method):
            raise ConnectionLost
        return answer

    def _carried_out(self, request: ApiRequest) -> ApiAnswer:
        if self.tokens is not None:
            self._authenticate(request)
        if urlsplit(request.target).path == f"/apis/{SLICES.group}":
            return _object(200, _group())
        target = _target(request, self.kinds)
        _check_formats(request)
        match request.method, bool(target.name):
            case "GET", True:
                stored = self.store.get(target.kind, target.namespace, target.name)
                return _object(200, _shown(stored, target))
            case "GET", False if target.query.get("watch") == "true":
                _check_version(target)
                return ApiAnswer(200, lines=self._watch(target, _selector(target)))
            case "GET", False:
                return _object(200, self._list(target, _selector(target)))
            case "POST", False:
                sent, warnings = _decoded(target, request.body)
                with _warned(warnings):
                    return _object(201, self._create(target, sent), warnings)
            case "PUT", True:
                sent, warnings = _decoded(target, request.body)
                with _warned(warnings):
                    return _object(200, self._update(target, sent), warnings)
            case "PATCH", True:
                return _object(200, self._patch(target, request))
            case "DELETE", True:
                return _object(200, self._delete(target, request.body))
            case _:
                raise status.method_not_allowed()

    def _authenticate(self, request: ApiRequest) -> None:
        authorization = request.headers.get("authorization")
        if authorization is None:
            raise _forbidden(request, self.kinds, "system:anonymous")
        token = authorization.removeprefix("Bearer ")
        if token in self.strangers:
            raise _forbidden(request, self.kinds, self.strangers[token])
        if token not in (self.tokens or ()):
            raise status.unauthorized()

    def _list(self, target: _Target, selects: Callable[[Object], bool]) -> Object:
        items = self.store.objects(target.kind, target.namespace or None, selects)
        metadata = {"resourceVersion": str(self.store.version)}
        if target.metadata_only:
            if not target.of_list:
                raise status.is_a_list()
            items = [_shown(item, target) for item in items]
            kind, api_version = "PartialObjectMetadata", "meta.k8s.io/v1"
        else:
            kind, api_version = target.kind.kind, target.kind.api_version
            if target.kind.group in _CUSTOM:
                metadata["continue"] = ""
            else:
                for item in items:
                    del item["apiVersion"], item["kind"]
        # Seen on 1.36.2 of ComputeDomains and ResourceSlices, with or without a selector; of whole objects `[]`.
        is_null = not items and target.metadata_only
        shown = None if is_null else items
        return {"kind": f"{kind}List", "apiVersion": api_version, "metadata": metadata, "items": shown}

    def _create(self, target: _Target, sent: Object) -> Object:
        meta = sent.setdefault("metadata", {})
        _check_namespace(target, meta)
        if target.kind.namespaced:
            meta["namespace"] = target.namespace
        if target.kind.has_status_path:
            sent.pop("status", None)
        new = self.store.named(target.kind, rules.defaulted(target.kind, sent))
        name = new["metadata"]["name"]
        if self.store.find(target.kind, target.namespace, name) is not None:
            raise status.already_exists(target.kind, name)
        rules.check_labels(target.kind, new)
        if target.kind is EVENTS:
            rules.check_event(new)
        if target.kind is SLICES:
            self._prepare_slice(new, None)
        elif target.kind is CLAIMS:
            rules.defaulted_claim(new)
        if target.query.get("dryRun") == "All":
            return new
        return self.store.put(target.kind, new)

    def _update(self, target: _Target, sent: Object) -> Object:
        meta = sent.setdefault("metadata", {})
        if meta.get("name") not in (None, "", target.name):
            raise status.bad_request(
                f"the name of the object ({meta['name']}) does not match the name on the URL ({target.name})"
            )
        _check_namespace(target, meta)
        old = self.store.get(target.kind, target.namespace, target.name)
        if meta.get("uid") not in (None, "", old["metadata"]["uid"]):
            raise status.another(target.kind, target.name, meta["uid"], old["metadata"]["uid"])
        if meta.get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
            raise status.modified(target.kind, target.name)
        kept = (
            "name",
            "namespace",
            "uid",
            "creationTimestamp",
            "generation",
            "generateName",
            "resourceVersion",
        )
        meta |= {key: old["metadata"][key] for key in kept if key in old["metadata"]}
        new = {"apiVersion": target.kind.api_version, "kind": target.kind.kind} | sent
        new = rules.defaulted(target.kind, _parted(target, new, old))
        rules.check_labels(target.kind, new)
        if target.kind is SLICES:
            self._prepare_slice(new, old)
        if target.query.get("dryRun") == "All":
            return new
        return self.store.put(target.kind, new)

    def _prepare_slice(self, new: Object, old: Object | None) -> None:
        if not self.device_taints:
            rules.without_taints(new, old)
        if not self.partitionable_devices:
            rules.without_counters(new, old)
        rules.with_times(new, self.store.now())
        rules.check_slice(new, old)

    def _patch(self, target: _Target, request: ApiRequest) -> Object:
        apply = _PATCHES.get(request.headers.get("content-type", ""))
        if apply is None:
            raise status.unsupported_patch()
        try:
            patch = json.loads(request.body)
        except ValueError as exc:
            raise status.bad_request(f"error decoding patch: {_json_wrong(exc)}") from exc
        old = self.store.get(target.kind, target.namespace, target.name)
        new = apply(old, patch)
        if new["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]:
            raise status.modified(target.kind, target.name)
        new = _parted(target, new, old)
        rules.check_labels(target.kind, new)
        if target.kind is EVENTS:
            rules.check_event(new)
        return _shown(self.store.put(target.kind, new), target)

    def _delete(self, target: _Target, body: bytes) -> Object:
        old = self.store.get(target.kind, target.namespace, target.name)
        conditions = json.loads(body).get("preconditions", {}) if body else {}
        for key, label in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            expected, actual = conditions.get(key), old["metadata"][key]
            if expected not in (None, actual):
                raise status.precondition(target.kind, target.name, label, expected, actual)
        deleted = self.store.delete(target.kind, target.namespace, target.name)
        return status.deleted(target.kind, deleted) if target.kind.group in _CUSTOM else deleted

    # --- watches ------------------------------------------------------------------------------------------

    async def _watch(self, target: _Target, selects: Callable[[Object], bool]) -> AsyncIterator[Object]:
        query = target.query
        ends_at = trio.current_time() + float(query.get("timeoutSeconds", WATCH_DEFAULT_S))
        bookmarks = query.get("allowWatchBookmarks") == "true"
        bookmark_at = _bookmark_first_at(ends_at) if bookmarks else ends_at
        version = int(query.get("resourceVersion") or 0)
        if version == 0:
            version = self.store.version
            for stored in self.store.objects(target.kind, target.namespace or None, selects):
                yield {"type": ADDED, "object": _shown(stored, target)}
            if bookmarks:
                yield _bookmark(target, version, initial=True)
                bookmark_at = max(bookmark_at, trio.current_time() + BOOKMARK_LAST_S)
        while True:
            changed = self.store.changed
            try:
                changes = self.store.since(version)
            except Failure as exc:
                yield {"type": "ERROR", "object": exc.status}
                return
            for change in changes:
                version = change.version
                if change.kind is target.kind and selects(change.object):
                    yield {"type": change.type, "object": _shown(change.object, target)}
            if trio.current_time() >= ends_at:
                return
            if changed is not self.store.changed:
                continue  # while the client took these: a bookmark would skip what has come since
            if bookmarks and trio.current_time() >= bookmark_at:
                version = max(version, self.store.version)
                yield _bookmark(target, version, initial=False)
                last_at = ends_at - BOOKMARK_LAST_S
                bookmark_at = (
                    min(bookmark_at + BOOKMARK_S, last_at) if bookmark_at < last_at else ends_at + 1.0
                )
            with trio.move_on_at(min(ends_at, bookmark_at)):
                await changed.wait()


def _bookmark_first_at(ends_at: float) -> float:
    return min(trio.current_time() + BOOKMARK_S, ends_at - BOOKMARK_LAST_S)


def _bookmark(target: _Target, version: int, *, initial: bool) -> Object:
    metadata: Object = {"resourceVersion": str(version)}
    if initial:
        metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
    empty: Object = {"apiVersion": target.kind.api_version, "kind": target.kind.kind, "metadata": metadata}
    if target.kind is SLICES:
        empty["spec"] = {"driver": "", "pool": {"name": "", "generation": 0, "resourceSliceCount": 0}}
    return {"type": "BOOKMARK", "object": _shown(empty, target)}


def _target(request: ApiRequest, kinds: Sequence[Kind]) -> _Target:
    """Parse the target of the request. Raises `Failure` 404 for a path that is not served."""
    url = urlsplit(request.target)
    query = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
    parts = [unquote(part) for part in url.path.split("/")[1:]]
    accept = request.headers.get("accept", "")
    metadata_only, of_list = _METADATA_ONLY in accept, f"{_METADATA_ONLY}List;" in accept
    for kind in kinds:
        prefix = ["apis", kind.group, kind.version] if kind.group else ["api", kind.version]
        if parts[: len(prefix)] != prefix:
            continue
        segments, namespace, part = parts[len(prefix) :], "", ""
        if kind.namespaced and segments[:1] == ["namespaces"]:
            namespace, segments = (segments[1] if len(segments) > 1 else ""), segments[2:]
        if kind.has_status_path and segments[2:] == ["status"]:
            segments, part = segments[:2], "status"
        if segments[:1] == [kind.plural] and len(segments) <= 2:
            return _Target(
                kind,
                namespace,
                segments[1] if len(segments) == 2 else "",
                query,
                metadata_only,
                of_list,
                part,
            )
    raise status.not_served() if url.path.startswith(_BUILT_IN) else status.no_page()


def _forbidden(request: ApiRequest, kinds: Sequence[Kind], user: str) -> Failure:
    """Return the failure of a forbidden request. Raises `Failure` 404 for a path that is not served."""
    target = _target(request, kinds)
    reading = "get" if target.name else "watch" if target.query.get("watch") == "true" else "list"
    verb = _VERBS.get(request.method, reading)
    return status.forbidden(target.kind, verb, user, namespace=target.namespace, name=target.name)


def _check_formats(request: ApiRequest) -> None:
    """Raise `Failure` 406 or 415 for formats that the server does not have."""
    accepted = {part.split(";")[0].strip() for part in request.headers.get("accept", "*/*").split(",")}
    if not accepted & _ACCEPTED:
        raise status.not_acceptable()
    content_type = request.headers.get("content-type", _JSON).split(";")[0].strip()
    if request.method in ("POST", "PUT") and content_type != _JSON:
        raise status.unsupported_body()


def _check_version(target: _Target) -> None:
    """Raise `Failure` 500 if a watch begins at what is no version."""
    version = target.query.get("resourceVersion", "")
    if version and not version.isdecimal():
        wrong = f'strconv.ParseUint: parsing "{version}": invalid syntax'
        raise Failure(500, "", f'resourceVersion: Invalid value: "{version}": {wrong}')


def _check_namespace(target: _Target, metadata: Object) -> None:
    """Raise `Failure` 400 if the object is for another namespace than the request."""
    if metadata.get("namespace") not in (None, "", target.namespace):
        raise status.bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )


def _parted(target: _Target, new: Object, old: Object) -> Object:
    """Return the part that a write at this path changes: all but the status, or the status alone."""
    if not target.kind.has_status_path:
        return new
    kept, status_source = (old, new) if target.part else (new, old)
    parted = {key: value for key, value in kept.items() if key != "status"}
    parted["metadata"] = parted["metadata"] | {"resourceVersion": old["metadata"]["resourceVersion"]}
    return parted | ({"status": status_source["status"]} if "status" in status_source else {})


def _selector(target: _Target) -> Callable[[Object], bool]:
    """Return the predicate of the field selector. Raises `Failure` 400 for an unselectable field."""
    values: dict[str, str] = {}
    for term in filter(None, target.query.get("fieldSelector", "").split(",")):
        path, _, value = term.partition("=")
        if path not in _SELECTABLE[target.kind]:
            raise status.bad_request(
                f"field label not supported for {target.kind.api_version}, Kind={target.kind.kind}: {path}"
            )
        values[path] = value.removeprefix("=")
    return lambda stored: all(_at(stored, path) == value for path, value in values.items())


def _at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value.get(part, {})
    return value


def _decoded(target: _Target, body: bytes) -> tuple[Object, tuple[str, ...]]:
    """Return the object in a body, and warnings about it. Raises `Failure` 400 if it is none."""
    wrong = ""
    sent: Any = None
    try:
        sent = json.loads(body)
    except ValueError as exc:
        wrong = _json_wrong(exc)
    if not wrong and not isinstance(sent, dict):
        wrong = (
            f"json: cannot unmarshal {_GO_TYPES.get(type(sent), 'null')} into Go value of type {_GO_HEADER}"
        )
    if wrong:
        shown = body.decode(errors="replace") if body.startswith(b"{") else body.hex()
        raise status.bad_request(
            f"the object provided is unrecognized (must be of type {target.kind.kind}): couldn't get version/kind; "
            f"json parse error: {wrong} ({shown})"
        )
    pruned, unknown = schema.without_unknown(target.kind, sent)
    warnings = tuple(f'unknown field "{path}"' for path in unknown)
    if warnings and target.query.get("fieldValidation") == "Strict":
        raise status.bad_request(
            f'{target.kind.kind} in version "{target.kind.version}" cannot be handled as a {target.kind.kind}: strict '
            f"decoding error: {', '.join(warnings)}"
        )
    return rules.pruned(pruned), warnings


def _json_wrong(exc: ValueError) -> str:
    """Return the words of Go's JSON for a text that ends too early; for other faults Python's."""
    at_end = isinstance(exc, json.JSONDecodeError) and exc.pos >= len(exc.doc.rstrip())
    return "unexpected end of JSON input" if at_end else str(exc)


def _shown(stored: Object, target: _Target) -> Object:
    if not target.metadata_only:
        return stored
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": stored["metadata"],
    }


def _group() -> Object:
    version = {"groupVersion": SLICES.api_version, "version": SLICES.version}
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": SLICES.group,
        "versions": [version],
        "preferredVersion": version,
    }


@contextmanager
def _warned(warnings: tuple[str, ...]) -> Iterator[None]:
    """A failure has these warnings as well."""
    try:
        yield
    except Failure as exc:
        exc.warnings = warnings
        raise


def _object(code: int, answered: Object, warnings: Sequence[str] = ()) -> ApiAnswer:
    return ApiAnswer(code, json.dumps(answered).encode(), headers=_warnings(warnings))


def _failed(failure: Failure) -> ApiAnswer:
    headers = _warnings(failure.warnings)
    if failure.retry_after_s is not None:
        headers = (*headers, ("Retry-After", str(failure.retry_after_s)))
    if failure.plain:
        return ApiAnswer(
            failure.code, str(failure).encode(), content_type="text/plain; charset=utf-8", headers=headers
        )
    return ApiAnswer(failure.code, json.dumps(failure.status).encode(), headers=headers)


def _warnings(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(("Warning", f"299 - {json.dumps(text)}") for text in texts)
