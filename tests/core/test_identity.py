"""Which device kubelet means by an ID. What stands in kubelet's ledger, or in a call, is input: any string."""

from __future__ import annotations

import pytest

from gpuactors.core.effects import Refused
from gpuactors.core.events import AllocateAsked, HostScanned, PreStartAsked
from gpuactors.core.model import DeviceId, PciFunction, ResourceName, Token, pci_address
from tests.core.builders import H100, Core, gpu

A, B = (pci_address(f"0000:0{n}:00.0") for n in (1, 2))
OTHERS = ResourceName("devices.kubevirt.io/other")
ODD_IDS = ("", "²", "1" * 4301, "٥١", "-1", "+1", " 1", "1\n", "0x1", "a/../b", "\x00", "💡", "0000:01:00.0 ")


def node(
    *functions: PciFunction,
    ledger: dict[str, str] | None = None,
    others: dict[tuple[str, str], str] | None = None,
) -> Core:
    """A node as a daemon finds it at its start."""
    core = Core()
    core.ledger, core.others = dict(ledger or {}), dict(others or {})
    core.feed(HostScanned(1, functions or (gpu(A), gpu(B))))
    return core


# --- odd IDs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ODD_IDS, ids=lambda i: ascii(i[:12]))
def test_an_odd_id_in_a_call_is_refused_and_nothing_else_happens(odd: str) -> None:
    core = Core(gpu(A), gpu(B))
    device = DeviceId(odd)
    answers = core.answers(
        AllocateAsked(Token(1), H100, ((device,),)), PreStartAsked(Token(2), H100, (device,))
    )
    assert [type(answer) for answer in answers] == [Refused, Refused]
    assert core.frame() == {A: "Healthy", B: "Healthy"}


@pytest.mark.parametrize("resource", [OTHERS, H100])
@pytest.mark.parametrize("odd", ODD_IDS, ids=lambda i: ascii(i[:12]))
def test_an_odd_id_in_kubelets_ledger_is_read(odd: str, resource: ResourceName) -> None:
    core = node(ledger={A: "vm-1"}, others={(resource, odd): "vm-2"})
    ours = {A: "Healthy", B: "Healthy"}
    assert core.frame() == (ours if resource == OTHERS else ours | {odd: "Unhealthy"})
