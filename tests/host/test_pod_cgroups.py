"""Which pods live, by their cgroups: both drivers of kubelet, both versions of the kernel's interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuactors.core.values.model import NO_PODS, PodLife
from gpuactors.host.pod_cgroups import PodCgroups, uid_of
from gpuactors.host.root import HostRoot
from gpuactors_simulation.host.pod_cgroups import CgroupTree

ONE, TWO, GONE = (f"{n}4d3c2b1-0000-4000-8000-00000000000{n}" for n in range(3))
STATIC = "0123456789abcdef0123456789abcdef"


def write(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("_", ".", 1)).write_text(content)


def v2(path: Path, *, populated: bool, used: int) -> None:
    write(path, cgroup_events=f"populated {int(populated)}\nfrozen 0\n")
    (path / "cpu.stat").write_text(f"usage_usec {used}\nuser_usec 1\n")


def v1(path: Path, *, processes: str, used: int) -> None:
    write(path, cgroup_procs="", cpuacct_usage=f"{used}\n")
    write(path / "0123abcd", cgroup_procs=processes)


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
    top = cgroups / "cpuacct" / f"{above}kubepods"
    v1(top / f"pod{ONE}", processes="17\n", used=5)
    v1(top / f"burstable/pod{TWO}", processes="", used=0)
    v1(top / f"besteffort/pod{STATIC}", processes="", used=7)
    assert pods.look([ONE, TWO, STATIC, GONE]).lives == {
        ONE: PodLife.RUNNING,
        TWO: PodLife.STARTING,
        STATIC: PodLife.STOPPED,
        GONE: PodLife.ABSENT,
    }


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
