"""`./do node`: brings a real Kubernetes node up, runs the tests of this folder on it, and takes it down again.

With `--lanes N` it brings up N nodes, which share the tests; with `--nodes N` one cluster of N nodes, for the scenarios
of `several/`. Needs root, for namespaces, mounts and cgroups. Everything
of a node is in namespaces and cgroups of its own, and gone afterwards, whatever happens: processes, mounts, namespaces,
cgroups. What a run that was killed has left is removed by the next one.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.deploy.tools import provide
from tests.node.lane import (
    IMAGES_IN_MEMORY,
    LANE_VARIABLE,
    MOST_LANES,
    MOST_WORKERS,
    OWN_DIRECTORIES,
    EndedError,
    Lane,
    NoProgramsError,
    Signals,
    end,
    kits_cgroups,
    lanes,
    play_script,
    sysctl_values,
    wait,
)  # fmt: skip
from tests.node.nvidia.programs import missing
from tests.release.image import SCRATCH_PREFIX, have_image
from tests.vm.commands import ProvisionError, need_root

CHECKOUT: Final = Path(__file__).resolve().parents[2]
DIRECTORY: Final = CHECKOUT / "var" / "node"
KIT_VARIABLE: Final = "GPUACTORS_NODE_KIT"
DEFAULT_KIT: Final = CHECKOUT.parent / "shared" / "node"
IMAGE_VARIABLE: Final = "TEST_NODE_IMAGE"

BINARIES: Final = (
    "etcd", "etcdctl", "containerd", "containerd-shim-runc-v2", "ctr", "runc", "kube-apiserver",
    "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl",
)  # fmt: skip
"""What the kit's install.sh unpacks into DIR/bin, by the names of the files of their releases."""

SETS: Final = ("A", "B")
"""A: Kubernetes' default gates. B: with those of DRA that are off by default (tests/node/versions.py)."""

RUNTIME_CONFIG: Final = {"A": "", "B": "resource.k8s.io/v1beta2=true"}
"""What the API server of a set serves besides its defaults: DeviceTaintRules as 1.36 has them. The kit adds what 1.35
needs for them. Where they are on and not served, controller manager and scheduler wait for them for ever."""

FAILED: Final = "failed.txt"
"""In DIRECTORY: the scenarios that have failed in the last run of pytest, a line each."""

GATES: Final = "TEST_NODE_SET"
"""Tells pytest the gates of the nodes: the one that hands the tests out runs in none of them."""

NO_DOMAINS: Final = "TEST_NODE_NO_DOMAINS"
"""Tells pytest that NVIDIA's controller and daemon of compute domains are not there."""

RELEASES: Final = "TEST_NODE_RELEASES"
"""Tells pytest the releases of Kubernetes' programs, for its table."""

NO_PLUGINS: Final = "TEST_NODE_NO_PLUGINS"
"""Tells pytest that NVIDIA's kubelet plugins are not there."""

AGAIN: Final = "TEST_NODE_AGAIN"
"""Set where scenarios are played once more: what their table's file is called."""

NODES: Final = "TEST_NODE_NODES"
"""Tells pytest how many nodes the cluster has; only the scenarios of `several/` are played then."""

SEVERAL: Final = "tests/node/several"

RED: Final = 1
"""Pytest's exit code where a test has failed."""


def kit_directory() -> Path | None:
    """Where the kit is, if there is one."""
    kit = Path(os.environ.get(KIT_VARIABLE) or DEFAULT_KIT)
    return kit if (kit / "install.sh").is_file() else None


def no_kit() -> str:
    """What to do without a kit, in one sentence."""
    where = os.environ.get(KIT_VARIABLE) or DEFAULT_KIT
    return (
        f"there is no node kit at {where}: set {KIT_VARIABLE} to a directory with "
        f"install.sh, up.sh, in.sh and down.sh (tests/node/README.md) whose install.sh DIR puts {', '.join(BINARIES)} "
        "of a Kubernetes, etcd, containerd and runc release into DIR/bin, and the CNI plugins bridge, host-local and "
        "loopback into DIR/cni/bin."
    )


def main(arguments: Sequence[str]) -> int:
    """Exit code of the tests; 69 where they cannot run here, or 0 with `--if-possible`."""
    parser = argparse.ArgumentParser(prog="./do node", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", choices=SETS, action="append", dest="sets", help="only with these gates")
    parser.add_argument("--keep", action="store_true", help="leave the node running, for a look at it")
    parser.add_argument(
        "--lanes",
        type=int,
        choices=range(1, MOST_LANES + 1),
        default=1,
        help="nodes side by side that share the tests",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        choices=range(2, MOST_WORKERS + 1),
        help="one cluster of so many nodes, and the scenarios of several nodes (one more joins in one of them)",
    )
    parser.add_argument(
        "--if-possible", action="store_true", help="without the kit or the programs of others: a line, and 0"
    )
    options, words = parser.parse_known_args(arguments)
    if options.nodes and options.lanes > 1:
        parser.error("a cluster of several nodes is in one lane")
    try:
        where = lanes(options.lanes, DIRECTORY)
    except ValueError as error:
        parser.error(str(error))
    return on_lanes(
        "./do node", where, lambda run: run.play(options.sets or (SETS if options.nodes is None else SETS[:1]), words),
        nodes=options.nodes or 1, keep=options.keep, if_possible=options.if_possible,
    )  # fmt: skip


def on_lanes(
    command: str, where: Sequence[Lane], play: Callable[[Run], int], *, nodes: int = 1, keep: bool = False,
    if_possible: bool = False,
) -> int:  # fmt: skip
    """Plays something on nodes that nobody else has meanwhile: its exit code; 69 where that cannot be here, or 0 with
    `if_possible`; 130 where a signal has ended it."""
    kit = kit_directory()
    if kit is None:
        return _not_played(command, no_kit(), is_failure=not if_possible)
    signals = Signals()
    signals.install()
    try:
        need_root(command)
        with _alone(where):
            _end_killed(where)
            return play(Run(kit, where, signals, nodes=nodes, keep=keep))
    except NoProgramsError as error:
        return _not_played(command, str(error), is_failure=not if_possible)
    except ProvisionError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return os.EX_UNAVAILABLE
    except EndedError:
        return 130


def _not_played(command: str, why: str, *, is_failure: bool) -> int:
    """Says in one line that nothing was played: the exit code."""
    print(f"{command}: no scenario was played: {why}", file=sys.stderr)
    return os.EX_UNAVAILABLE if is_failure else 0


class Run:
    """One run on these nodes: what holds for all of its sets."""

    def __init__(self, kit: Path, where: Sequence[Lane], signals: Signals, *, nodes: int, keep: bool) -> None:
        self._kit = kit
        self._lanes = where
        self._workers = where[0].workers[:nodes] if nodes > 1 else ()
        """One more than there are at first."""
        self.signals = signals
        self._keep = keep
        self.environment = {n: value for n, value in os.environ.items() if not n.startswith("GPUACTORS_")}
        """Of all that is started in the nodes."""

    def play(self, sets: Sequence[str], words: Sequence[str]) -> int:
        """The exit code of the tests, with the gates of each set."""
        began = time.monotonic()
        self.install()
        if self._workers:
            self.environment[NODES] = str(len(self._workers))
        every = SEVERAL if self._workers else "tests/node"
        chosen = () if any(word.startswith("tests/node") for word in words) else (every,)
        status = 0
        for gates in sets:
            with self.up(gates):
                code = self._pytest(self._lanes, (*chosen, *words))
            if code == RED and os.environ.get("CI") and (failed := sorted(_failed())):
                # Kubelet tries some things again after 90 s, and a machine of CI may be busy: what fails twice
                # is wrong. By name, kinds before rights: for 5 minutes kubelet counts what an ended plugin had.
                print(f"./do node: failed, once more on a fresh node: {', '.join(failed)}", flush=True)
                with self._up(self._lanes[:1], gates, keep=False):
                    code = self._pytest(self._lanes[:1], failed, {AGAIN: "-again"})
            # 5: no test of this set was chosen.
            status = status or (0 if code == 5 and words else code)
        print(f"./do node: {time.monotonic() - began:.0f} s", flush=True)
        return status

    def install(self) -> None:
        """Kit and image. Raises NoProgramsError, ProvisionError."""
        began = time.monotonic()
        for lane in (*self._lanes, *self._workers):
            if no_domains := lane.install(self._kit, self._lanes[0]):
                self.environment[NO_DOMAINS] = "yes"
        if no_domains:
            print(f"./do node: no scenario of compute domains is played: {no_domains}", flush=True)
        if no_plugins := missing():
            self.environment[NO_PLUGINS] = "yes"
            print(f"./do node: no scenario with NVIDIA's own plugins is played: {no_plugins}", flush=True)
        provide()
        layout = Path(os.environ.get(IMAGE_VARIABLE) or have_image().layout)
        self.environment |= {IMAGE_VARIABLE: str(layout), "PYTHONDONTWRITEBYTECODE": "1"}
        print(f"./do node: kit and image are there after {time.monotonic() - began:.0f} s", flush=True)
        self.signals.at_once = False

    @contextmanager
    def up(self, gates: str) -> Iterator[None]:
        """The nodes with the gates of a set, as `_up`."""
        self.environment |= {GATES: gates, "K8S_RUNTIME_CONFIG": RUNTIME_CONFIG[gates]}
        with self._up(self._lanes, gates, keep=self._keep):
            yield

    @contextmanager
    def _up(self, where: Sequence[Lane], gates: str, *, keep: bool) -> Iterator[None]:
        """The nodes, up. Taken down with all their state, and checked for what they have left."""
        mounts, every = _mounts(), (*where, *self._workers)
        releases = where[0].releases()
        self.environment |= {RELEASES: releases}
        with _own_directories(), kits_cgroups():
            try:
                end(every, self.environment)  # what a killed run has left
                began = time.monotonic()
                self._start(where, gates)
                up = len(where) + len(self._workers[:-1])
                print(
                    f"./do node: {up} up with set {gates} after {time.monotonic() - began:.1f} s: {releases}",
                    flush=True,
                )
                yield
                processor_s = sum(lane.processor_s() for lane in every)
                print(
                    f"./do node: set {gates} took {time.monotonic() - began:.0f} s, and {processor_s:.0f} s of "
                    f"processor time; load {os.getloadavg()[1]:.1f}",
                    flush=True,
                )
            finally:
                if keep:
                    for lane in every:
                        print(
                            f"./do node: the node runs on; {lane.program} bash enters it, "
                            f"{lane.directory}/down.sh --wipe ends it"
                        )
                else:
                    end(every, self.environment)
                    _check_nothing_is_left(every, mounts)

    def _start(self, where: Sequence[Lane], gates: str) -> None:
        sysctls, every = sysctl_values(), (*where, *self._workers)
        for lane in every:
            lane.prepare()
            lane.keep_sysctls(sysctls)
        # The namespaces are made by it, too: that of a node that joins later would else be a copy of the first one's.
        play_script(every, IMAGES_IN_MEMORY, self.environment, self.signals)
        play_script(where, ("up.sh", "--set", gates), self.environment, self.signals)
        joining = self._workers[:-1]
        play_script(joining, ("join.sh",), {**self.environment, "K8S_SET": gates}, self.signals)

    def program(self, *words: str) -> subprocess.Popen[str]:
        """Starts a module of Python in the first node: `program("tests.soak.day", "--seed", "7")`."""
        first = self._lanes[0]
        return first.start((str(first.program), sys.executable, "-m", *words), self.environment)

    def _pytest(
        self, where: Sequence[Lane], words: Sequence[str], more: Mapping[str, str] | None = None
    ) -> int:
        """The exit code of the tests. Of one node, pytest runs in it; otherwise it has a worker in each."""
        first = where[0]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        if len(where) == 1:
            command = [str(first.program), *command]
        else:
            command += ["--dist", "worksteal"]
            for lane in where:
                command += ["--tx", f"popen//python={shlex.join((str(lane.program), sys.executable))}"]
        environment = {**self.environment, **(more or {})}
        return wait(first.start((*command, *words), environment), None, self.signals)


def _failed() -> list[str]:
    """The scenarios that have failed in the last run of pytest."""
    return (DIRECTORY / FAILED).read_text().splitlines()


@contextmanager
def _own_directories() -> Iterator[None]:
    """Directories that nodes mount file systems at. Those that are made for them are removed again."""
    made: list[Path] = []
    for path in map(Path, OWN_DIRECTORIES):
        made += [parent for parent in (path, *path.parents) if not parent.exists()]
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        # The mounts of another run on this machine would go with them.
        for directory in made if LANE_VARIABLE not in os.environ else ():
            directory.rmdir()


def _check_nothing_is_left(where: Sequence[Lane], mounts_before: frozenset[str]) -> None:
    """Raises ProvisionError that names a process, mount or cgroup of the nodes."""
    left = [f"mount {mount}" for mount in sorted(_mounts() - mounts_before)]
    for lane in where:
        left += lane.left_behind()
    if left:
        raise ProvisionError("the node has left something behind: " + ", ".join(left))


def _mounts() -> frozenset[str]:
    """All of the machine, but for those of another run that builds its image."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return frozenset(mount for line in lines if SCRATCH_PREFIX not in (mount := line.split()[4]))


@contextmanager
def _alone(where: Sequence[Lane]) -> Iterator[None]:
    """One run at a time in each lane of this machine."""
    with ExitStack() as stack:
        for lane in where:
            lock = stack.enter_context(_lock(lane).open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("./do node: waiting for another run to end", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _end_killed(where: Sequence[Lane]) -> None:
    """Ends what a killed run has left in the lanes that this run does not use, and of nodes that were added to a lane:
    it may have had more of them."""
    for lane in where:
        end([worker for worker in lane.workers if worker.is_there()], os.environ)
    for lane in lanes(MOST_LANES - where[0].number, DIRECTORY)[len(where) :]:
        with _lock(lane).open("w") as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end([one for one in (lane, *lane.workers) if one.is_there()], os.environ)


def _lock(lane: Lane) -> Path:
    return Path(tempfile.gettempdir()) / f"gpuactors-node-{lane.number}.lock"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
