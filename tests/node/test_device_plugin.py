"""The device plugin on a real node: what the scheduler, kubelet and the pods see of it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
import pytest

from tests.node import pods
from tests.node.books import pod_resources
from tests.node.cluster import Object, eventually, kubectl
from tests.node.fake_host import A100, A100_RESOURCE, H100, H100_RESOURCE
from tests.node.node import Node
from tests.support.patience import patient

H = H100_RESOURCE

ALLOCATES = int(os.environ.get("TEST_NODE_ALLOCATES", "200"))
"""Of the scenario with another program that lists; 2,000 take a quarter of an hour."""

IDLE = "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done"
"""A program that opens no device."""


def test_the_incident(node: Node) -> None:
    """GPUs of pods, one that is bound late, pods that go and come, and a GPU that a process of the host has open."""
    daemon = node.install("holders-proc")
    for slot in (0x21, 0x22, 0x23):
        node.host.plug(slot)
    node.settled({H: 3})
    pods.start(node.api, "vm-1", {H: 2})
    pods.start(node.api, "vm-2", {H: 1})
    node.settled({H: 3}, {H: 3})
    late = node.host.plug(0x24, driver=None)
    node.host.bind(late)
    node.settled({H: 4}, {H: 4})
    pods.start(node.api, "vm-3", {H: 1})
    assert node.devices_of("vm-3") == {late}
    held, free = sorted(node.devices_of("vm-1"))
    pods.stop(node.api, "vm-1")
    assert node.settled({H: 4}).requests == {H: 2}
    with opened_by_process(node, held) as pid:
        node.settled({H: 3}, {H: 4})
        reason = daemon.run("explain", held, check=False)
        assert str(pid) in reason, reason
        assert "sleep" in reason, reason
        pods.start(node.api, "vm-4", {H: 1})
        assert node.devices_of("vm-4") == {free}
        pods.create(node.api, pods.tenant("vm-5", {H: 1}))
        wait_insufficient(node, "vm-5")
        assert node.settled({H: 3}, {H: 4}).requests == {H: 3}
    pods.wait_running(node.api, "vm-5")
    assert node.devices_of("vm-5") == {held}
    node.settled({H: 4}, {H: 4})
    node.check_open("vm-2", "vm-3", "vm-4", "vm-5")


def test_late_bind(node: Node) -> None:
    node.install()
    first = node.host.plug(0x21)
    node.settled({H: 1})
    late = node.host.plug(0x22, driver=None)
    node.settled({H: 1})
    node.host.bind(late)
    node.settled({H: 2})
    pods.start(node.api, "vm-1", {H: 2})
    assert node.devices_of("vm-1") == {first, late}
    node.settled({H: 2}, {H: 2})
    pods.stop(node.api, "vm-1")
    node.settled({H: 2})


def test_a_model_that_was_never_seen(node: Node) -> None:
    """Its resource appears with the first GPU, and nothing of it can be requested after the last one."""
    node.install()
    node.host.plug(0x21, H100)
    node.settled({H: 1})
    only = node.host.plug(0x31, A100)
    node.settled({H: 1, A100_RESOURCE: 1})
    pods.start(node.api, "vm-1", {A100_RESOURCE: 1})
    node.settled({H: 1, A100_RESOURCE: 1})
    pods.stop(node.api, "vm-1")
    node.settled({H: 1, A100_RESOURCE: 1})
    node.host.unplug(only)
    node.settled({H: 1}, {H: 1})
    pods.create(node.api, pods.tenant("vm-2", {A100_RESOURCE: 1}))
    wait_insufficient(node, "vm-2")
    node.host.plug(0x31, A100)
    pods.wait_running(node.api, "vm-2")
    node.settled({H: 1, A100_RESOURCE: 1}, {H: 1, A100_RESOURCE: 1})


@pytest.mark.parametrize("opens", [True, False], ids=("open", "not-open"))
def test_unplug_under_a_pod(node: Node, opens: bool) -> None:
    """The GPU stays in kubelet's list, Unhealthy, until its pod is gone: capacity counts what is allocated.

    While a process has it open, the kernel waits with the removal. Otherwise the function is gone at once.
    """
    node.install()
    node.host.plug(0x21)
    node.host.plug(0x22)
    node.settled({H: 2})
    pods.start(node.api, "vm-1", {H: 1}, command=None if opens else IDLE)
    (gone,) = node.devices_of("vm-1")
    (free,) = set(node.host.tree.functions) - {gone}
    # It is Unhealthy until its pod has ended, and so not among those that kubelet may give.
    node.excuse(f"{gone} of a pod is not in kubelet's list", 120.0)
    if opens:
        node.check_open("vm-1")
    node.host.unplug(gone)
    assert (gone in node.host.tree.functions) == opens

    def is_unhealthy() -> bool:
        look = node.books.look()
        assert (look.capacity[H], look.allocatable[H]) == (2, 1), look
        return look.healthy is not None and look.healthy[H] == {free}

    eventually(is_unhealthy, "a GPU that is listed, and Unhealthy")
    # Kubelet subtracts the pod from the one that is Healthy: the free one waits for the pod's end.
    pods.create(node.api, pods.tenant("vm-2", {H: 1}))
    wait_insufficient(node, "vm-2")
    # A list loses no device while a call may name it, some seconds; what is to stay is there after that as well.
    until = time.monotonic() + patient(3)
    while time.monotonic() < until:
        assert is_unhealthy()
        time.sleep(0.2)
    assert node.devices_of("vm-1") == {gone}
    assert pods.phase(pods.get(node.api, "vm-1")) == "Running"
    pods.stop(node.api, "vm-1")
    node.host.wake()
    pods.wait_running(node.api, "vm-2")
    node.settled({H: 1}, {H: 1})


def test_a_burst_on_shared_groups(node: Node) -> None:
    """Eight pods at once on eight groups of two GPUs: each runs, no group has two pods, and none is refused.

    A grant makes the other GPU of its group Unhealthy. Kubelet reads lists and answers in two goroutines, so the answer
    follows the list after a pause: otherwise the next pod may still be given that GPU, and is refused.
    """
    node.install()
    groups = 8
    for number in range(2 * groups):
        node.host.plug(0x20 + number, group=0x20 + number // 2)
    node.settled({H: 2 * groups})
    names = [f"vm-{number}" for number in range(groups)]
    for name in names:
        pods.create(node.api, pods.tenant(name, {H: 1}))
    refused = [said for name in names if (said := refusal(node, name))]
    assert refused == []
    # One GPU of each group is allocated, the other one is Unhealthy.
    node.settled({H: groups}, {H: 2 * groups})
    node.check_open(*names)
    for name in names:
        pods.delete(node.api, name)
    for name in names:
        pods.wait_phase(node.api, name, "gone")
    node.settled({H: 2 * groups}, {H: 2 * groups})


def test_drain(node: Node) -> None:
    """The pods are evicted, the daemon stays, and their GPUs are free again."""
    daemon = node.install()
    node.host.plug(0x21)
    node.host.plug(0x22)
    node.settled({H: 2})
    pods.start(node.api, "vm-1", {H: 1})
    pods.start(node.api, "vm-2", {H: 1})
    node.settled({H: 2})
    try:
        kubectl(
            "drain", node.name, "--ignore-daemonsets", "--force", "--delete-emptydir-data",
            f"--timeout={patient(60):.0f}s", timeout_s=90,
        )  # fmt: skip
        assert not pods.all_tenants(node.api)
        node.settled({H: 2}, {H: 2})
        assert node.free()[H] == 2
        pods.create(node.api, pods.tenant("vm-3", {H: 2}))
        wait_insufficient(node, "vm-3")
    finally:
        kubectl("uncordon", node.name)
    pods.wait_running(node.api, "vm-3")
    node.settled({H: 2}, {H: 2})
    assert node.daemon() == daemon


def test_forced_deletion(node: Node) -> None:
    """A pod is deleted without a grace period, and its process lives on: PreStartContainer, the gate, holds the
    successor's container until that has ended."""
    node.install()
    gpu = node.host.plug(0x21)
    node.settled({H: 1})
    first = pods.start(node.api, "vm-1", {H: 1}, dies_after_s=patient(6), grace_s=round(patient(20)))
    group = node.host.tree.functions[gpu].group
    assert group is not None
    old = f"pod {first['metadata']['uid']}"
    eventually(lambda: node.host.owners().get(group, set()) == {old}, "vm-1 to have its GPU open")
    pods.create(node.api, pods.tenant("vm-2", {H: 1}))
    wait_insufficient(node, "vm-2")
    pods.stop(node.api, "vm-1", grace_s=0)
    eventually(lambda: node.devices_of("vm-2") == {gpu}, "the GPU to be the successor's")
    waited = 0
    while True:
        phase, holders = pods.phase(pods.get(node.api, "vm-2")), node.host.owners().get(group, frozenset())
        if old not in holders:
            break
        assert (phase, *holders) == ("Pending", old), "the gate has let the successor start"
        waited += 1
        time.sleep(0.1)
    assert waited > 0, "the old process has ended too early for this test"
    pods.wait_running(node.api, "vm-2")
    node.check_open("vm-2")
    node.settled({H: 1}, {H: 1})


# --- steps ----------------------------------------------------------------------------------------------------------


def test_no_gpu_is_given_to_two_pods_while_another_program_lists(node: Node) -> None:
    """List makes kubelet forget the device of an Allocate in flight, if a pod has ended meanwhile. Each pod has four
    containers with a GPU each, and ends by itself; the sampler sees a GPU of two pods (rules.py)."""
    node.install()
    for slot in range(0x21, 0x29):
        node.host.plug(slot)
    node.settled({H: 8})
    made = refused = 0
    with another_program_lists() as lists:
        while made < ALLOCATES:
            for pod in pods.all_tenants(node.api):
                if pods.phase(pod) in ("Succeeded", "Failed"):
                    refused += pods.phase(pod) == "Failed"
                    assert pods.phase(pod) == "Succeeded" or "had forgotten that" in pods.told(pod), (
                        pods.told(pod)
                    )
                    pods.delete(node.api, pod["metadata"]["name"], grace_s=0)
            if len(pods.all_tenants(node.api)) < 3:
                pod = pods.tenant(f"churn-{made}", {H: 1}, command="sleep 0.3")
                (container,) = pod["spec"]["containers"]
                pod["spec"]["containers"] = [{**container, "name": f"c{n}"} for n in range(4)]
                pods.create(node.api, pod)
                made += 4
            time.sleep(0.05)
        print(f"{made} Allocates, {len(lists)} Lists of another program, {refused} pods refused")
    pods.clear(node.api)
    node.settled({H: 8})


@contextmanager
def another_program_lists() -> Iterator[list[float]]:
    """List in a loop, by a thread; when it was answered."""
    over, answered = threading.Event(), list[float]()

    def run() -> None:
        while not over.wait(0.02):
            with suppress(grpc.RpcError):  # the rate limit is for all clients together
                pod_resources("List")
                answered.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield answered
    finally:
        over.set()
        thread.join()


@contextmanager
def opened_by_process(node: Node, gpu: str) -> Iterator[int]:
    """A process of the host has the GPU's group open. Its PID."""
    group = node.host.tree.functions[gpu].group
    process = subprocess.Popen(("sh", "-c", f"exec 3<>/dev/vfio/{group}; exec sleep 600"))
    try:
        name = f"process {process.pid}"
        eventually(lambda: name in node.host.owners().get(group or 0, ()), f"{name} to open group {group}")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def wait_insufficient(node: Node, pod: str) -> None:
    """Waits until the scheduler has said that the node lacks what a pod requests."""

    def said() -> bool:
        found = pods.get(node.api, pod)
        assert found is not None, f"there is no pod {pod}"
        assert not pods.is_scheduled(found), pods.told(found)
        conditions = found.get("status", {}).get("conditions", ())
        return any(c["type"] == "PodScheduled" and c.get("reason") == "Unschedulable" for c in conditions)

    eventually(said, f"pod {pod} to be unschedulable")


def refusal(node: Node, name: str) -> str:
    """Waits until a pod runs or kubelet has refused it; what kubelet says, if it has."""

    def decided() -> Object:
        pod = pods.get(node.api, name)
        assert pods.phase(pod) in ("Running", "Failed"), pods.told(pod)
        return pod or {}

    pod = eventually(decided, f"pod {name} to run or be refused")
    return "" if pods.phase(pod) == "Running" else pods.told(pod)
