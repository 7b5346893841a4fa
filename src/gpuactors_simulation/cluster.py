"""The cluster around a simulated node that serves claims: an API server on loopback, and what is seen of claims by it,
by kubelet and on the node's disk.

The same for each DRA driver. Must not know what a driver's devices are, and must not judge.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, final

from gpuactors.core.state.claims import ClaimRecord
from gpuactors_simulation.kube.http import serve_loopback
from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.kube.status import CLAIMS
from gpuactors_simulation.kubelet.dra.surroundings import surroundings_of
from gpuactors_simulation.kubelet.dra.values import Surroundings
from gpuactors_simulation.kubelet.values import KubeletView
from gpuactors_simulation.situation import ClaimSeen

NODE: Final = "node-1"
NAMESPACE: Final = "default"
_CHECKPOINT: Final = "gpuactors-checkpoint.json"


@asynccontextmanager
async def open_cluster(directory: Path, driver: str) -> AsyncIterator[Cluster]:
    """A cluster of one node, which serves claims of one driver."""
    server = FakeApiServer()
    server.add_node(NODE)
    async with serve_loopback(server) as port:
        (directory / "kubeconfig").write_text(json.dumps(_kubeconfig(port)))
        yield Cluster(directory, server, driver)


def _kubeconfig(port: int) -> Mapping[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "simulation",
        "clusters": [{"name": "simulation", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "simulation", "user": {}}],
        "contexts": [{"name": "simulation", "context": {"cluster": "simulation", "user": "simulation"}}],
    }


@final
class Cluster:
    """Made by `open_cluster`. `directory` is the simulated node's."""

    def __init__(self, directory: Path, server: FakeApiServer, driver: str) -> None:
        self.server = server
        self.settings: Mapping[str, Any] = {
            "node_name": NODE,
            "kubeconfig": directory / "kubeconfig",
            "cdi_dir": directory / "c",
        }
        """The daemon's configuration of the claims of any driver."""
        self.plugin_dir = directory / "k/plugins" / driver
        self._driver = driver
        self._cdi_dir = directory / "c"

    def around(self) -> Surroundings:
        """Return the surroundings of kubelet's DRA manager."""
        return surroundings_of(self.server, self._cdi_files)

    def _cdi_files(self) -> Iterator[bytes]:
        for path in sorted(self._cdi_dir.glob("*.json")):
            try:
                yield path.read_bytes()
            except FileNotFoundError:  # of a claim that ends at this moment
                continue

    def lose_checkpoint(self) -> None:
        """Delete the daemon's checkpoint while no daemon runs; the claims' files stay."""
        (self.plugin_dir / _CHECKPOINT).unlink()

    # --- what is seen -------------------------------------------------------------------------------------------

    def offers(self) -> dict[str, bool]:
        """Return the devices in the node's ResourceSlices, and whether each is tainted."""
        return {
            device["name"]: bool(device.get("taints"))
            for stored_slice in self.server.slices(self._driver)
            for device in stored_slice["spec"].get("devices") or ()
        }

    def claims(
        self, view: KubeletView, entries: Iterable[ClaimRecord], named: Callable[[str], str | None]
    ) -> tuple[ClaimSeen, ...]:
        """Each claim, by its name. `entries` has the daemon's words; `named` is how a device is shown, None if it is
        not."""
        words = {str(e.name.uid): (str(e.state), e.problem) for e in entries}
        claims_by_uid = {info.uid: info for info in view.dra.claims}
        names = {info.uid: info.name for info in view.dra.claims}
        devices = {info.uid: frozenset(d.device for d in info.devices) for info in view.dra.claims}
        for claim in self.server.store.objects(CLAIMS):
            uid = claim["metadata"]["uid"]
            allocation = claim.get("status", {}).get("allocation", {})
            names[uid] = claim["metadata"]["name"]
            devices[uid] = frozenset(r["device"] for r in allocation.get("devices", {}).get("results", ()))
        return tuple(
            ClaimSeen(
                name,
                devices=frozenset(shown for d in devices[uid] if (shown := named(d)) is not None),
                is_known=uid in claims_by_uid,
                is_prepared=uid in claims_by_uid and claims_by_uid[uid].prepared,
                state=words.get(uid, ("", ""))[0],
                problem=words.get(uid, ("", ""))[1],
            )
            for uid, name in sorted(names.items(), key=lambda item: item[1])
        )

    def left(self, *directories: Path) -> Iterator[str]:
        """The traces of claims on the node: CDI files, what is in these directories, entries of the checkpoint."""
        yield from (str(path.name) for path in self._files(self._cdi_dir, *directories))
        checkpoint = self.plugin_dir / _CHECKPOINT
        if checkpoint.is_file():
            for uid in json.loads(checkpoint.read_text())["checkpoint"]["claims"]:
                yield f"an entry of the checkpoint, of claim {uid}"

    def _files(self, *directories: Path) -> Iterator[Path]:
        """They come and go while this looks: the daemon removes them in a thread. `os.walk` takes that."""
        for directory in directories:
            yield from sorted(Path(at, name) for at, _, names in os.walk(directory) for name in names)
