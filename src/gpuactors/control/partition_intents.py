"""The file `partitions.json` in the state directory: the partitions of the NVLink fabric that gpuactors is to activate
or deactivate, or has activated, in this boot (ADR 0025). Implements `ports.partitions.PartitionIntentsFile`.

    {"boot": "<id>", "partitions": [{"id": "7", "goal": "activate", "devices": ["0000:3b:00.0", "0000:5d:00.0"]}]}

No act is done before its intent is here. Lost, it leaves active partitions that nobody deactivates: a reader must say
that it is damaged. An activation does not outlive a boot, nor does an intent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from gpuactors.control.boot_json import BootContent, BootJson, Form
from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.partition import Goal, Intent, PartitionId

FILE_NAME: Final = "partitions.json"

PARTITIONS_FILE_MAX_BYTES: Final = 1 << 16
"""The maximum length of the file: a board has 15 partitions of up to 8 GPUs."""


class _Partition(Struct, frozen=True):
    id: Annotated[str, Meta(pattern=r"^[0-9]{1,10}\Z")]
    goal: Goal
    devices: Annotated[list[Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,64}\Z")]], Meta(min_length=1)]


class _Content(BootContent, frozen=True):
    partitions: list[_Partition]


def partition_intents_json(directory: str, boot: str) -> BootJson[tuple[Intent, ...]]:
    """Make the file of one state directory, as `BootJson`."""
    return BootJson(_FORM, directory, boot)


def _value_of(content: _Content) -> tuple[Intent, ...]:
    if len({p.id for p in content.partitions}) < len(content.partitions):
        raise ValueError("it has a partition twice")
    return tuple(
        Intent(PartitionId(p.id), frozenset(map(DeviceKey, p.devices)), p.goal) for p in content.partitions
    )


def _content_of(intents: tuple[Intent, ...]) -> Mapping[str, object]:
    return {"partitions": [{"id": i.id, "goal": str(i.goal), "devices": sorted(i.devices)} for i in intents]}


_FORM: Final = Form[tuple[Intent, ...]](
    name=FILE_NAME,
    bytes_max=PARTITIONS_FILE_MAX_BYTES,
    content=_Content,
    nothing=(),
    value_of=_value_of,
    content_of=_content_of,
    damaged="has no list of partitions",
    remedy="deactivate by the fabric manager's tool what no virtual machine uses, and remove the file",
)
