"""The objects, their versions and their history: one counter for all, as etcd has it. Knows no rule of a kind."""

from __future__ import annotations

import random
import string
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Final, final

import trio
from msgspec import Struct

from gpuactors_simulation.kube import status
from gpuactors_simulation.kube.status import Kind, Object

ADDED, MODIFIED, DELETED = "ADDED", "MODIFIED", "DELETED"

_EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)
_NAME_MAX: Final = 58
"""Of a `generateName`; five characters follow (apiserver/pkg/storage/names)."""
_ALPHABET: Final = "bcdfghjklmnpqrstvwxz2456789"
_HISTORY_MAX: Final = 1000


class Change(Struct, frozen=True):
    """One change of one object."""

    version: int
    type: str
    kind: Kind
    object: Object


@final
class Store:
    """The objects. What it returns is a copy."""

    def __init__(self, seed: int = 0) -> None:
        self.version = 1000
        self.changed = trio.Event()
        self._objects: dict[tuple[Kind, str, str], Object] = {}
        self._history: deque[Change] = deque(maxlen=_HISTORY_MAX)
        self._oldest = self.version
        self._random = random.Random(seed)

    def now(self) -> str:
        """Return the server's time, in whole seconds."""
        try:
            seconds = trio.current_time()
        except RuntimeError:  # no run yet
            seconds = 0.0
        return (_EPOCH + timedelta(seconds=int(seconds))).strftime("%Y-%m-%dT%H:%M:%SZ")

    def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return the object; None if there is none."""
        stored = self._objects.get((kind, namespace, name))
        return deepcopy(stored) if stored is not None else None

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Return the object. Raises `Failure` 404."""
        stored = self.find(kind, namespace, name)
        if stored is None:
            raise status.not_found(kind, name)
        return stored

    def objects(
        self, kind: Kind, namespace: str | None = None, selects: Callable[[Object], bool] | None = None
    ) -> list[Object]:
        """Return the objects of a kind, by name; those alone that `selects` holds for, which must not change them."""
        items = [
            (key, value)
            for key, value in self._objects.items()
            if key[0] is kind and namespace in (None, key[1]) and (selects is None or selects(value))
        ]
        return [deepcopy(value) for _, value in sorted(items, key=lambda item: item[0][1:])]

    def named(self, kind: Kind, sent: Object) -> Object:
        """Return a new object with all that the server gives it, except for a version; it is not stored."""
        made = deepcopy(sent)
        meta = made.setdefault("metadata", {})
        if not meta.get("name"):
            meta["name"] = meta.get("generateName", "")[:_NAME_MAX] + "".join(
                self._random.choices(_ALPHABET, k=5)
            )
        meta["uid"] = self.uid()
        meta["creationTimestamp"] = self.now()
        meta.pop("resourceVersion", None)
        if kind.counts_generations:
            meta["generation"] = 1
        return {"apiVersion": kind.api_version, "kind": kind.kind} | made

    def uid(self) -> str:
        """Return a new UID."""
        digits = "".join(self._random.choices(string.hexdigits.lower()[:16], k=32))
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def put(self, kind: Kind, new: Object) -> Object:
        """Store an object that was `named`, or another content of a stored one. An equal one changes nothing."""
        meta = new["metadata"]
        key = (kind, meta.get("namespace", ""), meta["name"])
        before = self._objects.get(key)
        if before is not None:
            meta["resourceVersion"] = before["metadata"]["resourceVersion"]
            if new == before:
                return deepcopy(new)
            if kind.counts_generations and _counted(new) != _counted(before):
                meta["generation"] = before["metadata"].get("generation", 0) + 1
        self._store(key, new, MODIFIED if before is not None else ADDED)
        return deepcopy(new)

    def delete(self, kind: Kind, namespace: str, name: str) -> Object:
        """Remove the object. Raises `Failure` 404."""
        deleted = self.get(kind, namespace, name)
        del self._objects[kind, namespace, name]
        self._count(DELETED, kind, deleted)
        return deleted

    def seed(self, kind: Kind, stored: Object) -> None:
        """Store an object as it is, with the version that it has."""
        meta = stored["metadata"]
        self.version = max(self.version, int(meta["resourceVersion"]))
        self._objects[kind, meta.get("namespace", ""), meta["name"]] = deepcopy(stored)
        self._history.append(Change(int(meta["resourceVersion"]), ADDED, kind, deepcopy(stored)))

    def since(self, version: int) -> list[Change]:
        """Return the changes after a version. Raises `Failure` 410 if it is too old."""
        if version < self._oldest:
            raise status.expired(version, self._oldest)
        return [change for change in self._history if change.version > version]

    def forget(self) -> None:
        """Forget all history: every watch from an older version is too old (etcd compacts every five minutes)."""
        self._history.clear()
        self._oldest = self.version

    def _store(self, key: tuple[Kind, str, str], new: Object, change: str) -> None:
        self._objects[key] = new
        self._count(change, key[0], new)

    def _count(self, change: str, kind: Kind, changed: Object) -> None:
        self.version += 1
        changed["metadata"]["resourceVersion"] = str(self.version)
        if len(self._history) == _HISTORY_MAX:
            self._oldest = self._history[0].version
        self._history.append(Change(self.version, change, kind, deepcopy(changed)))
        self.changed.set()
        self.changed = trio.Event()


def _counted(stored: Object) -> Object:
    return {key: value for key, value in stored.items() if key not in ("metadata", "status")}
