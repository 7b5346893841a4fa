"""`--preset kata` on a real node: the CDI files are there for every name that kubelet has, before anybody needs them.

Kata is not on the node. Its rule (`tests/support/kata.py`) reads the files that are on disk, and containerd resolves
the same names for the pods, whose containers show what they got.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.node import pods
from tests.node.claims import CDI, IDLE
from tests.node.cluster import eventually
from tests.node.daemonset import NAMESPACE
from tests.node.fake_host import A100, A100_RESOURCE, H100_RESOURCE
from tests.node.node import Node
from tests.support.kata import SandboxError, sandbox_nodes
from tests.support.patience import patient

H: Final = H100_RESOURCE
FILE: Final = CDI / "gpuactors-nvidia.com_GH100_H100_SXM5_80GB.json"
FILE_OF_A100: Final = CDI / "gpuactors-nvidia.com_GA100_A100_SXM4_40GB.json"

DIRECTORIES: Final = (Path("/etc/cdi"), CDI)
"""Where Kata and containerd look."""

HEALED_S: Final = patient(10.0)
"""A file that somebody has touched is written again within about a second."""

RETRY_S: Final = patient(20.0)
"""A file that could not be written is tried again after 5 s."""

LOOK_S: Final = 0.02


def nodes_of(node: Node, *devices: str) -> set[str]:
    """The device nodes of a virtual machine with these GPUs."""
    return {"/dev/vfio/vfio", *(f"/dev/vfio/{node.host.group_of(device)}" for device in devices)}


def check_resolves(node: Node, pod: str) -> None:
    """Kata makes the sandbox of a pod, of its own devices, by what kubelet and the files say; and containerd has made
    its container of the same names: Allocate's answer has nothing else."""
    its = node.devices_of(pod)
    assert sandbox_nodes(DIRECTORIES, {H: its}) == nodes_of(node, *its)
    assert pods.nodes_in(pod) == {Path(name).name for name in nodes_of(node, *its)}
    assert pods.variables_in(pod) == {}
    node.check_open(pod)


@contextmanager
def always_resolvable(node: Node) -> Iterator[None]:
    """While the context is open, in each look the files resolve every device that was Healthy at kubelet, or that a pod
    had, just before."""
    over = threading.Event()
    wrong: list[str] = []
    looks = 0

    def watch() -> None:
        nonlocal looks
        while not over.wait(LOOK_S):
            look = node.books.look_even_so()
            if look.healthy is None or look.allocated is None:
                continue  # kubelet did not answer
            names = {r: ids | look.of_pods(r) for r, ids in look.healthy.items()}
            try:
                sandbox_nodes(DIRECTORIES, names)
                looks += bool(any(names.values()))
            except SandboxError as error:
                wrong.append(f"{time.strftime('%H:%M:%S')} {error}")

    watching = threading.Thread(target=watch, name="resolves", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join(timeout=30)
    assert not wrong, wrong[:3]
    assert looks, "no look has seen a device"


def renewed(node: Node) -> None:
    """Another pod of the DaemonSet, after the first one has ended."""
    node.excuse_no_plugin()
    before = node.daemon()
    node.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{before.name}", 1)
    eventually(lambda: node.api.find(f"/api/v1/namespaces/{NAMESPACE}/pods/{before.name}") is None, "its end")
    eventually(lambda: node.daemon().uid != before.uid, "another pod")


def test_a_pod_gets_its_gpu_by_a_name_that_the_files_resolve(node: Node) -> None:
    """GPUs that are plugged late, pods, and another daemon: at no time is there a name that the files do not have."""
    node.install("kata")
    with always_resolvable(node):
        for slot in (0x21, 0x22):
            node.host.plug(slot)
        node.settled({H: 2})
        pods.start(node.api, "vm-1", {H: 1})
        check_resolves(node, "vm-1")
        node.host.plug(0x31, A100)
        node.settled({H: 2, A100_RESOURCE: 1})
        assert FILE_OF_A100.exists()
        renewed(node)
        node.settled({H: 2, A100_RESOURCE: 1}, {H: 2, A100_RESOURCE: 1})
        check_resolves(node, "vm-1")
        pods.start(node.api, "vm-2", {H: 1})
        check_resolves(node, "vm-2")
        pods.stop(node.api, "vm-1")
        node.settled({H: 2, A100_RESOURCE: 1})
    pods.stop(node.api, "vm-2")
    node.host.clear()
    node.settled({}, {})
    eventually(lambda: not FILE.exists() and not FILE_OF_A100.exists(), "no file without a device")


def test_no_gpu_is_healthy_before_its_file_is_there(node: Node) -> None:
    """A directory stands where the file is to be: the GPU is listed, Unhealthy, and the reason names the path."""
    daemon = node.install("kata")
    FILE.mkdir(parents=True)
    try:
        gpu = node.host.plug(0x21)
        node.settled({}, {H: 1})
        assert str(FILE) in (said := daemon.run("explain", gpu, check=False)), said
        assert "CdiFileUnwritten" in node.daemon().run("inspect", "-o", "json", check=False)
    finally:
        FILE.rmdir()
    with always_resolvable(node):
        node.settled({H: 1}, {H: 1}, within_s=RETRY_S)
        pods.start(node.api, "vm-1", {H: 1})
        check_resolves(node, "vm-1")


def test_a_file_that_is_removed_or_torn_is_written_again(node: Node) -> None:
    """By hand, while the daemon runs, with a pod that has a GPU of it."""
    node.install("kata")
    for slot in (0x21, 0x22):
        node.host.plug(slot)
    node.settled({H: 2})
    pods.start(node.api, "vm-1", {H: 1})
    wanted = FILE.read_text()
    FILE.unlink()
    eventually(FILE.exists, "the file that was removed", HEALED_S)
    assert FILE.read_text() == wanted
    FILE.write_text(wanted[:40])
    eventually(lambda: FILE.read_text() == wanted, "the file that was torn", HEALED_S)
    check_resolves(node, "vm-1")
    pods.start(node.api, "vm-2", {H: 1})
    check_resolves(node, "vm-2")
    node.settled({H: 2}, {H: 2})


def test_a_name_stays_while_a_pod_has_its_gpu_that_is_gone(node: Node) -> None:
    node.install("kata")
    gone, other = node.host.plug(0x21), node.host.plug(0x22)
    node.settled({H: 2})
    pods.start(node.api, "vm-1", {H: 1}, command=IDLE)
    (its,) = node.devices_of("vm-1")
    if its != gone:
        gone, other = other, gone
    nodes = nodes_of(node, gone)
    # It is Unhealthy until its pod has ended, and so not among those that kubelet may give.
    node.excuse(f"{gone} of a pod is not in kubelet's list", 60.0)
    node.host.unplug(gone)
    eventually(
        lambda: (node.books.look().healthy or {}).get(H) == frozenset({other}), "a GPU that is Unhealthy"
    )
    until = time.monotonic() + patient(3)
    while time.monotonic() < until:
        assert sandbox_nodes(DIRECTORIES, {H: {gone}}) == nodes
        time.sleep(0.2)
    pods.stop(node.api, "vm-1")
    node.settled({H: 1}, {H: 1})

    def is_left_out() -> bool:
        assert sandbox_nodes(DIRECTORIES, {H: {other}}) == nodes_of(node, other)
        return gone not in FILE.read_text()

    eventually(is_left_out, "a file without the GPU that is gone")
