"""Rolling updates under pods with claims: no call is refused, and each version reads what the other has left.

The stream of pods sees two hand-overs by default; `TEST_HAND_OVERS=50` makes it so many, at 15 to 40 s each. Seen on a
busy machine of two cores: 10 hand-overs after one another, 141 pods, none refused; a pod took at most 7.2 s, a prepare
5.6 s.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.node import daemonset, pods
from tests.node.claims import ClaimNode, by_address, claims, from_template, kubelet_calls, request
from tests.node.daemonset import IMAGE, OTHER_IMAGE, Installed
from tests.node.fake_host import NVIDIA
from tests.node.images import add_image
from tests.node.older import CLAIMS_COMMIT, older
from tests.node.run import IMAGE_VARIABLE
from tests.support.patience import patient

__all__ = ["claims"]

HAND_OVERS: Final = int(os.environ.get("TEST_HAND_OVERS", "2"))
GPUS: Final = (0x21, 0x22, 0x23)
SECOND_TRY_S: Final = 55.0
"""Kubelet prepares again after 60 to 90 s."""


@pytest.mark.node_set("any")
@pytest.mark.timeout(patient(120.0 + 60.0 * HAND_OVERS))
@pytest.mark.long
def test_no_call_is_refused_in_rolling_updates_under_a_stream_of_pods(claims: ClaimNode) -> None:
    gpus = {claims.host.plug(slot, driver=NVIDIA): NVIDIA for slot in GPUS}
    claims.offered(*gpus)
    claims.template("one", request())
    before, over, took = len(refusals()), threading.Event(), list[float]()
    made = 0
    with ThreadPoolExecutor(len(GPUS)) as threads:
        lanes = [threads.submit(stream, claims, lane, over, took) for lane in range(len(GPUS))]
        try:
            for number in range(HAND_OVERS):
                claims.node.update((OTHER_IMAGE, IMAGE)[number % 2])
                made += 1
        finally:
            over.set()
    calls = [c.ended - c.began for c in kubelet_calls() if c.ended is not None]
    claims.node.said(
        f"{made} hand-overs, {len(took)} pods, {len(refusals()) - before} refused; a pod took at most "
        f"{max(took, default=0):.1f} s, a prepare at most {max(calls, default=0):.2f} s"
    )
    for lane in lanes:
        lane.result()
    assert refusals()[before:] == []
    assert max(took) < SECOND_TRY_S
    claims.nothing_is_left(gpus)


@pytest.mark.node_set("any")
@pytest.mark.timeout(patient(240.0))
def test_claims_outlive_an_update_from_an_older_version_and_back(claims: ClaimNode, tmp_path: Path) -> None:
    """By the manifests and the image of each: the claims of the older version are released by today's, those of
    today's by the older one, and each prepares a new claim beside them."""
    found = older(Path(os.environ[IMAGE_VARIABLE]), tmp_path, CLAIMS_COMMIT)
    claims.node.said(found.what)
    add_image(found.layout, found.image)
    gpus = [claims.host.plug(slot, driver=NVIDIA) for slot in GPUS]
    for number, address in enumerate(gpus):
        claims.template(f"gpu-{number}", request(selector=by_address(address)))
    uids: dict[str, str] = {}

    def start(pod: str, number: int) -> None:
        claims.create(pod, from_template(f"gpu-{number}"))
        claims.runs(pod, gpus[number])
        uids[pod] = claims.uid_of(pod)

    def stop(pod: str) -> None:
        pods.stop(claims.api, pod)
        claims.is_released(uids.pop(pod))

    def all_run() -> None:
        claims.registered()
        for pod, uid in uids.items():
            claims.is_prepared(uid)
            claims.runs(pod, gpus[int(pod[-1])])

    def older_installed() -> Installed:
        return daemonset.install(image=found.image, base=found.deploy / "overlays" / "dra")

    claims.node.switch(older_installed)
    claims.registered()
    claims.offered(*gpus)
    start("then-0", 0)
    start("then-1", 1)
    claims.node.switch(lambda: daemonset.install("dra"))
    all_run()
    start("now-2", 2)
    stop("then-0")
    start("now-0", 0)
    claims.node.switch(older_installed)
    all_run()
    for pod in tuple(uids):
        stop(pod)
    claims.nothing_is_left(dict.fromkeys(gpus, NVIDIA))


def stream(claims: ClaimNode, lane: int, over: threading.Event, took: list[float]) -> None:
    """Pods, one after the other; the time from each pod's making until it runs."""
    number = 0
    while not over.is_set():
        number += 1
        name, began = f"vm-{lane}-{number}", time.monotonic()
        claims.create(name, from_template("one"))
        claims.comes_to(name, "Running")
        took.append(time.monotonic() - began)
        pods.stop(claims.api, name)


def refusals() -> list[str]:
    """The lines of kubelet's log about prepares and unprepares that failed, but for those before any call of ours: the
    API server's authorizer does not know yet that the claim is for this node."""
    log = Path(os.environ["K8S_DIR"], "log", "kubelet.log").read_text(errors="replace")
    failed = ("prepare dynamic resources", "NodePrepareResources failed", "NodeUnprepareResources failed")
    lines = (line for line in log.splitlines() if line.startswith("E") and "is forbidden" not in line)
    return [line for line in lines if any(text in line for text in failed)]
