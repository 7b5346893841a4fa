"""The fake kubelet's DRA manager on real sockets: with the daemon's plugin, and with one that is made with grpcio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio

from gpuactors_simulation.kubelet.dra.values import Surroundings
from gpuactors_simulation.kubelet.fake import FakeKubelet, open_fake_kubelet
from gpuactors_simulation.kubelet.transport import UnixTransport
from gpuactors_simulation.kubelet.values import Phase
from tests.kubelet.dra.serving import Core, serving, short_directory
from tests.simulation.kubelet.dra.rig import DRIVER, Node
from tests.support.dra_grpcio import PLUGIN, REGISTRATION
from tests.support.patience import patient

WITHIN_S = patient(30.0)


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


@asynccontextmanager
async def started(kubelet_dir: Path) -> AsyncIterator[tuple[FakeKubelet, Node]]:
    node = Node()
    dra = Surroundings(node.claim, node.wipe)
    async with open_fake_kubelet(UnixTransport(kubelet_dir), seed=1, dra=dra) as kubelet:
        await kubelet.start()
        yield kubelet, node


async def registered(kubelet: FakeKubelet) -> str:
    """The version by which kubelet calls its plugin."""
    with trio.fail_after(WITHIN_S):
        view = await kubelet.until(lambda view: any(i.connected for i in view.dra.instances))
    return view.dra.instances[0].version


async def lives_and_dies(kubelet: FakeKubelet, node: Node) -> None:
    node.add("a", "uid-a")
    kubelet.submit("vm", {}, uses=("a",))
    with trio.fail_after(WITHIN_S):
        await kubelet.until(lambda view: view.pods["vm"].phase is Phase.RUNNING)
        kubelet.delete("vm")
        await kubelet.until(lambda view: "vm" not in view.pods)
    assert [(call.call, call.claims, call.error) for call in kubelet.dra_calls] == [
        ("prepare", ("uid-a",), ""),
        ("unprepare", ("uid-a",), ""),
    ]


async def test_the_daemons_plugin_is_found_called_and_let_go(kubelet_dir: Path) -> None:
    core = Core()
    async with started(kubelet_dir) as (kubelet, node):
        async with serving(kubelet_dir, core) as served:
            assert await registered(kubelet) == "v1.DRAPlugin"
            await lives_and_dies(kubelet, node)
            assert [call for call, _ in core.asked] == ["prepare", "unprepare"]
            assert [status.registered for status in served.told] == [True]
        with trio.fail_after(WITHIN_S):
            await kubelet.until(lambda view: not view.dra.instances)


@contextmanager
def grpcio_plugin(kubelet_dir: Path, version: str) -> Iterator[None]:
    """A DRA plugin that shares nothing with ours."""
    api, registry = kubelet_dir / "api.sock", kubelet_dir / "plugins_registry" / "theirs-reg.sock"
    messages = PLUGIN[version].message

    class Plugin:
        def NodePrepareResources(self, request: Any, context: Any) -> Any:
            device = messages("Device")(pool_name="p", device_name="d", cdi_device_ids=["k/c=d"])
            entry = messages("NodePrepareResourceResponse")(devices=[device])
            return messages("NodePrepareResourcesResponse")(claims={c.uid: entry for c in request.claims})

        def NodeUnprepareResources(self, request: Any, context: Any) -> Any:
            entry = messages("NodeUnprepareResourceResponse")()
            return messages("NodeUnprepareResourcesResponse")(claims={c.uid: entry for c in request.claims})

    class Registration:
        def GetInfo(self, request: Any, context: Any) -> Any:
            return REGISTRATION.message("PluginInfo")(
                type="DRAPlugin", name=DRIVER, endpoint=str(api), supported_versions=[f"{version}.DRAPlugin"]
            )

        def NotifyRegistrationStatus(self, request: Any, context: Any) -> Any:
            return REGISTRATION.message("RegistrationStatusResponse")()

    with ThreadPoolExecutor(8) as threads:
        servers = []
        for path, file, service, servicer in (
            (api, PLUGIN[version], "DRAPlugin", Plugin()),
            (registry, REGISTRATION, "Registration", Registration()),
        ):
            server = grpc.server(threads)
            file.add_service(server, service, servicer)
            server.add_insecure_port(f"unix:{path}")
            server.start()
            servers.append(server)
        try:
            yield
        finally:
            for server in servers:
                server.stop(grace=None).wait()


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_a_plugin_made_with_grpcio_is_found_and_called(kubelet_dir: Path, version: str) -> None:
    async with started(kubelet_dir) as (kubelet, node):
        with grpcio_plugin(kubelet_dir, version):
            assert await registered(kubelet) == f"{version}.DRAPlugin"
            await lives_and_dies(kubelet, node)
