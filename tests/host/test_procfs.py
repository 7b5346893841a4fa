"""Who holds a group, by /proc: on fake trees, and on this machine's own /proc."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.core.values.model import Holder, PciAddress
from gpuactors.host import procfs
from gpuactors.host.procfs import ProcReader, node_id, pod_uid
from gpuactors.host.root import HostRoot
from gpuactors_simulation.host.tree import HostTree, PciSpec
from tests.support.patience import patient

GPU = PciSpec("0000:23:00.0", "10de", "2330", "030200", 51, driver="vfio-pci")
OTHER = PciSpec("0000:24:00.0", "10de", "2330", "030200", 52, driver="vfio-pci")
UID = "0f3c1f0e-8a4b-4c57-9d3e-5b6a7c8d9e0f"
UNUSED = "/dev/random"
"""A character device that nothing has open, neither another test nor the system."""
PATIENCE_S = patient(10.0)
EXIT_THREAD = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
"""exit(2), which glibc calls for the last thread only: asm/unistd.h."""


def target(spec: PciSpec) -> PollTarget:
    assert spec.group is not None
    return PollTarget(spec.group, (PciAddress(spec.address),), may_open=False)


BOTH = (target(GPU), target(OTHER))


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path, cdev=True)
    tree.plug(GPU)
    tree.plug(OTHER)
    return tree


def reader(tree: HostTree) -> ProcReader:
    return ProcReader(HostRoot(str(tree.root)))


# --- fake trees -------------------------------------------------------------------------------------------------


def test_nobody(tree: HostTree) -> None:
    found = reader(tree).find(BOTH)
    assert (found.holders, found.exhaustive) == ({}, True)


def test_a_holder_is_named_with_its_pod(tree: HostTree) -> None:
    tree.open_group(51, 4711, pod_uid=UID, device=False)
    tree.open_group(52, 4712, "dpdk-testpmd", device=True)
    found = reader(tree).find(BOTH)
    assert found.holders == {
        51: (Holder(4711, "qemu-system-x86", UID),),
        52: (Holder(4712, "dpdk-testpmd", None),),
    }
    assert found.exhaustive
    tree.close_group(51, 4711)
    tree.kill(4712)
    assert reader(tree).find(BOTH).holders == {}


def test_one_process_holds_two_groups_and_only_those_that_were_asked_for_are_told(tree: HostTree) -> None:
    tree.open_group(51, 4711)
    tree.open_group(52, 4711)
    holder = Holder(4711, "qemu-system-x86", None)
    assert reader(tree).find(BOTH).holders == {51: (holder,), 52: (holder,)}
    found = reader(tree).find((target(OTHER),))
    assert (found.holders, found.exhaustive) == ({52: (holder,)}, True)


def test_a_cdev_counts_for_its_group(tree: HostTree) -> None:
    tree.open_group(51, 4711, device=False)
    descriptors = tree.root / "proc/4711/fd"
    (descriptors / "9").symlink_to(tree.root / f"dev/vfio/devices/vfio{tree.vfio_number(OTHER.address)}")
    assert set(reader(tree).find(BOTH).holders) == {51, 52}


def test_an_open_device_without_a_group_makes_the_answer_inexhaustive(tree: HostTree) -> None:
    """A process that was handed a device's descriptor: /proc does not say of which device it is."""
    tree.open_group(52, 4711)
    (tree.root / "proc/4713/fd").mkdir(parents=True)
    (tree.root / "proc/4713/fd/5").symlink_to("anon_inode:[vfio-device]")
    found = reader(tree).find(BOTH)
    assert set(found.holders) == {52}
    assert not found.exhaustive


def test_some_pids_alone(tree: HostTree) -> None:
    tree.open_group(51, 4711)
    tree.open_group(52, 4712)
    found = reader(tree).find(BOTH, only=(4712, 4799))
    assert set(found.holders) == {52}
    assert not found.exhaustive


def thread(tree: HostTree, pid: int, tid: int, state: str) -> None:
    """A thread of a process, in that state."""
    directory = tree.root / f"proc/{pid}/task/{tid}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "stat").write_text(f"{tid} (CPU 0) (KVM)) {state} 1 1 1")


def take_descriptors(tree: HostTree, pid: int) -> None:
    """What the kernel does first with a process that ends."""
    for descriptor in (tree.root / f"proc/{pid}/fd").iterdir():
        descriptor.unlink()


@pytest.mark.parametrize(("leader", "other"), [("D", "S"), ("Z", "D"), ("Z", "R")])
def test_a_holder_that_is_ending_holds_what_it_held(tree: HostTree, leader: str, other: str) -> None:
    """Seen on a real kernel: no descriptor in /proc, and EBUSY for two seconds more."""
    tree.open_group(51, 4711)
    tree.open_group(52, 4712)
    before = reader(tree).find(BOTH).holders
    take_descriptors(tree, 4711)
    thread(tree, 4711, 4711, leader)
    thread(tree, 4711, 4721, other)
    assert reader(tree).find(BOTH, before=before).holders == before
    assert reader(tree).find((target(GPU),), only=(4711,), before=before).holders == {51: before[51]}
    assert set(reader(tree).find(BOTH).holders) == {52}, "what was not seen before cannot be known"


def test_a_holder_that_has_ended_or_let_go_or_is_another_process_now_holds_nothing(tree: HostTree) -> None:
    tree.open_group(51, 4711)
    before = reader(tree).find(BOTH).holders
    take_descriptors(tree, 4711)
    thread(tree, 4711, 4711, "Z")
    assert reader(tree).find(BOTH, before=before).holders == {}, "a zombie: everything is closed"
    thread(tree, 4711, 4711, "S")
    (tree.root / "proc/4711/fd/0").symlink_to("/dev/null")
    assert reader(tree).find(BOTH, before=before).holders == {}, "it lives, and has closed it"
    (tree.root / "proc/4711/fd/0").unlink()
    (tree.root / "proc/4711/comm").write_text("kworker/0:1\n")
    assert reader(tree).find(BOTH, before=before).holders == {}, "the number was given to another one"


def test_a_process_that_vanishes_is_skipped(tree: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of the three places: before its descriptors, between them, and before its name is read."""
    for pid, group in ((1, 51), (2, 52)):
        tree.open_group(group, pid)
    (tree.root / "proc/3").mkdir()
    assert set(reader(tree).find(BOTH).holders) == {51, 52}
    (tree.root / "proc/2/comm").unlink()
    found = reader(tree).find(BOTH)
    assert (set(found.holders), found.exhaustive) == ({51}, True)

    listing = os.listdir

    def one_more(path: str) -> list[str]:
        return ["99", *listing(path)]

    monkeypatch.setattr(os, "listdir", one_more)
    assert set(reader(tree).find(BOTH).holders) == {51}


def test_what_may_not_be_read_makes_the_answer_inexhaustive(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything here, so the refusal is played."""
    tree.open_group(51, 1)
    tree.open_group(52, 2)
    listing = os.listdir

    def refuse(path: str) -> list[str]:
        if path.endswith("/proc/2/fd"):
            raise PermissionError(13, "Permission denied", path)
        return listing(path)

    monkeypatch.setattr(os, "listdir", refuse)
    found = reader(tree).find(BOTH)
    assert (set(found.holders), found.exhaustive) == ({51}, False)


def test_without_proc_nothing_is_known(tree: HostTree) -> None:
    (tree.root / "proc").rmdir()
    found = reader(tree).find(BOTH)
    assert (found.holders, found.exhaustive) == ({}, False)


def test_our_own_process_is_no_holder(tree: HostTree) -> None:
    tree.open_group(51, 4711)
    tree.open_group(52, 4712)
    (tree.root / "proc/self").symlink_to("4711")
    assert set(reader(tree).find(BOTH).holders) == {52}


def test_a_pass_ends_early_when_it_is_told_to(tree: HostTree) -> None:
    tree.open_group(51, 4711)
    asked = iter((True, False))
    (tree.root / "proc/4712/fd").mkdir(parents=True)
    found = reader(tree).find(BOTH, go_on=lambda: next(asked))
    assert (found.holders, found.exhaustive) == ({}, False)


# --- cgroups ----------------------------------------------------------------------------------------------------

ESCAPED = UID.replace("-", "_")
SLICE = f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{ESCAPED}.slice"
STATIC = "d41d8cd98f00b204e9800998ecf8427e"


@pytest.mark.parametrize(
    ("cgroup", "uid"),
    [
        (f"0::{SLICE}/cri-containerd-abc.scope", UID),
        (f"0::{SLICE}/crio-abc.scope/container", UID),
        (f"0::/kubepods.slice/kubepods-pod{ESCAPED}.slice/cri-containerd-abc.scope", UID),
        (f"0::/../../kubepods-burstable-pod{ESCAPED}.slice/cri-containerd-abc.scope", UID),
        (f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{ESCAPED}.slice/x.scope", UID),
        (f"0::/kubepods/burstable/pod{UID}/abc", UID),
        (f"0::/kubepods/pod{STATIC}/abc", STATIC),
        (f"0::/kubepods.slice/kubepods-pod{STATIC}.slice/abc", STATIC),
        (f"12:pids:/\n11:devices:/kubepods/besteffort/pod{UID}/abc\n1:name=systemd:/init.scope", UID),
        (f"3:cpu,cpuacct:{SLICE}/cri-containerd-abc.scope", UID),
        (f"0::/kubepods/pod{STATIC}/abc/kubelet/kubepods/burstable/pod{UID}/def", UID),
        ("0::/user.slice/user-0.slice/session-1.scope", None),
        ("0::/machine.slice/libpod-4f5e.scope/container", None),
        ("0::/system.slice/podman.service", None),
        ("0::/", None),
        ("", None),
        ("garbage", None),
    ],
)
def test_the_pod_is_in_the_cgroup(cgroup: str, uid: str | None) -> None:
    assert pod_uid(cgroup + "\n") == uid


# --- nodes ------------------------------------------------------------------------------------------------------


def test_a_node_is_known_by_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    link = tmp_path / "link"
    link.symlink_to(plain)
    paths = (
        "/dev/null",
        "/dev/zero",
        str(plain),
        str(link),
        str(tmp_path),
        str(tmp_path / "none"),
        "/proc/self/fd/0",
    )
    found = [node_id(path) for path in paths]
    assert found[0] == (-1, os.stat("/dev/null").st_rdev)
    assert found[1] not in (None, found[0])
    assert found[2] == found[3] == (plain.stat().st_dev, plain.stat().st_ino)
    assert found[4:6] == [None, None]

    # An old C library has no statx.
    assert procfs._statx is not None
    monkeypatch.setattr(procfs, "_statx", None)
    assert [node_id(path) for path in paths] == found


# --- this machine's /proc ---------------------------------------------------------------------------------------


@contextmanager
def holding(path: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a file open, and is killed at the end."""
    program = f"import os, sys; os.open({path!r}, os.O_RDONLY); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        try:
            yield process
        finally:
            process.kill()


def stand_in(tmp_path: Path, device: str) -> ProcReader:
    """A host whose group 51 is a device of this machine, with this machine's /proc."""
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/51").symlink_to(device)
    (tmp_path / "proc").symlink_to("/proc")
    return ProcReader(HostRoot(str(tmp_path)))


def comm() -> str:
    return Path(sys.executable).name[:15]


def test_a_real_holder_is_found_and_gone_when_it_is_killed(tmp_path: Path) -> None:
    reader = stand_in(tmp_path, UNUSED)
    with holding(UNUSED) as process:
        (holder,) = reader.find((target(GPU),)).holders[51]
        assert (holder.pid, holder.command) == (process.pid, comm())
        assert holder.pod_uid == pod_uid(Path("/proc/self/cgroup").read_text())
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=PATIENCE_S)
        assert reader.find((target(GPU),)).holders == {}


@pytest.mark.skipif(
    os.geteuid() != 0, reason="of a process without its first thread only root may read /proc/PID/fd"
)
def test_a_real_holder_whose_first_thread_has_ended_holds_on(tmp_path: Path) -> None:
    """Then /proc/PID/fd is empty, although the other threads have everything open."""
    reader = stand_in(tmp_path, UNUSED)
    program = (
        f"import ctypes, os, sys, threading; os.open('{UNUSED}', os.O_RDONLY); print('open', flush=True)\n"
        "threading.Thread(target=threading.Event().wait).start(); sys.stdin.readline()\n"
        f"print('gone', flush=True); ctypes.CDLL(None).syscall({EXIT_THREAD}, 0)"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"open\n"
            before = reader.find((target(GPU),)).holders
            assert [h.pid for h in before[51]] == [process.pid]
            process.stdin.write(b"\n")
            process.stdin.flush()
            until = time.monotonic() + PATIENCE_S
            while os.listdir(f"/proc/{process.pid}/fd"):
                assert time.monotonic() < until
            assert reader.find((target(GPU),), before=before).holders == before
        finally:
            process.kill()
        process.wait(timeout=PATIENCE_S)
        assert reader.find((target(GPU),), before=before).holders == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="making a device node needs root")
def test_a_holder_by_another_inode_is_found(tmp_path: Path) -> None:
    """As in a container, which has nodes of its own."""
    own = tmp_path / "containers-own"
    try:
        os.mknod(own, stat.S_IFCHR | 0o600, os.stat(UNUSED).st_rdev)
        os.close(os.open(own, os.O_RDONLY))
    except PermissionError:
        pytest.skip("device nodes cannot be made or opened here")
    reader = stand_in(tmp_path, UNUSED)
    with holding(str(own)) as process:
        (holder,) = reader.find((target(GPU),)).holders[51]
        assert holder.pid == process.pid


@pytest.fixture
def deep() -> Iterator[Path]:
    """A directory that begins a chain whose path is longer than a link can tell."""
    directory = Path(tempfile.mkdtemp(prefix="deep-"))
    yield directory
    # Each one out of the last but one: as many levels have no path that a call takes.
    while (first := directory / "d").exists():
        rest = first / "d"
        if rest.exists():
            rest.rename(directory / "next")
        first.rmdir()
        if (directory / "next").exists():
            (directory / "next").rename(first)
    directory.rmdir()


def test_a_file_of_anyone_whose_path_is_too_long_blinds_nobody(deep: Path, tmp_path: Path) -> None:
    """The kernel has no link for a path of more than a page (proc_pid_readlink: ENAMETOOLONG)."""
    reader = stand_in(tmp_path, UNUSED)
    program = (
        "import os, sys\n"
        "for _ in range(2500): os.mkdir('d'); os.chdir('d')\n"
        f"os.open('.', os.O_RDONLY); os.open('{UNUSED}', os.O_RDONLY); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], cwd=deep, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"open\n"
            (holder,) = reader.find((target(GPU),)).holders[51]
            assert holder.pid == process.pid
        finally:
            process.kill()


DAC_READ_SEARCH, SYS_PTRACE = "dac_read_search", "sys_ptrace"

SEES = """
import sys
from gpuactors.core.values.model import PciAddress
from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.host.procfs import ProcReader
from gpuactors.host.root import HostRoot
found = ProcReader(HostRoot(sys.argv[1])).find((PollTarget(51, (PciAddress(sys.argv[2]),), may_open=False),))
print(*(holder.pid for holder in found.holders.get(51, ())), found.exhaustive)
"""


def setpriv(*capabilities: str, user: int = 0) -> tuple[str, ...]:
    """The beginning of a command that shall run with these capabilities only. Skips the test where we lack them."""
    effective = int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16)
    wanted = (
        1 << 2 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 19
    )  # and CAP_SETGID, CAP_SETUID, CAP_SETPCAP (linux/capability.h)
    if effective & wanted != wanted or shutil.which("setpriv") is None:
        pytest.skip("needs root's capabilities and setpriv")
    these = ",".join(("-all", *(f"+{name}" for name in capabilities)))
    as_user = ("--reuid", str(user), "--regid", str(user), "--clear-groups") if user else ()
    return "setpriv", f"--bounding-set={these}", f"--inh-caps={these}", *as_user


@pytest.mark.parametrize(
    ("capabilities", "seen"),
    [((), False), ((DAC_READ_SEARCH,), False), ((SYS_PTRACE,), False), ((DAC_READ_SEARCH, SYS_PTRACE), True)],
)
def test_another_users_process_is_seen_with_two_capabilities(
    tmp_path: Path, capabilities: tuple[str, ...], seen: bool
) -> None:
    """By root, who has no others: what the help, the README and the manifests say. Without them nobody is not said."""
    stand_in(tmp_path, UNUSED)
    hold = (*setpriv(user=65534), "sh", "-c", f"exec 3<{UNUSED}; echo open; exec sleep 60")
    with subprocess.Popen(hold, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"open\n"
            inspection = (*setpriv(*capabilities), sys.executable, "-c", SEES, str(tmp_path), GPU.address)
            told = subprocess.run(
                inspection, check=True, capture_output=True, text=True, timeout=PATIENCE_S
            ).stdout.split()
        finally:
            process.kill()
    assert (str(process.pid) in told[:-1]) is seen
    if not seen:
        assert told == ["False"]


def test_we_are_not_found_ourselves(tmp_path: Path) -> None:
    reader = stand_in(tmp_path, UNUSED)
    descriptor = os.open(UNUSED, os.O_RDONLY)
    try:
        assert reader.find((target(GPU),)).holders == {}
        with holding(UNUSED) as process:
            assert [h.pid for h in reader.find((target(GPU),)).holders[51]] == [process.pid]
    finally:
        os.close(descriptor)


def test_holders_come_in_the_order_of_their_pids(tree: HostTree) -> None:
    """A group opens once, but forked processes share the descriptor."""
    tree.open_group(51, 20)
    tree.open_group(52, 3)
    (tree.root / "proc/3/fd/9").symlink_to(tree.root / "dev/vfio/51")
    holders = reader(tree).find((replace(target(GPU)),)).holders
    assert [h.pid for h in holders[51]] == [3, 20]
