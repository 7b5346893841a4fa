"""A lane: one of the nodes that run side by side on this machine, with a directory, namespaces and cgroups of its own.

Each process of a lane is in its cgroup from its first instruction, and so is all that it starts. So a lane is ended by
ending what is in its cgroup, whoever started it, and whether or not the run that did so is still there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, final

from tests.support.patience import patient
from tests.vm.commands import FailedError, ProvisionError, run

CGROUPS: Final = Path("/sys/fs/cgroup")
LANE_VARIABLE: Final = "TEST_NODE_LANE"
DIRECTORY_VARIABLE: Final = "TEST_NODE_DIRECTORY"

MOST_LANES: Final = 4
"""As many kinds of device nodes as there are for groups (real_tenants.py)."""

DRIVERS_ROOTS: Final = "/run/nvidia"
"""Where a driver that runs in a container mounts its root."""

OWN_DIRECTORIES: Final = (
    "/var/lib/gpuactors",
    "/run/nvidia-persistenced",
    "/etc/kubernetes/node-feature-discovery/features.d",
    "/lib/modules",
    DRIVERS_ROOTS,
)
"""Of the machine; each node has a file system of its own there, which is empty at first."""

LINKED: Final = (
    "bin", "cni", ".installed", os.path.join("domains", "root", "bin"),
    "domains/1.tar", "domains/bare.tar", "domains/.installed",
)  # fmt: skip
"""What a kit's install.sh unpacks, and nobody writes to."""

PROGRAMS: Final = ("kubelet", "kube-apiserver", "kube-scheduler", "kube-controller-manager")
"""Kubernetes' own: of one release, or of those that may run beside each other."""

MOST_WORKERS: Final = 3
"""Nodes that can be added to a lane's own."""

STATUS_INTERVAL: Final = "--node-status-update-frequency=1s"
"""Ten times as often as by default: most waits of these tests are for the node's status."""

_CGROUP: Final = "gpuactors-node-"
"""Begins the name of a lane's cgroup."""

KITS_CGROUPS: Final = "k8s-[0-9]"
"""Of the kit's cgroups.sh, in each hierarchy."""

SYSCTLS: Final = (
    "vm.overcommit_memory", "vm.panic_on_oom", "kernel.panic", "kernel.panic_on_oops", "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
)  # fmt: skip
"""What kubelet sets on the whole machine. The kit's down.sh restores what `run/sysctls` says, and its up.sh writes that
file unless there is one: in one lane it could come to read what kubelet of another has set."""

_PROC_SYS: Final = Path("/proc/sys")

SCRIPT_S: Final = 180.0
"""For one of the kit's scripts. The first start reads 800 MB."""

END_S: Final = 20.0
"""From SIGKILL to the end of the last process, and of its cgroup."""

_POLL_S: Final = 0.05

IMAGES_IN_MEMORY: Final = (
    "in.sh",
    "sh",
    "-ec",
    'd=$K8S_DIR/data/containerd; mkdir -p "$d"; mount -t tmpfs images "$d"',
)
"""What is unpacked of images is 500 MB, which it takes ten seconds to remove from a disk."""

_IN_CGROUP: Final = 'echo $$ >"$0" && exec "$@"'
"""For `sh -c`, with the cgroup's file of processes, then the command."""


class NoProgramsError(ProvisionError):
    """The kit takes programs of others from elsewhere, and they are not there. The text is the kit's sentence."""


class EndedError(BaseException):
    """A signal has asked for the end."""


@final
class Signals:
    """Which of SIGINT, SIGTERM and SIGHUP has come. It is an exception only where something is waited for: nothing
    that is being taken down is interrupted."""

    def __init__(self) -> None:
        self.asked = False
        self.at_once = True
        """A signal is an exception wherever it comes: while there is no node yet."""

    def install(self) -> None:
        """Takes the three signals. Not by ignoring or blocking them: programs that are started would inherit that."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._came())

    def _came(self) -> None:
        self.asked = True
        if self.at_once:
            raise EndedError

    def check(self) -> None:
        """Raises EndedError if one has come."""
        if self.asked:
            raise EndedError


@dataclass(frozen=True, slots=True)
class Lane:
    """One of the nodes."""

    number: int
    directory: Path
    """Where the kit is installed for it."""
    worker: int = 0
    """Which of the nodes that are added to the lane's own one; 0: that one, with the control plane."""

    @property
    def workers(self) -> tuple[Lane, ...]:
        """The nodes that can be added. GPUs of all of them share the lane's kind of device nodes."""
        name = self.directory.name
        return tuple(
            Lane(self.number, self.directory.with_name(f"{name}-worker-{worker}"), worker)
            for worker in range(1, MOST_WORKERS + 1)
        )

    @property
    def cgroup(self) -> str:
        """Its name in each hierarchy, and kubelet's --cgroup-root: another kubelet on this machine ends the processes
        of pods that it does not know."""
        return f"{_CGROUP}{zlib.crc32(str(self.directory).encode()):08x}"

    @property
    def program(self) -> Path:
        """`PROGRAM COMMAND…` runs a command in the lane: in its cgroup and namespaces, with its variables."""
        return self.directory / "in-lane.sh"

    @property
    def join(self) -> Path:
        """The program that adds a worker's node to the cluster, which is up. In the worker's cgroup: `start`."""
        return self.directory / "join.sh"

    def variables(self) -> dict[str, str]:
        """What the kit's scripts and the scenarios are told of the lane."""
        kubelets = f"{STATUS_INTERVAL} --cgroup-root=/{self.cgroup}"
        # Of a worker the kit has arguments of its own, and puts these after them.
        name = "K8S_WORKER_KUBELET_ARGS" if self.worker else "K8S_KUBELET_ARGS"
        return {LANE_VARIABLE: str(self.number), name: kubelets}

    # --- before it is up ----------------------------------------------------------------------------------------------

    def install(self, kit: Path, like: Lane) -> str:
        """Puts the kit into the directory. What `like` has unpacked is linked. Returns why there are no compute
        domains, or nothing. Raises NoProgramsError, ProvisionError."""
        if self != like:
            for name in LINKED:
                _link(like.directory / name, self.directory / name)
        install(kit, self.directory)
        no_domains = ""
        try:
            install(kit / "domains", self.directory)
        except NoProgramsError as error:
            no_domains = str(error)
        variables = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in self.variables().items()
        )
        directory = shlex.quote(str(self.directory))
        self.program.write_text(
            f"#!/bin/sh\necho $$ >{self._own_processes()} || exit\n{variables}unset K8S_INSIDE\n"
            f'exec {directory}/in.sh bash -c \'. "$0/env.sh"; exec "$@"\' {directory} "$@"\n'
        )
        self.program.chmod(0o755)
        if self.worker:
            words = (like.directory / "worker.sh", like.directory, self.directory, self.worker)
            self.join.write_text(f"#!/bin/sh\nunset K8S_INSIDE\nexec {shlex.join(map(str, words))}\n")
            self.join.chmod(0o755)
        return no_domains

    def prepare(self) -> None:
        """Makes the cgroups, in each hierarchy of version 1 or the one of version 2: kubelet makes none of its root."""
        for hierarchy in _hierarchies():
            cgroup = hierarchy / self.cgroup
            cgroup.mkdir(exist_ok=True)
            # Empty at first in version 1, and nothing runs with that.
            for setting in ("cpuset.cpus", "cpuset.mems"):
                if (cgroup / setting).is_file() and not (cgroup / setting).read_text().strip():
                    (cgroup / setting).write_text((hierarchy / setting).read_text())
        self._own_processes().parent.mkdir(exist_ok=True)

    def releases(self) -> str:
        """What Kubernetes' programs say of themselves: `kubelet, kube-apiserver v1.36.2`, or two releases; empty where
        a kit has other ones."""
        found: dict[str, list[str]] = {}
        for name in PROGRAMS:
            with suppress(OSError):
                said = subprocess.run(
                    (self.directory / "bin" / name, "--version"), capture_output=True, text=True, check=False
                )
                found.setdefault(said.stdout.strip().rpartition(" ")[2], []).append(name)
        return "; ".join(f"{', '.join(names)} {release}" for release, names in found.items())

    def _own_processes(self) -> Path:
        """The processes that are none of a pod's. In version 2 a cgroup with children has no processes of its own."""
        return _accounts() / self.cgroup / "own" / "cgroup.procs"

    def processor_s(self) -> float:
        """The processor time of everything that has run in the lane since `prepare`."""
        cgroup = _accounts() / self.cgroup
        with suppress(OSError):  # version 1
            return int((cgroup / "cpuacct.usage").read_text()) / 1e9
        usage = dict(line.split() for line in (cgroup / "cpu.stat").read_text().splitlines())
        return int(usage["usage_usec"]) / 1e6

    # --- its programs -------------------------------------------------------------------------------------------------

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts a command in the cgroup. It is in a session of its own: Ctrl-C is for `./do node`, which ends it."""
        return subprocess.Popen(
            ("sh", "-c", _IN_CGROUP, str(self._own_processes()), *command), stdin=subprocess.DEVNULL, stdout=output,
            stderr=None if output is None else subprocess.STDOUT, text=True, start_new_session=True,
            env={**environment, **self.variables()},
        )  # fmt: skip

    # --- its end ------------------------------------------------------------------------------------------------------

    def is_there(self) -> bool:
        """It has not been ended."""
        return any((hierarchy / self.cgroup).exists() for hierarchy in _hierarchies())

    def keep_sysctls(self, values: str) -> None:
        """Says what the sysctls are to be once the lane has ended."""
        (self.directory / "run").mkdir(exist_ok=True)
        (self.directory / "run" / "sysctls").write_text(values)

    def _processes(self) -> frozenset[str]:
        cgroups = [hierarchy / self.cgroup for hierarchy in _hierarchies()]
        return frozenset(process for cgroup in cgroups for process, _ in processes_below(cgroup))

    def kill(self) -> None:
        """Ends every process, and the namespaces and mounts with them. Raises ProvisionError if one does not end."""
        deadline = time.monotonic() + patient(END_S)
        while processes := self._processes():
            if time.monotonic() > deadline:
                raise ProvisionError(f"processes of {self.cgroup} do not end: {', '.join(sorted(processes))}")
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            time.sleep(_POLL_S)

    def remove_cgroups(self) -> None:
        """Removes them from each hierarchy. What does not go is said by `left_behind`."""
        deadline = time.monotonic() + patient(END_S)
        for hierarchy in _hierarchies():
            for directory, _, _ in os.walk(hierarchy / self.cgroup, topdown=False):
                # A process that has just ended still counts for a moment.
                while not _removed(directory) and time.monotonic() < deadline:
                    time.sleep(_POLL_S)

    def left_behind(self) -> list[str]:
        """Processes and cgroups that are still there. Namespaces end with their last process."""
        found = [f"cgroup {cgroup}" for cgroup in CGROUPS.glob(f"**/{self.cgroup}")]
        for name in (entry for entry in os.listdir("/proc") if entry.isdigit()):
            try:
                program = os.readlink(f"/proc/{name}/exe")
            except OSError:
                continue
            if program.startswith(f"{self.directory}/"):
                found.append(f"process {name} ({program})")
        return found


def install(kit: Path, directory: Path) -> None:
    """Plays a kit's install.sh. Raises NoProgramsError where it, or a program that it takes from elsewhere, is missing,
    and ProvisionError."""
    script = kit / "install.sh"
    if not script.is_file():
        raise NoProgramsError(f"{script} is missing")
    try:
        run(("bash", str(script), str(directory)))
    except FailedError as error:
        if error.status == os.EX_UNAVAILABLE:
            raise NoProgramsError(error.words) from None
        raise


def sysctl_values() -> str:
    """What `SYSCTLS` are now, as `sysctl -p` reads it; those that this kernel has."""
    paths = {name: _PROC_SYS / name.replace(".", "/") for name in SYSCTLS}
    return "".join(f"{name} = {path.read_text().strip()}\n" for name, path in paths.items() if path.exists())


def end(where: Sequence[Lane], environment: Mapping[str, str]) -> None:
    """Ends the lanes, and removes all state: of this run, or of one that was killed. Raises ProvisionError."""
    for lane in where:
        lane.kill()
    if installed := [lane for lane in where if (lane.directory / "down.sh").is_file()]:
        for lane in installed:
            lane.prepare()
        play_script(installed, ("down.sh", "--wipe"), environment)
    for lane in where:
        lane.kill()  # what down.sh has started
        lane.remove_cgroups()


@contextmanager
def kits_cgroups() -> Iterator[None]:
    """The kit makes cgroups for kubelets whenever a node is added, and nobody here uses them: those that were not there
    before are removed at the end, unless another user of the kit has something in them."""
    before = set(_of_kit())
    try:
        yield
    finally:
        for cgroup in set(_of_kit()) - before:
            _removed(str(cgroup))


def _of_kit() -> Iterator[Path]:
    for hierarchy in _hierarchies():
        yield from hierarchy.glob(KITS_CGROUPS)


def lanes(count: int, directory: Path) -> tuple[Lane, ...]:
    """So many, from that on which `TEST_NODE_LANE` says. Raises ValueError if there are not so many."""
    first = int(os.environ.get(LANE_VARIABLE) or 0)
    if first + count > MOST_LANES:
        raise ValueError(f"there are {MOST_LANES} lanes, 0 to {MOST_LANES - 1}")
    base = Path(os.environ.get(DIRECTORY_VARIABLE) or directory / "kit")
    return tuple(
        Lane(first + index, base if index == 0 else base.with_name(f"{base.name}-{index}"))
        for index in range(count)
    )


def play_script(
    where: Sequence[Lane],
    words: Sequence[str],
    environment: Mapping[str, str],
    signals: Signals | None = None,
) -> list[str]:
    """One of the kit's scripts in several lanes at once: what it said in each. Raises ProvisionError if it fails in
    one, or takes too long, and EndedError if one of `signals` comes."""
    with tempfile.TemporaryDirectory(prefix="node-") as scratch:
        files = [Path(scratch) / str(index) for index in range(len(where))]
        processes: list[subprocess.Popen[str]] = []
        for lane, file in zip(where, files, strict=True):
            with file.open("w") as output:
                processes.append(
                    lane.start((f"{lane.directory}/{words[0]}", *words[1:]), environment, output)
                )
        for process in processes:
            try:
                wait(process, patient(SCRIPT_S), signals)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        said = [file.read_text().strip() for file in files]
    for lane, process, text in zip(where, processes, said, strict=True):
        if process.returncode != 0:
            raise ProvisionError(f"{' '.join(words)} failed in {lane.directory}:\n{text}")
    return said


def wait(process: subprocess.Popen[str], within_s: float | None, signals: Signals | None) -> int:
    """Its exit code. Raises EndedError if a signal comes first, and TimeoutExpired."""
    deadline = None if within_s is None else time.monotonic() + within_s
    while True:
        if signals is not None:
            signals.check()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=_POLL_S)
        if deadline is not None and time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, within_s or 0)


def own_cgroup() -> Path:
    """Where the cgroup of the lane is that this process runs in; those of the node's pods are below it."""
    name = re.search(f"{_CGROUP}[0-9a-f]{{8}}", Path("/proc/self/cgroup").read_text())
    assert name is not None, "this process is in no lane"
    return _accounts() / name[0]


def processes_below(cgroup: Path) -> Iterator[tuple[str, str]]:
    """The processes of a cgroup and of those below it, each with the directory of the one that it is in."""
    for directory, _, _ in os.walk(cgroup):
        processes = ""
        with suppress(OSError):  # it was removed, or is one of threads
            processes = Path(directory, "cgroup.procs").read_text()
        yield from ((process, directory) for process in processes.split())


def _hierarchies() -> list[Path]:
    if (CGROUPS / "cgroup.controllers").is_file():
        return [CGROUPS]
    return sorted(path for path in CGROUPS.iterdir() if (path / "cgroup.procs").is_file())


def _accounts() -> Path:
    """The hierarchy that all processes of a lane are in, by which processor time is counted."""
    return next((path for path in _hierarchies() if path.name == "cpuacct"), _hierarchies()[0])


def _removed(directory: str) -> bool:
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _link(source: Path, target: Path) -> None:
    """The same file or files at a second path, in place of what is there."""
    shutil.rmtree(target, ignore_errors=True)
    target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link, symlinks=True)
    elif source.is_file():
        os.link(source, target)
