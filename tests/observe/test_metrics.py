"""The metrics: each series is there from the start, counts what it says, and costs a page and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from gpuactors.core.events import Event
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import CALL, HEALTHY, MEANINGS, Cause
from gpuactors.core.values.claim import Prepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Granted, Level, Log, Refusal, Refused
from gpuactors.core.values.model import DeviceId, Health, LedgerEntry, LedgerFile, Pod
from gpuactors.core.values.partition import PartitionState
from gpuactors.observe.counts import COUNTED_EVENTS, METHODS, OUTCOMES, Counts
from gpuactors.observe.metrics import Metrics
from gpuactors.observe.metrics_of_state import GAUGES
from gpuactors.ports.node import Step
from tests.core.builders import H100, A, B, Core, gpu, node
from tests.core.gpus.claim_core import ON_HOST, ClaimCore, core_with
from tests.core.gpus.claim_core import name as claim_name
from tests.core.kinds.boards import key
from tests.core.partitions.board import Board

WALL = 1_000_000.0


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def metrics(counts: Counts) -> Metrics:
    return Metrics("1.2.3", counts, now=lambda: WALL, process=False)


def series(metrics: Metrics, state: NodeState, at: float = 0.0, inbox: int = 0) -> Mapping[str, float]:
    page = metrics.page(state, at, inbox).decode()
    lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, _, value in lines}
    assert len(found) == len(lines), "no series twice"
    return found


def test_every_series_of_a_resource_exists_at_zero(metrics: Metrics) -> None:
    core = Core(gpu("01:00.0"))
    found = series(metrics, core.state)
    for cause, meaning in MEANINGS.items():
        named = [name for name in found if name.startswith("gpuactors_devices{") and f'"{cause}"' in name]
        assert bool(named) == (meaning.health != CALL), cause
        assert all(f'resource="{H100}"' in name for name in named)
    assert sum(v for name, v in found.items() if name.startswith("gpuactors_devices{")) == 1
    for method in METHODS:
        assert found[f'gpuactors_calls_total{{method="{method}",outcome="refused"}}'] == 0
    for cause in Cause:
        assert (f'gpuactors_refusals_total{{cause="{cause}"}}' in found) == (
            MEANINGS[cause].health != HEALTHY
        )
    for name, _ in COUNTED_EVENTS.values():
        assert found[name] == 0


def test_no_label_holds_a_sentence(metrics: Metrics) -> None:
    core = Core(gpu("01:00.0", driver=None), gpu("02:00.0"))
    core.enabled = {"0000:02:00.0": 1}
    core.pass_time(60)
    page = metrics.page(core.state, core.at, 0).decode()
    for value in re.findall(r'="([^"]*)"', page):
        assert " " not in value, value


def test_calls_are_timed_and_counted_by_outcome_and_refusals_by_cause(
    metrics: Metrics, counts: Counts
) -> None:
    state = Core(gpu("01:00.0")).state
    counts.called("Allocate", 0.02, Granted(()))
    counts.called("Allocate", 3.0, Refused(Refusal.UNAVAILABLE, "r", (Cause.ORPHANED, Cause.USE_LATE)))
    counts.called("Allocate", 9.0, None)
    counts.called("NodePrepareResources", 1.0, Prepared(()))
    found = series(metrics, state)
    outcomes = {o: found[f'gpuactors_calls_total{{method="Allocate",outcome="{o}"}}'] for o in OUTCOMES}
    assert outcomes == {"granted": 1, "refused": 1, "abandoned": 1}
    assert found['gpuactors_call_duration_seconds_count{method="Allocate"}'] == 2, (
        "an abandoned one is kubelet's time"
    )
    assert found['gpuactors_call_duration_seconds_sum{method="Allocate"}'] == pytest.approx(3.02)
    assert found['gpuactors_call_duration_seconds_bucket{le="0.025",method="Allocate"}'] == 1
    assert found['gpuactors_refusals_total{cause="Orphaned"}'] == 1
    assert found['gpuactors_refusals_total{cause="UseLate"}'] == 1
    assert found['gpuactors_calls_total{method="NodePrepareResources",outcome="granted"}'] == 1


@pytest.mark.parametrize("line", COUNTED_EVENTS)
def test_a_warning_of_the_log_is_counted_and_its_debug_line_is_not(
    metrics: Metrics, counts: Counts, line: str
) -> None:
    state = Core().state
    for level in Level:
        counts.stepped(Step(state, Ticked(), 0.0, (Log(level, line, {}), Log(level, "device.changed", {}))))
    assert series(metrics, state)[COUNTED_EVENTS[line][0]] == 2, "as a warning and as an error"
    assert series(metrics, state)["gpuactors_events_total"] == len(Level)
    assert counts.steps == len(Level)


def test_times_are_of_the_day_and_zero_where_nothing_has_been(metrics: Metrics) -> None:
    core = Core(gpu("01:00.0"))
    core.feed(Ticked())
    began = core.at
    core.pass_time(40)
    found = series(metrics, core.state, at=began + 50)
    label = f'{{resource="{H100}"}}'
    assert found[f"gpuactors_device_list_changed_timestamp_seconds{label}"] == WALL - 50
    assert found[f"gpuactors_stream_opened_timestamp_seconds{label}"] == 0
    assert found[f"gpuactors_device_list_compared_timestamp_seconds{label}"] == 0
    read_at = core.state.kubelet.ledger.read_at
    assert began < read_at
    assert found["gpuactors_ledger_read_timestamp_seconds"] == WALL - 50 + read_at - began


def test_the_owner_of_a_gpu_is_named_as_long_as_it_has_it(metrics: Metrics) -> None:
    core = Core(gpu("01:00.0"), gpu("02:00.0"))
    core.ledger = {"0000:01:00.0": "vm-1"}
    core.claims = {"0000:02:00.0": "claim-1"}
    core.pass_time(60)
    owners = [n for n in series(metrics, core.state) if n.startswith("gpuactors_device_owner_info")]
    assert len(owners) == 1, "a claim of another driver's pool is no device here"
    for label in ('gpu="0000:01:00.0"', 'pod_namespace="default"', 'pod_name="vm-1"', f'resource="{H100}"'):
        assert label in owners[0]
    core.ledger = {}
    core.pass_time(60)
    assert not [n for n in series(metrics, core.state) if n.startswith("gpuactors_device_owner_info")]


def test_a_gpu_of_a_virtual_machine_names_it(metrics: Metrics) -> None:
    core = Core(gpu("01:00.0"), gpu("02:00.0"))
    core.ledger = {"0000:01:00.0": "virt-launcher-db-x7k2p", "0000:02:00.0": "virt-launcher-db-0"}
    core.pass_time(60)
    assert {n: 'vm="db"' in n for n in owner_series(metrics, core)} == {
        f'gpuactors_device_owner_info{{claim="",gpu="0000:01:00.0",pod_name="virt-launcher-db-x7k2p",'
        f'pod_namespace="default",pod_uid="",resource="{H100}",vm="db"}}': True,
        f'gpuactors_device_owner_info{{claim="",gpu="0000:02:00.0",pod_name="virt-launcher-db-0",'
        f'pod_namespace="default",pod_uid="",resource="{H100}",vm=""}}': False,
    }


def test_there_is_one_series_of_an_owner_for_each_gpu_that_is_held_now(metrics: Metrics) -> None:
    """However many pods have come and gone: 20 pods of a virtual machine that starts again and again, 8 GPUs."""
    addresses = [f"0000:{n:02x}:00.0" for n in range(1, 9)]
    core = Core(*(gpu(address, n) for n, address in enumerate(addresses, start=1)))
    for start in range(20):
        end = "bcdfghjklmnpqrstvwxz"[start]
        core.ledger = {a: f"virt-launcher-vm{n}-x7k2{end}" for n, a in enumerate(addresses) if n != start % 8}
        core.pass_time(60)
        found = owner_series(metrics, core)
        assert len(found) == 7
        assert all(f"x7k2{end}" in name for name in found)
    core.ledger = {}
    core.pass_time(60)
    assert owner_series(metrics, core) == []


def owner_series(metrics: Metrics, core: Core) -> list[str]:
    return [n for n in series(metrics, core.state) if n.startswith("gpuactors_device_owner_info")]


def test_an_unhealthy_gpu_is_named_with_its_cause_as_long_as_it_is(metrics: Metrics) -> None:
    core = Core(gpu("01:00.0"), gpu("02:00.0"))
    core.enabled = {"0000:02:00.0": 1}
    core.pass_time(60)
    found = [n for n in series(metrics, core.state) if n.startswith("gpuactors_device_unhealthy_info")]
    labels = f'cause="HeldByOther",gpu="0000:02:00.0",resource="{H100}"'
    assert found == [f"gpuactors_device_unhealthy_info{{{labels}}}"]
    core.enabled = {}
    core.pass_time(60)
    assert not [n for n in series(metrics, core.state) if n.startswith("gpuactors_device_unhealthy_info")]


def test_a_dead_gpu_is_named_also_while_a_pod_has_it(metrics: Metrics) -> None:
    core = node(ledger={A: "vm-1"})
    core.inspect(A, replace(gpu(A), is_silent=True))
    assert core.device_list()[A] == Health.HEALTHY
    named = [n for n in series(metrics, core.state) if n.startswith("gpuactors_device_dead_info")]
    assert named == [f'gpuactors_device_dead_info{{gpu="{A}",resource="{H100}"}}']
    core.inspect(A, gpu(A))
    assert not [n for n in series(metrics, core.state) if n.startswith("gpuactors_device_dead_info")]


@pytest.mark.parametrize(
    ("methods", "method"), [(("flr", "bus"), "flr"), (("bus",), "bus"), ((), "none"), (None, "unknown")]
)
def test_the_method_that_the_kernel_would_try_first_is_named(
    metrics: Metrics, methods: tuple[str, ...] | None, method: str
) -> None:
    core = node(replace(gpu(A), reset_methods=methods), gpu(B, driver="nvidia"))
    named = [n for n in series(metrics, core.state) if n.startswith("gpuactors_device_reset_info")]
    assert named == [f'gpuactors_device_reset_info{{gpu="{A}",method="{method}"}}'], (
        "and B is on no vfio driver"
    )


def test_the_groups_in_use_are_counted_by_resource(metrics: Metrics) -> None:
    core = Core(gpu("01:00.0"), gpu("02:00.0"))
    core.pass_time(60)
    name = f'gpuactors_groups_in_use{{resource="{H100}"}}'
    assert series(metrics, core.state)[name] == 0
    core.enabled = {"0000:02:00.0": 1}
    core.pass_time(60)
    assert series(metrics, core.state)[name] == 1


def test_a_pod_of_which_only_the_uid_is_known_has_that(metrics: Metrics) -> None:
    """Kubelet's checkpoint file, which is read where PodResources does not answer, names no pod."""

    class ByFile(Core):
        def ledger_event(self, read: int) -> Event:
            entry = LedgerEntry(H100, DeviceId("0000:01:00.0"), Pod("", "", "5f0c"))
            return LedgerRead(read, None, (), (), file=LedgerFile((entry,)))

    core = ByFile(gpu("01:00.0"))
    core.pass_time(60)
    (owner,) = [n for n in series(metrics, core.state) if n.startswith("gpuactors_device_owner_info")]
    for label in ('pod_namespace=""', 'pod_name=""', 'pod_uid="5f0c"'):
        assert label in owner


def test_a_gpu_that_a_pod_has_by_two_ids_has_one_series(metrics: Metrics) -> None:
    """Kubelet's ledger may name it by its address and by an older plugin's number: a scrape with a series twice is at
    fault."""
    core = Core(gpu("01:00.0", 7))
    core.ledger = {"0000:01:00.0": "vm-1", "7": "vm-1"}
    core.pass_time(60)
    (owner,) = core.state.index.owners.values()
    assert len(owner.entries) == 2
    assert len([n for n in series(metrics, core.state) if n.startswith("gpuactors_device_owner_info")]) == 1


def test_claims_are_counted_by_state(metrics: Metrics) -> None:
    core = ClaimCore()
    core.feed(Ticked())
    found = series(metrics, core.state)
    states = {s: found[f'gpuactors_claims{{driver="gpu.nvidia.com",state="{s}"}}'] for s in _STATES}
    assert set(states.values()) == {0}
    assert found['gpuactors_claims_served{driver="gpu.nvidia.com"}'] == 1
    assert found['gpuactors_slices_published{driver="gpu.nvidia.com"}'] == 0


def test_the_oldest_pending_claim_is_dated_until_it_is_prepared(metrics: Metrics) -> None:
    pending = 'gpuactors_claims_pending_since_timestamp_seconds{driver="gpu.nvidia.com"}'
    core = core_with(ON_HOST, gpu(B), one=(A,), two=(B,))
    assert series(metrics, core.state, at=core.at)[pending] == 0
    core.held_back = {"device"}
    core.prepare(claim_name("one"))
    core.pass_time(20)
    core.prepare(claim_name("two"))
    core.pass_time(5)
    assert series(metrics, core.state, at=core.at)[pending] == WALL - 25
    core.release("device")
    assert series(metrics, core.state, at=core.at)[pending] == 0


_STATES = [state for state in ClaimState if state is not ClaimState.ABSENT]


def test_partitions_are_counted_by_state(metrics: Metrics) -> None:
    assert not [name for name in series(metrics, Core().state) if "gpuactors_partitions{" in name]
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    board.started()
    board.settled()
    found = series(metrics, board.state)
    shown = {name: count for name, count in found.items() if name.startswith("gpuactors_partitions{")}
    assert len(shown) == len(PartitionState) - 1
    assert {name for name, count in shown.items() if count} == {'gpuactors_partitions{state="Active"}'}


def test_inbox_restarts_version_and_journal(metrics: Metrics, counts: Counts) -> None:
    counts.restarted("pod_resources")
    found = series(metrics, Core().state, inbox=7)
    assert found["gpuactors_inbox_events"] == 7
    assert found["gpuactors_inbox_capacity_events"] == 256
    assert found['gpuactors_actor_restarts_total{actor="pod_resources"}'] == 1
    assert found['gpuactors_build_info{version="1.2.3"}'] == 1
    assert found["gpuactors_journal_bytes"] == 0
    kept = Metrics("1", Counts(), journal=lambda: (123, 456.0), process=False)
    found = series(kept, Core().state)
    assert (found["gpuactors_journal_bytes"], found["gpuactors_journal_since_timestamp_seconds"]) == (
        123,
        456,
    )


def test_each_metric_of_the_state_is_declared_once_with_its_labels_and_a_full_stop() -> None:
    assert len({gauge.name for gauge in GAUGES}) == len(GAUGES)
    core = Core(gpu("01:00.0"))
    metrics = Metrics("1", Counts(), process=False)
    for gauge in GAUGES:
        assert re.fullmatch(r"gpuactors_[a-z_]+", gauge.name)
        assert not gauge.name.endswith("_total"), "that is a counter's"
        assert gauge.help.endswith(".")
    page = metrics.page(core.state, core.at, 0).decode()
    for gauge in GAUGES:
        assert f"# TYPE {gauge.name} gauge" in page
