"""What a daemon with claims needs around it, as a process: an API server on loopback, and kubelet's calls by grpcio."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import trio

from gpuactors_simulation.kube.http import serve_loopback
from gpuactors_simulation.kube.server import ApiAnswer, ApiRequest, FakeApiServer
from gpuactors_simulation.kube.status import CLAIMS, Kind, forbidden
from tests.support import dra_grpcio
from tests.support.patience import patient

DRIVER: Final = "gpu.nvidia.com"
NODE: Final = "node-1"
WAIT_S: Final = patient(20.0)


class Api:
    """A fake API server in a thread of its own. The UIDs that it gives follow from `seed`."""

    def __init__(self, seed: int = 0) -> None:
        self.server = FakeApiServer(seed=seed)
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

    def claim(self, name: str, *addresses: str, uid: str = "", admin: bool = False) -> str:
        """Makes a claim that the scheduler has given these devices; its UID, which is `uid` where that is given: the
        claim of a cluster that has outlived its node. `admin`: with admin access to them."""
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
        if uid:
            made["metadata"]["uid"] = uid
            self.do(self.server.store.put, CLAIMS, made)
        results = [
            {
                "request": "gpu",
                "driver": DRIVER,
                "pool": NODE,
                "device": device_of(a),
                **({"adminAccess": True} if admin else {}),
            }
            for a in addresses
        ]
        self.do(
            self.server.set_claim_status,
            "default",
            name,
            {"allocation": {"devices": {"results": results}}},
        )
        return str(made["metadata"]["uid"])

    def forbid(self, kind: Kind) -> None:
        """The daemon's role has no right to list objects of this kind: 403, as the server words it."""
        answer, failure = self.server.answer, forbidden(kind, "list", "system:serviceaccount:test")

        async def answering(request: ApiRequest) -> ApiAnswer:
            if f"/{kind.plural}" in request.target:
                return ApiAnswer(failure.code, json.dumps(failure.status).encode())
            return await answer(request)

        self.server.answer = answering  # type: ignore[method-assign]

    def slices(self, driver: str = DRIVER) -> int:
        """How many slices the driver has."""
        return len(self.do(self.server.slices, driver))

    def devices(self, driver: str = DRIVER) -> list[str]:
        """The names of the devices in the slices."""
        slices = self.do(self.server.slices, driver)
        return sorted(d["name"] for s in slices for d in s["spec"].get("devices") or ())

    def taints(self, address: str) -> set[str]:
        """The values of the taints of a GPU in the slices."""
        slices = self.do(self.server.slices, DRIVER)
        devices = (
            d for s in slices for d in s["spec"].get("devices") or () if d["name"] == device_of(address)
        )
        return {taint["value"] for d in devices for taint in d.get("taints") or ()}


def device_of(address: str) -> str:
    """The name in the slices of the device with this PCI address, or of a mediated device with this UUID."""
    if ":" not in address:
        return f"mdev-{address}"
    return f"gpu-{address.replace(':', '-').replace('.', '-')}"


def write_kubeconfig(path: Path, port: int) -> None:
    """A kubeconfig file for the API server at this port of loopback."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    path.write_text(json.dumps(content))


def get_info(
    kubelet_dir: Path,
    instance: str = "",
    timeout_s: float = dra_grpcio.GET_INFO_S,
    driver: str = DRIVER,
) -> Any:
    """What the plugin says of itself, on a new connection. Raises grpc.RpcError."""
    with grpc.insecure_channel(f"unix:{_registry_socket(kubelet_dir, instance, driver)}") as channel:
        request = dra_grpcio.REGISTRATION.message("InfoRequest")()
        return dra_grpcio.registration(channel)["GetInfo"](request, timeout=timeout_s)


def _registry_socket(kubelet_dir: Path, instance: str, driver: str) -> Path:
    name = f"{driver}-{instance}-reg.sock" if instance else f"{driver}-reg.sock"
    return kubelet_dir / "plugins_registry" / name


@contextmanager
def plugin_of(
    kubelet_dir: Path,
    instance: str = "",
    *,
    get_info_s: float = dra_grpcio.GET_INFO_S,
    driver: str = DRIVER,
) -> Iterator[Mapping[str, Any]]:
    """The DRA plugin's methods, found as kubelet finds them: by the registration socket."""
    registry = _registry_socket(kubelet_dir, instance, driver)
    deadline = time.monotonic() + WAIT_S
    while not registry.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the registration socket did not come")
        time.sleep(0.01)
    info = get_info(kubelet_dir, instance, get_info_s, driver)
    with grpc.insecure_channel(f"unix:{registry}") as channel:
        status = dra_grpcio.REGISTRATION.message("RegistrationStatus")(plugin_registered=True)
        dra_grpcio.registration(channel)["NotifyRegistrationStatus"](status, timeout=WAIT_S)
    with grpc.insecure_channel(f"unix:{info.endpoint}") as channel:
        yield dra_grpcio.plugin(channel)


def prepare(plugin: Mapping[str, Any], name: str, uid: str, namespace: str = "default") -> Any:
    request = dra_grpcio.prepare_request((namespace, name, uid))
    return plugin["NodePrepareResources"](request, timeout=dra_grpcio.CALL_S).claims[uid]


def unprepare(plugin: Mapping[str, Any], name: str, uid: str, namespace: str = "default") -> Any:
    request = dra_grpcio.unprepare_request((namespace, name, uid))
    return plugin["NodeUnprepareResources"](request, timeout=dra_grpcio.CALL_S).claims[uid]
