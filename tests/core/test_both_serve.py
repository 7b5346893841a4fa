"""One GPU that NVIDIA's device plugin and gpuactors both serve: who gives it first has it (docs/operate.md)."""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events.host import HostScanned
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Refused
from gpuactors.core.values.model import Health, PciFunction, device_key
from gpuactors.core.values.status import DeviceStatus
from tests.core.builders import A, B, Core, allocate_call, gpu

UUID = "GPU-6b8a2c14-93f0-4f8e-9d3a-0f5f6a1c7e21"
PLUGIN = "nvidia.com/gpu"
BY_CONTAINER = f"allocated to pod default/c-1 as {PLUGIN}"


def on_nvidia() -> PciFunction:
    return replace(gpu(A, 51, driver="nvidia"), gpu_uuid=UUID)


def node(first: PciFunction) -> Core:
    """A node with that GPU, and another one that is free."""
    core = Core()
    core.feed(HostScanned(1, (first, gpu(B, 52))))
    return core


def container_has_it(core: Core) -> None:
    core.others = {(PLUGIN, UUID): "c-1"}
    core.pass_time(limits.LEDGER_QUIET_S)


def status(core: Core) -> DeviceStatus:
    return core.state.assessments[device_key(A)].status


def test_theirs_gives_it_first_and_it_is_bound_to_vfio_under_the_container() -> None:
    core = node(on_nvidia())
    container_has_it(core)
    core.inspect(A, gpu(A, 51))
    assert (status(core).health, status(core).cause) == (Health.UNHEALTHY, Cause.CLAIMED_ELSEWHERE)
    assert status(core).message == BY_CONTAINER
    (refused,) = core.called(allocate_call(A), core.state.host.functions[A])
    assert isinstance(refused, Refused)
    assert BY_CONTAINER in refused.reason
    core.others = {}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert status(core).health is Health.HEALTHY


def test_ours_gives_it_first_and_theirs_still_lists_it() -> None:
    """Its container does not start. Kubelet counts the GPU as the virtual machine's until that ends."""
    core = node(on_nvidia())
    core.inspect(A, gpu(A, 51))
    core.ledger = {A: "vm-1"}
    container_has_it(core)
    assert (status(core).health, status(core).cause) == (Health.HEALTHY, Cause.ALLOCATED)
    assert status(core).message == f"allocated to pod default/vm-1; also {BY_CONTAINER}"
    core.ledger = {}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert (status(core).health, status(core).message) == (Health.UNHEALTHY, BY_CONTAINER)


def test_it_leaves_the_list_when_it_goes_back_to_containers() -> None:
    core = node(gpu(A, 51))
    assert status(core).health is Health.HEALTHY
    core.inspect(A, on_nvidia())
    container_has_it(core)
    assert core.device_list() == {B: "Healthy"}


def test_a_daemon_that_starts_later_does_not_know_the_uuid_of_a_gpu_on_vfio() -> None:
    """No container can use it there, and every GPU on vfio may be the one of an ID: none is withheld."""
    core = node(gpu(A, 51))
    container_has_it(core)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
