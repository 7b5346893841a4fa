"""The steps of a script of calls to an API server: values, played by `api_player.py`."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from gpuactors.kube.client import JSON
from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.kube.status import Object

Answers = Mapping[str, Any]
"""The body of each step's answer, by the step's name."""

_REFERENCE: Final = re.compile(r"\{([a-z0-9-]+):([^{}]*)\}")


class Client(StrEnum):
    """Who sends a request."""

    ADMIN = "an administrator"
    ANONYMOUS = "nobody: the request has no token"
    BAD = "nobody: the token is not one of this server"
    EXPIRED = "a service account whose token has expired"
    ELSEWHERE = "a service account whose token is for another audience"
    DELETED = "a service account that has been deleted"
    STRANGER = "a service account without rights"


@dataclass(frozen=True, slots=True)
class Edited:
    """The body of an earlier answer with changes."""

    answer: str
    """The name of the step."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """New values, by path: `spec.devices.0.attributes.index.int`."""
    without: tuple[str, ...] = ()
    """Paths to leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `{step:path}` in its path and body stands for a value of an earlier answer."""

    name: str
    path: str
    method: str = "GET"
    body: Any = None
    """JSON, `Edited`, or bytes to send as they are."""
    content_type: str = JSON
    accept: str = JSON
    client: Client = Client.ADMIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """A request to a server that has no capacity left for its client."""

    name: str
    ask: Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """Bytes on a new connection, which need not be HTTP."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrange:
    """What somebody else does to the cluster. It is not compared; its answer can be referred to."""

    name: str
    original: tuple[Ask, ...]
    """Each must succeed, or find the object there already. The last one's answer is that of the step."""
    fake: Callable[[FakeApiServer], Object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """A request, asked again until a value of its answer is another than a known one. It is not compared."""

    name: str
    ask: Ask
    path: str
    unlike: str
    """A reference to the known value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A watch, read until the server ends it."""

    name: str
    path: str
    """With `timeoutSeconds`."""
    accept: str = JSON
    during: tuple[Ask, ...] = ()
    """Asked one after the other while the watch runs."""
    after: int = 0
    """How many events must have come before the first of `during`."""


Step = Ask | Overload | Raw | Arrange | Until | Watch


def resolved(value: Any, answers: Answers) -> Any:
    """The value with each reference replaced. A string that is one reference becomes the value itself."""
    match value:
        case Edited(answer, changes, without):
            return _edited(copy.deepcopy(answers[answer]), resolved(dict(changes), answers), without)
        case str():
            if (whole := _REFERENCE.fullmatch(value)) is not None:
                return copy.deepcopy(_found(answers, whole))
            return _REFERENCE.sub(lambda match: str(_found(answers, match)), value)
        case dict():
            return {key: resolved(inner, answers) for key, inner in value.items()}
        case list() | tuple():
            return [resolved(inner, answers) for inner in value]
        case _:
            return value


def value_at(found: Any, path: str) -> Any:
    """The value at a path of a body, as in a reference."""
    for part in filter(None, path.split(".")):
        found = found[_key(found, part)]
    return found


def _found(answers: Answers, match: re.Match[str]) -> Any:
    return value_at(answers[match[1]], match[2])


def _edited(found: Any, changes: Mapping[str, Any], without: tuple[str, ...]) -> Any:
    for path, value in changes.items():
        parent, key = _parent(found, path)
        parent[key] = value
    for path in without:
        parent, key = _parent(found, path)
        del parent[key]
    return found


def _parent(found: Any, path: str) -> tuple[Any, Any]:
    *parts, last = path.split(".")
    for part in parts:
        found = found.setdefault(part, {}) if isinstance(found, dict) else found[int(part)]
    return found, _key(found, last)


def _key(found: Any, part: str) -> str | int:
    return int(part) if isinstance(found, list) else part
