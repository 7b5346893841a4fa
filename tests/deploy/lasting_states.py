"""Each state that a node may stay in, and the alerts that it must set off, and no other.

The claims are in `lasting_claims.py`. A state here is a quiet node's scrapes with some series changed. What there can
be is read off the daemon's own declarations, so that a new cause, state, metric or alert without a row fails
test_lasting_states.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.domain import DRIVER as DOMAINS
from gpuactors.core.values.model import Health
from gpuactors.core.values.partition import PartitionState
from tests.core.builders import H100
from tests.core.gpus.claim_core import DRIVER as GPUS
from tests.deploy.lasting_claims import MINUTES, NO_ALERT, REFUSED
from tests.deploy.scrapes import series, text

ADDRESS: Final = "0000:01:00.0"
UNUSABLE: Final = frozenset({"GpuactorsGpuNotUsable"})
LOST: Final = frozenset({"GpuactorsGpuLostUnderItsPod"})
AT_ONCE: Final = LOST | {"GpuactorsGpuDead"}
"""They concern a pod that has lost its GPU, or a GPU that no pod may get: also where another one is so next."""
NOT_READY: Final = frozenset({"GpuactorsNotReady"})

Changed = Mapping[str, str]
"""The values of some series, as promtool expands them."""


def always(value: float) -> str:
    return f"{value:g}x{MINUTES}"


GROWS: Final = f"0+1x{MINUTES}"
"""A counter that counts one each minute."""

# --- devices --------------------------------------------------------------------------------------------------------

DEVICES: Final[Mapping[Cause, frozenset[str]]] = {
    Cause.FREE: NO_ALERT,
    Cause.ALLOCATED: NO_ALERT,
    Cause.JUST_ALLOCATED: NO_ALERT,
    # In use, as it is meant.
    Cause.CLAIMED_ELSEWHERE: NO_ALERT,
    Cause.GROUP_IN_USE: NO_ALERT,
    Cause.CARD_IN_USE: NO_ALERT,
    # Kubelet's ledger, which would say it, has an alert of its own.
    Cause.HOLDER_UNKNOWN: NO_ALERT,
    # As the operator has set it up.
    Cause.NOT_SELECTED: NO_ALERT,
    Cause.VIRTUAL_FUNCTION: NO_ALERT,
    Cause.VIRTUAL_FUNCTIONS: NO_ALERT,
    Cause.MEDIATED_DEVICES: NO_ALERT,
    # Another entry of the same device.
    Cause.LISTED_AS_OTHER: NO_ALERT,
    Cause.ID_RELEASED: NO_ALERT,
    Cause.ORPHANED: frozenset({"GpuactorsGpuOrphaned"}),
    Cause.HELD_BY_OTHER: frozenset({"GpuactorsGpuInForeignHands"}),
    Cause.DEAD: frozenset({"GpuactorsGpuDead"}),
    Cause.GONE: LOST,
    Cause.REPLACED_BY_ANOTHER: LOST,
    Cause.UNREADABLE: UNUSABLE,
    Cause.UNBINDING: UNUSABLE,
    Cause.NOT_BOUND: UNUSABLE,
    Cause.NO_IOMMU_MODE: UNUSABLE,
    Cause.NO_IOMMU_GROUP: UNUSABLE,
    Cause.BEHIND_VMD: UNUSABLE,
    Cause.GROUP_NOT_VIABLE: UNUSABLE,
    Cause.RESERVED_REGION: UNUSABLE,
    Cause.NODE_MISSING: UNUSABLE,
    Cause.USE_UNREADABLE: UNUSABLE,
    Cause.FABRIC_OF_HOST: UNUSABLE,
    Cause.PHYSICAL_FUNCTION_ON_VFIO: UNUSABLE,
    Cause.PHYSICAL_FUNCTION_NOT_READY: UNUSABLE,
    Cause.VGPU_UNNAMED: UNUSABLE,
    Cause.RESOURCE_MIXED: UNUSABLE,
    Cause.CDI_FILE_UNWRITTEN: UNUSABLE,
    Cause.CDI_NAME_INVALID: UNUSABLE,
    Cause.CDI_NAME_TAKEN: UNUSABLE,
    Cause.UNKNOWN_ID: UNUSABLE,
    Cause.SET_ASIDE: UNUSABLE,
}
"""A device with this cause. One that sets nothing off may be as it is for as long as its pod runs: the dashboard counts
it as one that needs no hand."""


def device(cause: Cause, health: str, gpu: str = ADDRESS, values: str = always(1)) -> Changed:
    """What a daemon serves of a device with this cause."""
    changed = {series("gpuactors_devices", resource=H100, health=health, cause=cause): values}
    if health == Health.UNHEALTHY:
        changed[series("gpuactors_device_unhealthy_info", gpu=gpu, resource=H100, cause=cause)] = values
    if cause is Cause.DEAD:
        changed[series("gpuactors_device_dead_info", gpu=gpu, resource=H100)] = values
    return changed


def by_turns(cause: Cause) -> Changed:
    """Eight GPUs, of which at each scrape another one has this cause: pods end, each after its turn."""
    turns: dict[str, str] = {}
    for gpu in range(8):
        values = " ".join("1" if minute // 2 % 8 == gpu else "_" for minute in range(MINUTES + 1))
        turns |= device(cause, Health.UNHEALTHY, f"0000:{gpu + 1:02x}:00.0", values)
    return turns


# --- the rest of the node -------------------------------------------------------------------------------------------

PARTITIONS: Final[Mapping[PartitionState, frozenset[str]]] = {
    state: NO_ALERT if state is PartitionState.ACTIVE else frozenset({"GpuactorsPartitionStuck"})
    for state in PartitionState
    if state is not PartitionState.ABSENT
}


def _flags() -> Iterator[tuple[str, Changed, frozenset[str]]]:
    def off(*names: str, **labels: str) -> Changed:
        return {series(name, **labels): always(0) for name in names}

    unready = off("gpuactors_ready")
    yield "it is not ready", unready, NOT_READY
    yield "it waits for its predecessor", off("gpuactors_serving", "gpuactors_ready"), NOT_READY
    unregistered = {**unready, **off("gpuactors_resource_registered", resource=H100)}
    registers = NOT_READY | {"GpuactorsResourceNotRegistered"}
    yield "kubelet refuses a resource", unregistered, registers
    yield "there is no kubelet", {**unregistered, **off("gpuactors_kubelet_found")}, registers
    contested = {**unregistered, series("gpuactors_resource_contested", resource=H100): always(1)}
    yield "another plugin serves a resource", contested, NOT_READY | {"GpuactorsResourceContested"}
    unread = {**unready, **off("gpuactors_ledger_readable")}
    yield "kubelet's ledger cannot be read", unread, NOT_READY | {"GpuactorsLedgerUnreadable"}
    yield (
        "the configuration is not used",
        off("gpuactors_config_file_in_use"),
        frozenset({"GpuactorsConfigNotUsed"}),
    )
    yield "no uevents come", off("gpuactors_uevents_received"), frozenset({"GpuactorsUeventsMissing"})
    for driver in (GPUS, DOMAINS):
        unserved = {**unready, **off("gpuactors_claims_served", driver=driver)}
        yield f"{driver} is not served", unserved, NOT_READY | {"GpuactorsClaimsNotServed"}
        unpublished = {**unready, **off("gpuactors_slices_published", driver=driver)}
        yield f"{driver} is not published", unpublished, NOT_READY | {"GpuactorsSlicesNotPublished"}


FLAGS: Final = (*_flags(),)
"""Each metric that says whether something is so, where it is not, with those that follow."""

COUNTERS: Final[Mapping[str, frozenset[str]]] = {
    series("gpuactors_actor_restarts_total", actor="pod_resources"): frozenset({"GpuactorsActorRestarts"}),
    series("gpuactors_broken_claims_total"): frozenset({"GpuactorsBug"}),
    series("gpuactors_broken_rules_total"): frozenset({"GpuactorsBug"}),
    series("gpuactors_calls_total", method="Allocate", outcome="granted"): NO_ALERT,
    series("gpuactors_calls_total", method="Allocate", outcome="refused"): REFUSED,
    series("gpuactors_calls_total", method="Allocate", outcome="abandoned"): NO_ALERT,
    # What these count is a flag, a state or a refusal for as long as it lasts.
    series("gpuactors_contests_total"): NO_ALERT,
    series("gpuactors_unregistrations_total"): NO_ALERT,
    series("gpuactors_label_conflicts_total"): NO_ALERT,
    series("gpuactors_ledger_damages_total"): NO_ALERT,
    series("gpuactors_ledger_failures_total"): NO_ALERT,
    series("gpuactors_partition_failures_total"): NO_ALERT,
    series("gpuactors_partitions_lost_total"): NO_ALERT,
    series("gpuactors_refusals_total", cause=Cause.GONE): NO_ALERT,
    # A browser that keeps its connections open.
    series("gpuactors_http_connections_turned_away_total"): NO_ALERT,
    series("gpuactors_events_total"): NO_ALERT,
}
"""A counter that counts one each minute."""


def _figures() -> Iterator[tuple[str, Changed, frozenset[str]]]:
    yield "events wait", {series("gpuactors_inbox_events"): always(200)}, frozenset({"GpuactorsInboxFull"})
    yield "calls wait", {series("gpuactors_calls_waiting"): always(5)}, NO_ALERT
    disagreements = {series("gpuactors_device_list_disagreements", resource=H100): always(3)}
    yield "kubelet has another list", disagreements, NO_ALERT  # which is a contest
    old = {series("gpuactors_ledger_read_timestamp_seconds"): always(1)}
    yield "the ledger was read long ago", old, frozenset({"GpuactorsLedgerUnreadable"})
    dead = {series("gpuactors_device_dead_info", gpu=ADDRESS, resource=H100): always(1)}
    yield "a GPU is dead under its pod", dead, frozenset({"GpuactorsGpuDead"})
    too_many = {series("gpuactors_devices_allocated", resource=H100): always(9)}
    yield "more is allocated than there is", too_many, frozenset({"GpuactorsFreeCountNegative"})
    for method, fires in SLOW.items():
        buckets = {"0.1": always(0), "12.0": GROWS, "+Inf": GROWS}
        name = "gpuactors_call_duration_seconds_bucket"
        yield f"{method} is slow", {series(name, method=method, le=le): v for le, v in buckets.items()}, fires


SLOW: Final = {
    "Allocate": frozenset({"GpuactorsCallsSlow"}),
    "GetPreferredAllocation": frozenset({"GpuactorsCallsSlow"}),
    # They wait within the call for what passes: a partition, a former owner, a domain.
    "PreStartContainer": NO_ALERT,
    "NodePrepareResources": NO_ALERT,
    "NodeUnprepareResources": NO_ALERT,
}
"""A method whose calls take 12 s."""

FIGURES: Final = (*_figures(),)

OF_OTHERS: Final[tuple[tuple[str, Changed, frozenset[str]], ...]] = (
    ("it cannot be scraped", {text("up", {}): always(0)}, frozenset({"GpuactorsDown"})),
    (
        "its node restarts",
        {
            text("up", {}): always(0),
            text("kube_node_status_condition", {"condition": "Ready", "status": "true"}): always(0),
        },
        NO_ALERT,
    ),
    (
        "a pod is missing",
        {text("kube_daemonset_status_number_unavailable", {"daemonset": "gpuactors"}): always(1)},
        frozenset({"GpuactorsPodMissing"}),
    ),
)
"""What Prometheus itself and kube-state-metrics say."""

BY_FILMS: Final = frozenset({"gpuactors_claims", "gpuactors_claims_pending_since_timestamp_seconds"})

SAYS_NO_STATE: Final = frozenset(
    {
        "gpuactors_build_info",
        "gpuactors_call_duration_seconds_count",
        "gpuactors_call_duration_seconds_sum",
        "gpuactors_device_list_changed_timestamp_seconds",
        "gpuactors_device_list_compared_timestamp_seconds",
        "gpuactors_device_owner_info",
        "gpuactors_device_reset_info",
        "gpuactors_functions",
        "gpuactors_groups_in_use",
        "gpuactors_inbox_capacity_events",
        "gpuactors_journal_bytes",
        "gpuactors_journal_since_timestamp_seconds",
        "gpuactors_stream_opened_timestamp_seconds",
    }
)
"""Metrics that are no trouble whatever they say."""
