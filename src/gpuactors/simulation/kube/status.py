"""Failures as the API server words them: a `Status` object with the HTTP status of its code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
"""An object of the API, as JSON has it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object that the server has."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = False
    counts_generations: bool = False
    """`metadata.generation` grows with each change of what is neither metadata nor status."""
    fields: tuple[str, ...] = ("spec", "status")
    """What an object has beside its metadata."""

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
CLAIMS = Kind("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim", namespaced=True)
NODES = Kind("", "v1", "nodes", "Node")
DOMAINS = Kind(
    "resource.nvidia.com",
    "v1beta1",
    "computedomains",
    "ComputeDomain",
    namespaced=True,
    counts_generations=True,
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

KINDS = (SLICES, CLAIMS, NODES, DOMAINS, CLIQUES, EVENTS)


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that is wrong with an object."""

    field: str
    reason: str
    message: str


class Failure(Exception):
    """The answer to a request is this failure."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }
        if details is not None:
            self.status["details"] = details


def not_served() -> Failure:
    """There is no such path."""
    return Failure(404, "NotFound", "the server could not find the requested resource", {})


def not_found(kind: Kind, name: str) -> Failure:
    """There is no object of this name."""
    return Failure(404, "NotFound", f'{kind.qualified} "{name}" not found', _subject(kind, kind.plural, name))


def bad_request(message: str) -> Failure:
    """The request makes no sense."""
    return Failure(400, "BadRequest", message)


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


def precondition(kind: Kind, name: str, what: str, given: str, found: str) -> Failure:
    """A deletion's precondition does not hold."""
    return Failure(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {kind.kind}.{kind.group} "{name}": the {what} in the precondition ({given}) '
        f"does not match the {what} in record ({found}). The object might have been modified",
        _subject(kind, kind.kind, name),
    )


def invalid(kind: Kind, name: str, causes: Sequence[Cause]) -> Failure:
    """The object breaks rules."""
    said = ", ".join(f"{cause.field}: {cause.message}" for cause in causes)
    details = _subject(kind, kind.kind, name)
    details["causes"] = [{"reason": c.reason, "message": c.message, "field": c.field} for c in causes]
    qualified = f"{kind.kind}.{kind.group}" if kind.group else kind.kind
    return Failure(422, "Invalid", f'{qualified} "{name}" is invalid: {said}', details)


def patch_failed() -> Failure:
    """A JSON patch cannot be applied, or a test of it fails: 422, and never 409."""
    return Failure(422, "Invalid", "the server rejected our request due to an error in our request", {})


def expired(version: int, oldest: int) -> Failure:
    """A watch from a version that the server has forgotten."""
    return Failure(410, "Expired", f"too old resource version: {version} ({oldest})")


def unauthorized() -> Failure:
    """The token is none."""
    return Failure(401, "Unauthorized", "Unauthorized")


def forbidden(kind: Kind, verb: str, who: str = "system:anonymous") -> Failure:
    """The client may not do that."""
    message = (
        f'{kind.qualified} is forbidden: User "{who}" cannot {verb} resource "{kind.plural}" in API group '
        f'"{kind.group}" at the cluster scope'
    )
    return Failure(403, "Forbidden", message, {"kind": kind.plural} | _group(kind))


def _subject(kind: Kind, word: str, name: str) -> Object:
    return {"name": name, "kind": word} | _group(kind)


def _group(kind: Kind) -> Object:
    return {"group": kind.group} if kind.group else {}
