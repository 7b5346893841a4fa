"""The least that can be a DRA plugin in Python: grpcio, no logic, one request and two files for a claim.

`python -m tests.bench.bare_dra KUBELET_DIR DRIVER CDI_DIR PORT` answers kubelet's registration and its calls. A prepare
reads the claim from the API server at this port of loopback, writes its UID into a checkpoint that is synced, and one
CDI file; an unprepare removes both. It ignores who has a GPU, its driver, faults and successors: a floor, not a plugin.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc

from tests.support.dra_grpcio import PLUGIN, REGISTRATION

WORKERS = 4
V1 = PLUGIN["v1"]


class Plugin:
    """The DRA plugin. One call at a time."""

    def __init__(self, directory: Path, driver: str, cdi: Path, port: int) -> None:
        self._checkpoint = directory / "checkpoint.json"
        self._driver = driver
        self._cdi = cdi
        self._api = HTTPConnection("127.0.0.1", port)
        self._prepared: list[str] = []

    def NodePrepareResources(self, request: Any, _: Any) -> Any:
        answer = V1.message("NodePrepareResourcesResponse")()
        for claim in request.claims:
            path = f"/apis/resource.k8s.io/v1/namespaces/{claim.namespace}/resourceclaims/{claim.name}"
            self._api.request("GET", path)
            results = json.load(self._api.getresponse())["status"]["allocation"]["devices"]["results"]
            self._prepared.append(claim.uid)
            self._write()
            nodes = [{"path": "/dev/vfio/vfio"}, {"path": "/dev/vfio/1"}]
            devices = [{"name": r["device"], "containerEdits": {"deviceNodes": nodes}} for r in results]
            kind = f"k8s.{self._driver}/claim"
            self._spec(claim.uid).write_text(
                json.dumps({"cdiVersion": "0.6.0", "kind": kind, "devices": devices})
            )
            for result in results:
                answer.claims[claim.uid].devices.add(
                    request_names=[result["request"]],
                    pool_name=result["pool"],
                    device_name=result["device"],
                    cdi_device_ids=[f"{kind}={result['device']}"],
                )
        return answer

    def NodeUnprepareResources(self, request: Any, _: Any) -> Any:
        answer = V1.message("NodeUnprepareResourcesResponse")()
        for claim in request.claims:
            self._spec(claim.uid).unlink(missing_ok=True)
            self._prepared.remove(claim.uid)
            self._write()
            answer.claims[claim.uid].SetInParent()
        return answer

    def _spec(self, uid: str) -> Path:
        return self._cdi / f"k8s.{self._driver}-claim_{uid}.json"

    def _write(self) -> None:
        new = self._checkpoint.with_suffix(".new")
        with new.open("w") as file:
            json.dump(self._prepared, file)
            file.flush()
            os.fsync(file.fileno())
        new.rename(self._checkpoint)


class Registration:
    """Kubelet's questions."""

    def __init__(self, driver: str, endpoint: str) -> None:
        self._driver = driver
        self._endpoint = endpoint

    def GetInfo(self, _: Any, __: Any) -> Any:
        return REGISTRATION.message("PluginInfo")(
            type="DRAPlugin",
            name=self._driver,
            endpoint=self._endpoint,
            supported_versions=["v1.DRAPlugin"],
        )

    def NotifyRegistrationStatus(self, _: Any, __: Any) -> Any:
        return REGISTRATION.message("RegistrationStatusResponse")()


def main(kubelet: str, driver: str, cdi: str, port: str) -> None:
    """Serves until it is killed."""
    directory, registry = Path(kubelet, "plugins", driver), Path(kubelet, "plugins_registry")
    for made in (directory, registry, Path(cdi)):
        made.mkdir(parents=True, exist_ok=True)
    endpoint = f"{directory}/dra.sock"
    servers = []
    for file, service, servicer, socket in (
        (V1, "DRAPlugin", Plugin(directory, driver, Path(cdi), int(port)), endpoint),
        (REGISTRATION, "Registration", Registration(driver, endpoint), f"{registry}/{driver}-reg.sock"),
    ):
        server = grpc.server(ThreadPoolExecutor(WORKERS))
        file.add_service(server, service, servicer)
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        servers.append(server)
    servers[0].wait_for_termination()


if __name__ == "__main__":
    main(*sys.argv[1:])
