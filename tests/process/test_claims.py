"""Claims, with a daemon process, an API server on loopback, and grpcio as kubelet."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import trio

from gpuactors.simulation.kube.http import serve_loopback
from gpuactors.simulation.kube.server import FakeApiServer
from tests.process.daemon import WAIT_S, DaemonProcess, eventually, gpuactors
from tests.process.node import H100, HEALTHY, Node, address, open_node
from tests.support import dra_grpcio

DRIVER: Final = "gpu.nvidia.com"
NODE: Final = "node-1"


class Api:
    """A fake API server in a thread of its own."""

    def __init__(self) -> None:
        self.server = FakeApiServer()
        self.server.add_node(NODE)
        self.port = 0
        self._began = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._stop = trio.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._serve,), daemon=True)

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with serve_loopback(self.server) as self.port:
            self._began.set()
            await self._stop.wait()

    def do(self, change: Any, *args: Any) -> Any:
        """Carries something out in the server's thread."""
        assert self._token is not None
        return trio.from_thread.run_sync(change, *args, trio_token=self._token)

    def __enter__(self) -> Api:
        self._thread.start()
        assert self._began.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self._stop.set)
        self._thread.join(WAIT_S)

    def claim(self, name: str, *addresses: str) -> str:
        """Makes a claim that the scheduler has given these devices; its UID."""
        made = self.do(
            self.server.add_claim,
            {
                "metadata": {"namespace": "default", "name": name},
                "spec": {
                    "devices": {
                        "requests": [{"name": "gpu", "exactly": {"deviceClassName": "vfio.gpu.nvidia.com"}}]
                    }
                },
            },
        )
        results = [
            {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": _device(a)} for a in addresses
        ]
        self.do(
            self.server.set_claim_status,
            "default",
            name,
            {"allocation": {"devices": {"results": results}}},
        )
        return str(made["metadata"]["uid"])

    def devices(self) -> list[str]:
        """The names of the devices in the slices."""
        slices = self.do(self.server.slices, DRIVER)
        return sorted(d["name"] for s in slices for d in s["spec"].get("devices") or ())


def _device(of: str) -> str:
    return f"gpu-{of.replace(':', '-').replace('.', '-')}"


@contextmanager
def claims_node(**plugged: str) -> Iterator[tuple[Node, Api, Path]]:
    """A node with GPUs in these slots (`g23="vfio-pci"`), its API server, and its CDI directory."""
    with open_node() as node, Api() as api:
        for slot, driver in plugged.items():
            node.plug(int(slot[1:], 16), "2330", driver=driver)
        kubeconfig = node.directory / "kubeconfig"
        kubeconfig.write_text(json.dumps(_kubeconfig(api.port)))
        yield node, api, node.directory / "cdi"


def _kubeconfig(port: int) -> Mapping[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }


def daemon_of(node: Node, cdi: Path, *words: str) -> DaemonProcess:
    return node.daemon(
        "--dra=on",
        f"--node-name={NODE}",
        f"--kubeconfig={node.directory / 'kubeconfig'}",
        f"--cdi-dir={cdi}",
        *words,
    )


@contextmanager
def plugin_of(node: Node) -> Iterator[Mapping[str, Any]]:
    """The DRA plugin's methods, found as kubelet finds them: by the registration socket."""
    registry = node.kubelet_dir / "plugins_registry" / f"{DRIVER}-reg.sock"
    eventually(registry.exists, "the registration socket")
    with grpc.insecure_channel(f"unix:{registry}") as channel:
        methods = dra_grpcio.registration(channel)
        info = methods["GetInfo"](
            dra_grpcio.REGISTRATION.message("InfoRequest")(), timeout=dra_grpcio.GET_INFO_S
        )
        status = dra_grpcio.REGISTRATION.message("RegistrationStatus")(plugin_registered=True)
        methods["NotifyRegistrationStatus"](status, timeout=WAIT_S)
    with grpc.insecure_channel(f"unix:{info.endpoint}") as channel:
        yield dra_grpcio.plugin(channel)


def prepare(plugin: Mapping[str, Any], name: str, uid: str) -> Any:
    request = dra_grpcio.prepare_request(("default", name, uid))
    return plugin["NodePrepareResources"](request, timeout=dra_grpcio.CALL_S).claims[uid]


def unprepare(plugin: Mapping[str, Any], name: str, uid: str) -> Any:
    request = dra_grpcio.unprepare_request(("default", name, uid))
    return plugin["NodeUnprepareResources"](request, timeout=dra_grpcio.CALL_S).claims[uid]


def test_a_pre_bound_gpu_from_slice_to_unprepare() -> None:
    gpu = address(0x23)
    with claims_node(g23="vfio-pci", g24="vfio-pci") as (node, api, cdi), daemon_of(node, cdi) as daemon:
        eventually(lambda: api.devices() == [_device(gpu), _device(address(0x24))], "the slice")
        with plugin_of(node) as plugin:
            uid = api.claim("one", gpu)
            prepared = prepare(plugin, "one", uid)
            assert prepared.error == ""
            (device,) = prepared.devices
            assert (device.pool_name, device.device_name) == (NODE, _device(gpu))
            assert list(device.request_names) == ["gpu"]
            assert list(device.cdi_device_ids) == [
                f"k8s.{DRIVER}/claim={uid}-{_device(gpu)}",
                f"{DRIVER}/metadata={uid}_gpu",
            ]
            (devices,) = cdi.glob(f"k8s.{DRIVER}-claim_{uid}.json")
            (made,) = json.loads(devices.read_text())["devices"]
            paths = [n["path"] for n in made["containerEdits"]["deviceNodes"]]
            assert paths == ["/dev/vfio/35", "/dev/vfio/vfio"]
            # One owner per GPU: the device plugin does not offer it meanwhile.
            node.wait_device_lists({H100: {gpu: "Unhealthy", address(0x24): HEALTHY}})
            assert unprepare(plugin, "one", uid).error == ""
            assert list(cdi.iterdir()) == []
            assert node.tree.driver_of(gpu) == "vfio-pci"
            node.wait_device_lists({H100: {gpu: HEALTHY, address(0x24): HEALTHY}})
        daemon.wait_event("claim.unprepared", claim="default/one")


def test_a_claim_outlives_the_daemon() -> None:
    gpu = address(0x23)
    with claims_node(g23="vfio-pci") as (node, api, cdi):
        uid = api.claim("one", gpu)
        with daemon_of(node, cdi), plugin_of(node) as plugin:
            first = prepare(plugin, "one", uid)
            assert first.error == ""
        for path in cdi.iterdir():
            path.unlink()
        with daemon_of(node, cdi) as daemon:
            daemon.wait_event("checkpoint.read", claims=1)
            eventually(lambda: len(list(cdi.iterdir())) == 2, "the CDI files that were lost")
            node.wait_device_lists({H100: {gpu: "Unhealthy"}})
            with plugin_of(node) as plugin:
                assert list(prepare(plugin, "one", uid).devices) == list(first.devices)
                assert unprepare(plugin, "one", uid).error == ""
            assert list(cdi.iterdir()) == []


def test_the_new_claim_waits_in_its_call_for_the_old_one() -> None:
    gpu = address(0x23)
    with (
        claims_node(g23="vfio-pci") as (node, api, cdi),
        daemon_of(node, cdi) as daemon,
        plugin_of(node) as plugin,
    ):
        old, new = api.claim("old", gpu), api.claim("new", gpu)
        assert prepare(plugin, "old", old).error == ""
        answers: list[Any] = []
        waiting = threading.Thread(target=lambda: answers.append(prepare(plugin, "new", new)))
        waiting.start()
        daemon.wait_event("claim.waiting", claim="default/new", has=["the claim default/old"])
        assert answers == []
        assert unprepare(plugin, "old", old).error == ""
        waiting.join(WAIT_S)
        assert [a.error for a in answers] == [""]


def test_a_claim_that_is_not_allocated_or_not_there_is_refused_with_the_reason() -> None:
    with claims_node(g23="vfio-pci") as (node, api, cdi), daemon_of(node, cdi), plugin_of(node) as plugin:
        uid = api.claim("one", address(0x23))
        api.do(api.server.set_claim_status, "default", "one", {})
        assert prepare(plugin, "one", uid).error == "the claim is not allocated"
        assert "it was deleted" in prepare(plugin, "gone", "uid-of-gone").error
        assert unprepare(plugin, "gone", "uid-of-gone").error == ""


def test_without_an_api_server_it_says_what_to_do() -> None:
    with open_node() as node:
        ended = gpuactors(
            "run", "--dra=on", f"--host-root={node.tree.root}", f"--kubelet-dir={node.kubelet_dir}",
            f"--state-dir={node.directory / 's'}", env={"KUBERNETES_SERVICE_HOST": ""},
        )  # fmt: skip
    assert ended.returncode == 78, "a configuration that cannot work (sysexits.h, EX_CONFIG)"
    assert "name a kubeconfig file with --kubeconfig" in ended.stderr
