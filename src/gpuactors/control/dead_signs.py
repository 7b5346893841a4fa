"""The file `dead-signs.json` in the state directory: which PCI functions are dead, by the first sign of each, as this
node's gpuactors has seen them in this boot (ADR 0024). Implements `ports.node.DeadSignsFile`.

    {"boot": "<id>", "functions": {"0000:3b:00.0": {"presence": 4711, "sign": "silent"}}}

Only with it does a daemon that starts know a function that was silent and answers again, and one whose fatal error only
the port above has counted. Lost, it brings such a function back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from gpuactors.control.boot_json import BootContent, BootJson, Form
from gpuactors.core.values.dead_signs import DeadSign, DeadSigns
from gpuactors.core.values.model import Sign, pci_address

FILE_NAME: Final = "dead-signs.json"

DEAD_SIGNS_FILE_MAX_BYTES: Final = 1 << 20
"""The maximum length of the file: some 60 bytes for each dead function. A dead card takes its virtual functions with
it, 256 at most."""


class _Sign(Struct, frozen=True):
    presence: Annotated[int, Meta(ge=1)]
    sign: Sign


class _Content(BootContent, frozen=True):
    functions: dict[str, _Sign]


def dead_signs_json(directory: str, boot: str) -> BootJson[DeadSigns]:
    """Make the file of one state directory, as `BootJson`."""
    return BootJson(_FORM, directory, boot)


def _value_of(content: _Content) -> DeadSigns:
    return {pci_address(a): DeadSign(of.presence, of.sign) for a, of in content.functions.items()}


def _content_of(signs: DeadSigns) -> Mapping[str, object]:
    return {
        "functions": {
            address: {"presence": sign.presence, "sign": str(sign.sign)} for address, sign in signs.items()
        }
    }


_FORM: Final = Form[DeadSigns](
    name=FILE_NAME,
    bytes_max=DEAD_SIGNS_FILE_MAX_BYTES,
    content=_Content,
    nothing={},
    value_of=_value_of,
    content_of=_content_of,
    damaged="is no list of dead functions",
    remedy="it is written again",
)
