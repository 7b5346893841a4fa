"""The file `partitions.json` in the state directory: the partitions of the NVLink fabric that gpuactors is to activate
or deactivate, or has activated, in this boot (ADR 0025). Implements `ports.partitions.PartitionIntentsFile`.

    {"boot": "<id>", "partitions": [{"id": "7", "goal": "activate", "devices": ["0000:3b:00.0", "0000:5d:00.0"]}]}

No act is done before its intent is here. Lost, it leaves active partitions that nobody deactivates: a reader must say
that it is damaged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Annotated, Final, final

import trio
from msgspec import Meta, Struct, ValidationError, convert

from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.partition import Goal, Intent, PartitionId
from gpuactors.decoding import decode_json
from gpuactors.ports.errors import StateFileError
from gpuactors.process.plain_files import read_plain, replace_plain

FILE_NAME: Final = "partitions.json"

PARTITIONS_FILE_MAX_BYTES: Final = 1 << 16
"""The maximum length of the file: a board has 15 partitions of up to 8 GPUs."""

PARTITIONS_READ_S: Final = 2.0
"""The deadline of a read, before the daemon serves."""

_MODE: Final = 0o644


class _Partition(Struct, frozen=True):
    id: Annotated[str, Meta(pattern=r"^[0-9]{1,10}\Z")]
    goal: Goal
    devices: Annotated[list[Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,64}\Z")]], Meta(min_length=1)]


class _Content(Struct, frozen=True):
    boot: Annotated[str, Meta(min_length=1)]
    partitions: list[_Partition]


@final
class PartitionIntentsJson:
    """The file of one state directory, which is there."""

    def __init__(self, directory: str, boot: str) -> None:
        """`boot`: the id of this boot of the host. An activation does not outlive a boot, nor does an intent."""
        self._path: Final = os.path.join(directory, FILE_NAME)
        self._boot: Final = boot

    async def read(self) -> tuple[Intent, ...]:
        """Implement `ports.partitions.PartitionIntentsFile.read` in a thread, as a disk that hangs must not stop the
        daemon."""
        with trio.move_on_after(PARTITIONS_READ_S):
            return await trio.to_thread.run_sync(self._read, abandon_on_cancel=True)
        raise StateFileError(f"cannot read {self._path}: no answer within {PARTITIONS_READ_S:g} s")

    def _read(self) -> tuple[Intent, ...]:
        try:
            text = read_plain(self._path, PARTITIONS_FILE_MAX_BYTES + 1)
        except FileNotFoundError:
            return ()
        except OSError as exc:
            raise StateFileError(f"cannot read {self._path}: {exc.strerror}") from None
        try:
            content = convert(decode_json(text, dict[str, object]), _Content)
            if len({p.id for p in content.partitions}) < len(content.partitions):
                raise ValueError("it has a partition twice")
        except (ValueError, ValidationError) as exc:
            raise StateFileError(
                f"{self._path} has no list of partitions ({type(exc).__name__}: {str(exc)[:100]}); deactivate by the "
                "fabric manager's tool what no virtual machine uses, and remove the file"
            ) from None
        if content.boot != self._boot:
            return ()
        return tuple(
            Intent(PartitionId(p.id), frozenset(map(DeviceKey, p.devices)), p.goal)
            for p in content.partitions
        )

    async def write(self, intents: Sequence[Intent]) -> None:
        """Implement `ports.partitions.PartitionIntentsFile.write`: a new file replaces the old one, so it is whole at
        any moment, and is on disk when this returns."""
        partitions = [{"id": i.id, "goal": str(i.goal), "devices": sorted(i.devices)} for i in intents]
        text = json.dumps({"boot": self._boot, "partitions": partitions})
        try:
            await trio.to_thread.run_sync(self._write, text.encode())
        except OSError as exc:
            raise StateFileError(f"cannot write {self._path}: {exc.strerror}; it is tried again") from None

    def _write(self, text: bytes) -> None:
        replace_plain(self._path, text, _MODE, durable=True)
