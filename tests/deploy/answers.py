"""What the panels of the dashboard and the queries of docs/reference.md#metrics answer for one node.

test_dashboard.py asks Prometheus' own engine, and picture.py draws it."""

from __future__ import annotations

from typing import Final

from tests.core.builders import H100

A, B, C, D, E = (f"0000:0{n}:00.0" for n in range(1, 6))
CALLS: Final = 30
"""Between the two scrapes, which are five minutes apart: 0.1 each second."""

ASKED_AT_S: Final = 540
"""When the queries are asked, after the first scrape."""

PENDING_S: Final = 480
"""How long the claim that cannot be bound has been pending then."""

MEMORY_BYTES: Final = 52428800

VM: Final = "vm-1"
LAUNCHER: Final = f"virt-launcher-{VM}-x7k2p"

_OF_THE_POD: Final = (
    f'container="gpuactors",gpu="{A}",node="n1",pod_name="{LAUNCHER}",pod_namespace="default",resource="{H100}",'
    f'vm="{VM}"'
)
OF_THE_POD: Final = f"gpuactors_device_owner_info{{{_OF_THE_POD}}}"
KUBEVIRTS: Final = (
    f'kubevirt_vmi_info{{name="{VM}",namespace="default",phase="running",vmi_pod="{LAUNCHER}"}}'
)
"""KubeVirt's own metric of the virtual machine (its pkg/monitoring/metrics/virt-controller, vmiInfo), in part."""
NEEDS_A_HAND: Final[dict[str, float]] = {
    f'gpuactors_device_unhealthy_info{{cause="HeldByOther",container="gpuactors",gpu="{C}",node="n1",'
    f'resource="{H100}"}}': 1
}

SHOWN: Final[dict[str, list[dict[str, float]]]] = {
    "Healthy GPUs": [{"{}": 2}],
    "Allocated GPUs": [{"{}": 1}],
    "GPUs that need a hand": [{"{}": 1}],
    "Nodes that are not ready": [{"{}": 1}],
    "Free GPUs by resource": [{f'{{resource="{H100}"}}': 1}],
    "Why GPUs are Unhealthy": [{'{cause="HeldByOther"}': 1, '{cause="ClaimedElsewhere"}': 1}],
    "Which pod has which GPU": [
        {
            OF_THE_POD: 1,
            f'gpuactors_device_owner_info{{claim="default/one",container="gpuactors",gpu="{D}",node="n1"}}': 1,
            f'gpuactors_device_owner_info{{claim="default/two",container="gpuactors",gpu="{E}",node="n1"}}': 1,
        }
    ],
    "Which GPUs need a hand, and why": [NEEDS_A_HAND],
    "Firing alerts": [
        {
            'ALERTS{alertname="GpuactorsResourceContested",alertstate="firing",container="gpuactors",node="n1",'
            f'resource="{H100}",severity="critical"}}': 1,
            'ALERTS{alertname="GpuactorsRefusals",alertstate="firing",method="Allocate",node="n1",'
            'severity="warning"}': 1,
        }
    ],
    "Calls": [{'{method="Allocate",outcome="granted"}': 0.1, '{method="Allocate",outcome="refused"}': 0.1}],
    "Calls, 99th percentile": [{'{method="Allocate"}': 0.005}],
    "Refusals by cause": [{'{cause="LedgerLate"}': CALLS}],
    "Claims by state": [
        {
            '{driver="gpu.nvidia.com",state="Prepared"}': 1,
            '{driver="gpu.nvidia.com",state="Binding"}': 1,
        }
    ],
    "Longest pending claim": [{'{driver="gpu.nvidia.com"}': PENDING_S}],
    "Resources that kubelet does not have from us": [
        {f'gpuactors_resource_registered{{container="gpuactors",node="n1",resource="{H100}"}}': 0},
        {f'gpuactors_resource_contested{{container="gpuactors",node="n1",resource="{H100}"}}': 1},
    ],
    "Resident memory": [
        {'process_resident_memory_bytes{container="gpuactors",node="n1"}': MEMORY_BYTES},
    ],
    "Restarts": [{'{node="n1"}': 1}, {'{actor="pod_resources",node="n1"}': 1}],
}
"""What each query of a panel shows, besides zeros."""

EXACT: Final = {"Calls, 99th percentile": 0.0005, "Restarts": 1}
"""Interpolated within a bucket, or beyond the scrapes, so rounded to this."""

ASKED: Final[list[dict[str, float]]] = [
    {f'{{resource="{H100}"}}': 1},
    NEEDS_A_HAND,
    {OF_THE_POD: 1},
    {OF_THE_POD: 1},
    {f'{{{_OF_THE_POD},name="{VM}",phase="running"}}': 1},
    {'{pod_namespace="default"}': 1, "{}": 2},
    {'gpuactors_ready{container="gpuactors",node="n1"}': 0},
    {'{cause="LedgerLate"}': CALLS},
    {"{}": 0.005},
    {'{version="1"}': 1},
]
"""What each query of docs/reference.md#metrics answers."""
