"""Kubelet's calls to a DRA plugin for grpcio: registration, prepare and unprepare, the health stream, in each version.

Must not import gpuactors, as `grpcio_proto.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import grpc

from tests.support.grpcio_proto import ProtoFile

REGISTRATION: Final = ProtoFile("pluginregistration.proto", "pluginregistration")

PLUGIN: Final[Mapping[str, ProtoFile]] = {
    version: ProtoFile(f"dra_{version}.proto", f"k8s.io.kubelet.pkg.apis.dra.{version}")
    for version in ("v1", "v1beta1")
}
HEALTH: Final[Mapping[str, ProtoFile]] = {
    version: ProtoFile(f"dra_health_{version}.proto", version) for version in ("v1", "v1alpha1")
}

CALL_S: Final = 45.0
"""Kubelet's deadline of a prepare or unprepare (cm/dra/manager.go, defaultClientCallTimeout)."""

GET_INFO_S: Final = 1.0
"""Its deadline of GetInfo (pluginmanager/operationexecutor)."""


def registration(channel: grpc.Channel) -> Mapping[str, Any]:
    """The callables `GetInfo` and `NotifyRegistrationStatus`."""
    return REGISTRATION.stub(channel, "Registration")


def plugin(channel: grpc.Channel, version: str = "v1") -> Mapping[str, Any]:
    """The callables `NodePrepareResources` and `NodeUnprepareResources`."""
    return PLUGIN[version].stub(channel, "DRAPlugin")


def health(channel: grpc.Channel, version: str = "v1") -> Mapping[str, Any]:
    """The callable `NodeWatchResources`."""
    return HEALTH[version].stub(channel, "DRAResourceHealth")


def prepare_request(*claims: tuple[str, str, str], version: str = "v1") -> Any:
    """A claim is namespace, name and UID."""
    return _request("NodePrepareResourcesRequest", claims, version)


def unprepare_request(*claims: tuple[str, str, str], version: str = "v1") -> Any:
    """As `prepare_request`."""
    return _request("NodeUnprepareResourcesRequest", claims, version)


def _request(name: str, claims: tuple[tuple[str, str, str], ...], version: str) -> Any:
    message = PLUGIN[version].message
    return message(name)(
        claims=[message("Claim")(namespace=n, name=name_, uid=uid) for n, name_, uid in claims]
    )
