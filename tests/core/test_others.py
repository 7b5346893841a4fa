"""GPUs that another program's claims have: no pod and no claim here gets one, whoever wrote the files that say so."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.control.pods_view import pods_view
from gpuactors.core.events.host import HostScanned
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.reports.snapshot import project
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.cdi import CdiSpec, CdiSpecs
from gpuactors.core.values.effects import Answer, Granted, Refused
from gpuactors.core.values.model import (
    ClaimedDevice,
    Health,
    PciAddress,
    PciFunction,
    Pod,
    ResourceName,
    Settings,
    device_key,
)
from gpuactors.core.values.selector import parse_selector
from tests.core.builders import H100, SETTINGS, A, B, C, Core, allocate_call, gpu

UID = "6b8a2c14-93f0-4f8e-9d3a-0f5f6a1c7e21"
OTHER_UID = "00000000-93f0-4f8e-9d3a-0f5f6a1c7e21"
NVIDIAS, OTHERS = "gpu.nvidia.com", "gpu.example.com"
FREE, TAKEN = Cause.FREE, Cause.CLAIMED_ELSEWHERE


def listed(
    driver: str = NVIDIAS,
    device: str = "gpu-vfio-1",
    *,
    uid: str = UID,
    cdi_ids: tuple[str, ...] | None = None,
) -> ClaimedDevice:
    """A device of another driver's claim, as kubelet lists it."""
    ids = (f"k8s.{driver}/claim={uid}-{device}",) if cdi_ids is None else cdi_ids
    return ClaimedDevice(driver, "node", device, "default/c1", Pod("default", "p1", ""), uid, ids)


def spec(
    *nodes: str, driver: str = NVIDIAS, device: str = "gpu-vfio-1", uid: str = UID, ending: str = "yaml"
) -> CdiSpec:
    """The CDI file of that claim."""
    path = f"/var/run/cdi/k8s.{driver}-claim_{uid}.{ending}"
    return CdiSpec(path, (f"k8s.{driver}/claim={uid}-{device}",), nodes)


def node(
    *claims: ClaimedDevice,
    specs: tuple[CdiSpec, ...] = (),
    functions: tuple[PciFunction, ...] = (),
    settings: Settings = SETTINGS,
) -> Core:
    core = Core(settings=settings)
    core.strangers, core.cdi = claims, CdiSpecs(specs)
    core.feed(HostScanned(1, functions or (gpu(A, 51), gpu(B, 52), gpu(C, 53))))
    return core


def allocated(core: Core, address: PciAddress) -> Answer:
    """The answer to an Allocate of the device, after a fresh inspection of it."""
    (answer,) = core.called(allocate_call(address), core.state.host.functions[address])
    return answer


def causes(core: Core) -> dict[str, Cause]:
    return {d.id: d.cause for of in core.state.published.device_lists.values() for d in of}


def reason(core: Core, address: PciAddress) -> str:
    (device,) = (
        d for of in core.state.published.device_lists.values() for d in of if d.key == device_key(address)
    )
    assert device.health is Health.UNHEALTHY
    return device.reason


@pytest.mark.parametrize("driver", [NVIDIAS, OTHERS])
@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_a_gpu_of_another_drivers_claim_is_given_to_no_pod(driver: str, ending: str) -> None:
    core = node(listed(driver), specs=(spec("/dev/vfio/52", driver=driver, ending=ending),))
    assert causes(core) == {A: FREE, B: TAKEN, C: FREE}
    assert reason(core, B) == "in use by the claim default/c1 of pod default/p1"
    assert isinstance(allocated(core, B), Refused)
    assert isinstance(allocated(core, A), Granted)


def test_it_is_known_of_its_vfio_device_as_well() -> None:
    functions = (gpu(A, 51, cdev=0), gpu(B, 52, cdev=1))
    core = node(listed(), specs=(spec("/dev/vfio/devices/vfio1"),), functions=functions)
    assert causes(core) == {A: FREE, B: TAKEN}


def test_a_claim_has_every_gpu_of_its_group() -> None:
    core = node(listed(), specs=(spec("/dev/vfio/51"),), functions=(gpu(A, 51), gpu(B, 51), gpu(C, 53)))
    assert causes(core) == {A: TAKEN, B: TAKEN, C: FREE}


def test_its_file_counts_before_kubelet_lists_the_claim_and_after() -> None:
    core = node(specs=(spec("/dev/vfio/52"),))
    assert causes(core) == {A: FREE, B: TAKEN, C: FREE}
    assert reason(core, B) == (
        f"in use by the claim with UID {UID}, by /var/run/cdi/k8s.{NVIDIAS}-claim_{UID}.yaml"
    )
    core.cdi = CdiSpecs()
    core.pass_time(limits.LEDGER_QUIET_S)
    assert set(causes(core).values()) == {FREE}


def test_a_file_that_is_removed_while_kubelet_lists_the_claim_frees_nothing() -> None:
    core = node(listed(), specs=(spec("/dev/vfio/52"),))
    core.cdi = CdiSpecs()
    core.pass_time(limits.LEDGER_QUIET_S)
    assert causes(core) == {A: FREE, B: TAKEN, C: FREE}
    core.strangers = ()
    core.pass_time(limits.LEDGER_QUIET_S)
    assert set(causes(core).values()) == {FREE}


def test_a_file_is_read_where_kubelet_does_not_answer() -> None:
    core = node()
    core.ledger_problem, core.cdi = "kubelet hangs", CdiSpecs((spec("/dev/vfio/52"),))
    core.pass_time(limits.LEDGER_QUIET_S)
    assert causes(core)[B] is TAKEN


@pytest.mark.parametrize("driver", [NVIDIAS, OTHERS])
def test_without_the_file_each_gpu_that_it_may_be_is_withheld_and_says_so(driver: str) -> None:
    core = node(listed(driver))
    core.ledger = {A: "vm-1"}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert causes(core) == {A: Cause.ALLOCATED, B: TAKEN, C: TAKEN}, "whose A is is known"
    assert reason(core, C) == (
        f"may be in use by the claim default/c1 of pod default/p1: kubelet lists gpu-vfio-1 of {driver} for it, no "
        f"file in the CDI directory defines k8s.{driver}/claim={UID}-gpu-vfio-1, and nothing says which GPU that is"
    )
    assert isinstance(allocated(core, C), Refused)
    core.cdi = CdiSpecs((spec("/dev/vfio/52", driver=driver),))
    core.pass_time(limits.LEDGER_QUIET_S)
    assert causes(core) == {A: Cause.ALLOCATED, B: TAKEN, C: FREE}


def test_it_says_why_the_file_is_not_known() -> None:
    core = node(listed())
    core.cdi = CdiSpecs(problem="/var/run/cdi does not exist")
    core.pass_time(limits.LEDGER_QUIET_S)
    assert "-gpu-vfio-1: /var/run/cdi does not exist, and nothing says" in reason(core, C)


def test_a_driver_of_nvidia_withholds_no_gpu_of_another_vendor() -> None:
    settings = replace(SETTINGS, selectors=(parse_selector("class=03"),))
    functions = (gpu(A, 51), replace(gpu(B, 52), vendor="1002"))
    assert causes(node(listed(), functions=functions, settings=settings)) == {A: TAKEN, B: FREE}
    assert causes(node(listed(OTHERS), functions=functions, settings=settings)) == {A: TAKEN, B: TAKEN}


@pytest.mark.parametrize(
    "claimed",
    [
        listed("nic.example.com", "nic-0", cdi_ids=()),
        listed("compute-domain.nvidia.com", "channel-0"),
        listed(
            "compute-domain.nvidia.com", "daemon-0", cdi_ids=("k8s.compute-domain.nvidia.com/device=all",)
        ),
        listed(OTHERS, "watch", cdi_ids=("management.nvidia.com/gpu=all",)),
    ],
)
def test_what_is_no_gpu_withholds_none(claimed: ClaimedDevice) -> None:
    every = CdiSpec("/var/run/cdi/all.yaml", ("k8s.compute-domain.nvidia.com/device=all",), ("/dev/nvidia0",))
    core = node(
        claimed, specs=(every,), functions=(gpu(A, 51), replace(gpu(B, 52), host_nodes=("/dev/nvidia0",)))
    )
    assert set(causes(core).values()) == {FREE}


def test_a_claim_whose_file_has_no_gpu_has_none() -> None:
    nic = CdiSpec("/var/run/cdi/nic.json", (f"k8s.nic.example.com/claim={UID}-nic-0",), ("/dev/vfio/77",))
    assert set(causes(node(listed("nic.example.com", "nic-0"), specs=(nic,))).values()) == {FREE}


def test_nvidias_gpu_without_a_cdi_device_may_be_any() -> None:
    assert set(causes(node(listed(cdi_ids=()))).values()) == {TAKEN}


def test_a_metadata_device_says_nothing_of_its_gpu() -> None:
    ids = (f"k8s.{NVIDIAS}/claim={UID}-gpu-vfio-1", f"{NVIDIAS}/metadata={UID}_gpu")
    metadata = CdiSpec(f"/var/run/cdi/{NVIDIAS}_metadata_{UID}_gpu.json", (ids[1],))
    assert set(causes(node(listed(cdi_ids=ids), specs=(metadata,))).values()) == {TAKEN}
    core = node(listed(cdi_ids=ids), specs=(metadata, spec("/dev/vfio/52")))
    assert causes(core) == {A: FREE, B: TAKEN, C: FREE}
    of_a_nic = node(listed(cdi_ids=ids), specs=(spec(),))
    assert set(causes(of_a_nic).values()) == {FREE}, "its own file says that it has no GPU"


def test_of_a_file_of_several_devices_it_is_one_of_theirs() -> None:
    ids = ("vendor.com/gpu=0", "vendor.com/gpu=1")
    every = CdiSpec("/etc/cdi/vendor.yaml", ids, ("/dev/vfio/51", "/dev/vfio/52"))
    core = node(specs=(every,))
    assert set(causes(core).values()) == {FREE}, "it is no claim's"
    core.strangers = (listed(OTHERS, cdi_ids=ids[:1]),)
    core.pass_time(limits.LEDGER_QUIET_S)
    assert causes(core) == {A: TAKEN, B: TAKEN, C: FREE}
    assert "vendor.com/gpu=0 is one of several devices of its CDI file" in reason(core, A)


def test_a_free_gpu_that_may_be_somebodys_is_not_opened_to_see_whether_it_is_held() -> None:
    for core, may_open in (
        (node(), [True, True, True]),
        (node(listed(), specs=(spec("/dev/vfio/52"),)), [True, False, True]),
        (node(listed()), [False, False, False]),
    ):
        core.silent = True
        core.pass_time(POLL_S)
        assert [t.may_open for t in project(core.state).inspections.poll.targets] == may_open


def test_the_doubt_is_no_gpu_of_the_pod() -> None:
    core = node(listed())
    assert pods_view(core.state) == ()
    core.cdi = CdiSpecs((spec("/dev/vfio/52"),))
    core.pass_time(limits.LEDGER_QUIET_S)
    (pod,) = pods_view(core.state)
    assert (pod.name, pod.devices) == ("default/p1", (B,))


# --- on the host's driver ---------------------------------------------------------------------------------


def on_nvidia(address: str, group: int, minor: int | None, **of: object) -> PciFunction:
    nodes = (f"/dev/nvidia{minor}",) if minor is not None else ()
    return replace(gpu(address, group, driver="nvidia"), host_nodes=nodes, gpu_uuid="GPU-1", **of)


def owners(core: Core) -> dict[str, str]:
    return {a: o.message(ResourceName("")) for a, o in core.state.index.possible_owners.items()}


def test_a_containers_gpu_is_known_by_the_node_of_its_driver() -> None:
    functions = (on_nvidia(A, 51, 0), on_nvidia(B, 52, 1), gpu(C, 53))
    core = node(listed(device="gpu-1"), specs=(spec("/dev/nvidia1", device="gpu-1"),), functions=functions)
    assert owners(core) == {B: "in use by the claim default/c1 of pod default/p1"}


def test_a_containers_gpu_that_is_bound_to_vfio_under_it_is_still_its_own() -> None:
    core = node(
        listed(device="gpu-0"),
        specs=(spec("/dev/nvidia0", device="gpu-0"),),
        functions=(on_nvidia(A, 51, 0), gpu(B, 52), gpu(C, 53)),
    )
    core.inspect(A, gpu(A, 51))
    assert owners(core) == {A: "in use by the claim default/c1 of pod default/p1"}
    # The next GPU that NVIDIA's driver takes gets the number: the container opens that one.
    core.inspect(B, on_nvidia(B, 52, 0))
    assert owners(core).keys() == {B}


def test_who_may_have_that_number_now_is_withheld_as_well() -> None:
    core = node(
        listed(device="gpu-0"),
        specs=(spec("/dev/nvidia0", device="gpu-0"),),
        functions=(on_nvidia(A, 51, 0), gpu(B, 52), gpu(C, 53)),
    )
    core.inspect(A, gpu(A, 51))
    core.inspect(B, on_nvidia(B, 52, None))
    assert owners(core).keys() == {A, B}
    assert "NVIDIA's driver does not say which GPU that is" in owners(core)[B]


def test_of_a_node_that_no_gpu_is_known_to_have_it_is_one_whose_node_is_not_known() -> None:
    functions = (on_nvidia(A, 51, 0), on_nvidia(B, 52, None), gpu(C, 53))
    core = node(listed(device="gpu-1"), specs=(spec("/dev/nvidia1", device="gpu-1"),), functions=functions)
    assert owners(core) == {
        B: "may be in use by the claim default/c1 of pod default/p1: it has /dev/nvidia1, and NVIDIA's driver does not "
        "say which GPU that is"
    }


def test_a_gpu_of_another_vendor_is_known_by_its_render_node() -> None:
    amd = replace(
        gpu(A, 51, driver="amdgpu"), vendor="1002", host_nodes=("/dev/dri/card1", "/dev/dri/renderD128")
    )
    core = node(
        listed("gpu.amd.com", "gpu-0"),
        specs=(spec("/dev/dri/renderD128", driver="gpu.amd.com", device="gpu-0"),),
        functions=(amd, gpu(B, 52)),
    )
    assert owners(core).keys() == {A}


MIG = "MIG-6b8a2c14-93f0-4f8e-9d3a-0f5f6a1c7e21"


@pytest.mark.parametrize(
    ("divided", "withheld"),
    [
        ((True, False), {A}),
        ((True, None), {A}),
        ((None, False), {A}),
        ((None, None), {A, B}),
        ((False, False), {A, B}),
        ((True, True), {A, B}),
    ],
)
@pytest.mark.parametrize("device", [MIG, f"{MIG}::1"])
def test_a_mig_device_is_a_part_of_a_gpu_that_is_divided(
    divided: tuple[bool | None, bool | None], withheld: set[str], device: str
) -> None:
    functions = (
        on_nvidia(A, 51, 0, has_parts=divided[0]),
        on_nvidia(B, 52, 1, has_parts=divided[1]),
        gpu(C, 53),
    )
    core = node(functions=functions)
    core.others = {("nvidia.com/mig-1g.10gb", device): "p1"}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert owners(core).keys() == withheld
    assert owners(core)[A] == (
        "may be allocated to pod default/p1: the ID of a MIG device does not say of which GPU it is a part as "
        "nvidia.com/mig-1g.10gb"
    )
    core.others = {}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert owners(core) == {}


def test_a_uuid_that_no_gpu_has_may_be_of_one_whose_uuid_is_not_known() -> None:
    functions = (on_nvidia(A, 51, 0), replace(on_nvidia(B, 52, 1), gpu_uuid=None), gpu(C, 53))
    core = node(functions=functions)
    core.others = {("nvidia.com/gpu", f"GPU-{UID}"): "p1"}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert owners(core).keys() == {B}


def test_an_allocated_gpu_stays_healthy_whatever_is_in_doubt() -> None:
    core = node(listed())
    core.ledger = {A: "vm-1"}
    core.pass_time(limits.LEDGER_QUIET_S)
    (device,) = (d for d in core.state.published.device_lists[H100] if d.key == device_key(A))
    assert device.health is Health.HEALTHY
