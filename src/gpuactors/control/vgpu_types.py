"""The file `vgpu-types.json` in the state directory: the names of vGPU types by physical card, as this node's
gpuactors has read them in this boot. Implements `ports.node.VgpuTypesFile`.

    {"boot": "<id>", "cards": {"0000:3b:00.0": {"driverBind": 4711, "names": {"1147": "NVIDIA L40S-1Q"}}}}

Only with it can a daemon that starts while a card is full know the profile of its vGPUs: NVIDIA's driver lists those
types only that could be set now. Lost, it costs these names and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from gpuactors.control.boot_json import BootContent, BootJson, Form
from gpuactors.core.values.model import PciAddress, is_pci_address
from gpuactors.core.values.vgpu import CardTypes

FILE_NAME: Final = "vgpu-types.json"

VGPU_TYPES_FILE_MAX_BYTES: Final = 1 << 20
"""The maximum length of the file: a node has a few cards, each with some dozens of types."""


class _Card(Struct, frozen=True, rename="camel"):
    driver_bind: Annotated[int, Meta(ge=1)]
    names: dict[
        Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")], Annotated[str, Meta(pattern=r"^[\x20-\x7e]{1,128}$")]
    ]


class _Content(BootContent, frozen=True):
    cards: dict[str, _Card]


def vgpu_types_json(directory: str, boot: str) -> BootJson[Mapping[PciAddress, CardTypes]]:
    """Make the file of one state directory, as `BootJson`."""
    return BootJson(_FORM, directory, boot)


def _value_of(content: _Content) -> Mapping[PciAddress, CardTypes]:
    return {
        PciAddress(card): CardTypes(types.driver_bind, {int(n): (name,) for n, name in types.names.items()})
        for card, types in content.cards.items()
        if is_pci_address(card)
    }


def _content_of(cards: Mapping[PciAddress, CardTypes]) -> Mapping[str, object]:
    """A number with several names is left out: it has none."""
    return {
        "cards": {
            card: {
                "driverBind": types.driver_bind,
                "names": {str(n): names[0] for n, names in types.names.items() if len(names) == 1},
            }
            for card, types in cards.items()
        }
    }


_FORM: Final = Form[Mapping[PciAddress, CardTypes]](
    name=FILE_NAME,
    bytes_max=VGPU_TYPES_FILE_MAX_BYTES,
    content=_Content,
    nothing={},
    value_of=_value_of,
    content_of=_content_of,
    damaged="is no list of vGPU types",
    remedy="it is written again",
)
