"""The file `vgpu-types.json` in the state directory: the names of vGPU types by physical card, as this node's
gpuactors has read them in this boot. Implements `ports.node.VgpuTypesFile`.

    {"boot": "<id>", "cards": {"0000:3b:00.0": {"driverBind": 4711, "names": {"1147": "NVIDIA L40S-1Q"}}}}

Only with it can a daemon that starts while a card is full know the profile of its vGPUs: NVIDIA's driver lists those
types only that could be set now. Lost, it costs these names and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Final, final

import trio
from msgspec import Meta, Struct, ValidationError, convert

from gpuactors.core.values.model import PciAddress, is_pci_address
from gpuactors.core.values.vgpu import CardTypes
from gpuactors.decoding import decode_json
from gpuactors.ports.errors import StateFileError
from gpuactors.process.plain_files import read_plain, replace_plain

FILE_NAME: Final = "vgpu-types.json"

VGPU_TYPES_FILE_MAX_BYTES: Final = 1 << 20
"""The maximum length of the file: a node has a few cards, each with some dozens of types."""

VGPU_TYPES_READ_S: Final = 2.0
"""The deadline of a read, at the start and before the daemon serves: kubelet waits for its plugin as long."""

_MODE: Final = 0o644


class _Card(Struct, frozen=True, rename="camel"):
    driver_bind: Annotated[int, Meta(ge=1)]
    names: dict[
        Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")], Annotated[str, Meta(pattern=r"^[\x20-\x7e]{1,128}$")]
    ]


class _Content(Struct, frozen=True):
    boot: str
    cards: dict[str, _Card]


@final
class VgpuTypesJson:
    """The file of one state directory, which is there."""

    def __init__(self, directory: str, boot: str) -> None:
        """`boot`: the id of this boot of the host; a file of another one says nothing."""
        self._path: Final = os.path.join(directory, FILE_NAME)
        self._boot: Final = boot

    async def read(self) -> Mapping[PciAddress, CardTypes]:
        """Implement `ports.node.VgpuTypesFile.read` in a thread, as a disk that hangs must not stop the daemon."""
        with trio.move_on_after(VGPU_TYPES_READ_S):
            return await trio.to_thread.run_sync(self._read, abandon_on_cancel=True)
        raise StateFileError(f"cannot read {self._path}: no answer within {VGPU_TYPES_READ_S:g} s")

    def _read(self) -> Mapping[PciAddress, CardTypes]:
        try:
            text = read_plain(self._path, VGPU_TYPES_FILE_MAX_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as exc:
            raise StateFileError(f"cannot read {self._path}: {exc.strerror}") from None
        try:
            content = convert(decode_json(text, dict[str, object]), _Content)
        except (ValueError, ValidationError) as exc:
            raise StateFileError(
                f"{self._path} is no list of vGPU types ({type(exc).__name__}: {str(exc)[:100]}); it is written again"
            ) from None
        if content.boot != self._boot:
            return {}
        return {
            PciAddress(card): CardTypes(
                types.driver_bind, {int(n): (name,) for n, name in types.names.items()}
            )
            for card, types in content.cards.items()
            if is_pci_address(card)
        }

    async def write(self, cards: Mapping[PciAddress, CardTypes]) -> None:
        """Implement `ports.node.VgpuTypesFile.write`: a new file replaces the old one, so it is whole at any
        moment. A number with several names is left out: it has none."""
        content = _Content(
            self._boot,
            {
                card: _Card(
                    types.driver_bind,
                    {str(n): names[0] for n, names in types.names.items() if len(names) == 1},
                )
                for card, types in cards.items()
            },
        )
        text = json.dumps({"boot": content.boot, "cards": {c: _as_json(t) for c, t in content.cards.items()}})
        try:
            await trio.to_thread.run_sync(self._write, text.encode())
        except OSError as exc:
            raise StateFileError(f"cannot write {self._path}: {exc.strerror}; it is tried again") from None

    def _write(self, text: bytes) -> None:
        replace_plain(self._path, text, _MODE, durable=True)


def _as_json(card: _Card) -> Mapping[str, object]:
    return {"driverBind": card.driver_bind, "names": card.names}
