"""SR-IOV: a virtual function is no whole GPU, and a GPU with virtual functions is none. Neither is given away; who has
one keeps it, and kubelet's books stay right."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.pool import wanted_pool
from gpuactors.core.events.host import HostChanged
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.reports.snapshot import report
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import DraHealth, Prepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Granted, Ready, Refused
from gpuactors.core.values.model import PciAddress, PciFunction
from gpuactors.core.values.slices import ServerKeepsTaints
from tests.core.builders import audio, gpu, pre_start_call
from tests.core.gpus.claim_core import ClaimCore, allocated, name

PF, VF, OTHER = "0000:01:00.0", "0000:01:00.4", "0000:02:00.0"


def physical(driver: str | None = "vfio-pci", *, virtual: bool = True) -> PciFunction:
    return replace(gpu(PF, 1, driver=driver), has_virtual_functions=virtual)


def virtual(driver: str | None = "vfio-pci") -> PciFunction:
    return replace(gpu(VF, 9, driver=driver), physical=PciAddress(PF))


def causes(core: ClaimCore) -> dict[str, Cause]:
    return {device.key: device.cause for device in report(core.state)}


def test_the_device_plugin_gives_neither_away_and_says_why() -> None:
    core = ClaimCore(physical(), virtual(), gpu(OTHER, 2))
    assert core.device_list() == {PF: "Unhealthy", VF: "Unhealthy", OTHER: "Healthy"}
    assert causes(core) == {PF: Cause.VIRTUAL_FUNCTIONS, VF: Cause.VIRTUAL_FUNCTION, OTHER: Cause.FREE}
    for address, cause in ((PF, Cause.VIRTUAL_FUNCTIONS), (VF, Cause.VIRTUAL_FUNCTION)):
        answer = core.allocation(core.allocate(address))
        assert isinstance(answer, Refused)
        assert answer.causes == (cause,)
    assert "a virtual function of 0000:01:00.0, which is no whole GPU" in core.reason(VF)
    assert "write 0 to its sriov_numvfs" in core.reason(PF)


@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci", None])
def test_no_claim_gets_one_on_any_driver_and_nothing_is_touched(driver: str | None) -> None:
    core = ClaimCore(physical(driver), virtual(driver))
    for address, cause in ((PF, Cause.VIRTUAL_FUNCTIONS), (VF, Cause.VIRTUAL_FUNCTION)):
        refused = core.refused(core.prepare(allocated(name("one"), address)))
        assert refused.causes == (cause,)
        assert address in refused.reason
    assert core.acts == []


def test_a_slice_has_no_virtual_function_and_the_physical_one_with_a_taint() -> None:
    core = ClaimCore(physical("nvidia"), virtual("nvidia"), gpu(OTHER, 2))
    assert core.wanted.offer is not None
    pool = wanted_pool(core.wanted.offer, ServerKeepsTaints.YES)
    taints = {d.name: [t.value for t in d.taints] for d in pool.devices}
    assert taints == {"gpu-0000-01-00-0": ["VirtualFunctions"], "gpu-0000-02-00-0": []}
    assert pool.left_out == {
        "gpu-0000-01-00-4": "0000:01:00.4 is a virtual function of 0000:01:00.0, which is no whole GPU"
    }


def test_a_pod_keeps_a_gpu_whose_virtual_functions_appear_and_the_books_stay_right() -> None:
    core = ClaimCore(physical(virtual=False), gpu(OTHER, 2))
    assert isinstance(core.allocation(core.allocate(PF)), Granted)
    core.ledger[PF] = "vm-1"
    core.pass_time(limits.LEDGER_S)
    core.changed(physical(), virtual())
    assert core.device_list() == {PF: "Healthy", VF: "Unhealthy", OTHER: "Healthy"}
    assert causes(core)[PF] is Cause.ALLOCATED
    token = core.token()
    core.feed(pre_start_call(PF, token=token))
    assert isinstance(core.allocation(token), Ready), "its container may start again"
    core.ledger.clear()
    core.pass_time(limits.LEDGER_S + POLL_S)
    assert core.device_list()[PF] == "Unhealthy"
    core.changed(physical(virtual=False))
    assert core.device_list()[PF] == "Healthy"


def test_a_claim_keeps_a_gpu_whose_virtual_functions_appear() -> None:
    core = ClaimCore(physical("nvidia", virtual=False))
    core.prepare(allocated(name("one"), PF))
    core.changed(physical())
    assert [h.health for h in core.wanted.health] == [DraHealth.HEALTHY]
    assert core.wanted.offer is not None
    (offered,) = core.wanted.offer.devices
    assert (offered.claimed, offered.blocked) == (True, None)
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    assert core.claim_state(name("one")) is ClaimState.PREPARED


def test_a_physical_function_is_whole_again_when_its_virtual_ones_go_without_a_uevent_of_it() -> None:
    """One of its virtual functions may be none that is selected, and so not known."""
    for known in (virtual(), replace(audio(VF, 9), physical=PciAddress(PF))):
        core = ClaimCore(physical(), known)
        assert core.device_list()[PF] == "Unhealthy"
        core.functions[PciAddress(PF)] = physical(virtual=False)
        del core.functions[PciAddress(VF)]
        core.feed(HostChanged(PciAddress(VF), None, "remove pci"))
        assert core.device_list() == {PF: "Healthy"}
