"""Which pods live, by their cgroups: both drivers of kubelet, both versions of the kernel's interface."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from uuid import uuid4

import pytest

from gpuactors.core.values.model import NO_PODS, PodLife
from gpuactors.host.pod_cgroups import PodCgroups, uid_of
from gpuactors.host.root import CGROUPS, HostRoot
from gpuactors_simulation.host.pod_cgroups import CgroupTree

ONE, TWO, GONE = (f"{n}4d3c2b1-0000-4000-8000-00000000000{n}" for n in range(3))
STATIC = "0123456789abcdef0123456789abcdef"
CGROUPS_HERE = Path(CGROUPS)


def write(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("_", ".", 1)).write_text(content)


def v2(path: Path, *, populated: bool, used: int) -> None:
    write(path, cgroup_events=f"populated {int(populated)}\nfrozen 0\n")
    (path / "cpu.stat").write_text(f"usage_usec {used}\nuser_usec 1\n")


def v1(cgroups: Path, pod: str, *, tasks: int | None, used: int) -> None:
    """What a process of another PID namespace sees of it: cgroup.procs is empty."""
    write(cgroups / "cpuacct" / pod, cgroup_procs="", cpuacct_usage=f"{used}\n")
    if tasks is not None:
        write(cgroups / "pids" / pod, cgroup_procs="", pids_current=f"{tasks}\n")


class RealPod:
    """A pod's cgroups in the hierarchies of this machine."""

    def __init__(self, uid: str) -> None:
        self._uid = uid
        is_v2 = (CGROUPS_HERE / "cgroup.controllers").exists()
        tops = [CGROUPS_HERE] if is_v2 else [CGROUPS_HERE / "cpuacct", CGROUPS_HERE / "pids"]
        self._of_kubelet = [top / f"gpuactors-test-{uid}" for top in tops]
        for top in self._of_kubelet:
            (self._in_pod(top)).mkdir(parents=True)

    def _in_pod(self, top: Path) -> Path:
        return top / "kubepods" / f"pod{self._uid}" / "0123abcd"

    @contextmanager
    def process(self) -> Iterator[None]:
        into = " && ".join(f"echo $$ > {self._in_pod(top)}/cgroup.procs" for top in self._of_kubelet)
        with subprocess.Popen(("sh", "-c", f"{into} && echo in && exec cat"), stdin=PIPE, stdout=PIPE) as pod:
            assert pod.stdout is not None
            assert pod.stdout.readline() == b"in\n"
            yield
            pod.kill()

    def seen_from_a_container(self) -> PodLife:
        look = f"print(PodCgroups(HostRoot('/')).look(['{self._uid}']).lives['{self._uid}'])"
        imports = (
            f"from {PodCgroups.__module__} import PodCgroups; from {HostRoot.__module__} import HostRoot"
        )
        container = ("unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", f"{imports}; {look}")
        return PodLife(subprocess.run(container, check=True, capture_output=True, text=True).stdout.strip())

    def remove(self) -> None:
        for top in self._of_kubelet:
            for path in (pod := self._in_pod(top), *list(pod.parents)[:3]):
                path.rmdir()


@pytest.fixture
def real_pod() -> Iterator[RealPod]:
    try:
        pod = RealPod(str(uuid4()))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here ({error.strerror})")
    yield pod
    pod.remove()


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    return tmp_path / "sys/fs/cgroup"


@pytest.fixture
def pods(tmp_path: Path) -> PodCgroups:
    return PodCgroups(HostRoot(str(tmp_path)))


@pytest.mark.parametrize("above", ["", "kubelet.slice/kubelet-"], ids=["", "below a --cgroup-root"])
def test_the_systemd_driver_and_cgroup_v2(cgroups: Path, pods: PodCgroups, above: str) -> None:
    write(cgroups, cgroup_controllers="cpu memory\n")
    prefix = above.rpartition("/")[2]
    top = cgroups / f"{above}kubepods.slice"
    v2(top / f"{prefix}kubepods-pod{ONE.replace('-', '_')}.slice", populated=True, used=5)
    burstable = top / f"{prefix}kubepods-burstable.slice"
    v2(burstable / f"{prefix}kubepods-burstable-pod{TWO.replace('-', '_')}.slice", populated=False, used=0)
    v2(burstable / f"{prefix}kubepods-burstable-pod{STATIC}.slice", populated=False, used=7)
    assert pods.look([ONE, TWO, STATIC, GONE]).lives == {
        ONE: PodLife.RUNNING,
        TWO: PodLife.STARTING,
        STATIC: PodLife.STOPPED,
        GONE: PodLife.ABSENT,
    }


@pytest.mark.parametrize("above", ["", "k8s-0/"])
def test_the_cgroupfs_driver_and_cgroup_v1(cgroups: Path, pods: PodCgroups, above: str) -> None:
    v1(cgroups, f"{above}kubepods/pod{ONE}", tasks=17, used=5)
    v1(cgroups, f"{above}kubepods/burstable/pod{TWO}", tasks=0, used=0)
    v1(cgroups, f"{above}kubepods/besteffort/pod{STATIC}", tasks=0, used=7)
    assert pods.look([ONE, TWO, STATIC, GONE]).lives == {
        ONE: PodLife.RUNNING,
        TWO: PodLife.STARTING,
        STATIC: PodLife.STOPPED,
        GONE: PodLife.ABSENT,
    }


def test_a_pod_without_a_cgroup_of_its_tasks_is_left_out(cgroups: Path, pods: PodCgroups) -> None:
    """Kubelet removes one cgroup after the other: whether a process is there is not known, so it has not ended yet."""
    v1(cgroups, f"kubepods/pod{ONE}", tasks=None, used=5)
    assert pods.look([ONE, TWO]).lives == {TWO: PodLife.ABSENT}


@pytest.mark.skipif(os.geteuid() != 0, reason="cgroups are made by root")
def test_of_this_kernel_from_another_pid_namespace(real_pod: RealPod) -> None:
    """As the daemon in its container sees the pods of the host."""
    assert real_pod.seen_from_a_container() == PodLife.STARTING
    with real_pod.process():
        assert real_pod.seen_from_a_container() == PodLife.RUNNING
    assert real_pod.seen_from_a_container() == PodLife.STOPPED


def test_of_a_node_without_cgroups_of_pods_nothing_is_said(cgroups: Path, pods: PodCgroups) -> None:
    """Kubelet runs with --cgroups-per-qos=false, or the daemon does not see the host's: no pod has ended by that."""
    assert pods.look([ONE]) == NO_PODS
    write(cgroups, cgroup_controllers="cpu\n")
    write(cgroups / "system.slice/sshd.service")
    assert pods.look([ONE]) == NO_PODS


def test_pods_that_come_are_counted_once_and_those_that_go_are_not(tmp_path: Path, pods: PodCgroups) -> None:
    tree = CgroupTree(tmp_path)
    assert pods.look([]).came == 0
    tree.show({ONE: PodLife.RUNNING, TWO: PodLife.STARTING})
    assert [pods.look([]).came for _ in range(3)] == [2, 2, 2]
    tree.show({TWO: PodLife.RUNNING})
    assert pods.look([ONE]).came == 2
    tree.show({TWO: PodLife.RUNNING, GONE: PodLife.STARTING})
    assert pods.look([ONE]).came == 3


def test_a_pod_whose_files_cannot_be_read_is_left_out(cgroups: Path, pods: PodCgroups) -> None:
    write(cgroups, cgroup_controllers="cpu\n")
    path = cgroups / f"kubepods/burstable/pod{ONE}"
    (path / "cpu.stat").mkdir(parents=True)
    v2(cgroups / f"kubepods/burstable/pod{TWO}", populated=True, used=1)
    assert pods.look([ONE, TWO]).lives == {TWO: PodLife.RUNNING}


@pytest.mark.parametrize(
    "name", ["pod", "pod1", "kubepods.slice", "kubepods-burstable.slice", "podman", "crio-x.scope"]
)
def test_what_is_no_pod_is_none(name: str) -> None:
    assert uid_of(name) is None
