"""The least that can be a device plugin in Python: grpcio, no logic, nothing read twice.

`python bare_plugin.py DESCRIPTORS HOST_ROOT KUBELET_DIR [UEVENTS]` lists the functions on vfio-pci, registers when
kubelet.sock appears, answers every Allocate with the same nodes, and reads the function of a uevent anew. DESCRIPTORS
is the compiled deviceplugin.proto. It ignores users of a GPU, faults and successors: a floor, not a plugin.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from inotify_simple import INotify, flags

RESOURCE = "bare.example.com/gpu"
ENDPOINT = "bare.sock"
NODES = ("/dev/vfio/vfio", "/dev/vfio/1")
WORKERS = 20


def main(descriptors: str, host: str, kubelet: str, uevents: str = "") -> None:
    """Serves until it is killed."""
    message = _messages(descriptors)
    functions = f"{host}/sys/bus/pci/devices"
    listed = {address for address in os.listdir(functions) if _is_offered(f"{functions}/{address}")}
    changed = threading.Condition()
    number = 0

    def list_and_watch(_: Any, context: Any) -> Any:
        seen = -1
        while context.is_active():
            with changed:
                while number == seen:
                    changed.wait()
                seen = number
                devices = [message("Device")(ID=address, health="Healthy") for address in sorted(listed)]
            yield message("ListAndWatchResponse")(devices=devices)

    def allocate(request: Any, _: Any) -> Any:
        nodes = [message("DeviceSpec")(container_path=n, host_path=n, permissions="mrw") for n in NODES]
        answer = message("ContainerAllocateResponse")
        return message("AllocateResponse")(
            container_responses=[
                answer(envs={"PCI_RESOURCE_BARE": ",".join(container.devices_ids)}, devices=nodes)
                for container in request.container_requests
            ]
        )

    def options(_: Any, __: Any) -> Any:
        return message("DevicePluginOptions")()

    def serve() -> grpc.Server:
        methods = {
            "GetDevicePluginOptions": _unary(options, message("Empty")),
            "Allocate": _unary(allocate, message("AllocateRequest")),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                list_and_watch, message("Empty").FromString, lambda answer: answer.SerializeToString()
            ),
        }
        server = grpc.server(ThreadPoolExecutor(WORKERS))
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", methods),)
        )
        server.add_insecure_port(f"unix:{directory}/{ENDPOINT}")
        server.start()
        request = message("RegisterRequest")(version="v1beta1", endpoint=ENDPOINT, resource_name=RESOURCE)
        with grpc.insecure_channel(
            f"unix:{directory}/kubelet.sock", (("grpc.use_local_subchannel_pool", 1),)
        ) as channel:
            channel.unary_unary(
                "/v1beta1.Registration/Register",
                lambda asked: asked.SerializeToString(),
                message("Empty").FromString,
            )(request, wait_for_ready=True)
        return server

    def hear() -> None:
        nonlocal number
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
            heard.bind(uevents)
            while True:
                address = heard.recv(65536).partition(b"\0")[0].rpartition(b"/")[2].decode()
                with changed:
                    is_offered = _is_offered(f"{functions}/{address}")
                    if is_offered != (address in listed):
                        (listed.add if is_offered else listed.discard)(address)
                        number += 1
                        changed.notify_all()

    directory = f"{kubelet}/device-plugins"
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if uevents:
        with suppress(FileNotFoundError):
            os.unlink(uevents)
        threading.Thread(target=hear, daemon=True).start()
    watch = INotify()
    watch.add_watch(directory, flags.CREATE | flags.MOVED_TO)
    server = serve()
    while True:
        if any(event.name == "kubelet.sock" for event in watch.read()):
            server.stop(None)
            server = serve()


def _unary(behaviour: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        behaviour, request.FromString, lambda answer: answer.SerializeToString()
    )


def _is_offered(function: str) -> bool:
    try:
        with open(f"{function}/vendor", "rb") as vendor:
            if vendor.read() != b"0x10de\n":
                return False
        os.readlink(f"{function}/iommu_group")
        return os.readlink(f"{function}/driver").endswith("/vfio-pci")
    except OSError:
        return False


def _messages(descriptors: str) -> Any:
    with open(descriptors, "rb") as compiled:
        files = descriptor_pb2.FileDescriptorSet.FromString(compiled.read())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    classes: dict[str, Any] = {}

    def message(name: str) -> Any:
        if name not in classes:
            classes[name] = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"v1beta1.{name}"))
        return classes[name]

    return message


if __name__ == "__main__":
    main(*sys.argv[1:])
