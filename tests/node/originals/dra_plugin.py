"""The script's own DRA plugin: its two sockets, its answers, and a record of kubelet's calls."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from tests.node.originals.plugin import Call, Refusal, deadline_of
from tests.support.dra_grpcio import HEALTH, PLUGIN, REGISTRATION

VERSIONS: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
THREADS: Final = 16


@dataclass(frozen=True, slots=True)
class Info:
    """What GetInfo answers."""

    driver: str
    versions: tuple[str, ...] = VERSIONS
    type: str = "DRAPlugin"
    endpoint: str | None = None
    """None: the plugin's own."""


class DraPlugin:
    """A plugin with a socket for its API and one in `plugins_registry`."""

    def __init__(self, kubelet_dir: Path, name: str, info: Info) -> None:
        self.info = info
        self.calls: list[Call] = []
        self.told: list[tuple[bool, str]] = []
        """What NotifyRegistrationStatus said."""
        self.refusals: dict[str, list[Refusal]] = {}
        self.errors: dict[str, str] = {}
        """By claim: the error of its answer to a prepare."""
        self.skipped: set[str] = set()
        """Claims without an answer to a prepare."""
        self.prepared: Callable[[Any], tuple[str, str, Sequence[str]]] = lambda claim: (
            "pool",
            f"of-{claim.name}",
            ["script.example/gpu=one"],
        )
        """The answer to the prepare of a claim: pool, device and CDI ids."""
        self.unprepared: Callable[[Any], object] = lambda _: None
        self.stranger = False
        """Its answers to a prepare have one for a claim that was not asked for."""
        self.on_call: dict[str, Callable[[], object]] = {}
        self.healths: list[queue.SimpleQueue[Sequence[tuple[str, int]] | None]] = []
        """One for each open health stream."""
        self.endpoint = kubelet_dir / "plugins" / f"script-{name}" / "dra.sock"
        self.registry = kubelet_dir / "plugins_registry" / f"script-{name}-reg.sock"
        self.endpoint.parent.mkdir(parents=True, exist_ok=True)
        self._servers: list[grpc.Server] = []
        self._serve_api()
        self._register()

    def _serve_api(self) -> None:
        server = grpc.server(ThreadPoolExecutor(THREADS))
        for version, file in PLUGIN.items():
            file.add_service(server, "DRAPlugin", _Api(self, version))
        HEALTH["v1alpha1"].add_service(server, "DRAResourceHealth", _Health(self))
        self._start(server, self.endpoint)

    def _register(self) -> None:
        server = grpc.server(ThreadPoolExecutor(THREADS))
        REGISTRATION.add_service(server, "Registration", _Registration(self))
        self._start(server, self.registry)
        self._registration = server

    def _start(self, server: grpc.Server, path: Path) -> None:
        path.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{path}")
        server.start()
        self._servers.append(server)

    def deregister(self) -> None:
        """The registration's socket goes."""
        self._registration.stop(grace=None).wait()
        self.registry.unlink(missing_ok=True)

    def stop(self) -> None:
        """The registration's socket goes, then the rest."""
        self.deregister()
        for health in self.healths:
            health.put(None)
        for server in self._servers:
            server.stop(grace=None).wait()
        self.endpoint.unlink(missing_ok=True)

    def asked(self, *methods: str) -> list[Call]:
        """The calls of these methods, in order; of all methods if none is named."""
        return [call for call in tuple(self.calls) if call.method in methods or not methods]

    def answer(self, context: grpc.ServicerContext, method: str, **fields: Any) -> None:
        """Records a call, and refuses it if it is to be refused."""
        self.calls.append(Call(method, tuple(fields.items()), deadline_of(context)))
        self.on_call.get(method, lambda: None)()
        if self.refusals.get(method):
            refusal = self.refusals[method].pop(0)
            context.abort(refusal.code, refusal.text)


class _Registration:
    def __init__(self, plugin: DraPlugin) -> None:
        self._plugin = plugin

    def GetInfo(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._plugin.answer(context, "GetInfo")
        info = self._plugin.info
        return REGISTRATION.message("PluginInfo")(
            type=info.type,
            name=info.driver,
            endpoint=str(self._plugin.endpoint) if info.endpoint is None else info.endpoint,
            supported_versions=info.versions,
        )

    def NotifyRegistrationStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._plugin.told.append((request.plugin_registered, request.error))
        self._plugin.answer(context, "NotifyRegistrationStatus")
        return REGISTRATION.message("RegistrationStatusResponse")()


class _Api:
    def __init__(self, plugin: DraPlugin, version: str) -> None:
        self._plugin = plugin
        self._version = version
        self._message = PLUGIN[version].message

    def NodePrepareResources(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note("NodePrepareResources", request, context)
        entry = self._message("NodePrepareResourceResponse")
        answers = {
            c.uid: entry(**self._found(c)) for c in request.claims if c.name not in self._plugin.skipped
        }
        if self._plugin.stranger:
            answers["stranger"] = entry()
        return self._message("NodePrepareResourcesResponse")(claims=answers)

    def NodeUnprepareResources(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note("NodeUnprepareResources", request, context)
        for claim in request.claims:
            self._plugin.unprepared(claim)
        entry = self._message("NodeUnprepareResourceResponse")
        return self._message("NodeUnprepareResourcesResponse")(
            claims={claim.uid: entry() for claim in request.claims}
        )

    def _found(self, claim: Any) -> Mapping[str, Any]:
        if claim.name in self._plugin.errors:
            return {"error": self._plugin.errors[claim.name]}
        pool, name, ids = self._plugin.prepared(claim)
        device = self._message("Device")(
            request_names=["gpu"], pool_name=pool, device_name=name, cdi_device_ids=ids
        )
        return {"devices": [device]}

    def _note(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        claims = sorted((claim.namespace, claim.name, bool(claim.uid)) for claim in request.claims)
        self._plugin.answer(context, method, version=self._version, claims=claims)


class _Health:
    def __init__(self, plugin: DraPlugin) -> None:
        self._plugin = plugin

    def NodeWatchResources(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        lists: queue.SimpleQueue[Sequence[tuple[str, int]] | None] = queue.SimpleQueue()
        context.add_callback(lambda: lists.put(None))
        self._plugin.healths.append(lists)
        self._plugin.answer(context, "NodeWatchResources")
        message = HEALTH["v1alpha1"].message
        while (found := lists.get()) is not None:
            yield message("NodeWatchResourcesResponse")(
                devices=[
                    message("DeviceHealth")(
                        device=message("DeviceIdentifier")(pool_name="pool", device_name=name), health=health
                    )
                    for name, health in found
                ]
            )
