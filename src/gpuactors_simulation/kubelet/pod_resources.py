"""The PodResources service of the fake kubelet: which pod has which device, as kubelet 1.36 lists it.

Must not decide which pods are listed (`device_manager.py`): here are the messages and the rate limit.

Sources: pkg/kubelet/apis/podresources/{server_v1,grpc/ratelimit}.go and cm/container_manager_linux.go of kubelet 1.36.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

import trio
from grpclib import GRPCError, Status

from gpuactors.kubelet.pb.podresources import v1 as pb
from gpuactors_simulation.kubelet.checkpoint import CONTAINER, NODE_WITHOUT_TOPOLOGY, by_numa_node
from gpuactors_simulation.kubelet.device_manager import DeviceManager
from gpuactors_simulation.kubelet.dra.manager import ClaimManager
from gpuactors_simulation.kubelet.dra.values import ClaimInfo
from gpuactors_simulation.kubelet.values import Claim, LedgerEntry, ListedDevice, PodListing

QUERIES_PER_S: Final = 100.0
"""DefaultQPS, for all clients together."""

BURST: Final = 10
"""DefaultBurstTokens."""


class RateLimit:
    """A token bucket, full at first (golang.org/x/time/rate). `at` is in seconds of the caller's clock."""

    def __init__(self, per_s: float, burst: int, at: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = float(burst)
        self._at = at

    def allows(self, at: float) -> bool:
        """Return whether one more request may pass, and count it if so."""
        self._tokens = min(float(self._burst), self._tokens + (at - self._at) * self._per_s)
        self._at = at
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@final
class PodResourcesService(pb.PodResourcesListerBase):
    """Lives as long as kubelet's process."""

    def __init__(self, manager: DeviceManager, claims: ClaimManager | None = None) -> None:
        self._manager = manager
        self._claims = claims
        self._limit = RateLimit(QUERIES_PER_S, BURST, trio.current_time())

    async def list(self, message: pb.ListPodResourcesRequest) -> pb.ListPodResourcesResponse:
        """Return every active pod."""
        self._count()
        return pb.ListPodResourcesResponse(
            pod_resources=[self._pod_resources(listing) for listing in self._manager.listing()]
        )

    async def get(self, message: pb.GetPodResourcesRequest) -> pb.GetPodResourcesResponse:
        """One pod, if it is active; before 1.36 any pod. Unlike `list` it frees nothing."""
        self._count()
        listing = self._manager.listing_of(message.pod_name, message.pod_namespace)
        if listing is None:
            raise GRPCError(
                Status.UNKNOWN, f"pod {message.pod_name} in namespace {message.pod_namespace} not found"
            )
        return pb.GetPodResourcesResponse(pod_resources=self._pod_resources(listing))

    async def get_allocatable_resources(
        self, message: pb.AllocatableResourcesRequest
    ) -> pb.AllocatableResourcesResponse:
        """Return the Healthy devices of every resource, allocated or not."""
        self._count()
        return pb.AllocatableResourcesResponse(
            devices=[
                devices
                for resource, device in self._manager.allocatable()
                for devices in _listed_device(resource, device)
            ]
        )

    def _pod_resources(self, listing: PodListing) -> pb.PodResources:
        prepared = () if self._claims is None else self._claims.of_pod(listing.pod.uid)
        return _pod_resources(listing, prepared)

    def _count(self) -> None:
        if not self._limit.allows(trio.current_time()):
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")


def _pod_resources(listing: PodListing, prepared: Iterable[ClaimInfo]) -> pb.PodResources:
    container = pb.ContainerResources(
        name=CONTAINER,
        devices=[
            devices for resource, entry in listing.devices for devices in _entry_devices(resource, entry)
        ],
        dynamic_resources=[
            *(_dynamic(claim, listing.pod.namespace) for claim in listing.pod.claims),
            *(_dynamic_of(claim) for claim in prepared),
        ],
    )
    return pb.PodResources(name=listing.pod.name, namespace=listing.pod.namespace, containers=[container])


def _dynamic(claim: Claim, namespace: str) -> pb.DynamicResource:
    resource = pb.ClaimResource(
        cdi_devices=[
            pb.CdiDevice(name=cdi_id)
            for cdi_id in claim.cdi_ids or (f"k8s.{claim.driver}/claim={claim.name}",)
        ],
        driver_name=claim.driver,
        pool_name=claim.pool,
        device_name=claim.device,
    )
    return pb.DynamicResource(claim_name=claim.name, claim_namespace=namespace, claim_resources=[resource])


def _dynamic_of(claim: ClaimInfo) -> pb.DynamicResource:
    return pb.DynamicResource(
        claim_name=claim.name,
        claim_namespace=claim.namespace,
        claim_resources=[
            pb.ClaimResource(
                cdi_devices=[pb.CdiDevice(name=cdi_id) for cdi_id in device.cdi_ids],
                driver_name=device.driver,
                pool_name=device.pool,
                device_name=device.device,
                share_id=device.share_id,
            )
            for device in claim.devices
        ],
    )


def _entry_devices(resource: str, entry: LedgerEntry) -> Iterable[pb.ContainerDevices]:
    """One message per device and NUMA node."""
    for node, devices in by_numa_node(entry).items():
        for device in devices:
            yield _container_devices(resource, device, node)


def _listed_device(resource: str, device: ListedDevice) -> Iterable[pb.ContainerDevices]:
    for node in device.numa_nodes or (NODE_WITHOUT_TOPOLOGY,):
        yield _container_devices(resource, device.id, node)


def _container_devices(resource: str, device: str, node: int) -> pb.ContainerDevices:
    topology = None if node == NODE_WITHOUT_TOPOLOGY else pb.TopologyInfo(nodes=[pb.NumaNode(id=node)])
    return pb.ContainerDevices(resource_name=resource, device_ids=[device], topology=topology)
