"""Kubernetes Events about our node and its pods. Implements `ports.kube.EventApi`.

By core/v1 and not by events.k8s.io/v1: the server keeps both as one object, kubelet's own events about the same pods
are of core/v1, and `kubectl get events --sort-by=.lastTimestamp` and every older viewer know its `count` and times,
where a `series` has at least two. The name of an event follows from its object, reason and message, so a daemon that
has restarted finds the one that it made before: the server answers AlreadyExists, and its time is renewed.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Final, final
from urllib.parse import quote

import msgspec

from gpuactors.core.values.quote import quoted_name
from gpuactors.core.values.text import cut
from gpuactors.kube.client import MERGE_PATCH, ApiClient, Call
from gpuactors.ports.kube import ApiRefused, EventNote, ObjectRef

EVENT_MESSAGE_MAX_BYTES: Final = 1024
"""Limit on an event's message; events.k8s.io/v1 takes no longer note (pkg/apis/core/validation)."""

COMPONENT: Final = "gpuactors"

_DIGEST_BYTES: Final = 8
_NAME_MAX_CHARS: Final = 253 - 2 * _DIGEST_BYTES - 1
"""Limit on the object's name in an event's name, which is a DNS subdomain."""

_OF_NODES: Final = "default"
"""The namespace of events about what has none (core/v1 validation; client-go, tools/record)."""


class _Counted(msgspec.Struct):
    count: int = 0


@final
class KubeEvents:
    """The events of one node's daemon."""

    def __init__(self, client: ApiClient, node: str) -> None:
        self._client = client
        self._host = node
        self.node: Final = ObjectRef("Node", "", node, node)
        """See `EventApi.node`. With its name as its UID, as kubelet has it in its own events (pkg/kubelet, nodeRef):
        `kubectl describe node` looks for both."""

    async def tell(self, note: EventNote) -> int:
        if note.count > 1:
            try:
                return await self._renew(note, note.count)
            except ApiRefused as exc:
                if exc.code != 404:  # else the server has forgotten it
                    raise
        try:
            return await self._create(note)
        except ApiRefused as exc:
            if (exc.code, exc.refusal.reason) != (409, "AlreadyExists"):
                raise
        return await self._renew(note, None)

    async def _create(self, note: EventNote) -> int:
        about = note.about
        event = {
            "metadata": {"name": _name(note), "namespace": about.namespace or _OF_NODES},
            "involvedObject": _reference(about),
            "reason": note.reason,
            "message": cut(note.message, EVENT_MESSAGE_MAX_BYTES),
            "source": {"component": COMPONENT, "host": self._host},
            "firstTimestamp": _time(note.first_at),
            "lastTimestamp": _time(note.last_at),
            "count": 1,
            "reportingComponent": COMPONENT,
            "reportingInstance": self._host,
            "type": "Warning",
            "apiVersion": "v1",
            "kind": "Event",
        }
        what = f"create an event about {_words(about)}"
        return await self._counted(Call(what, "POST", _path(about), body=msgspec.json.encode(event)))

    async def _renew(self, note: EventNote, count: int | None) -> int:
        """Give the event this count, or keep its own, and the present time."""
        patch = {"lastTimestamp": _time(note.last_at), **({} if count is None else {"count": count})}
        what = f"repeat an event about {_words(note.about)}"
        path = f"{_path(note.about)}/{_name(note)}"
        return await self._counted(
            Call(what, "PATCH", path, body=msgspec.json.encode(patch), content_type=MERGE_PATCH)
        )

    async def _counted(self, call: Call) -> int:
        return max(1, (await self._client.decoded(call, _Counted)).count)


def _path(about: ObjectRef) -> str:
    return f"/api/v1/namespaces/{quote(about.namespace or _OF_NODES, safe='')}/events"


def _name(note: EventNote) -> str:
    about = note.about
    identity = (about.kind, about.namespace, about.name, about.uid, note.reason, note.message)
    digest = hashlib.blake2b("\0".join(identity).encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{quote(about.name[:_NAME_MAX_CHARS], safe='').rstrip('.-').lower()}.{digest}"


def _reference(about: ObjectRef) -> dict[str, str]:
    reference = {"kind": about.kind, "name": about.name, "uid": about.uid}
    if about.namespace:
        reference["namespace"] = about.namespace
    if about.kind == "Pod":
        reference["apiVersion"] = "v1"
    return reference


def _words(about: ObjectRef) -> str:
    name = quoted_name(f"{about.namespace}/{about.name}" if about.namespace else about.name)
    return f"the {about.kind.lower()} {name}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
