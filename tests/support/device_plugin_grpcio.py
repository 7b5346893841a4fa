"""The device plugin API (v1beta1) for grpcio. Must not import gpuactors, as `grpcio_proto.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import grpc

from tests.support.grpcio_proto import ProtoFile

PACKAGE: Final = "v1beta1"

_FILE: Final = ProtoFile("deviceplugin.proto", PACKAGE)


def message(name: str) -> Any:
    """The class of message `name`, e.g. `message("RegisterRequest")(version="v1beta1")`."""
    return _FILE.message(name)


def stub(channel: grpc.Channel, service: str = "DevicePlugin") -> Mapping[str, Any]:
    """The callables of a service by method name, e.g. `stub(channel)["Allocate"](request, timeout=5)`."""
    return _FILE.stub(channel, service)


def add_service(server: grpc.Server, service: str, servicer: object) -> None:
    """Serve `servicer`, whose methods are named and called as grpcio does it: `method(request, context)`."""
    _FILE.add_service(server, service, servicer)
