"""`./do node`: brings a real Kubernetes node up, runs the tests of this folder on it, and takes it down again.

Needs root, for namespaces, mounts and cgroups. Everything of the node is in namespaces of its own, and gone afterwards,
whatever happens: processes, mounts, namespaces, cgroups.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from tests.deploy.tools import provide
from tests.release.image import have_image
from tests.vm.commands import ProvisionError, need_root, run

CHECKOUT: Final = Path(__file__).resolve().parents[2]
DIRECTORY: Final = CHECKOUT / "var" / "node"
CGROUPS: Final = Path("/sys/fs/cgroup")
KIT_VARIABLE: Final = "GPUACTORS_NODE_KIT"
DEFAULT_KIT: Final = CHECKOUT.parent / "shared" / "node"
IMAGE_VARIABLE: Final = "TEST_NODE_IMAGE"

BINARIES: Final = (
    "etcd", "etcdctl", "containerd", "containerd-shim-runc-v2", "ctr", "runc", "kube-apiserver",
    "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl",
)  # fmt: skip
"""What the kit's install.sh unpacks into DIR/bin, by the names of the files of their releases."""

SETS: Final = ("A", "B")
"""A: Kubernetes' default gates. B: with those of DRA that are off by default in 1.35."""

FAILED: Final = "failed.txt"
"""In DIRECTORY: the scenarios that have failed in the last run of pytest, a line each."""

AGAIN: Final = "TEST_NODE_AGAIN"
"""Set where scenarios are played once more: what their table's file is called."""

LOCK: Final = Path(tempfile.gettempdir()) / f"gpuactors-node-{os.environ.get('TEST_NODE_LANE', '0')}.lock"
FIRST_START_S: Final = 180.0
RED: Final = 1
"""Pytest's exit code where a test has failed."""

STATUS_INTERVAL: Final = "--node-status-update-frequency=1s"
"""Ten times as often as by default: most waits of these tests are for the node's status."""


class _EndedError(BaseException):
    """A signal has asked for the end."""


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
    """Exit code of the tests; 69 where they cannot run here."""
    parser = argparse.ArgumentParser(prog="./do node", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", choices=SETS, action="append", dest="sets", help="only with these gates")
    parser.add_argument("--keep", action="store_true", help="leave the node running, for a look at it")
    options, words = parser.parse_known_args(arguments)
    kit = kit_directory()
    if kit is None:
        print(f"./do node: {no_kit()}", file=sys.stderr)
        # Where everything has to run, what cannot is a failure.
        return 69 if os.environ.get("CI") else 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        need_root("./do node")
        with _alone():
            return _tests(kit, options.sets or SETS, words, keep=options.keep)
    except ProvisionError as error:
        print(f"./do node: {error}", file=sys.stderr)
        return 69
    except (KeyboardInterrupt, _EndedError):
        return 130


def _end(number: int, frame: FrameType | None) -> None:
    raise _EndedError


def _tests(kit: Path, sets: Sequence[str], words: Sequence[str], *, keep: bool) -> int:
    began = time.monotonic()
    node = Path(os.environ.get("TEST_NODE_DIRECTORY") or DIRECTORY / "kit")
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    run(("bash", str(kit / "install.sh"), str(node)))
    if (kit / "domains" / "install.sh").is_file():
        run(("bash", str(kit / "domains" / "install.sh"), str(node)))
    provide()
    layout = Path(os.environ.get(IMAGE_VARIABLE) or have_image().layout)
    print(f"./do node: kit and image are there after {time.monotonic() - began:.0f} s", flush=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUACTORS_")}
    environment |= {
        IMAGE_VARIABLE: str(layout),
        "K8S_KUBELET_ARGS": f"{STATUS_INTERVAL} --cgroup-root=/{_cgroup(node)}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    status = 0
    for gates in sets:
        chosen = () if any(word.startswith("tests/node") for word in words) else ("tests/node",)
        with _node(node, gates, environment, keep=keep):
            code = _pytest(node, environment, (*chosen, *words))
        if (
            code == RED
            and os.environ.get("CI")
            and (failed := (DIRECTORY / FAILED).read_text().split("\n")[:-1])
        ):
            # Kubelet tries some things again after 90 s, and a machine of CI may be busy: what fails twice is wrong.
            print(f"./do node: failed, once more on a fresh node: {', '.join(failed)}", flush=True)
            with _node(node, gates, environment, keep=False):
                code = _pytest(node, environment | {AGAIN: "-again"}, failed)
        # 5: no test of this set was chosen.
        status = status or (0 if code == 5 and words else code)
    print(f"./do node: {time.monotonic() - began:.0f} s", flush=True)
    return status


def _pytest(node: Path, environment: dict[str, str], words: Sequence[str]) -> int:
    """The exit code of the tests, played inside the node's namespaces."""
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words)
    script = '. "$0/env.sh"; exec "$@"'
    return subprocess.run(
        (str(node / "in.sh"), "bash", "-c", script, str(node), *command),
        cwd=CHECKOUT, env=environment, stdin=subprocess.DEVNULL, check=False,
    ).returncode  # fmt: skip


@contextmanager
def _node(directory: Path, gates: str, environment: dict[str, str], *, keep: bool) -> Iterator[None]:
    """The node, up. Taken down with all its state, and checked for what it has left."""
    before = _mounts()
    _script(directory, "down.sh", "--wipe", environment=environment)  # what a killed run has left
    try:
        _make_cgroups(_cgroup(directory))
        began = time.monotonic()
        said = _script(directory, "up.sh", "--set", gates, environment=environment)
        print(
            f"./do node: {said.strip().splitlines()[-1]} after {time.monotonic() - began:.1f} s", flush=True
        )
        yield
    finally:
        if keep:
            print(
                f"./do node: the node runs on; {directory}/in.sh bash enters it, {directory}/down.sh --wipe ends it"
            )
        else:
            _script(directory, "domains/down-domains.sh", "--wipe", environment=environment, check=False)
            _script(directory, "down.sh", "--wipe", environment=environment)
            _remove_cgroups(_cgroup(directory))
            _check_nothing_is_left(directory, before)


def _script(
    directory: Path, script: str, *words: str, environment: dict[str, str], check: bool = True
) -> str:
    if not (directory / script).is_file():
        return ""
    # Not in our process group: Ctrl-C ends the tests, and must not end what cleans up after them.
    done = subprocess.run(
        (str(directory / script), *words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=environment, timeout=FIRST_START_S, check=False, start_new_session=True,
    )  # fmt: skip
    if check and done.returncode != 0:
        raise ProvisionError(f"{script} {' '.join(words)} failed:\n{done.stdout.strip()}")
    return done.stdout


def _cgroup(directory: Path) -> str:
    """Kubelet's --cgroup-root: another kubelet on this machine ends the processes of pods that it does not know."""
    return f"gpuactors-node-{zlib.crc32(str(directory).encode()):08x}"


def _make_cgroups(name: str) -> None:
    """In each hierarchy of version 1, or in the one of version 2. Kubelet makes none of its root."""
    for hierarchy in _hierarchies():
        cgroup = hierarchy / name
        cgroup.mkdir(exist_ok=True)
        for setting in (
            "cpuset.cpus",
            "cpuset.mems",
        ):  # empty at first in version 1, and nothing runs with that
            if (cgroup / setting).is_file() and not (cgroup / setting).read_text().strip():
                (cgroup / setting).write_text((hierarchy / setting).read_text())


def _remove_cgroups(name: str) -> None:
    for hierarchy in _hierarchies():
        for directory, _, _ in os.walk(hierarchy / name, topdown=False):
            with suppress(OSError):  # said by the check for what is left
                os.rmdir(directory)


def _hierarchies() -> list[Path]:
    if (CGROUPS / "cgroup.controllers").is_file():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if (path / "cgroup.procs").is_file()]


def _check_nothing_is_left(directory: Path, mounts_before: frozenset[str]) -> None:
    """Raises ProvisionError that names a process, mount or cgroup of the node."""
    left = [f"mount {mount}" for mount in sorted(_mounts() - mounts_before)]
    for name in (entry for entry in os.listdir("/proc") if entry.isdigit()):
        try:
            program = os.readlink(f"/proc/{name}/exe")
        except OSError:
            continue
        if program.startswith(f"{directory}/"):
            left.append(f"process {name} ({program})")
    left += [f"cgroup {cgroup}" for cgroup in CGROUPS.glob(f"**/{_cgroup(directory)}")]
    if left:
        raise ProvisionError("the node has left something behind: " + ", ".join(left))


def _mounts() -> frozenset[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return frozenset(line.split()[4] for line in lines)


@contextmanager
def _alone() -> Iterator[None]:
    """One node at a time on this machine."""
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("./do node: waiting for another run to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
