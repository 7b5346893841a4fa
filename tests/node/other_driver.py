"""Another vendor's DRA driver on the node: it offers GPUs by names that say nothing of where they are, and prepares a
claim by its CDI file, as such drivers do.

It binds nothing and opens nothing: a claim that is prepared and idle leaves no trace in the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

from tests.node.claims import CDI, CLAIMS_OF, NAMESPACE
from tests.node.cluster import CLASSES, SLICES, Api, Object, eventually, kubelet_dir, node_name
from tests.node.originals.dra_plugin import DraPlugin, Info

DRIVER: Final = "vgpu.vendor.example"
CLASS: Final = DRIVER
API: Final = "resource.k8s.io/v1"

_SPEC: Final = """\
---
cdiVersion: 0.7.0
containerEdits: {{}}
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/vfio/{group}
  name: {name}
kind: k8s.{driver}/claim
"""


@final
class OtherDriver:
    """The driver, while it runs. `groups`: the IOMMU group of each device that it offers."""

    def __init__(self, api: Api, groups: Mapping[str, int]) -> None:
        self._api = api
        self._groups = groups
        self._plugin = DraPlugin(kubelet_dir(), "other-driver", Info(DRIVER))
        self._plugin.prepared = self._prepare
        self._plugin.unprepared = lambda claim: self.file_of(claim.uid).unlink(missing_ok=True)

    def offer(self) -> None:
        """Its class, and its slice."""
        node = node_name()
        selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
        self._api.create(CLASSES, _object("DeviceClass", CLASS, {"selectors": [selector]}))
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        devices = [{"name": name} for name in self._groups]
        spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices}
        self._api.create(SLICES, _object("ResourceSlice", DRIVER, spec))

    def claim(self, name: str) -> Object:
        """A claim of one of its devices; the entry of a pod's `spec.resourceClaims`."""
        requests = [{"name": "gpu", "exactly": {"deviceClassName": CLASS}}]
        self._api.create(
            CLAIMS_OF.format(NAMESPACE), _object("ResourceClaim", name, {"devices": {"requests": requests}})
        )
        return {"name": "gpu", "resourceClaimName": name}

    def file_of(self, uid: str) -> Path:
        """The CDI file of a claim."""
        return CDI / f"k8s.{DRIVER}-claim_{uid}.yaml"

    def _prepare(self, claim: Any) -> tuple[str, str, list[str]]:
        found = self._api.get(f"{CLAIMS_OF.format(claim.namespace)}/{claim.name}")
        (result,) = found["status"]["allocation"]["devices"]["results"]
        device = str(result["device"])
        name = f"{claim.uid}-{device}"
        new = CDI / f".{claim.uid}.new"
        new.write_text(_SPEC.format(group=self._groups[device], name=name, driver=DRIVER))
        new.rename(self.file_of(claim.uid))
        return str(result["pool"]), device, [f"k8s.{DRIVER}/claim={name}"]

    def leave(self) -> None:
        """It ends, and takes its objects along."""
        self._plugin.stop()
        self._api.delete(f"{SLICES}/{DRIVER}")
        self._api.delete(f"{CLASSES}/{CLASS}")


def _object(kind: str, name: str, spec: Object) -> Object:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec}


@contextmanager
def other_driver(api: Api, groups: Mapping[str, int]) -> Iterator[OtherDriver]:
    """The driver, registered with kubelet."""
    driver = OtherDriver(api, groups)
    try:
        eventually(lambda: (True, "") in driver._plugin.told, "the other driver's registration")
        driver.offer()
        yield driver
    finally:
        driver.leave()
