"""Compute domains over several nodes, with NVIDIA's own controller and daemons; only nvidia-imex is a stand-in.

What happens to one node is not to be noticed on another: there the label never changes, and no workload is ever
without its domain's daemon.
"""

from __future__ import annotations

import os
import time
from typing import Final

import pytest

from tests.node import daemonset, domains, pods
from tests.node.cluster import NODES, Object, eventually, kubectl
from tests.node.daemonset import IMAGE, OTHER_IMAGE
from tests.node.several.member import Member
from tests.node.several.nodes import ROLLED_OUT_S, H, Nodes
from tests.node.tasks import container_of
from tests.support.patience import patient

pytestmark = pytest.mark.nvidias_domains

ROUNDS: Final = int(os.environ.get("TEST_ROUNDS", "2"))
"""Of forced replacements on all nodes at once; each takes some 3 s."""

UNTIL_REFUSED: Final = 10
"""Such rounds at most, until the API server has refused one of the claims. Seen: one of six."""


@pytest.mark.usefixtures("asking_again")
def test_a_domain_gets_ready_and_its_workload_runs_on_each_node(nodes: Nodes) -> None:
    uid = nodes.create()
    nodes.start_on_each("job", uid, resources={H: 1})
    nodes.all_ready(uid)
    nodes.covered()
    nodes.kept_label(uid)
    for one in nodes.members:
        job = pods.get(nodes.api, f"job-{one.number}") or {}
        assert job["spec"]["nodeName"] == one.name
        assert pods.nodes_in(f"job-{one.number}") == {"vfio", str(one.slot)}
    ours = [nodes.daemon_of(uid, one) for one in nodes.members]
    eventually(
        lambda: all(knows(pod, other) for pod in ours for other in ours), "daemons that know of each other"
    )


def knows(pod: Object, other: Object) -> bool:
    """NVIDIA's daemon of a pod has another one's address, which answers."""
    run = ("exec", "-n", domains.NAMESPACE, pod["metadata"]["name"], "--")
    address = other["status"]["podIP"]
    assert address in kubectl(*run, "cat", "/etc/hosts")
    return "1 packets received" in kubectl(*run, "ping", "-c", "1", "-W", "2", address)


@pytest.mark.usefixtures("asking_again")
def test_a_domains_daemon_is_killed_on_one_node(nodes: Nodes) -> None:
    uid = nodes.create()
    names = nodes.start_on_each("job", uid)
    before = nodes.daemons(uid)
    nodes.covered()
    hit = nodes.members[1]
    pod = nodes.daemon_of(uid, hit)
    hit.ask("kill_container", container_of(pod))
    eventually(lambda: restarts(nodes.daemon_of(uid, hit)) == 1, "the daemon's next container")
    nodes.all_ready(uid)
    assert nodes.daemons(uid) == before
    nodes.run(names)
    nodes.covered(but=["job-1"])
    nodes.kept_label(uid)


def restarts(pod: Object) -> int:
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


@pytest.mark.usefixtures("asking_again")
def test_gpuactors_is_killed_on_one_node(nodes: Nodes) -> None:
    """While the claims of all nodes are being prepared; and again when their workloads run."""
    hit = nodes.members[1]
    for one in nodes.members:
        one.ask("steer_from_now_on", "ready=no\n")
    uid = nodes.create()
    for one in nodes.members:
        nodes.make(f"job-{one.number}", uid, one)
    eventually(lambda: all(steered(one, uid) for one in nodes.members), "the steering of all daemons")
    hit.ask("kill_daemon", nodes.daemon(hit).uid)
    for one in nodes.members:
        one.ask("steer", uid, "ready=yes\n")
    nodes.run(f"job-{one.number}" for one in nodes.members)
    before = nodes.daemons(uid)
    hit.ask("kill_daemon", nodes.daemon(hit).uid)
    nodes.ready()
    replace_by_force(nodes, uid, "job", "next")
    assert nodes.daemons(uid) == before
    nodes.covered()
    nodes.kept_label(uid)


def steered(of: Member, uid: str) -> bool:
    """The directory of a domain is there, and has what the fake IMEX daemon is told."""
    return any(file.endswith(f"{uid}/fake-imex.conf") for file in of.ask("files"))


def replace_by_force(nodes: Nodes, uid: str, old: str, new: str) -> None:
    """On all nodes at once: the API server forgets each old pod, and its kubelet kills the container after 1 s."""
    for one in nodes.members:
        nodes.make(f"{new}-{one.number}", uid, one, dies_after_s=60)
    nodes.on_each(lambda one: pods.delete(nodes.api, f"{old}-{one.number}", grace_s=0))
    nodes.run(f"{new}-{one.number}" for one in nodes.members)


@pytest.mark.usefixtures("asking_again")
def test_one_node_reboots(nodes: Nodes) -> None:
    """All containers end at once, and the boot ID is another one."""
    uid = nodes.create()
    names = nodes.start_on_each("job", uid, restart="Always")
    before = nodes.daemons(uid)
    hit = nodes.members[1]
    boot = boot_id(nodes, hit.name)
    hit.ask("reboot")
    eventually(lambda: boot_id(nodes, hit.name) != boot, "another boot ID")
    eventually(lambda: restarts(pods.get(nodes.api, "job-1") or {}) >= 1, "the workload's next container")
    nodes.ready()
    nodes.run(names)
    nodes.all_ready(uid)
    assert nodes.daemons(uid) == before
    nodes.covered(but=["job-1"])
    nodes.kept_label(uid)


def boot_id(nodes: Nodes, name: str) -> str:
    return str(nodes.api.get(f"{NODES}/{name}")["status"]["nodeInfo"]["bootID"])


@pytest.mark.usefixtures("asking_again")
def test_one_node_is_drained(nodes: Nodes) -> None:
    """Its workload comes back within the time that the label stays: NVIDIA's daemon is still the same."""
    uid = nodes.create()
    nodes.start_on_each("job", uid)
    before = nodes.daemons(uid)
    hit = nodes.members[2]
    with nodes.drained(hit):
        assert pods.get(nodes.api, "job-2") is None
        nodes.run(["job-0", "job-1"])
    nodes.make("again-2", uid, hit)
    nodes.run(["again-2"])
    assert nodes.daemons(uid) == before
    nodes.covered()
    nodes.kept_label(uid)


@pytest.mark.usefixtures("asking_again")
def test_gpuactors_is_updated_in_the_middle(nodes: Nodes) -> None:
    """While one node's claim waits for its daemon, and back while the pods of all nodes are replaced."""
    hit = nodes.members[1]
    hit.ask("steer_from_now_on", "ready=no\n")
    uid = nodes.create()
    for one in nodes.members:
        nodes.make(f"job-{one.number}", uid, one, dies_after_s=60)
    nodes.run(["job-0", "job-2"])
    eventually(lambda: steered(hit, uid), "the steering of the daemon")
    nodes.set_image(OTHER_IMAGE)
    daemonset.wait_rolled_out(nodes.api, ROLLED_OUT_S)
    hit.ask("steer", uid, "ready=yes\n")
    nodes.run(["job-1"])
    before = nodes.daemons(uid)
    nodes.set_image(IMAGE)
    replace_by_force(nodes, uid, "job", "next")
    daemonset.wait_rolled_out(nodes.api, ROLLED_OUT_S)
    assert nodes.daemons(uid) == before
    nodes.covered()
    nodes.kept_label(uid)


@pytest.mark.usefixtures("asking_again")
def test_a_domain_is_deleted_while_two_nodes_have_workloads(nodes: Nodes) -> None:
    uid = nodes.create()
    used, unused = nodes.members[:2], nodes.members[2]
    for one in used:
        nodes.make(f"job-{one.number}", uid, one)
    nodes.run(["job-0", "job-1"])
    nodes.delete()
    eventually(lambda: not domains.daemons(nodes.api, uid), "the end of the domain's daemons")
    assert [nodes.values(one) for one in used] == [[uid, None], [uid, None]]
    assert nodes.values(unused) == []
    nodes.run(["job-0", "job-1"])  # nobody ends them


@pytest.mark.usefixtures("asking_again")
@pytest.mark.timeout(patient(240.0 + 20.0 * ROUNDS))
def test_pods_are_replaced_by_force_on_all_nodes_at_once(nodes: Nodes) -> None:
    """NVIDIA issue 641, on each node: the new claim is prepared before the old one is unprepared."""
    uid, earlier = nodes.create(), nodes.on_each(nodes.waited_for_another)
    nodes.start_on_each("job-0", uid, dies_after_s=60)
    before = nodes.daemons(uid)
    took = [replaced(nodes, uid, number) for number in range(ROUNDS)]
    nodes.said(f"{ROUNDS} rounds on {len(nodes.members)} nodes: {took} s; refused: {nodes.refused()}")
    now = nodes.on_each(nodes.waited_for_another)
    waited = [len(claims - others) for claims, others in zip(now, earlier, strict=True)]
    nodes.said(f"of {ROUNDS} new claims of each node {waited} came before the old one's end")
    assert all(waited), "on a node no new prepare came before the old unprepare"
    assert nodes.daemons(uid) == before
    nodes.kept_label(uid)


def replaced(nodes: Nodes, uid: str, number: int) -> float:
    """One round: how long it took, in seconds."""
    began = time.monotonic()
    replace_by_force(nodes, uid, f"job-{number}", f"job-{number + 1}")
    nodes.covered()
    return round(time.monotonic() - began, 1)


@pytest.mark.timeout(patient(400.0))
@pytest.mark.long
def test_a_claim_that_was_refused_once_finds_its_daemon(nodes: Nodes) -> None:
    """The API server refuses kubelet a claim, as it has not seen that it is of this node's pod, and the old claim is
    released meanwhile. Kubelet asks again after 60 to 90 s: NVIDIA's daemon is still the same."""
    uid = nodes.create()
    with domains.asking_again():
        nodes.start_on_each("job-0", uid, dies_after_s=60)
    before, took, refused = nodes.daemons(uid), list[float](), list[str]()
    while not refused and len(took) < UNTIL_REFUSED:
        took.append(replaced(nodes, uid, len(took)))
        refused = [name for name in nodes.refused() if not name.startswith("job-0-")]  # they replace none
    nodes.said(f"{len(took)} rounds: {took} s; refused: {refused}")
    assert nodes.daemons(uid) == before
    nodes.kept_label(uid)
    if not refused:
        pytest.skip(f"the API server has refused no claim in {len(took)} rounds")
