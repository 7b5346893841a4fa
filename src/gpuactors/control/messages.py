"""Between the view of a node and the messages of the control socket (`protos/control.proto`)."""

from __future__ import annotations

from gpuactors.control.claims_messages import (
    claims_message,
    claims_view,
    device_of_claims_message,
    device_of_claims_view,
)
from gpuactors.control.domains_messages import domains_message, domains_view
from gpuactors.control.pb.control import v1 as pb
from gpuactors.control.view import (
    About,
    Change,
    DeviceView,
    LastCallView,
    Member,
    NodeView,
    ResourceView,
    Setting,
)
from gpuactors.core.values.model import Holder


def status_response(view: NodeView, about: About, *, pid: int, version: str) -> pb.StatusResponse:
    """The answer to Status."""
    return pb.StatusResponse(
        pid=pid,
        version=version,
        role=view.role,
        resources=[
            pb.Resource(
                name=r.name,
                registered=r.registered,
                problem=r.problem,
                listed=r.listed,
                healthy=r.healthy,
                allocated=r.allocated,
            )
            for r in view.resources
        ],
        devices=[_device_message(device) for device in view.devices],
        kubelet_problem=view.kubelet_problem,
        ledger_problem=view.ledger_problem,
        uevents_problem=view.uevents_problem,
        node=about.node,
        settings=[pb.Setting(key=s.key, value=s.value, source=s.source) for s in about.settings],
        claims=claims_message(view.claims) if view.claims is not None else None,
        domains=domains_message(view.domains) if view.domains is not None else None,
        ledger_age_s=view.ledger_age_s,
    )


def about_of(response: pb.StatusResponse) -> About:
    """What the answering daemon reports of itself."""
    return About(response.node, tuple(Setting(s.key, s.value, s.source) for s in response.settings))


def node_view(response: pb.StatusResponse) -> NodeView:
    """What was answered. Fields that a newer daemon may send are dropped."""
    return NodeView(
        role=response.role,
        resources=tuple(
            ResourceView(r.name, r.registered, r.problem, r.listed, r.healthy, r.allocated)
            for r in response.resources
        ),
        devices=tuple(_device_view(device) for device in response.devices),
        kubelet_problem=response.kubelet_problem,
        ledger_problem=response.ledger_problem,
        uevents_problem=response.uevents_problem,
        claims=claims_view(response.claims) if response.claims is not None else None,
        domains=domains_view(response.domains) if response.domains is not None else None,
        ledger_age_s=response.ledger_age_s,
    )


def _device_message(device: DeviceView) -> pb.Device:
    return pb.Device(
        address=device.address,
        id=device.id,
        present=device.present,
        vendor=device.vendor,
        device=device.device,
        class_code=device.class_code,
        driver=device.driver,
        iommu_group=device.iommu_group,
        group=[pb.Member(address=m.address, driver=m.driver) for m in device.group],
        numa_node=device.numa_node,
        model=device.model,
        resource=device.resource,
        health=device.health,
        cause=device.cause,
        reason=device.reason,
        owner=device.owner,
        holders=[pb.Holder(pid=h.pid, command=h.command, pod_uid=h.pod_uid) for h in device.holders],
        history=[
            pb.Change(age_s=c.age_s, health=c.health, reason=c.reason, cause=c.cause) for c in device.history
        ],
        remedy=device.remedy,
        listed=device.listed,
        for_claims=device_of_claims_message(device.for_claims) if device.for_claims is not None else None,
        since_s=device.since_s,
        nodes=[*device.nodes],
        inspected_s=device.inspected_s,
        polled_s=device.polled_s,
        calls=[
            pb.LastCall(kind=c.kind, age_s=c.age_s, refused=c.refused, causes=[*c.causes])
            for c in device.calls
        ],
    )


def _device_view(message: pb.Device) -> DeviceView:
    return DeviceView(
        address=message.address,
        id=message.id,
        present=message.present,
        vendor=message.vendor,
        device=message.device,
        class_code=message.class_code,
        driver=message.driver,
        iommu_group=message.iommu_group,
        group=tuple(Member(m.address, m.driver) for m in message.group),
        numa_node=message.numa_node,
        model=message.model,
        resource=message.resource,
        health=message.health,
        cause=message.cause,
        reason=message.reason,
        owner=message.owner,
        holders=tuple(Holder(h.pid, h.command, h.pod_uid) for h in message.holders),
        history=tuple(Change(c.age_s, c.health, c.reason, c.cause) for c in message.history),
        remedy=message.remedy,
        listed=message.listed,
        for_claims=device_of_claims_view(message.for_claims) if message.for_claims is not None else None,
        since_s=message.since_s,
        nodes=tuple(message.nodes),
        inspected_s=message.inspected_s,
        polled_s=message.polled_s,
        calls=tuple(LastCallView(c.kind, c.age_s, c.refused, tuple(c.causes)) for c in message.calls),
    )
