"""Failures as the API server words them: a `Status` object with the HTTP status of its code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

Object = dict[str, Any]
"""An object of the API, as JSON has it."""


class Kind(Struct, frozen=True):
    """A kind of object that the server has."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = False
    counts_generations: bool = False
    """`metadata.generation` grows with each change of what is neither metadata nor status."""
    fields: tuple[str, ...] = ("spec", "status")
    """The fields of an object beside its metadata."""
    has_status_path: bool = False
    """The status is written at a path of its own, and nowhere else."""

    @property
    def api_version(self) -> str:
        """As objects have it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As messages name it: `resourceslices.resource.k8s.io`, `nodes`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


SLICES = Kind(
    "resource.k8s.io", "v1", "resourceslices", "ResourceSlice", counts_generations=True, fields=("spec",)
)
CLAIMS = Kind(
    "resource.k8s.io", "v1", "resourceclaims", "ResourceClaim", namespaced=True, has_status_path=True
)
NODES = Kind("", "v1", "nodes", "Node", has_status_path=True)
DOMAINS = Kind(
    "resource.nvidia.com",
    "v1beta1",
    "computedomains",
    "ComputeDomain",
    namespaced=True,
    counts_generations=True,
    has_status_path=True,
)
"""By the CustomResourceDefinitions of `deploy/chart/gpuactors/definitions`, as the next one."""
CLIQUES = Kind(
    "resource.nvidia.com",
    "v1beta1",
    "computedomaincliques",
    "ComputeDomainClique",
    namespaced=True,
    counts_generations=True,
    fields=("daemons",),
)
EVENTS = Kind(
    "",
    "v1",
    "events",
    "Event",
    namespaced=True,
    fields=(
        *(
            "involvedObject",
            "reason",
            "message",
            "source",
            "firstTimestamp",
            "lastTimestamp",
            "count",
            "type",
        ),
        *("eventTime", "series", "action", "related", "reportingComponent", "reportingInstance"),
    ),
)

CLASSES = Kind(
    "resource.k8s.io", "v1", "deviceclasses", "DeviceClass", counts_generations=True, fields=("spec",)
)

KINDS = (SLICES, CLAIMS, NODES, DOMAINS, CLIQUES, EVENTS, CLASSES)


class Cause(Struct, frozen=True):
    """One thing that is wrong with an object."""

    field: str
    reason: str
    message: str


class Failure(Exception):
    """The answer to a request is this failure."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Object | None = None,
        *,
        retry_after_s: int | None = None,
        plain: bool = False,
    ) -> None:
        """`plain`: a filter in front of the API answers, with the message as text. `retry_after_s` is its header."""
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        self.plain = plain
        self.warnings: tuple[str, ...] = ()
        self.status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }
        if not reason:
            del self.status["reason"]
        if details is not None:
            self.status["details"] = details


def not_served() -> Failure:
    """There is no such path in a group that the server has built in."""
    return Failure(404, "NotFound", "the server could not find the requested resource", {})


def no_page() -> Failure:
    """There is no such path, and nobody who could have it: no built-in group, no CustomResourceDefinition."""
    return Failure(404, "NotFound", "404 page not found\n", plain=True)


def not_found(kind: Kind, name: str) -> Failure:
    """There is no object of this name."""
    return Failure(404, "NotFound", f'{kind.qualified} "{name}" not found', _subject(kind, kind.plural, name))


def bad_request(message: str) -> Failure:
    """The request makes no sense."""
    return Failure(400, "BadRequest", message)


def method_not_allowed() -> Failure:
    """The path does not have this method."""
    message = "the server does not allow this method on the requested resource"
    return Failure(405, "MethodNotAllowed", message, {})


def not_acceptable() -> Failure:
    """The client accepts no format that the server has."""
    formats = (
        "application/json, application/yaml, application/vnd.kubernetes.protobuf, application/json;stream=watch, "
        "application/vnd.kubernetes.protobuf;stream=watch"
    )
    message = f"406: Not Acceptable\n\nAvailable representations: {formats}"
    return Failure(406, "NotAcceptable", message, {})


def is_a_list() -> Failure:
    """The client asks for a list as the metadata of one object."""
    message = "you requested PartialObjectMetadata, but the requested object is a list (*unstructured.UnstructuredList)"
    return Failure(406, "NotAcceptable", message, {})


def unsupported_body() -> Failure:
    """An object is in a format that the server does not read."""
    return Failure(
        415,
        "UnsupportedMediaType",
        "the body of the request was in an unknown format - accepted media types include: application/json, "
        "application/yaml, application/vnd.kubernetes.protobuf",
    )


def unsupported_patch() -> Failure:
    """A patch is of a kind that the server does not know."""
    return Failure(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})


def throttled() -> Failure:
    """The client's priority level has no seat and no queue left (apiserver, filters/priority-and-fairness.go)."""
    message = "Too many requests, please try again later.\n"
    return Failure(429, "TooManyRequests", message, retry_after_s=1, plain=True)


def modified(kind: Kind, name: str) -> Failure:
    """The object is not at the version that the request names."""
    return Failure(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {kind.qualified} "{name}": the object has been modified; please apply your '
        "changes to the latest version and try again",
        _subject(kind, kind.plural, name),
    )


def already_exists(kind: Kind, name: str) -> Failure:
    """There is an object of this name."""
    message = f'{kind.qualified} "{name}" already exists'
    return Failure(409, "AlreadyExists", message, _subject(kind, kind.plural, name))


def another(kind: Kind, name: str, sent_uid: str, stored_uid: str) -> Failure:
    """An update is for an object with another UID (apiserver/pkg/storage/errors.go)."""
    path = f"/registry/{kind.plural}/{name}"
    message = (
        f'Operation cannot be fulfilled on {kind.qualified} "{name}": StorageError: invalid object, Code: 4, '
        f"Key: {path}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: {sent_uid}, "
        f"UID in object meta: {stored_uid}"
    )
    return Failure(409, "Conflict", message, _subject(kind, kind.plural, name))


def precondition(kind: Kind, name: str, field: str, expected: str, actual: str) -> Failure:
    """A deletion's precondition does not hold."""
    again = "deleted and then recreated" if field == "UID" else "modified"
    return Failure(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {kind.kind}.{kind.group} "{name}": the {field} in the precondition '
        f"({expected}) does not match the {field} in record ({actual}). The object might have been {again}",
        _subject(kind, kind.kind, name),
    )


def invalid(kind: Kind, name: str, causes: Sequence[Cause]) -> Failure:
    """The object breaks rules."""
    message = ", ".join(f"{cause.field}: {cause.message}" for cause in causes)
    message = f"[{message}]" if len(causes) > 1 else message
    details = _subject(kind, kind.kind, name)
    details["causes"] = [{"reason": c.reason, "message": c.message, "field": c.field} for c in causes]
    qualified = f"{kind.kind}.{kind.group}" if kind.group else kind.kind
    return Failure(422, "Invalid", f'{qualified} "{name}" is invalid: {message}', details)


def patch_failed() -> Failure:
    """A JSON patch cannot be applied, or a test of it fails: 422, and never 409."""
    return Failure(422, "Invalid", "the server rejected our request due to an error in our request", {})


def expired(version: int, oldest: int) -> Failure:
    """A watch from a version that the server has forgotten."""
    return Failure(410, "Expired", f"too old resource version: {version} ({oldest})")


def unauthorized() -> Failure:
    """The token is none."""
    return Failure(401, "Unauthorized", "Unauthorized")


def forbidden(
    kind: Kind, verb: str, user: str = "system:anonymous", *, namespace: str = "", name: str = ""
) -> Failure:
    """The client may not do that."""
    subject = f'{kind.qualified} "{name}"' if name else kind.qualified
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    action = f'{verb} resource "{kind.plural}" in API group "{kind.group}" {where}'
    message = f'{subject} is forbidden: User "{user}" cannot {action}'
    details = _subject(kind, kind.plural, name)
    return Failure(403, "Forbidden", message, details if name else {"kind": kind.plural} | _group(kind))


def deleted(kind: Kind, stored: Object) -> Object:
    """Return the answer to the deletion of a custom resource; of a built-in one it is the object."""
    details = _subject(kind, kind.plural, stored["metadata"]["name"]) | {"uid": stored["metadata"]["uid"]}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def _subject(kind: Kind, word: str, name: str) -> Object:
    return {"name": name, "kind": word} | _group(kind)


def _group(kind: Kind) -> Object:
    return {"group": kind.group} if kind.group else {}
