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
from gpuactors.core.values.text import encodable
from gpuactors.kube import errors
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


class _Reference(msgspec.Struct, rename="camel", omit_defaults=True):
    kind: str
    name: str
    uid: str
    namespace: str = ""
    api_version: str = ""


class _Source(msgspec.Struct):
    component: str
    host: str


class _Metadata(msgspec.Struct):
    name: str
    namespace: str


class _Event(msgspec.Struct, rename="camel"):
    metadata: _Metadata
    involved_object: _Reference
    reason: str
    message: str
    source: _Source
    first_timestamp: str
    last_timestamp: str
    count: int
    reporting_component: str
    reporting_instance: str
    type: str = "Warning"
    api_version: str = "v1"
    kind: str = "Event"


class _Counted(msgspec.Struct):
    count: int = 0


@final
class KubeEvents:
    """The events of one node's daemon."""

    def __init__(self, client: ApiClient, node: str) -> None:
        self._client = client
        self._host = node

    @property
    def node(self) -> ObjectRef:
        """Implement `EventApi.node`. With its name as its UID, as kubelet has it in its own events (pkg/kubelet,
        nodeRef): `kubectl describe node` looks for both."""
        return ObjectRef("Node", "", self._host, self._host)

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
        event = _Event(
            metadata=_Metadata(_name(note), about.namespace or _OF_NODES),
            involved_object=_Reference(
                about.kind, about.name, about.uid, about.namespace, "v1" if about.kind == "Pod" else ""
            ),
            reason=note.reason,
            message=_message(note),
            source=_Source(COMPONENT, self._host),
            first_timestamp=_time(note.first_at),
            last_timestamp=_time(note.last_at),
            count=1,
            reporting_component=COMPONENT,
            reporting_instance=self._host,
        )
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
        body = await self._client.ask(call)
        return max(1, errors.answered(call.what, self._client.server, body, _Counted).count)


def _path(about: ObjectRef) -> str:
    return f"/api/v1/namespaces/{quote(about.namespace or _OF_NODES, safe='')}/events"


def _name(note: EventNote) -> str:
    about = note.about
    identity = (about.kind, about.namespace, about.name, about.uid, note.reason, note.message)
    digest = hashlib.blake2b("\0".join(identity).encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{quote(about.name[:_NAME_MAX_CHARS], safe='').rstrip('.-').lower()}.{digest}"


def _message(note: EventNote) -> str:
    """Return the message, cut at a whole character if it is too long."""
    text = encodable(note.message).encode()
    if len(text) <= EVENT_MESSAGE_MAX_BYTES:
        return text.decode()
    end = "…"
    return text[: EVENT_MESSAGE_MAX_BYTES - len(end.encode())].decode(errors="ignore") + end


def _words(about: ObjectRef) -> str:
    name = quoted_name(f"{about.namespace}/{about.name}" if about.namespace else about.name)
    return f"the {about.kind.lower()} {name}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
