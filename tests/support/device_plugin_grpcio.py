"""The device plugin API (v1beta1) for grpcio, made at run time from `protos/deviceplugin.proto`.

grpc_tools compiles the file into a temporary directory once per process; messages live in a descriptor pool of their
own, so nothing meets the generated code of the daemon. Must not import gpuactors: what is built on this is the
independent side of a test.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PROTO: Final = Path(__file__).resolve().parents[2] / "protos" / "deviceplugin.proto"
PACKAGE: Final = "v1beta1"


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    from grpc_tools import protoc  # here: importing it takes longer than everything else in this file

    with tempfile.TemporaryDirectory(prefix="deviceplugin-") as directory:
        compiled = Path(directory) / "deviceplugin.bin"
        status = protoc.main(["protoc", f"-I{PROTO.parent}", f"--descriptor_set_out={compiled}", PROTO.name])
        if status != 0:
            raise RuntimeError(
                f"protoc could not compile {PROTO} (status {status}; its own words are on stderr)"
            )
        files = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


@cache
def message(name: str) -> Any:
    """The class of message `name`, e.g. `message("RegisterRequest")(version="v1beta1")`."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


def stub(channel: grpc.Channel, service: str = "DevicePlugin") -> Mapping[str, Any]:
    """The callables of a service by method name, e.g. `stub(channel)["Allocate"](request, timeout=5)`."""
    callables: dict[str, Any] = {}
    for method in _pool().FindServiceByName(f"{PACKAGE}.{service}").methods:
        make: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
        callables[method.name] = make(
            f"/{PACKAGE}.{service}/{method.name}",
            request_serializer=message(method.input_type.name).SerializeToString,
            response_deserializer=message(method.output_type.name).FromString,
        )
    return callables


def add_service(server: grpc.Server, service: str, servicer: object) -> None:
    """Serve `servicer`, whose methods are named and called as grpcio does it: `method(request, context)`."""
    handlers: dict[str, Any] = {}
    for method in _pool().FindServiceByName(f"{PACKAGE}.{service}").methods:
        make: Any = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=message(method.input_type.name).FromString,
            response_serializer=message(method.output_type.name).SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", handlers),))
