"""Compute domains on a real node, with NVIDIA's own controller and daemon; only nvidia-imex itself is a stand-in.

The controller runs with its default namespace. NVIDIA's daemon is that of its own image: nvidia-imex comes from the
host by the CDI device of NVIDIA's container toolkit, and its configuration from gpuactors.

A daemon that takes the label away under a live claim fails every scenario that asks `Fabric.covered`; most directly
test_a_domain_is_made_and_its_workload_runs and test_a_pod_that_was_forced_away_is_replaced, where it never changes.
test_a_label_that_is_taken_away_comes_back shows that `covered` sees it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.node import domains, pods
from tests.node.claims import RETRY_S
from tests.node.cluster import CLAIMS, EVENTS, Object, eventually, kubectl
from tests.node.domains import LABEL, History, Imex, Steering
from tests.node.fake_host import H100_RESOURCE
from tests.node.node import Node
from tests.support.patience import patient

pytestmark = pytest.mark.nvidias_domains

H = H100_RESOURCE
GPU_SLOT: Final = 0x21

LABEL_S: Final = patient(120.0)
"""From the last claim of a domain that lives to the end of the label."""

CDI: Final = Path("/var/run/cdi")

FORCED_AWAY: Final = 4
"""Pods, one after the other, until the prepare of the next came before the unprepare."""


@dataclass(frozen=True, slots=True)
class Around:
    """What is there for all scenarios."""

    imex: Imex
    steering: Steering
    history: History


@pytest.fixture(scope="module")
def around(whole_node: Node) -> Iterator[Around]:
    """The host's IMEX, and NVIDIA's controller. gpuactors goes before them."""
    steering, history = Steering(), History()
    began = time.monotonic()
    with domains.imex_loaded() as imex, domains.toolkit(), domains.controller():
        whole_node.said(f"NVIDIA's controller runs after {time.monotonic() - began:.1f} s")
        try:
            with steering.steering(), history.recording(), domains.asking_again():
                yield Around(imex, steering, history)
        finally:
            began = time.monotonic()
            whole_node.uninstall()
            whole_node.said(f"gpuactors is gone after {time.monotonic() - began:.1f} s")
            began = time.monotonic()
    whole_node.said(f"NVIDIA's controller is gone after {time.monotonic() - began:.1f} s")


class Fabric:
    """A node with gpuactors and one GPU, as a scenario has it."""

    def __init__(self, node: Node, around: Around) -> None:
        self.node = node
        self.api = node.api
        self.imex, self.steering, self.history = around.imex, around.steering, around.history

    # --- what a scenario does ---------------------------------------------------------------------------------------

    def create(self, name: str = "training") -> str:
        """A domain: its UID."""
        return domains.create_domain(self.api, name)

    def delete(self, name: str = "training") -> None:
        """Deletes a domain, and waits until the controller has let it go."""
        domains.delete_domain(self.api, name)
        path = f"{domains.DOMAINS}/{name}"
        eventually(lambda: self.api.find(path) is None, f"the end of the domain {name}")

    def make(self, pod: str, uid: str, *, domain: str = "training", gpus: int = 0, **options: Any) -> None:
        """Creates a pod with a channel of a domain. `options`: those of any workload."""
        resources = {H: gpus} if gpus else None
        pods.create(self.api, domains.workload(pod, domain, uid, resources=resources, **options))

    def start(self, pod: str, uid: str, **options: Any) -> Object:
        """Creates such a pod, and waits until it runs."""
        self.make(pod, uid, **options)
        return pods.wait_running(self.api, pod)

    # --- what is asked ----------------------------------------------------------------------------------------------

    def label(self) -> str | None:
        """As it is now."""
        return domains.label_of(self.node.node_object())

    def values(self) -> list[str | None]:
        """Each value that the label was given since the scenario began."""
        return [seen.value for seen in self.history.label(self.api)]

    def claim_of(self, pod: str) -> str:
        """The name of a pod's claim, once it was made from the template."""

        def look() -> str:
            found = pods.get(self.api, pod) or {}
            (status,) = found.get("status", {}).get("resourceClaimStatuses", ({},))
            return str(status.get("resourceClaimName", ""))

        return eventually(look, f"the claim of {pod}")

    def waits_for(self, pod: str) -> str:
        """What the daemon says that a pod's claim waits for; empty unless it has said so."""
        lines = self._lines_of_claim(pod)
        return str(lines[-1].get("reason", "")) if lines and lines[-1]["event"] == "claim.waiting" else ""

    def waited_for(self, pod: str) -> list[str]:
        """Everything that the daemon has said that a pod's claim waited for."""
        return [str(line["reason"]) for line in self._lines_of_claim(pod) if line["event"] == "claim.waiting"]

    def _lines_of_claim(self, pod: str) -> list[dict[str, Any]]:
        claim = f"{pods.NAMESPACE}/{self.claim_of(pod)}"
        return [line for line in self.node.daemon().log() if line.get("claim") == claim]

    def explained(self, pod: str) -> str:
        """What `gpuactors explain` prints of a pod; an error where the daemon does not know it."""
        return self.node.daemon().run("explain", f"{pods.NAMESPACE}/{pod}", check=False)

    # --- what must hold ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The books of the GPU and of the channel are true, and no workload has run uncovered."""
        self.node.settled({H: 1})
        channels = Counter(
            result["device"]
            for claim in self.api.items(CLAIMS)
            if claim.get("status", {}).get("reservedFor")
            for result in claim["status"]["allocation"]["devices"]["results"]
            if result["driver"] == domains.DRIVER
        )
        assert all(count == 1 for count in channels.values()), channels
        self.covered()

    def covered(self, *names: str) -> None:
        """No workload has run without its domain's label and a ready daemon of it; or none of these."""
        wrong = [
            said for said in self.history.uncovered(self.api) if not names or said.startswith(tuple(names))
        ]
        assert not wrong, f"{wrong}\n{self.history.told(self.api)}"

    def nothing_is_left(self) -> None:
        """Waits until no claim, daemon, directory, CDI file or label of a domain is there."""
        eventually(lambda: self.label() is None, "the end of the label", LABEL_S)
        eventually(lambda: not self.api.items(domains.DAEMON_PODS), "the end of the daemons' pods")
        eventually(lambda: not self.api.items(CLAIMS), "the end of all claims")
        eventually(lambda: not self._files(), "the end of all files of domains")

    def _files(self) -> list[Path]:
        directories = domains.domain_directories()
        mine = list(directories.iterdir()) if directories.is_dir() else []
        return [*mine, *CDI.glob(f"*{domains.DRIVER}*")]


@pytest.fixture
def fabric(node: Node, around: Around) -> Iterator[Fabric]:
    """Installed, and without a domain; afterwards nothing of a domain is left."""
    around.steering.words = ""
    node.install("compute-domains")
    node.host.plug(GPU_SLOT)
    node.settled({H: 1})
    around.history.begin(node.api)
    found = Fabric(node, around)
    yield found
    node.said(f"label: {around.history.label(node.api)}\n{around.history.told(node.api)}")
    pods.clear(node.api)
    for domain in node.api.items(domains.ALL_DOMAINS):
        found.delete(domain["metadata"]["name"])
    found.nothing_is_left()
    assert not around.steering.failed, around.steering.failed


# --- made, replaced, made anew ----------------------------------------------------------------------------------------


def test_a_domain_is_made_and_its_workload_runs(fabric: Fabric) -> None:
    uid = fabric.create()
    assert fabric.label() is None
    fabric.make("job-0", uid, gpus=1)
    claim = f"{pods.NAMESPACE}/{fabric.claim_of('job-0')}"
    eventually(lambda: f"{claim}: Binding for" in fabric.explained("job-0"), "the waiting claim in explain")
    pods.wait_running(fabric.api, "job-0")
    fabric.check()
    assert f"{claim}: Prepared for" in fabric.explained("job-0")
    said = kubectl("logs", "job-0")
    node = "/dev/nvidia-caps-imex-channels/channel0"
    # The device cgroup lets it pass, and the kernel has no driver of this number: without a right it is EPERM.
    assert f"has {node}: {fabric.imex.channel_major:x}:0" in said, said
    assert "No such device or address" in said, said
    assert f"domain {uid}" in said, said
    (daemon,) = domains.daemons(fabric.api, uid)
    assert domains.is_ready(daemon), pods.told(daemon)
    assert fabric.values() == [uid]


def test_a_pod_that_was_forced_away_is_replaced(fabric: Fabric) -> None:
    """The API server forgets it at once, and kubelet kills its container after 1 s: the new claim comes first."""
    uid = fabric.create()
    fabric.start("job-0", uid, dies_after_s=60)
    (daemon,) = domains.daemons(fabric.api, uid)
    # Again where kubelet was so busy that the new pod came after the old one's end.
    for i in range(FORCED_AWAY):
        old, new = f"job-{i}", f"job-{i + 1}"
        fabric.make(new, uid, dies_after_s=60)
        pods.delete(fabric.api, old, grace_s=0)
        pods.wait_running(fabric.api, new)
        if waited := [reason for reason in fabric.waited_for(new) if f"{old}-channel" in reason]:
            break
    assert waited, "no new prepare came before the old unprepare"
    fabric.check()
    assert fabric.values() == [uid]
    assert [pod["metadata"]["uid"] for pod in domains.daemons(fabric.api, uid)] == [daemon["metadata"]["uid"]]


def test_a_pod_is_replaced(fabric: Fabric) -> None:
    """The scheduler gives the channel away when the old claim has been released; the label goes in between, and the
    daemon with it."""
    uid = fabric.create()
    fabric.start("job-0", uid)
    fabric.make("job-1", uid)
    pods.stop(fabric.api, "job-0")
    pods.wait_running(fabric.api, "job-1")
    fabric.check()
    assert fabric.values() == [uid], fabric.history.told(fabric.api)


def test_a_daemon_that_is_ending_does_not_count(fabric: Fabric) -> None:
    """It has left the clique at once, and its claim and a `status.nodes` that is not refreshed say that it is there."""
    fabric.steering.words = "term=ignore\n"
    uid = fabric.create()
    fabric.start("job-0", uid)
    eventually(lambda: domains.ready_in_status(fabric.api, uid), "a status that says that the node is Ready")
    with domains.without_controller(), ending(fabric, uid):
        fabric.make("job-1", uid)
        pods.delete(fabric.api, "job-0", grace_s=0)
        # Until now the channel was not to be had: kubelet asks for it once the old claim has none.
        eventually(lambda: fabric.waits_for("job-1") or runs(fabric, "job-1"), "the prepare of job-1")
        observe(lambda: not runs(fabric, "job-1"), 3.0, "job-1 waits for a daemon that is not ending")
    pods.wait_running(fabric.api, "job-1")
    fabric.covered("job-1")


@contextmanager
def ending(fabric: Fabric, uid: str) -> Iterator[None]:
    """An administrator has deleted the daemon's pod, which ends when the context ends."""
    (daemon,) = domains.daemons(fabric.api, uid)
    fabric.api.delete(f"{domains.DAEMON_PODS}/{daemon['metadata']['name']}")
    eventually(lambda: not domains.ready_in_clique(fabric.api, uid), "the daemon's leaving the clique")
    try:
        yield
    finally:
        fabric.steering.words = ""
        fabric.steering.steer(uid, "die=0\n")


def runs(fabric: Fabric, pod: str) -> bool:
    """The API server says that the pod runs."""
    return pods.phase(pods.get(fabric.api, pod)) == "Running"


def observe(holds: Callable[[], bool], for_s: float, what: str) -> None:
    """Looks again and again for so long. Raises AssertionError at once where it does not hold."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        assert holds(), f"not so: {what}"
        time.sleep(0.2)


def test_a_domain_is_made_anew_under_the_same_name(fabric: Fabric) -> None:
    first = fabric.create()
    fabric.start("job-0", first)
    pods.stop(fabric.api, "job-0")
    fabric.delete()
    second = fabric.create()
    fabric.start("job-0", second)
    fabric.check()
    assert first != second
    assert fabric.values() == [first, None, second]
    assert [path.name for path in domains.domain_directories().iterdir()] == [second]


# --- deleted under a pod ----------------------------------------------------------------------------------------------


def test_a_domain_is_deleted_under_its_pod(fabric: Fabric) -> None:
    uid = fabric.create()
    before = fabric.start("job-0", uid)
    fabric.delete()
    eventually(lambda: not domains.daemons(fabric.api, uid), "the end of the domain's daemon")
    # Nobody ends the pod: its channel stays its own until it ends.
    claim = fabric.api.get(f"{domains.TENANTS_CLAIMS}/{fabric.claim_of('job-0')}")
    assert claim["status"]["reservedFor"][0]["uid"] == before["metadata"]["uid"]
    assert runs(fabric, "job-0")
    fabric.node.settled({H: 1})
    pods.stop(fabric.api, "job-0")
    fabric.nothing_is_left()


def test_a_deleted_domain_gets_no_label_back(fabric: Fabric) -> None:
    """The controller takes the label away, with each of its retries, and each time gpuactors puts it back."""
    uid = fabric.create()
    fabric.start("job-0", uid)
    fabric.delete()
    eventually(lambda: not domains.daemons(fabric.api, uid), "the end of the domain's daemon")
    observe(lambda: fabric.label() is None, 1.0, "the label stays away")
    assert fabric.values() == [uid, None], fabric.history.label(fabric.api)


# --- others' programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("not_ready_s", [12.0, 30.0], ids=("12s", "30s"))
def test_a_daemon_that_is_not_ready_is_waited_for(fabric: Fabric, not_ready_s: float) -> None:
    """The workload waits, and then runs. A call of kubelet is answered after 35 s at the latest, with what it has
    waited for, and kubelet calls again after 60 to 90 s: 12 s are within one call, 30 s need not be."""
    fabric.steering.words = "ready=no\n"
    uid = fabric.create()
    fabric.make("job-0", uid)
    eventually(lambda: "does not say yet" in fabric.waits_for("job-0"), "the claim's wait for the daemon")
    observe(lambda: not runs(fabric, "job-0"), not_ready_s, "job-0 waits")
    fabric.steering.steer(uid, "ready=yes\n")
    pods.wait_running(fabric.api, "job-0", RETRY_S)
    fabric.check()
    assert fabric.values() == [uid]
    told = failures(fabric, "job-0")
    assert all("does not say yet" in said for said in told), told
    assert not told or not_ready_s > 12.0, told


def failures(fabric: Fabric, pod: str) -> list[str]:
    """Kubelet's events of prepares that have failed, those that the API server itself refused left out."""
    uid = (pods.get(fabric.api, pod) or {})["metadata"]["uid"]
    events = fabric.api.items(
        EVENTS, fieldSelector=f"involvedObject.uid={uid},reason=FailedPrepareDynamicResources"
    )
    return [e["message"] for e in events if domains.NOT_SEEN_YET not in e["message"]]


def test_the_controller_is_restarted(fabric: Fabric) -> None:
    uid = fabric.create()
    fabric.start("job-0", uid)
    with domains.without_controller():
        fabric.check()
    # Whenever a domain is added, it takes the label from each node where it names no domain.
    fabric.create("other")
    fabric.check()
    assert fabric.values() == [uid]
    pods.stop(fabric.api, "job-0")
    fabric.delete()
    eventually(lambda: fabric.label() is None, "the end of the label")


def test_a_label_that_is_taken_away_comes_back(fabric: Fabric) -> None:
    uid = fabric.create()
    fabric.start("job-0", uid)
    fabric.covered()
    kubectl("label", "node", fabric.node.name, f"{LABEL}-")
    eventually(lambda: fabric.label() == uid, "the label")
    assert fabric.values() == [uid, None, uid]
    assert "job-0 runs while the label is None" in str(fabric.history.uncovered(fabric.api))
    # Kubernetes' own controller has ended the daemon's pod, or not, by what it has seen; it makes one anew.
    eventually(lambda: any(map(domains.is_ready, domains.daemons(fabric.api, uid))), "a ready daemon")


def test_the_daemon_starts_by_itself(fabric: Fabric) -> None:
    """Its configuration is there, and nvidia-imex, which its image does not have."""
    uid = fabric.create()
    fabric.start("job-0", uid)
    (daemon,) = domains.daemons(fabric.api, uid)
    (status,) = daemon["status"]["containerStatuses"]
    assert (status["restartCount"], status["ready"]) == (0, True), pods.told(daemon)
    directory = domains.domain_directories() / uid
    assert "{{.IMEXCmdBindInterfaceIP}}" in (directory / "imexd.cfg.tmpl").read_text()
    configuration = (directory / "imexd.cfg").read_text()
    assert f"IMEX_CMD_BIND_INTERFACE_IP={daemon['status']['podIP']}" in configuration, configuration
    fabric.check()


def test_a_daemon_whose_host_has_no_device_for_management_is_told_what_to_do(fabric: Fabric) -> None:
    spec = domains.MANAGEMENT.read_text()
    domains.MANAGEMENT.unlink()
    try:
        uid = fabric.create()
        fabric.make("job-0", uid)

        def says_so() -> bool:
            reasons = [str(line.get("reason", "")) for line in fabric.node.daemon().log()]
            return any("nvidia-ctk cdi generate --mode=management" in reason for reason in reasons)

        eventually(says_so, "what to do")
        assert not runs(fabric, "job-0")
    finally:
        domains.MANAGEMENT.write_text(spec)
    # Within the same call of kubelet.
    pods.wait_running(fabric.api, "job-0")
    fabric.check()


@pytest.mark.long
def test_nothing_is_left_behind(fabric: Fabric) -> None:
    uid = fabric.create()
    fabric.start("job-0", uid)
    assert (domains.domain_directories() / uid / "imexd.cfg").is_file(), (
        "the daemon has written into its directory"
    )
    pods.stop(fabric.api, "job-0")
    # The domain is still there, and nobody uses it.
    fabric.nothing_is_left()
    fabric.delete()
    eventually(
        lambda: (
            "computedomain" not in kubectl("get", "daemonsets,resourceclaimtemplates", "-A", "-o", "name")
        ),
        "the end of what the controller has made",
    )
    report = json.loads(fabric.node.daemon().run("inspect", "-o", "json"))["compute_domains"]
    assert (report["domains"], report["label"]["status"]) == ([], "Absent"), report
    assert {claim["state"] for claim in report["claims"]} == {"Unprepared"}, report
    fabric.check()
    assert fabric.values() == [uid, None]
