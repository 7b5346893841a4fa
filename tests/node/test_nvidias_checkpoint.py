"""The checkpoints that NVIDIA's kubelet plugins write, and those of the fake (`tests/support/nvidia_checkpoint.py`):
the same bytes for the same claims, checksums included.

A run leaves both, claims and bytes, in var/node/nvidias-checkpoints.json. A copy of that is in tests/acts/recorded/:
with it the fake is compared where NVIDIA's programs are not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final, final

import pytest

from tests.node import domains, pods
from tests.node.claims import by_address, from_template, request
from tests.node.cluster import CLAIMS, Object, eventually
from tests.node.conftest import RESULTS
from tests.node.nvidia.plugins import DOMAIN_DRIVER, GPU_DRIVER, VFIO_CLASS
from tests.node.nvidia.scene import Scene, scene  # noqa: F401  # a fixture
from tests.node.test_domains import around  # noqa: F401  # a fixture
from tests.support import nvidia_checkpoint as nvidia

pytestmark = [pytest.mark.nvidias_domains, pytest.mark.nvidias_plugins]

RECORDED: Final = RESULTS / "nvidias-checkpoints.json"

UNKNOWN_FIELD: Final = {
    "opaque": {
        "driver": GPU_DRIVER,
        "parameters": {
            "apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig", "unknown": "<&>",
        },
    }
}  # fmt: skip
"""A configuration that its plugin refuses, once it has written down that the prepare has begun."""


@final
class Comparison:
    """Both plugins' files, from time to time, each beside what the fake writes of the same claims."""

    def __init__(self, found: Scene) -> None:
        self._scene = found
        self._claims: dict[str, Object] = {}
        """Each claim as it was last, by UID."""
        self._recorded: list[Object] = []

    def holds(self, what: str, states: Mapping[str, str] | None = None) -> None:
        """Waits until each file is as the fake's. `states`: of the claims of these pods; all others are prepared."""
        for driver in (GPU_DRIVER, DOMAIN_DRIVER):
            look = partial(self._same, driver, states or {})
            found = eventually(look, f"{what}: the file of {driver}")
            if not any(found["content"] == known["content"] for known in self._recorded):
                self._recorded.append({"what": what, **found})
        RECORDED.write_text(json.dumps(self._recorded, indent=1) + "\n")

    def _same(self, driver: str, states: Mapping[str, str]) -> Object:
        content = (self._scene.theirs.directory(driver) / "checkpoint.json").read_text()
        there = json.loads(content)["v2"].get("preparedClaims", {})
        expected = self._expected(driver, states)
        names = {name for claim in expected for name in _devices_of(claim, driver)}
        offered = self._scene.theirs.offered(driver)
        given: Object = {
            "driver": driver,
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "claims": [self._claim(claim, there, states) for claim in expected],
            "attributes": {name: offered[name]["attributes"] for name in sorted(names & offered.keys())},
        }
        written = nvidia.written(**given).decode()
        assert json.loads(written) == json.loads(content)
        assert written == content
        return {**given, "content": content}

    def _expected(self, driver: str, states: Mapping[str, str]) -> list[Object]:
        """The claims that the file must have: those that are allocated, and those that were aborted."""
        now = {
            c["metadata"]["uid"]: c
            for c in self._scene.api.items(CLAIMS)
            if c.get("status", {}).get("reservedFor")
        }
        self._claims |= now
        assert states.keys() <= set(map(_pod_of, self._claims.values())), "a claim that is to come"
        gone = [
            claim
            for uid, claim in self._claims.items()
            if uid not in now and states.get(_pod_of(claim)) == nvidia.ABORTED
        ]
        return [claim for claim in (*now.values(), *gone) if _devices_of(claim, driver)]

    @staticmethod
    def _claim(claim: Object, there: Object, states: Mapping[str, str]) -> Object:
        uid = claim["metadata"]["uid"]
        meta = {name: claim["metadata"][name] for name in ("uid", "namespace", "name")}
        at = there.get(uid, {}).get("abortedAt")
        return {
            "claim": {"metadata": meta, "status": claim["status"]},
            "state": states.get(_pod_of(claim), nvidia.COMPLETED),
        } | ({"abortedAt": at} if at else {})


def _pod_of(claim: Object) -> str:
    return str(claim["status"]["reservedFor"][0]["name"])


def _devices_of(claim: Object, driver: str) -> list[str]:
    results = claim["status"]["allocation"]["devices"]["results"]
    return [result["device"] for result in results if result["driver"] == driver]


@pytest.mark.long
def test_the_fake_writes_what_they_write(scene: Scene) -> None:  # noqa: F811
    same = Comparison(scene)
    scene.theirs.start()
    same.holds("no claim")
    scene.use_all()
    same.holds("a container's GPU, two on vfio, a channel and a daemon")
    # The plugin refuses its configuration, once it has written down that the prepare has begun.
    scene.claims.template(
        "refused", request(selector=by_address(scene.free), device_class=VFIO_CLASS), config=[UNKNOWN_FIELD]
    )
    scene.claims.create("v2", from_template("refused"))
    same.holds("a prepare of a GPU has begun", {"v2": nvidia.STARTED})
    pods.stop(scene.api, "v2")
    pods.stop(scene.api, "job-0")
    eventually(lambda: not scene.api.items(domains.DAEMON_PODS), "the end of the daemon's pod")
    same.holds("the channel and the daemon have ended")
    scene.delete()
    scene.steering.words = "ready=no\n"
    uid = scene.create()
    scene.make("job-1", uid)
    same.holds("a prepare of a channel waits for its daemon", {"job-1": nvidia.STARTED})
    pods.stop(scene.api, "job-1")
    same.holds("a prepare of a channel was given up", {"job-1": nvidia.ABORTED})
