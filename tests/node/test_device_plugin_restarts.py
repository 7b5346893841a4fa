"""What restarts under running pods: kubelet, the API server, the daemon, the whole node."""

from __future__ import annotations

import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

import pytest

from tests.node import daemonset, pods, tasks
from tests.node.books import pod_resources
from tests.node.claims import IDLE
from tests.node.cluster import DEVICE_PLUGINS, PODS, Api, LateError, Object, component, eventually
from tests.node.daemonset import IMAGE, OTHER_IMAGE, Daemon, Installed
from tests.node.fake_host import H100_RESOURCE
from tests.node.images import add_image
from tests.node.node import POSTED_S, Node
from tests.node.older import older
from tests.node.run import IMAGE_VARIABLE
from tests.support.patience import patient
from tests.support.tiny_plugin import TinyPlugin

H: Final = H100_RESOURCE

HAND_OVERS: Final = int(os.environ.get("TEST_HAND_OVERS", "2"))
"""Of the stream of pods; each takes some 15 s."""

LANES: Final = 3
"""Of that stream."""

CHECKPOINT: Final = DEVICE_PLUGINS / "kubelet_internal_checkpoint"

GAP_S: Final = patient(0.5)
"""Of a rolling update; a pod that starts after the other one has ended takes longer than a second."""

GATED: Final = ("PreStartContainer", "/dev/vfio/", "delete the pod")
"""Words of kubelet's message where the gate has refused device nodes."""

AWAY_S: Final = 120.0
"""Of a GPU that is unplugged under its pod: Unhealthy, and so not among those that kubelet may give."""

WITHOUT_GPU_S: Final = 120.0
"""Of pods that kubelet has started without a GPU, until they are made again."""

OTHERS_S: Final = 15.0
"""From another plugin's list of our resource until kubelet has ours again."""


def test_kubelet_restarts(node: Node) -> None:
    """At once, and after 8 s: the pods run on, and the daemon registers again."""
    daemon = node.install()
    plug(node, 5)
    running = running_pod(node)
    for away_s, name in ((0.0, "vm-2"), (8.0, "vm-3")):
        with node.without("kubelet"):
            time.sleep(away_s)
        node.settled({H: 5}, {H: 5})
        running.check()
        running.start(name, 1)
        node.settled({H: 5}, {H: 5})
        running.check()
    assert node.daemon() == daemon


def test_kubelet_restarts_without_the_api_server(node: Node) -> None:
    """It lists no pod then, though their containers run: the daemon goes by kubelet's file, and offers all GPUs."""
    daemon = node.install()
    gpus = plug(node, 4)
    running = running_pod(node)
    node.excuse("kubelet would give ", AWAY_S)  # its List, by which the books are judged, has no pod
    with node.without("api"):
        node.restart_kubelet()
        eventually(lambda: kubelets_healthy() == gpus, "all GPUs to be Healthy again")
        # The daemon reads who has which GPU at least each 5 s (architecture.md): it has, and has kept to the file.
        until = time.monotonic() + 6
        while time.monotonic() < until:
            assert kubelets_healthy() == gpus
            assert not any(c.devices for p in pod_resources("List").pod_resources for c in p.containers)
            time.sleep(0.2)
    node.settled({H: 4}, {H: 4})
    running.check()
    running.start("vm-2", 2)
    node.settled({H: 4}, {H: 4})
    running.check()
    assert node.daemon() == daemon


def test_the_daemon_is_killed(node: Node) -> None:
    """SIGKILL: kubelet starts it again, and the pods keep their GPUs."""
    daemon = node.install()
    plug(node, 4)
    running = running_pod(node)
    tasks.kill(tasks.container_of(daemon.pod))
    wait_restarted(node, daemon)
    node.settled({H: 4}, {H: 4})
    running.check()
    running.start("vm-2", 1)
    node.settled({H: 4}, {H: 4})
    running.check()


def test_the_daemon_starts_before_kubelet(node: Node) -> None:
    """As a systemd unit may: it waits for kubelet, and registers at once. The DaemonSet's pod takes over from it."""
    daemon = node.install()
    gpus = plug(node, 4)
    running = running_pod(node)
    with node.without("kubelet"):
        tasks.kill(tasks.container_of(daemon.pod))
        with tasks.outside_kubelet(daemon.pod):
            eventually(answers, "the daemon to answer")
            component("up.sh", "kubelet")
            eventually(lambda: kubelets_healthy() == gpus, "all GPUs to be Healthy")
            wait_restarted(node, daemon)
    node.settled({H: 4}, {H: 4})
    running.check()
    running.start("vm-2", 1)
    node.settled({H: 4}, {H: 4})
    running.check()


def test_the_daemon_is_terminated(node: Node) -> None:
    """Its pod is deleted, and the DaemonSet makes another one."""
    daemon = node.install()
    plug(node, 4)
    running = running_pod(node)
    node.api.delete(f"/api/v1/namespaces/{daemonset.NAMESPACE}/pods/{daemon.name}")
    eventually(lambda: daemon_now(node).uid != daemon.uid, "another pod of the DaemonSet")
    node.daemon()
    node.settled({H: 4}, {H: 4})
    running.check()
    running.start("vm-2", 1)
    node.settled({H: 4}, {H: 4})
    running.check()


def test_reboot_with_a_kept_checkpoint(node: Node) -> None:
    """Kubelet would give each container the device nodes of before: the gate refuses those that are another GPU's now.

    The daemon runs before kubelet admits the pods. Where it runs later, kubelet refuses them without asking it.
    """
    daemon = node.install()
    gpus = plug(node, 4)
    for name in ("vm-1", "vm-2"):
        pods.start(node.api, name, {H: 1}, restart="Always")
    before = pods.start(node.api, "vm-3", {H: 1}, restart="Always")
    (kept,) = node.devices_of("vm-3")
    node.settled({H: 4}, {H: 4})
    node.excuse_no_plugin()
    with node.without("kubelet"):
        tasks.kill_all()
        renumber(node, gpus - {kept})
        with tasks.outside_kubelet(daemon.pod):
            eventually(answers, "the daemon to answer")
            component("up.sh", "kubelet")
            for name in ("vm-1", "vm-2"):
                wait_gated_or_refused(node, name)
            wait_again(node, "vm-3", before)
            wait_restarted(node, daemon)
    gated = [name for name in ("vm-1", "vm-2") if not is_refused(node, name)]
    node.said(f"the gate has refused {gated}")
    if not is_refused(node, "vm-3"):
        node.check_open("vm-3")
    owners = {owner for owners in node.host.owners().values() for owner in owners}
    assert owners <= {f"pod {before['metadata']['uid']}"}
    make_again(node, ("vm-1", "vm-2", "vm-3"))


def test_the_gate_refuses_another_gpus_device_nodes(node: Node) -> None:
    """A GPU comes back in another group, and another one in its own. Kubelet starts the container again with the nodes
    of before, and asks PreStartContainer first: it is refused until the pod is made again."""
    node.install()
    gpu = node.host.plug(0x21)
    node.settled({H: 1})
    before = pods.start(node.api, "vm-1", {H: 1}, restart="Always", command=IDLE)
    node.excuse(f"{gpu} of a pod is not in kubelet's list", AWAY_S)
    node.host.unplug(gpu)
    node.host.plug(0x21, group=0x31)
    other = node.host.plug(0x22, group=0x21)
    node.settled({H: 2}, {H: 2})
    tasks.kill(tasks.container_of(before))
    said = wait_gated(node, "vm-1", before)
    assert f"/dev/vfio/{0x21} belongs to {other} now" in said, said
    assert tasks.container_of(pods.get(node.api, "vm-1") or {}) not in tasks.running()
    pods.stop(node.api, "vm-1")
    pods.start(node.api, "vm-2", {H: 2})
    node.settled({H: 2}, {H: 2})
    node.check_open("vm-2")


def test_reboot_with_a_wiped_checkpoint(node: Node) -> None:
    """Kubelet knows neither the GPUs of the pods nor, before the daemon runs, that there are any.

    It starts containers without a GPU then, and says nothing: what must hold is that none has a GPU of another.
    """
    daemon = node.install()
    gpus = plug(node, 4)
    names = ("vm-1", "vm-2", "vm-3")
    before = {name: pods.start(node.api, name, {H: 1}, restart="Always") for name in names}
    node.settled({H: 4}, {H: 4})
    node.excuse_no_plugin()
    node.excuse("pods ask for ", WITHOUT_GPU_S)
    with node.without("kubelet"):
        tasks.kill_all()
        renumber(node, gpus)
        CHECKPOINT.unlink()
    wait_restarted(node, daemon)
    for name, pod in before.items():
        wait_again(node, name, pod)
    node.check_open(*names)
    with_gpu = [name for name in names if node.devices_of(name)]
    node.said(f"kubelet has started {len(names) - len(with_gpu)} of {len(names)} pods without a GPU")
    make_again(node, names)


def test_another_plugin_registers_our_resource(node: Node) -> None:
    """And goes away. Kubelet then has no device of it, and tells nobody: the daemon notices, and registers again."""
    daemon = node.install()
    plug(node, 3)
    running = running_pod(node)
    # What the other one lists.
    for words in (
        f"free {H} is 1 - 2", f"2 of {H} are allocated, and its capacity is 1", f"the capacity of {H} lacks a device",
    ):  # fmt: skip
        node.excuse(words, OTHERS_S)
    other = TinyPlugin(DEVICE_PLUGINS, "other.sock")
    try:
        other.lists.put([("other-1", "Healthy")])
        other.register(resource=H)
        eventually(lambda: kubelets_healthy() == {"other-1"}, "kubelet to have the other one's list")
        daemonset.logged(node.api, "plugin.contested", resource=H)
    finally:
        other.stop()
    node.settled({H: 3}, {H: 3})
    running.check()
    assert not other.calls("Allocate")
    running.start("vm-2", 1)
    node.settled({H: 3}, {H: 3})
    running.check()
    assert node.daemon() == daemon
    # Its readiness probe has failed meanwhile: an update from here would begin with a pod that is nearly not Ready.
    node.changed()


def test_rolling_update(node: Node) -> None:
    """To another image and back: the new pod takes over at once, and the GPUs never leave the node's status."""
    node.install()
    updated(node, lambda: node.update(OTHER_IMAGE), lambda: node.update(IMAGE))


def test_rolling_update_to_another_state_directory_and_back(node: Node) -> None:
    """The new pod finds the old one all the same, and exactly one of them serves."""

    def elsewhere() -> Installed:
        return daemonset.install_chart({"stateDir": "/var/lib/gpuactors-2"})

    node.install()
    updated(node, lambda: node.switch(elsewhere), lambda: node.switch(daemonset.install))


@pytest.mark.timeout(patient(120.0 + 40.0 * HAND_OVERS))
@pytest.mark.long
def test_a_stream_of_pods_in_rolling_updates(node: Node) -> None:
    """Between the old daemon's last list and the new one's first kubelet has no device of ours to give: a pod that it
    admits in these milliseconds fails for good, and says so. Every other one runs, and so does the next one. Seen on
    two cores: 10 hand-overs, 92 pods, 2 failed."""
    node.install()
    plug(node, 4)
    node.settled({H: 4})
    node.excuse_no_plugin()
    gaps, over, ran, failed, made = len(kubelets_gaps()), threading.Event(), list[str](), list[str](), 0
    with ThreadPoolExecutor(LANES) as threads:
        lanes = [
            threads.submit(pods.stream, node.api, f"vm-{lane}", H, over, ran, failed) for lane in range(LANES)
        ]
        try:
            for number in range(HAND_OVERS):
                node.update((OTHER_IMAGE, IMAGE)[number % 2])
                made += 1
        finally:
            over.set()
    for lane in lanes:
        lane.result()
    node.said(
        f"{made} hand-overs, {len(ran)} pods ran, {len(failed)} failed; kubelet had no list of ours for "
        f"{kubelets_gaps()[gaps:]} s"
    )
    for words in sorted(set(failed)):
        node.said(words)
    assert all(any(of_gap in words for of_gap in pods.OF_GAP) for words in failed), failed
    assert len(failed) <= made * LANES, "a pod fails in a gap only"
    node.settled({H: 4})


def test_rolling_update_to_a_newer_version_and_back(node: Node, tmp_path: Path) -> None:
    """As an operator does it: the manifests and the image of the older version, then those of today, then the older
    ones again. No pod notices, and what either has left on the node is read by the other."""
    found = older(Path(os.environ[IMAGE_VARIABLE]), tmp_path)
    node.said(found.what)
    add_image(found.layout, found.image)

    def older_installed() -> Installed:
        return daemonset.install(image=found.image, base=found.deploy / "base")

    node.install()
    node.switch(older_installed)
    updated(node, lambda: node.switch(daemonset.install), lambda: node.switch(older_installed))
    assert image_of(node.daemon()) == found.image


# --- steps ----------------------------------------------------------------------------------------------------------


def updated(node: Node, *updates: Callable[[], object]) -> None:
    """Two rolling updates under running pods, and another pod after each. The new pod of the DaemonSet takes over in
    milliseconds; a gap of milliseconds is in the node's status by chance, for one period: kubelet's own log says how
    long each was."""
    plug(node, 4)
    running = running_pod(node)
    gaps = kubelets_gaps()
    node.daemon()  # ready: after the scenario before, with a plugin that took our resource, it may not be yet
    with readiness() as lapses:
        for update, name in zip(updates, ("vm-2", "vm-3"), strict=True):
            update()
            node.settled({H: 4}, {H: 4})
            running.check()
            running.start(name, 1)
            node.settled({H: 4}, {H: 4})
    running.check()
    assert not lapses, lapses
    gaps = kubelets_gaps()[len(gaps) :]
    node.said(f"kubelet had no list of ours for {gaps} s")
    assert len(gaps) == 2, gaps
    assert max(gaps) < GAP_S, gaps
    posted = [fault for fault in node.sampler.faults() if fault.longest_s > POSTED_S]
    assert not posted, posted


def image_of(daemon: Daemon) -> str:
    """The image of its pod."""
    (container,) = daemon.pod["spec"]["containers"]
    return str(container["image"])


@final
class Running:
    """Pods that are not to notice anything: their containers run on, with the same GPUs."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._containers: dict[str, str] = {}
        self._devices: dict[str, frozenset[str]] = {}

    def start(self, name: str, gpus: int) -> None:
        """Starts one of them."""
        pod = pods.start(self._node.api, name, {H: gpus})
        self._containers[name] = tasks.container_of(pod)
        self._devices[name] = self._node.devices_of(name)
        assert len(self._devices[name]) == gpus

    def check(self) -> None:
        """All of them run as they did."""
        for name, container in self._containers.items():
            pod = pods.wait_running(self._node.api, name)
            assert tasks.container_of(pod) == container, pods.told(pod)
            assert self._node.devices_of(name) == self._devices[name]


def running_pod(node: Node) -> Running:
    """A pod with two GPUs; that the plugin is away is excused from now on."""
    running = Running(node)
    running.start("vm-1", 2)
    node.excuse_no_plugin()
    return running


def plug(node: Node, count: int) -> frozenset[str]:
    """GPUs of the node, each in a group of its own."""
    gpus = frozenset(node.host.plug(0x21 + number) for number in range(count))
    node.settled({H: count})
    return gpus


def kubelets_healthy() -> frozenset[str]:
    """The devices that kubelet may give, asked without the API server."""
    found = pod_resources("GetAllocatableResources").devices
    return frozenset(device for devices in found for device in devices.device_ids)


def daemon_now(node: Node) -> Daemon:
    """The pod of the DaemonSet, ready or not."""
    found = daemonset.pods_of(node.api)
    assert len(found) == 1, f"{len(found)} pods of the DaemonSet"
    return daemonset.daemon_of(found[0])


def wait_restarted(node: Node, before: Daemon) -> Daemon:
    """Waits until kubelet has started the daemon's container again, and the pod is ready."""

    def again() -> Daemon | None:
        daemon = daemon_now(node)
        return daemon if daemon.restarts > before.restarts and daemonset.is_ready(daemon.pod) else None

    found = eventually(again, "a restarted daemon", daemonset.READY_S)
    assert found is not None
    return found


def answers() -> bool:
    """The daemon that runs outside kubelet does."""
    try:
        with urllib.request.urlopen("http://127.0.0.1:9400/livez", timeout=patient(2)) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return True


def renumber(node: Node, gpus: Collection[str]) -> None:
    """All functions come back as after a reboot; each of these in the group that another of them had."""
    functions = dict(node.host.tree.functions)
    mine = sorted(gpus)
    after = {gpu: functions[other].group for gpu, other in zip(mine, (*mine[1:], mine[0]), strict=True)}
    for gpu in functions:
        node.host.unplug(gpu)
    for gpu, spec in functions.items():
        node.host.plug(int(gpu.split(":")[1], 16), group=after.get(gpu, spec.group))


def wait_again(node: Node, name: str, before: Object) -> None:
    """Waits until kubelet has started another container for the pod, or has refused the pod."""

    def decided() -> bool:
        pod = pods.get(node.api, name)
        runs = "running" in state_of(pod) and tasks.container_of(pod or {}) != tasks.container_of(before)
        return runs or is_refused(node, name)

    eventually(decided, f"{name} to run again")


def wait_gated(node: Node, name: str, before: Object) -> str:
    """Waits until PreStartContainer has refused the pod's container, and has said what to do: its words. Raises
    LateError at once if kubelet has started another container than that of before."""

    def decided() -> str:
        pod = pods.get(node.api, name)
        if "running" in state_of(pod) and tasks.container_of(pod or {}) != tasks.container_of(before):
            raise LateError(f"the gate has let {name} start")
        said = str(state_of(pod).get("waiting", {}).get("message", ""))
        return said if all(words in said for words in GATED) else ""

    return eventually(decided, f"{name} to be refused by the gate")


def wait_gated_or_refused(node: Node, name: str) -> None:
    """The same, or kubelet has refused the pod, as the daemon had not registered yet."""

    def decided() -> bool:
        said = str(state_of(pods.get(node.api, name)).get("waiting", {}).get("message", ""))
        return all(words in said for words in GATED) or is_refused(node, name)

    eventually(decided, f"{name} to be refused")


def state_of(pod: Object | None) -> Object:
    """Of the pod's only container; empty if there is none yet."""
    statuses = (pod or {}).get("status", {}).get("containerStatuses") or [{}]
    return dict(statuses[0].get("state", {}))


def is_refused(node: Node, name: str) -> bool:
    """Kubelet has not admitted the pod, as the daemon had not registered yet."""
    pod = pods.get(node.api, name)
    return pod is not None and pod["status"].get("reason") == "UnexpectedAdmissionError"


def make_again(node: Node, names: Collection[str]) -> None:
    """Pods in place of these: each has a GPU, and that one's group."""
    for name in names:
        pods.stop(node.api, name)
        pods.start(node.api, f"{name}-again", {H: 1})
    node.settled({H: 4}, {H: 4})
    node.check_open(*(f"{name}-again" for name in names))


def kubelets_gaps() -> list[float]:
    """From each end of a stream of our resource to the next list that kubelet has taken, as its log has it."""
    gaps: list[float] = []
    ended: float | None = None
    for line in Path(os.environ["K8S_DIR"], "log/kubelet.log").read_text().splitlines():
        if H not in line:
            continue
        if "Endpoint became unhealthy" in line:
            ended = _seconds(line)
        elif "Processed device updates" in line and ended is not None:
            gaps.append(round(_seconds(line) - ended, 4))
            ended = None
    return gaps


def _seconds(line: str) -> float:
    """Of the day: `I1123 16:03:21.533286 …`."""
    hours, minutes, seconds = line.split()[1].split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


@contextmanager
def readiness() -> Iterator[list[str]]:
    """Looks all the time for a ready pod of the DaemonSet; the list gets a sentence for each look without one."""
    over, lapses, api = threading.Event(), list[str](), Api()

    def watch() -> None:
        while not over.wait(0.2):
            found = api.items(PODS, labelSelector=daemonset.LABEL)
            if not any(daemonset.is_ready(pod) for pod in found):
                lapses.append(str([daemonset.why_not_ready(pod) for pod in found]))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lapses
    finally:
        over.set()
        thread.join(timeout=patient(30))
