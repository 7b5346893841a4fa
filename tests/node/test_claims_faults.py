"""Claims under faults: forced deletions, restarts, a daemon that is killed in each act, lost races."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress

import pytest

from tests.node import pods
from tests.node.books import DRIVER
from tests.node.claims import (
    CDI,
    IDLE,
    RETRY_S,
    ClaimNode,
    by_address,
    checkpoint,
    claims,
    forget_everything,
    from_template,
    kill,
    kubelet_calls,
    request,
)
from tests.node.cluster import eventually
from tests.node.fake_host import H100_RESOURCE, NVIDIA

__all__ = ["claims"]

H = H100_RESOURCE

API_AWAY_S = float(os.environ.get("TEST_NODE_API_AWAY_S", "60"))
"""How long the API server is away."""


def test_forced_deletion_with_a_successor(claims: ClaimNode) -> None:
    """The new claim's Prepare comes before the old claim's Unprepare: it waits in its call, and then has the GPU."""
    gpu = claims.host.plug(0x21, driver=NVIDIA)
    claims.offered(gpu)
    claims.template("one", request())
    claims.create("vm-0", from_template("one"), dies_after_s=30)
    claims.runs("vm-0", gpu)
    for number in range(1, 4):
        old, new = f"vm-{number - 1}", f"vm-{number}"
        old_uid = claims.uid_of(old)
        claims.create(new, from_template("one"), dies_after_s=30)
        claims.waits(new)
        pods.delete(claims.api, old, grace_s=0)
        claims.runs(new, gpu)
        new_uid = claims.uid_of(new)
        claims.is_prepared(new_uid)
        claims.is_released(old_uid)
        claims.settled({})
        if _prepared_first(old_uid, new_uid):
            break
    else:
        pytest.fail("no Prepare came before the old claim's Unprepare: the scenario did not happen")
    pods.clear(claims.api)
    claims.nothing_is_left({gpu: NVIDIA})


def _prepared_first(old: str, new: str) -> bool:
    """Kubelet began to prepare the new claim before it began to unprepare the old one."""
    prepare = next(call for call in kubelet_calls() if call.uid == new)
    unprepare = next(call for call in kubelet_calls("Unprepare") if call.uid == old)
    return prepare.began < unprepare.began


def test_kubelet_restarts_in_a_prepare(claims: ClaimNode) -> None:
    gpu = claims.host.plug(0x21, driver=NVIDIA)
    claims.offered(gpu)
    claims.template("one", request())
    claims.hang("nvidia/unbind")
    claims.create("vm-1", from_template("one"))
    claims.asleep(gpu)
    uid = claims.uid_of("vm-1")
    assert checkpoint() == {uid: "Reserved"}
    claims.node.restart_kubelet()
    claims.go_on()
    claims.runs("vm-1", gpu)
    claims.is_prepared(uid)
    claims.settled({})
    pods.stop(claims.api, "vm-1")
    claims.nothing_is_left({gpu: NVIDIA})
    claims.offered(gpu)


def test_the_host_has_a_disk_in_the_group(claims: ClaimNode) -> None:
    """The scheduler does not know yet that the host uses it: no uevent has come. The prepare looks again."""
    gpu = claims.host.plug(0x21, driver=NVIDIA)
    disk = claims.host.plug(0x31, "a808", vendor="144d", class_code="010802", group=0x21, driver=None)
    claims.offered(gpu)
    claims.template("one", request())
    claims.host.silent = True
    claims.host.bind(disk, "nvme")
    claims.host.silent = False
    claims.create("vm-1", from_template("one"))
    words = f"{disk} is bound to nvme and is no part of the GPU"
    eventually(
        lambda: any(words in told for told in claims.refused("vm-1")), f"{words!r} in the pod's events"
    )
    assert (claims.host.drivers(), checkpoint()) == ({gpu: NVIDIA, disk: "nvme"}, {})
    assert [claims.host.kernel.override(address) for address in (gpu, disk)] == ["", ""]
    claims.offered()
    claims.host.unbind(disk)
    claims.runs("vm-1", gpu)
    assert claims.host.drivers() == {gpu: "vfio-pci", disk: None}
    pods.stop(claims.api, "vm-1")
    claims.nothing_is_left({gpu: NVIDIA})
    assert claims.host.drivers() == {gpu: NVIDIA, disk: None}
    claims.host.unplug(disk)
    claims.offered(gpu)


@pytest.mark.long
def test_the_api_server_is_away(claims: ClaimNode) -> None:
    """Pods run on; the one that is being deleted ends, and its GPU is returned without an API server."""
    running, ending = (claims.host.plug(slot, driver=NVIDIA) for slot in (0x21, 0x22))
    counted = claims.host.plug(0x25)
    claims.offered(running, ending, counted)
    claims.settled({H: 1})
    pods.start(claims.api, "vm-1", {H: 1})
    claims.offered(running, ending)
    claims.template("one", request())
    claims.create("vm-2", from_template("one"))
    claims.runs("vm-2", running)
    claims.create("vm-3", from_template("one"), dies_after_s=3, grace_s=10)
    claims.runs("vm-3", ending)
    restarts, owners = claims.restarts(), claims.host.owners()
    uid = claims.uid_of("vm-3")
    pods.delete(claims.api, "vm-3")
    with claims.node.without("api"):
        until = time.monotonic() + API_AWAY_S
        claims.is_released(uid)
        claims.on({ending: NVIDIA, running: "vfio-pci"})
        eventually(lambda: time.monotonic() > until, "the time without an API server", API_AWAY_S + 1, 0.5)
        assert claims.host.owners() == {0x21: owners[0x21], 0x25: owners[0x25]}
    pods.wait_phase(claims.api, "vm-3", "gone")
    claims.settled({H: 1})
    claims.offered(running, ending)
    assert claims.restarts() == restarts
    # They look again a minute later only (client-go's growing pauses); what is started anew does so at once.
    claims.node.excuse_no_plugin()
    with claims.node.without("kubelet", "kube-scheduler", "kube-controller-manager"):
        pass
    claims.offered(running, ending)
    claims.create("vm-4", from_template("one"))
    claims.runs("vm-4", ending)
    pods.clear(claims.api)
    claims.nothing_is_left({running: NVIDIA, ending: NVIDIA, counted: "vfio-pci"})


def test_the_daemon_is_killed_in_each_act(claims: ClaimNode) -> None:
    """Three claims are being prepared and two released, each at another write that hangs, when SIGKILL comes."""
    gpus = [claims.host.plug(slot, driver=NVIDIA) for slot in range(0x31, 0x36)]
    claims.offered(*gpus)
    claims.template("one", request())
    pods_of = {f"vm-{number}": gpu for number, gpu in enumerate(gpus)}
    ending, starting = list(pods_of)[:2], list(pods_of)[2:]
    for name in ending:
        claims.create(name, from_template("one"))
        claims.runs(name, pods_of[name])
    ended = {claims.uid_of(name) for name in ending}
    for name, write in zip(starting, ("vfio-pci/bind", "nvidia/unbind", "driver_override"), strict=True):
        claims.hang(write)
        claims.create(name, from_template("one"))
        claims.asleep(pods_of[name])
    for name, write in zip(ending, ("nvidia/bind", "vfio-pci/unbind"), strict=True):
        claims.hang(write)
        pods.delete(claims.api, name)
        claims.asleep(pods_of[name])
    # In this order, as FUSE (unlike sysfs) lets one writer at a time into a file.
    before = checkpoint()
    assert sorted(before.values()) == ["Releasing"] * 2 + ["Reserved"] * 3
    daemon = claims.node.daemon()
    kill(daemon)
    assert checkpoint() == before
    # Seen: the container counts as running while one of its processes sleeps in the kernel, so kubelet starts no other
    # one until the writes return.
    claims.go_on()
    claims.restarted(daemon)
    for name in starting:
        claims.nudge(name)
        claims.runs(name, pods_of[name])
        claims.is_prepared(claims.uid_of(name))
    for name, uid in zip(ending, ended, strict=True):
        claims.nudge(name)
        claims.is_released(uid)
    claims.on({pods_of[name]: NVIDIA for name in ending})
    claims.settled({})
    claims.renew_daemon()
    pods.clear(claims.api)
    claims.nothing_is_left(dict.fromkeys(gpus, NVIDIA))
    claims.offered(*gpus)


def test_the_daemon_is_killed_between_acts(claims: ClaimNode) -> None:
    """SIGKILL as soon as the intent is on disk: of the prepare, and of the release."""
    gpu = claims.host.plug(0x21, driver=NVIDIA)
    claims.offered(gpu)
    claims.template("one", request())
    daemon = claims.renew_daemon()
    claims.offered(gpu)
    claims.create("vm-1", from_template("one"))
    eventually(lambda: "Reserved" in checkpoint().values(), "the intent to prepare", poll_s=0.002)
    kill(daemon)
    claims.restarted(daemon)
    claims.nudge("vm-1")
    claims.runs("vm-1", gpu)
    uid = claims.uid_of("vm-1")
    claims.is_prepared(uid)
    daemon = claims.renew_daemon()
    pods.delete(claims.api, "vm-1")
    eventually(lambda: checkpoint().get(uid) == "Releasing", "the intent to release", poll_s=0.002)
    kill(daemon)
    claims.restarted(daemon)
    claims.nudge("vm-1")
    claims.nothing_is_left({gpu: NVIDIA})
    pods.wait_phase(claims.api, "vm-1", "gone")
    claims.offered(gpu)
    claims.settled({})


def test_the_checkpoint_and_the_files_are_lost(claims: ClaimNode) -> None:
    """Kubelet's list alone names the claim of the virtual machine: it keeps its GPU until its end, and has its files
    again. Its GPU stays on vfio, as the driver before is not known."""
    gpu = claims.host.plug(0x21, driver=NVIDIA)
    claims.offered(gpu)
    claims.template("one", request())
    claims.create("vm-1", from_template("one"))
    claims.runs("vm-1", gpu)
    uid = claims.uid_of("vm-1")
    daemon = claims.renew_daemon()
    kill(daemon)
    forget_everything()
    claims.restarted(daemon)
    (line,) = eventually(lambda: claims.logged("claim.recovered"), "the claim in the log")
    assert (line["uid"], line["devices"]) == (uid, [gpu]), line
    claims.is_prepared(uid)
    claims.settled({})
    pods.clear(claims.api)
    claims.nothing_is_left({gpu: "vfio-pci"})
    claims.offered(gpu)


def test_the_last_gpu_is_wanted_twice_at_once(claims: ClaimNode) -> None:
    """By the device plugin and by a claim: one has it, and the other is told why, or has it later."""
    # The scheduler gives it to both, as neither API knows the other; the sampler counts an allocated claim as an owner.
    # Only one of the pods runs: no group is ever open in two.
    claims.node.excuse("belongs to ['claim ", 60.0)
    gpu = claims.host.plug(0x25)
    claims.template("one", request())
    for claim_first in (False, True):
        claims.offered(gpu)
        claims.settled({H: 1})
        if claim_first:
            claims.create("claimed", from_template("one"))
            eventually(
                lambda: pods.is_scheduled(pods.get(claims.api, "claimed")),
                "the scheduler's choice",
                poll_s=0.01,
            )
        pods.create(claims.api, pods.tenant("counted", {H: 1}))
        if not claim_first:
            claims.create("claimed", from_template("one"))
        _one_has_it(claims, gpu)
        pods.clear(claims.api)
        claims.nothing_is_left({gpu: "vfio-pci"})
    claims.settled({H: 1})


def _is_scheduled(claims: ClaimNode) -> bool:
    return pods.is_scheduled(pods.get(claims.api, "claimed"))


def _one_has_it(claims: ClaimNode, gpu: str) -> None:
    winner = eventually(lambda: _winner(claims), "a pod with the GPU", RETRY_S)
    loser = "claimed" if winner == "counted" else "counted"
    reason = eventually(lambda: claims.told(loser) or claims.awaits(), f"a reason for {loser}", poll_s=0.5)
    claims.node.said(f"{winner} has the GPU; {loser}: {reason}")
    uid = str((pods.get(claims.api, winner) or {})["metadata"]["uid"])
    eventually(lambda: claims.host.owners() == {0x25: frozenset({f"pod {uid}"})}, f"{winner} to have it open")
    assert pods.phase(pods.get(claims.api, loser)) in ("Pending", "Failed")
    pods.stop(claims.api, winner)
    if pods.phase(pods.get(claims.api, loser)) == "Pending":
        claims.runs(loser, gpu)


def _winner(claims: ClaimNode) -> str:
    phases = {name: pods.phase(pods.get(claims.api, name)) for name in ("counted", "claimed")}
    running = [name for name, phase in phases.items() if phase == "Running"]
    assert len(running) < 2, phases
    return "".join(running)


def test_deeply_nested_parameters(claims: ClaimNode) -> None:
    """A claim whose parameters nest 700 deep is refused, and everything else goes on. Each prepare of it ended the
    daemon by RecursionError."""
    gpu, counted = claims.host.plug(0x21, driver=NVIDIA), claims.host.plug(0x25)
    claims.offered(gpu, counted)
    claims.settled({H: 1})
    deep: object = "x"
    for _ in range(700):
        deep = {"a": deep}
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig", "deep": deep}
    config = {"requests": ["gpu"], "opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}
    before = claims.renew_daemon()
    try:
        claims.template("deep", request(selector=by_address(gpu)), config=[config])
        claims.create("vm-1", from_template("deep"))
        told = eventually(lambda: claims.refused("vm-1"), "an answer to its prepare", RETRY_S)
        # Words of the daemon, not of kubelet, which has lost it.
        assert "rpc error" not in told[-1], told[-1]
        pods.start(claims.api, "vm-2", {H: 1})
        claims.settled({H: 1})
        assert claims.restarts() == before.restarts
    finally:
        pods.delete(claims.api, "vm-1")
        claims.renew_daemon()
        claims.nudge("vm-1")


def test_two_cards_are_rescanned_and_their_groups_numbers_swapped(claims: ClaimNode) -> None:
    """A container that restarts gets the CDI files without a call: at no time does a claim's file name the other's
    group."""
    slots = {"vm-1": 0x25, "vm-2": 0x26}
    gpus = {pod: claims.host.plug(slot) for pod, slot in slots.items()}
    claims.offered(*gpus.values())
    for pod, gpu in gpus.items():
        claims.template(pod, request(selector=by_address(gpu)))
        claims.create(pod, from_template(pod), command=IDLE)
        claims.comes_to(pod, "Running")
    uids = {pod: claims.uid_of(pod) for pod in slots}
    assert groups_in_files(uids) == {"vm-1": 0x25, "vm-2": 0x26}
    for gpu in gpus.values():
        claims.host.unplug(gpu)
    eventually(lambda: groups_in_files(uids) == {}, "the removal of both claims' files")
    claims.host.plug(0x25, group=0x26)
    claims.host.plug(0x26, group=0x25)
    eventually(lambda: groups_in_files(uids) == {"vm-1": 0x26, "vm-2": 0x25}, "files with the new numbers")
    assert {line["claim"] for line in claims.logged("claim.astray")} == {
        f"default/{claims.claim_of(pod)['metadata']['name']}" for pod in slots
    }
    for uid in uids.values():
        claims.is_prepared(uid)
    pods.clear(claims.api)
    claims.nothing_is_left(dict.fromkeys(gpus.values(), "vfio-pci"))


def groups_in_files(uids: Mapping[str, str]) -> dict[str, int]:
    """The IOMMU group in the CDI file of each pod's claim that has one."""
    found: dict[str, int] = {}
    for pod, uid in uids.items():
        with suppress(FileNotFoundError):
            content = json.loads((CDI / f"k8s.{DRIVER}-claim_{uid}.json").read_text())
            nodes = [n["path"] for d in content["devices"] for n in d["containerEdits"]["deviceNodes"]]
            (group,) = {int(path.rpartition("/")[2]) for path in nodes if path != "/dev/vfio/vfio"}
            assert group not in found.values(), f"two claims' files name group {group}"
            found[pod] = group
    return found
