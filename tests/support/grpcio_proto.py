"""A file of `protos/` for grpcio, made at run time: messages, stubs and handlers.

grpc_tools compiles the file into a temporary directory once per process; messages live in a descriptor pool of their
own, so nothing meets the generated code of the daemon. Must not import gpuactors: what is built on this is the
independent side of a test.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

PROTOS: Final = Path(__file__).resolve().parents[2] / "protos"


@final
class ProtoFile:
    """One file, by its name in `protos/` and its proto package."""

    def __init__(self, name: str, package: str) -> None:
        self._name = name
        self._package = package
        self.message = cache(self._message)
        """The class of a message, e.g. `message("RegisterRequest")(version="v1beta1")`."""

    @cached_property
    def _pool(self) -> descriptor_pool.DescriptorPool:
        from grpc_tools import protoc  # here: importing it takes longer than everything else in this file

        with tempfile.TemporaryDirectory(prefix="proto-") as directory:
            compiled = Path(directory) / "compiled.bin"
            status = protoc.main(["protoc", f"-I{PROTOS}", f"--descriptor_set_out={compiled}", self._name])
            if status != 0:
                raise RuntimeError(
                    f"protoc could not compile {self._name} (status {status}; its own words are on stderr)"
                )
            files = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
        pool = descriptor_pool.DescriptorPool()
        for file in files.file:
            pool.Add(file)
        return pool

    def _message(self, name: str) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"{self._package}.{name}"))

    def definition(self) -> descriptor_pb2.FileDescriptorProto:
        """What the file defines, as if it had no name and no package: to compare two versions of an API."""
        found = descriptor_pb2.FileDescriptorProto()
        self._pool.FindFileByName(self._name).CopyToProto(found)
        found.ClearField("name")
        found.ClearField("package")
        return text_format.Parse(
            str(found).replace(f'".{self._package}.', '".'), descriptor_pb2.FileDescriptorProto()
        )

    def stub(self, channel: grpc.Channel, service: str) -> Mapping[str, Any]:
        """The callables of a service by method name, e.g. `stub(channel, "DevicePlugin")["Allocate"](request)`."""
        callables: dict[str, Any] = {}
        for method in self._pool.FindServiceByName(f"{self._package}.{service}").methods:
            make: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
            callables[method.name] = make(
                f"/{self._package}.{service}/{method.name}",
                request_serializer=self.message(method.input_type.name).SerializeToString,
                response_deserializer=self.message(method.output_type.name).FromString,
            )
        return callables

    def add_service(self, server: grpc.Server, service: str, servicer: object) -> None:
        """Serve `servicer`, whose methods are named and called as grpcio does it: `method(request, context)`. A method
        that it does not have is UNIMPLEMENTED."""
        handlers: dict[str, Any] = {}
        for method in self._pool.FindServiceByName(f"{self._package}.{service}").methods:
            if not hasattr(servicer, method.name):
                continue
            make: Any = (
                grpc.unary_stream_rpc_method_handler
                if method.server_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            handlers[method.name] = make(
                getattr(servicer, method.name),
                request_deserializer=self.message(method.input_type.name).FromString,
                response_serializer=self.message(method.output_type.name).SerializeToString,
            )
        generic = grpc.method_handlers_generic_handler(f"{self._package}.{service}", handlers)
        server.add_generic_rpc_handlers((generic,))
