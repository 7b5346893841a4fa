"""A kind of device that only tests know: the two halves of a card, as mediated devices are parts of one.

All that the core asks of a kind is here. Its devices have keys that are no PCI addresses, are in IOMMU groups without
any function of the host, and are usable as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, final
from uuid import NAMESPACE_DNS, uuid5

import pytest
from msgspec.structs import replace

from gpuactors.core.kinds import table
from gpuactors.core.kinds.kind import Act, HostFacts, Kind
from gpuactors.core.values import memo
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import AllocatedDevice, BoundFunction, DeviceEdits, Json
from gpuactors.core.values.inventory import Device, KindName
from gpuactors.core.values.model import (
    DeviceKey,
    Observed,
    PciFunction,
    ResourceName,
    device_key,
    pci_address,
)
from gpuactors.core.values.slices import OfferedDevice, attribute
from gpuactors.core.values.status import Reason
from gpuactors.core.values.vfio import VfioConfig
from tests.core.builders import gpu

RESOURCE: Final = ResourceName("toy.example.com/half")
CARD: Final = pci_address("0000:05:00.0")
"""Its driver makes the halves."""

_KEY: Final = r"toy(?:-[0-9a-f]+){5}"


_HALVED: Final = "Toy"
"""The name of a card that has halves."""


def card(driver: str | None = "toy-halves", *, halved: bool = True) -> PciFunction:
    """A card, which no selector of `SETTINGS` chooses; with halves, unless it is not `halved`."""
    function = gpu(CARD, 5, device="70aa", model=_HALVED if halved else "Whole toy", driver=driver)
    return replace(function, vendor="f00d")


def half(number: int) -> DeviceKey:
    return DeviceKey(f"toy-{uuid5(NAMESPACE_DNS, f'{CARD}/{number}')}")


def group_of(number: int) -> int:
    return 500 + number


@final
class Halves:
    """The halves of the cards."""

    name: Final = KindName("half")
    acts: Final = frozenset[Act]()
    env_prefix: Final = "TOY_"

    def is_key(self, text: str) -> bool:
        return re.fullmatch(_KEY, text) is not None

    def slice_name(self, key: DeviceKey) -> str:
        return f"half-{key}"

    def key_of(self, slice_name: str) -> DeviceKey | None:
        key = slice_name.removeprefix("half-")
        return DeviceKey(key) if key != slice_name and self.is_key(key) else None

    def devices(self, facts: HostFacts) -> Iterator[Device]:
        cards = [
            function
            for function in facts.functions.values()
            if function.vendor == "f00d" and function.model == _HALVED
        ]
        for function in cards:
            for number in (0, 1):
                yield Device(
                    key=half(number),
                    kind=self.name,
                    resource=RESOURCE,
                    model=f"half of {function.device}",
                    is_selected=True,
                    units=(function,),
                    members=(),
                    group=group_of(number),
                    parent=device_key(function.address),
                    nodes=("/dev/vfio/vfio", f"/dev/vfio/{group_of(number)}"),
                    numa_node=function.numa_node,
                    pcie_root=function.pcie_root,
                    driver=function.driver,
                    has_backing=function.driver == "toy-halves",
                    may_be_unbinding=False,
                    fault=function.fault,
                    iommufd=False,
                )

    def blocker(self, device: Device, use: Observed | None) -> Reason | None:
        return None if device.has_backing else self.not_backed(device)

    def not_backed(self, device: Device) -> Reason:
        return Reason(Cause.NOT_BOUND, f"{device.parent} is not on toy-halves, which makes it")

    def never_given(self, device: Device) -> Reason | None:
        return None

    def to_bind(self, device: Device) -> tuple[PciFunction, ...]:
        return ()

    def not_viable(self, device: Device, to_bind: Collection[PciFunction]) -> Reason | None:
        return None

    def of_the_hosts_fabric(self, device: Device, fabric: str) -> Reason | None:
        return None

    def offer(self, device: Device, *, claimed: bool) -> OfferedDevice:
        attributes = {"type": attribute("half"), "parent": attribute(device.parent or "")}
        return OfferedDevice(self.slice_name(device.key), attributes, {"memory": "1Gi"}, claimed=claimed)

    def edits(
        self,
        result: AllocatedDevice,
        device: Device | None,
        bound: Sequence[BoundFunction],
        config: VfioConfig,
    ) -> DeviceEdits:
        nodes = device.nodes if device is not None else ()
        edits: Json = {"env": ("TOY=1",), "deviceNodes": tuple({"path": node} for node in nodes)}
        return DeviceEdits(result, edits, {"toy.example.com/uuid": self.key_of(result.device) or ""})


HALVES: Final[Kind] = Halves()


@contextmanager
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The core knows halves, after whole functions."""
    with monkeypatch.context() as patch:
        patch.setattr(table, "KINDS", (*table.KINDS, HALVES))
        memo.forget()
        yield
    memo.forget()
