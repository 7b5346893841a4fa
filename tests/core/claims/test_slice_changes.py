"""How often a slice is written for what happens to a GPU: each change of the wanted pool is a write, and makes the
scheduler look at the node anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gpuactors.core.claims.pool import Pool, wanted_pool
from gpuactors.core.events import Event
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Effect
from gpuactors.core.values.model import PciFunction
from gpuactors.core.values.slices import ServerKeeps
from tests.core.builders import A, B, audio, gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, name


class Written(ClaimCore):
    """A core, and each pool that its publisher would write, in order."""

    pools: list[Pool]

    def _step(self, event: Event) -> list[Effect]:
        effects, offer = super()._step(event), self.state.offered.offer
        self.pools = getattr(self, "pools", [])
        if offer is not None and self.state.gpus.claims.loaded:
            pool = wanted_pool(offer, ServerKeeps.YES)
            if not self.pools or self.pools[-1] != pool:
                self.pools.append(pool)
        return effects

    @property
    def values(self) -> list[list[str]]:
        """The taints of the first GPU in each."""
        return [[t.value for t in pool.devices[0].taints] for pool in self.pools]


def core_of(driver: str) -> Written:
    core = Written(gpu(A, 1, driver=driver), audio("0000:01:00.1", 1, driver=None), gpu(B, 2, driver=driver))
    core.created(allocated(name("one"), A))
    core.pass_time(60)
    return core


def nobody_opens_it(core: Written) -> None:
    core.pass_time(60)


def a_vm_runs(core: Written) -> None:
    """It ends just before the unprepare, so that no poll has seen that."""
    core.enabled[A] = 1
    core.pass_time(60)
    core.enabled.clear()


@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci"])
@pytest.mark.parametrize("used", [nobody_opens_it, a_vm_runs])
def test_a_claims_life_writes_no_slice(driver: str, used: Callable[[Written], None]) -> None:
    """From its prepare to the moment at which kubelet has heard that it was unprepared."""
    core = core_of(driver)
    core.prepare(name("one"))
    core.listed(name("one"), A)
    used(core)
    core.unprepare(name("one"))
    core.pass_time(0.06)
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE
    assert core.device_list().get(A) == ("Healthy" if driver == "vfio-pci" else None)
    core.claims.clear()
    core.pass_time(60)
    assert core.driver(A) == driver
    assert len(core.pools) == 1, core.values


def test_a_process_that_stays_after_its_claim_is_one_change() -> None:
    core = core_of("vfio-pci")
    core.prepare(name("one"))
    core.enabled[A] = 1
    core.pass_time(60)
    core.unprepare(name("one"))
    core.pass_time(60)
    assert core.values == [[], ["HeldByOther"]]


def test_an_allocate_and_the_end_of_its_pod_are_two_changes() -> None:
    core = core_of("vfio-pci")
    core.allocate(A)
    core.ledger[A] = "vm-1"
    core.pass_time(60)
    core.ledger.clear()
    core.pass_time(60)
    assert core.values == [[], ["Allocated"], []]


def with_iommufd(function: PciFunction) -> PciFunction:
    return replace(function, iommufd=True)


def test_iommufd_that_comes_with_the_first_bind_is_one_change_of_all_gpus() -> None:
    core = core_of("nvidia")
    for function in (gpu(A, 1, driver="nvidia"), gpu(B, 2, driver="nvidia")):
        core.changed(with_iommufd(function))
    assert len(core.pools) == 2
    assert [d.attributes["iommuFDEnabled"].value for d in core.pools[-1].devices] == [True, True]
