"""The fake kubelet's pods: what they hold, how they end, what PodResources lists meanwhile, and what a restart leaves.

Times and texts are those that were seen on a running kubelet 1.36. All in memory, on trio's mock clock.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from grpclib import GRPCError, Status
from msgspec.structs import replace
from trio.testing import MockClock

from gpuactors.actors import pod_resources
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.ledger.kubelet_startup import counted
from gpuactors.core.ledger.ledger import first_ledger
from gpuactors.core.reports.snapshot import LedgerWanted
from gpuactors.core.values.model import (
    DeviceId,
    LedgerEntry,
    LedgerFile,
    LedgerSource,
    Pod,
    ResourceName,
)
from gpuactors.kubelet.pb.podresources import v1 as pb
from gpuactors.limits import LEDGER_SETTLE_S
from gpuactors.ports.errors import KubeletError
from gpuactors.ports.node import LedgerQuestion, LedgerReader
from gpuactors_simulation.host.tree import HostTree, PciSpec, Uevent
from gpuactors_simulation.kubelet.checkpoint import CorruptCheckpointError
from gpuactors_simulation.kubelet.containers import FIRST_PID, QEMU, TreeTenancy
from gpuactors_simulation.kubelet.fake import open_fake_kubelet
from gpuactors_simulation.kubelet.pods import READMIT_AFTER_S, RELEASE_S
from gpuactors_simulation.kubelet.transport import CHECKPOINT_FILE, MemoryTransport, UnixTransport
from gpuactors_simulation.kubelet.values import Claim, Phase
from tests.memory.faults import SLOW_S, Fault, Faults
from tests.memory.kubelet import memory_ledger
from tests.simulation.kubelet.rig import GPU, Plugin, Rig, all_healthy, registered, rig

LISTS = LedgerQuestion(lists=True)
UNHEALTHY_AGAIN = (
    "UnexpectedAdmissionError: Allocate failed due to previously allocated devices are no longer healthy; "
    f"cannot allocate unhealthy devices {GPU}, which is unexpected"
)
NONE_HEALTHY = (
    "UnexpectedAdmissionError: Allocate failed due to no healthy devices present; "
    f"cannot allocate unhealthy devices {GPU}, which is unexpected"
)


def memory_of(r: Rig) -> MemoryTransport:
    assert isinstance(r.transport, MemoryTransport)
    return r.transport


async def running(r: Rig, name: str, count: int = 1) -> None:
    assert (await r.kubelet.admit(name, {GPU: count})).phase is Phase.RUNNING


async def gone(r: Rig, name: str) -> float:
    """When the pod was gone."""
    await r.kubelet.until(lambda view: name not in view.pods)
    return trio.current_time()


# --- the end of a pod -------------------------------------------------------------------------------------------


@pytest.mark.trio
@pytest.mark.parametrize("dies_after_s", [0.0, 4.6])
async def test_a_deleted_pod_keeps_its_device_until_its_process_has_ended(
    dies_after_s: float, autojump_clock: MockClock
) -> None:
    plugin = Plugin(first=all_healthy(1))
    async with registered(plugin) as r:
        await running(r, "vm")
        began = trio.current_time()
        r.kubelet.delete("vm", dies_after_s=dies_after_s)
        r.kubelet.delete("vm", dies_after_s=dies_after_s)
        assert r.kubelet.view.pods["vm"].phase is Phase.TERMINATING
        await trio.sleep(dies_after_s + RELEASE_S - 0.01)
        await r.figures(1, 1, 1)
        assert await r.listed() == {"vm": ["gpu0"]}
        assert await gone(r, "vm") - began == pytest.approx(dies_after_s + RELEASE_S)
        assert await r.listed() == {}
        await running(r, "next")


@pytest.mark.trio
async def test_the_next_pod_gets_a_device_at_once_after_a_forced_deletion_while_the_old_process_lives(
    autojump_clock: MockClock,
) -> None:
    plugin = Plugin(first=all_healthy(1))
    async with registered(plugin) as r:
        await running(r, "vm")
        r.kubelet.force_delete("vm")
        assert "vm" not in r.kubelet.view.pods
        assert await r.listed() == {}
        await running(r, "next")
        assert r.kubelet.view.holdings["next", GPU].devices == ("gpu0",)
        assert [pod.name for pod in r.kubelet.containers] == ["vm", "next"]
        r.kubelet.end_process("vm")
        assert [pod.name for pod in r.kubelet.containers] == ["next"]
        await trio.sleep(10)
        assert r.kubelet.view.pods["next"].phase is Phase.RUNNING
        with pytest.raises(KeyError):
            r.kubelet.force_delete("vm")


@pytest.mark.trio
async def test_no_pod_is_adopted_with_an_id_that_another_one_has(autojump_clock: MockClock) -> None:
    plugin = Plugin(first=all_healthy(1))
    async with registered(plugin) as r:
        await running(r, "vm")
        with pytest.raises(ValueError, match=f"pod vm has gpu0 of {GPU}"):
            r.kubelet.adopt("older", {GPU: ("gpu1", "gpu0")})
        assert "older" not in r.kubelet.view.pods
        r.kubelet.adopt("other", {"vendor.example/gpu": ("gpu0",)})
        r.kubelet.force_delete("vm")
        r.kubelet.adopt("older", {GPU: ("gpu1", "gpu0")})
        assert r.kubelet.view.holdings["older", GPU].devices == ("gpu1", "gpu0")


@pytest.mark.trio
async def test_a_pod_of_the_same_name_is_another_one(autojump_clock: MockClock) -> None:
    plugin = Plugin(first=all_healthy(2))
    async with registered(plugin) as r:
        await running(r, "vm")
        r.kubelet.force_delete("vm", dies_after_s=5)
        await running(r, "vm")
        assert await r.listed() == {"vm": ["gpu0"]}
        await trio.sleep(10)
        assert len(r.kubelet.containers) == 1
        assert r.kubelet.view.pods["vm"].phase is Phase.RUNNING


@pytest.mark.trio
async def test_a_machine_that_ends_by_itself_frees_its_device(autojump_clock: MockClock) -> None:
    plugin = Plugin(first=all_healthy(1))
    async with registered(plugin) as r:
        await running(r, "vm")
        r.kubelet.end_process("vm")
        await r.kubelet.until(lambda view: view.pods["vm"].phase is Phase.SUCCEEDED)
        await r.figures(1, 1, 0)
        assert await r.listed() == {}
        r.kubelet.delete("vm")
        assert "vm" not in r.kubelet.view.pods


@pytest.mark.trio
async def test_a_pod_deleted_during_its_allocate_leaves_nothing(autojump_clock: MockClock) -> None:
    plugin = Plugin(first=all_healthy(1), hold_allocate=trio.Event())
    async with registered(plugin) as r:
        r.kubelet.submit("vm", {GPU: 1})
        await plugin.allocating.wait()
        r.kubelet.delete("vm")
        await trio.sleep(3)
        await r.figures(1, 1, 1)
        assert plugin.hold_allocate is not None
        plugin.hold_allocate.set()
        await gone(r, "vm")
        assert r.kubelet.containers == ()
        await running(r, "next")


# --- PodResources -----------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_a_pod_is_listed_with_its_devices_when_its_allocate_is_answered_and_before_pre_start(
    autojump_clock: MockClock,
) -> None:
    busy = [GRPCError(Status.UNAVAILABLE, "still held")]
    plugin = Plugin(
        first=all_healthy(2),
        hold_allocate=trio.Event(),
        pre_start_required=True,
        pre_start_errors=busy,
    )
    async with registered(plugin) as r:
        r.kubelet.submit("vm", {GPU: 1})
        await plugin.allocating.wait()
        assert await r.listed() == {"vm": []}
        assert plugin.hold_allocate is not None
        plugin.hold_allocate.set()
        assert (await r.kubelet.settled("vm")).phase is Phase.STARTING
        assert await r.listed() == {"vm": ["gpu0"]}


@pytest.mark.trio
async def test_all_clients_together_have_a_burst_of_10_and_100_a_second(autojump_clock: MockClock) -> None:
    async with rig() as r, r.pod_resources() as one, r.pod_resources() as two:
        for client in (one, two) * 5:
            await client.list(pb.ListPodResourcesRequest())
        for client in (one, two):
            with pytest.raises(GRPCError, match="rejected by rate limit") as refused:
                await client.list(pb.ListPodResourcesRequest())
            assert refused.value.status is Status.RESOURCE_EXHAUSTED
        await trio.sleep(0.0101)
        await one.list(pb.ListPodResourcesRequest())
        with pytest.raises(GRPCError, match="rejected"):
            await two.list(pb.ListPodResourcesRequest())


@pytest.mark.trio
async def test_claims_one_pod_and_what_is_allocatable(autojump_clock: MockClock) -> None:
    plugin = Plugin(first=[("gpu0", "Healthy"), ("gpu1", "Unhealthy")])
    async with rig() as r, r.serving(plugin), r.pod_resources() as stub:
        await r.register()
        await r.figures(2, 1)
        r.kubelet.submit("vm", {GPU: 1}, claims=(Claim("mine", "gpu.example", "node-1", "gpu-3b"),))
        await r.kubelet.settled("vm")
        answer = await stub.get(pb.GetPodResourcesRequest(pod_name="vm", pod_namespace="default"))
        assert answer.pod_resources is not None
        (container,) = answer.pod_resources.containers
        ((dynamic,),) = [container.dynamic_resources]
        assert (dynamic.claim_name, dynamic.claim_namespace) == ("mine", "default")
        assert [(c.driver_name, c.pool_name, c.device_name) for c in dynamic.claim_resources] == [
            ("gpu.example", "node-1", "gpu-3b")
        ]
        with pytest.raises(GRPCError, match="pod other in namespace default not found"):
            await stub.get(pb.GetPodResourcesRequest(pod_name="other", pod_namespace="default"))
        allocatable = await stub.get_allocatable_resources(pb.AllocatableResourcesRequest())
        assert [(d.resource_name, d.device_ids) for d in allocatable.devices] == [(GPU, ["gpu0"])]
        assert allocatable.devices[0].topology is None


# --- a restart of kubelet ---------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_the_ledger_comes_back_from_the_file_and_the_pods_from_the_api_server(
    autojump_clock: MockClock,
) -> None:
    plugin = Plugin(first=all_healthy(3))
    async with registered(plugin, "sub/p.sock") as r:
        await running(r, "vm-1")
        await running(r, "vm-2")
        held = r.kubelet.view.holdings
        await r.kubelet.stop()
        r.kubelet.delete("vm-2")  # asked for while kubelet is down
        assert r.kubelet.view.pods["vm-2"].phase is Phase.TERMINATING
        await r.kubelet.start()
        started = trio.current_time()
        assert r.kubelet.view.holdings == held
        assert await r.listed() == {}, "kubelet does not know its pods yet"
        await gone(r, "vm-2")
        assert READMIT_AFTER_S[0] <= trio.current_time() - started <= READMIT_AFTER_S[1] + RELEASE_S
        assert await r.listed() == {"vm-1": ["gpu0"]}
        await r.figures(0, 0, 1)
        await r.register("sub/p.sock")
        await r.figures(3, 3, 1)
        await running(r, "vm-3", 2)
        assert r.kubelet.double_handouts == []


@pytest.mark.trio
async def test_without_its_file_kubelet_forgets_what_its_pods_have(autojump_clock: MockClock) -> None:
    plugin = Plugin(first=all_healthy(2))
    async with registered(plugin, "sub/p.sock") as r:
        await running(r, "vm-1")
        await r.kubelet.stop()
        memory_of(r).checkpoint = None
        await r.kubelet.start()
        await r.register("sub/p.sock")
        await r.figures(2, 2, 1)
        assert r.kubelet.view.holdings == {}
        await running(r, "vm-2")
        assert r.kubelet.view.holdings["vm-2", GPU].devices == ("gpu0",), "vm-1 has it as well"


@pytest.mark.trio
async def test_a_damaged_file_is_a_line_in_kubelets_log(tmp_path: Path) -> None:
    transport = UnixTransport(tmp_path)
    (transport.device_plugins / CHECKPOINT_FILE).write_text("{")
    with pytest.raises(CorruptCheckpointError):
        transport.read_checkpoint()
    async with open_fake_kubelet(transport) as kubelet:
        await kubelet.start()
        (warning,) = kubelet.warnings
        assert warning.startswith("Continue after failing to read checkpoint file.")


@pytest.mark.trio
@pytest.mark.parametrize(
    ("first_list", "message"),
    [
        ([("gpu0", "Healthy"), ("gpu1", "Healthy")], ""),
        ([("gpu0", "Unhealthy"), ("gpu1", "Healthy")], UNHEALTHY_AGAIN),
        ([("gpu1", "Healthy")], UNHEALTHY_AGAIN),
        (None, NONE_HEALTHY),
    ],
    ids=["Healthy", "Unhealthy", "missing", "no plugin"],
)
async def test_after_a_restart_only_a_pod_that_does_not_run_needs_its_device_healthy(
    first_list: list[tuple[str, str]] | None, message: str, autojump_clock: MockClock
) -> None:
    """gpu0 belongs to the pod in back-off; the running pod's device is treated no better, and it is not checked."""
    busy = [GRPCError(Status.UNAVAILABLE, "still held")]
    plugin = Plugin(first=all_healthy(1), pre_start_required=True, pre_start_errors=busy)
    async with registered(plugin, "sub/p.sock") as r:
        assert (await r.kubelet.admit("backing-off", {GPU: 1})).phase is Phase.STARTING
        plugin.streams[-1].send_nowait(all_healthy(2))
        await r.figures(2, 2, 1)
        await running(r, "runs")
        await r.kubelet.stop()
        await r.kubelet.start()
        if first_list is not None:
            plugin.first = first_list
            await r.register("sub/p.sock")
        await trio.sleep(READMIT_AFTER_S[1] + 0.5)
        assert r.kubelet.view.pods["runs"].phase is Phase.RUNNING
        pod = r.kubelet.view.pods["backing-off"]
        assert (pod.phase, pod.message) == (Phase.FAILED if message else Phase.RUNNING, message)
        assert r.kubelet.view.holdings["runs", GPU].devices == ("gpu1",)


@pytest.mark.trio
async def test_what_ended_while_kubelet_was_down_is_seen_at_its_start(autojump_clock: MockClock) -> None:
    plugin = Plugin(first=all_healthy(3))
    async with registered(plugin, "sub/p.sock") as r:
        for name in ("ends", "forced", "stays"):
            await running(r, name)
        await r.kubelet.stop()
        r.kubelet.end_process("ends")
        r.kubelet.force_delete("forced", dies_after_s=2.0)
        await trio.sleep(60)
        assert [pod.name for pod in r.kubelet.containers] == ["forced", "stays"]
        assert r.kubelet.view.pods["ends"].phase is Phase.RUNNING
        await r.kubelet.start()
        await r.kubelet.until(lambda view: view.pods["ends"].phase is Phase.SUCCEEDED)
        await trio.sleep(READMIT_AFTER_S[1] + 2.0)
        assert [pod.name for pod in r.kubelet.containers] == ["stays"]
        assert await r.listed() == {"stays": ["gpu2"]}


# --- machines that hold their devices ---------------------------------------------------------------------------

ONE, OTHER = "0000:01:00.0", "0000:02:00.0"


def node(directory: Path) -> HostTree:
    tree = HostTree(directory)
    for address, group in ((ONE, 51), (OTHER, 52)):
        tree.plug(PciSpec(address, "10de", "2330", "030200", group, driver="vfio-pci"))
    return tree


def holding_plugin() -> Plugin:
    return Plugin(
        first=[(ONE, "Healthy"), (OTHER, "Healthy")],
        nodes={ONE: "/dev/vfio/51", OTHER: "/dev/vfio/52"},
    )


@pytest.mark.trio
async def test_a_machine_holds_its_groups_from_its_start_to_its_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    tree = node(tmp_path)
    async with registered(holding_plugin(), tenancy=TreeTenancy(tree)) as r:
        await running(r, "vm", 2)
        assert {tree.holder_of(51), tree.holder_of(52)} == {FIRST_PID}
        pod = r.kubelet.view.pods["vm"]
        assert (tmp_path / f"proc/{FIRST_PID}/comm").read_text() == QEMU + "\n"
        assert pod.uid.replace("-", "_") in (tmp_path / f"proc/{FIRST_PID}/cgroup").read_text()
        r.kubelet.delete("vm", dies_after_s=4.6)
        await trio.sleep(4.5)
        assert tree.holder_of(51) == FIRST_PID
        await gone(r, "vm")
        assert tree.holder_of(51) is None
        assert r.kubelet.double_handouts == []


@pytest.mark.trio
async def test_a_machine_may_open_late(tmp_path: Path, autojump_clock: MockClock) -> None:
    tree = node(tmp_path)
    async with registered(holding_plugin(), tenancy=TreeTenancy(tree)) as r:
        assert (await r.kubelet.admit("vm", {GPU: 1}, opens_after_s=4.6)).phase is Phase.RUNNING
        assert tree.holder_of(51) is None
        await trio.sleep(4.7)
        assert tree.holder_of(51) == FIRST_PID
        r.kubelet.delete("vm")
        await gone(r, "vm")
        # One that is deleted before it has opened anything opens nothing.
        await r.kubelet.admit("short", {GPU: 1}, opens_after_s=4.6)
        r.kubelet.delete("short")
        await trio.sleep(10)
        assert tree.holder_of(51) is None


@pytest.mark.trio
async def test_after_a_forced_deletion_the_next_machine_meets_the_old_one(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Kubelet's own fault, and what a plugin has to prevent: the model counts it as a double hand-out."""
    tree = node(tmp_path)
    async with registered(holding_plugin(), tenancy=TreeTenancy(tree)) as r:
        await running(r, "vm", 2)
        r.kubelet.force_delete("vm", dies_after_s=30.0)
        failed = await r.kubelet.admit("next", {GPU: 1})
        message = (
            f"qemu-system-x86_64: -device vfio-pci,host={ONE}: vfio {ONE}: failed to open /dev/vfio/51: "
            "Device or resource busy"
        )
        assert (failed.phase, failed.message) == (Phase.FAILED, message)
        (double,) = r.kubelet.double_handouts
        assert (double.pod, double.devices, double.message) == ("next", (ONE,), message)
        await trio.sleep(30.1)
        await running(r, "third", 2)
        assert len(r.kubelet.double_handouts) == 1


@pytest.mark.trio
async def test_a_machine_that_fails_holds_nothing(tmp_path: Path, autojump_clock: MockClock) -> None:
    tree = node(tmp_path)
    tree.open_group(52, 77, "python3")
    async with registered(holding_plugin(), tenancy=TreeTenancy(tree)) as r:
        assert (await r.kubelet.admit("vm", {GPU: 2})).phase is Phase.FAILED
        assert (tree.holder_of(51), tree.holder_of(52)) == (None, 77)
        assert [d.pod for d in r.kubelet.double_handouts] == ["vm"]
        tree.kill(77)
        tree.unbind(ONE)
        failed = await r.kubelet.admit("next", {GPU: 2})
        assert failed.message.endswith("failed to open /dev/vfio/51: No such file or directory")
        assert len(r.kubelet.double_handouts) == 1, "not busy, but not there"


@pytest.mark.trio
async def test_a_machine_opens_what_its_cdi_names_lead_to_once_they_are_found(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    tree, files = node(tmp_path), dict[str, str]()
    plugin = Plugin(first=[(ONE, "Healthy")], cdi_ids=(f"{GPU}={ONE}",))
    async with registered(
        plugin, tenancy=TreeTenancy(tree), cdi=lambda names: [files[n] for n in names]
    ) as r:
        pod = await r.kubelet.admit("vm", {GPU: 1})
        assert pod.phase is Phase.STARTING
        assert "unresolvable CDI devices" in pod.message
        files[f"{GPU}={ONE}"] = "/dev/vfio/51"
        await r.kubelet.until(lambda view: view.pods["vm"].phase is Phase.RUNNING)
        assert tree.holder_of(51) == FIRST_PID


@pytest.mark.trio
async def test_a_machines_end_lets_an_unbind_go_on(tmp_path: Path, autojump_clock: MockClock) -> None:
    tree, sent = node(tmp_path), list[Uevent]()
    async with registered(holding_plugin(), tenancy=TreeTenancy(tree, sent.extend)) as r:
        await running(r, "vm")
        tree.unbind(ONE)
        assert tree.is_waiting(ONE)
        r.kubelet.delete("vm")
        assert not tree.is_waiting(ONE)
        assert [u.action for u in sent][-1] == "unbind"


# --- the ledger over the memory transport -----------------------------------------------------------------------


def entries(uids: dict[str, str], *, by_name: bool) -> tuple[LedgerEntry, ...]:
    return tuple(
        LedgerEntry(
            ResourceName(GPU),
            DeviceId(device),
            Pod("default" if by_name else "", name if by_name else "", uids[name]),
        )
        for name, device in (("vm-1", "gpu0"), ("vm-2", "gpu1"))
    )


class Counting:
    """Reads a ledger, and says what the core counts of it."""

    def __init__(self, ledger: LedgerReader) -> None:
        self._ledger = ledger
        self._known = first_ledger(1, lists=True)

    async def read(self) -> tuple[LedgerSource, tuple[LedgerEntry, ...]]:
        """The source of the entries, and the entries."""
        event = await pod_resources.read(1, LedgerWanted(1, lists=True), self._ledger)
        assert isinstance(event, LedgerRead)
        found = counted(self._known, (), event, trio.current_time(), device_plugin=True)
        self._known = replace(self._known, young=found.young, books=found.books)
        return found.source, found.entries


@pytest.mark.trio
async def test_the_memory_ledger_reads_what_a_real_one_would(autojump_clock: MockClock) -> None:
    plugin = Plugin(first=all_healthy(2))
    async with rig() as r, r.serving(plugin, "sub/p.sock"):
        ledger = memory_ledger(memory_of(r))
        counting = Counting(ledger)
        assert await ledger.read(LISTS) == await ledger.read(LISTS)
        await r.register("sub/p.sock")
        await r.figures(2, 2)
        for name in ("vm-1", "vm-2"):
            await running(r, name)
        uids = {name: pod.uid for name, pod in r.kubelet.view.pods.items()}
        by_name, by_uid = entries(uids, by_name=True), entries(uids, by_name=False)
        assert (await ledger.read(LISTS)).claims == ()
        assert await counting.read() == (LedgerSource.LIST, by_name)

        await r.kubelet.stop()
        assert await counting.read() == (LedgerSource.FILE, by_uid)

        await r.kubelet.start()
        assert await counting.read() == (LedgerSource.LIST_AND_FILE, by_uid)
        await trio.sleep(READMIT_AFTER_S[1])
        assert await counting.read() == (LedgerSource.LIST, by_name)
        # The file still names vm-1, and this kubelet is still young; but it has listed it before.
        r.kubelet.force_delete("vm-1")
        assert await counting.read() == (LedgerSource.LIST, by_name[1:])


@pytest.mark.trio
async def test_what_only_the_file_names_is_believed_for_a_while(autojump_clock: MockClock) -> None:
    plugin = Plugin(first=all_healthy(2))
    async with registered(plugin, "sub/p.sock") as r:
        await running(r, "vm-1")
        await r.kubelet.stop()
        r.kubelet.force_delete("vm-1")
        await r.kubelet.start()
        counting = Counting(memory_ledger(memory_of(r)))
        _, entries = await counting.read()
        assert len(entries) == 1
        await trio.sleep(LEDGER_SETTLE_S)
        assert await counting.read() == (LedgerSource.LIST, ())


@pytest.mark.trio
async def test_reads_fail_and_take_long_when_told_to(autojump_clock: MockClock) -> None:
    transport = MemoryTransport()
    faults = Faults()
    ledger = memory_ledger(transport, faults)
    assert (await ledger.read(LISTS)).file == LedgerFile(exists=False)
    faults.order(Fault.READ_FAILS)
    with pytest.raises(KubeletError, match="fails as planned"):
        await ledger.read(LISTS)
    faults.order(Fault.READ_SLOW)
    began = trio.current_time()
    await ledger.read(LISTS)
    assert trio.current_time() - began == pytest.approx(SLOW_S)
    assert not faults.waits(Fault.READ_FAILS)
    assert not faults.waits(Fault.READ_SLOW)


# --- what a pod that names its node shows ------------------------------------------------------------------------


@pytest.mark.trio
async def test_a_pod_that_names_its_node_is_admitted_by_kubelet_alone(autojump_clock: MockClock) -> None:
    async with registered(Plugin(first=[("gpu0", "Healthy"), ("gpu1", "Unhealthy")])) as r:
        r.kubelet.submit("greedy", {GPU: 2}, bound=True)
        greedy = await r.kubelet.settled("greedy")
        assert greedy.phase is Phase.FAILED
        assert "requested number of devices unavailable" in greedy.message
        r.kubelet.submit("other", {"example.org/nobodys": 1}, bound=True)
        assert (await r.kubelet.settled("other")).phase is Phase.RUNNING, "kubelet knows no such resource"
        r.kubelet.submit("waits", {GPU: 2})
        assert (await r.kubelet.settled("waits")).phase is Phase.PENDING


@pytest.mark.trio
async def test_an_answer_without_a_container_loses_the_device_until_kubelet_makes_its_books_anew(
    autojump_clock: MockClock,
) -> None:
    plugin = Plugin(first=all_healthy(2))
    async with registered(plugin) as r:
        assert (await r.kubelet.admit("first", {GPU: 1})).phase is Phase.RUNNING
        plugin.empty_answers = 1
        assert (await r.kubelet.admit("empty", {GPU: 1})).phase is Phase.FAILED
        r.kubelet.submit("next", {GPU: 1}, bound=True)
        assert "Available: 0" in (await r.kubelet.settled("next")).message
        r.kubelet.force_delete("first", dies_after_s=0.0)
        r.kubelet.submit("last", {GPU: 2}, bound=True)
        assert (await r.kubelet.settled("last")).phase is Phase.RUNNING
