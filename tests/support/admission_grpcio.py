"""How the grpcio stand-in admits a pod: devicemanager/manager.go's Allocate and PreStartContainer of kubelet 1.36.

Chooses among the devices that are Healthy and nobody's, asks the plugin which of them it prefers and takes of its
answer what was offered, calls Allocate, and PreStartContainer as often as it is refused. No scheduler, no container.
Must not import gpuactors, and must not be kinder than kubelet.
"""

from __future__ import annotations

import itertools
import time
from typing import Final

import grpc

from tests.support.kubelet_grpcio import EmptyAnswer, EndpointStopped, KubeletStandIn, go_text

PRE_START_RETRY_S: Final = (0.3, 11.7, 15.0)
"""Waits between kubelet's attempts to start a container: seen. The last one repeats."""

PRE_START_S: Final = 30.0
"""Kubelet's deadline of PreStartContainer. Allocate and GetPreferredAllocation have none."""


class UnexpectedAdmissionError(Exception):
    """Kubelet does not admit the pod, for good. The text is what the pod's status says."""

    def __init__(self, why: str) -> None:
        super().__init__(f"UnexpectedAdmissionError: Allocate failed due to {why}, which is unexpected")


def admit(kubelet: KubeletStandIn, pod: str, resource: str, size: int) -> tuple[str, ...]:
    """The devices of the pod's one container, which would run now.

    Raises UnexpectedAdmissionError. Waits for ever where PreStartContainer is refused for ever.
    """
    with kubelet.admission:
        kubelet.begin_pod(pod)
        try:
            devices = _give(kubelet, pod, resource, size)
        except UnexpectedAdmissionError:
            kubelet.fail_pod(pod)
            raise
    _start(kubelet, resource, devices)
    return devices


def _give(kubelet: KubeletStandIn, pod: str, resource: str, size: int) -> tuple[str, ...]:
    devices = _choose(kubelet, resource, size)
    if not devices:
        return ()
    try:
        kubelet.allocate(resource, devices, pod=pod, timeout_s=None)
    except EndpointStopped:
        raise UnexpectedAdmissionError(f"endpoint {resource} has been stopped") from None
    except EmptyAnswer as error:
        raise UnexpectedAdmissionError(str(error)) from None
    except grpc.RpcError as error:
        raise UnexpectedAdmissionError(go_text(error)) from None
    return devices


def _choose(kubelet: KubeletStandIn, resource: str, size: int) -> tuple[str, ...]:
    healthy = kubelet.healthy().get(resource)
    if healthy is None and not kubelet.taken(resource):
        return ()  # no plugin's: kubelet admits the pod without it
    if healthy is None:
        raise UnexpectedAdmissionError(f"cannot allocate unregistered device {resource}")
    if not healthy:
        raise UnexpectedAdmissionError(
            f"no healthy devices present; cannot allocate unhealthy devices {resource}"
        )
    available = healthy.keys() - kubelet.taken(resource)
    if len(available) < size:
        raise UnexpectedAdmissionError(
            f"requested number of devices unavailable for {resource}. "
            f"Requested: {size}, Available: {len(available)}"
        )
    try:
        wanted = available.intersection(_preferred(kubelet, resource, available, size))
    except EndpointStopped:
        raise UnexpectedAdmissionError(f"endpoint {resource} has been stopped") from None
    except grpc.RpcError as error:
        raise UnexpectedAdmissionError(
            f"device plugin GetPreferredAllocation rpc failed with err: {go_text(error)}"
        ) from None
    return tuple([*wanted, *(available - wanted)][:size])


def _preferred(kubelet: KubeletStandIn, resource: str, available: set[str], size: int) -> tuple[str, ...]:
    if not kubelet.options(resource).get_preferred_allocation_available:
        return ()
    return kubelet.preferred(resource, available, (), size, timeout_s=None)


def _start(kubelet: KubeletStandIn, resource: str, devices: tuple[str, ...]) -> None:
    if not devices or not kubelet.options(resource).pre_start_required:
        return
    for wait_s in itertools.chain(PRE_START_RETRY_S, itertools.repeat(PRE_START_RETRY_S[-1])):
        try:
            kubelet.prestart(resource, devices, timeout_s=PRE_START_S)
            return
        except (grpc.RpcError, EndpointStopped):
            time.sleep(wait_s)
