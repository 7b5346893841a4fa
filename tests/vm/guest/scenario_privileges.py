"""The daemon needs no more than deploy/ grants it: shown from outside, by what is refused in its pod, and by its work.

Every scenario runs the daemon in that pod (`pod.py`). Here the pod itself is checked: what the kernel says of the
process, what a second process in such a pod tries in vain, and that in it the kernel is heard, GPUs are handed out,
external processes are seen and an operator is answered. What fails where less is granted is `privileges_lacking`'s.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gpuactors import limits
from gpuactors.core.deviceplugin.registration import KUBELET_LIST_TAKEN_S
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from gpuactors.core.host.schedule import POLL_FAST_S
from gpuactors.core.host.usage import POLL_S
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.support.patience import patient
from tests.vm.guest.confined import new_pid_namespace
from tests.vm.guest.daemon import CONFINED, DaemonProcess, environment_of, mounts_of, status_of
from tests.vm.guest.node import KUBELET_DIR, SLACK_S, Node, arguments, last_reason
from tests.vm.guest.pod import CHECKOUT, STATE_DIR, Pod, image_pod, privileged_pod, probe_of
from tests.vm.guest.runner import Guest
from tests.vm.guest.sysfs import Function, function_behind
from tests.vm.guest.tenant import Tenant
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2"),
    functions=(PciFunction("edu1", "edu", "rp1"), PciFunction("edu2", "edu", "rp2")),
    image=True,
)

RESOURCE: Final = "pci-1234/11e8"

FRAME_WITHIN_S: Final = UNSETTLED_INSPECTIONS_S[0] + SLACK_S
FIRST_FRAME_WITHIN_S: Final = limits.DISCONNECT_WAIT_S + SLACK_S
SEEN_WITHIN_S: Final = POLL_S + SLACK_S
RELEASE_SEEN_WITHIN_S: Final = POLL_FAST_S + SLACK_S

DIRECTORY_WITHIN_S: Final = 2 * limits.KUBELET_DIR_RETRY_S + SLACK_S

COMMAND_TIMEOUT_S: Final = patient(60.0)
"""A Python process in a pod: a second for the attempts; the command line's imports take as long as the daemon's."""

PYTHON: Final = "/usr/bin/python3"
"""As it is in the image, and in what stands in for it."""

EXPLAIN_ATTEMPTS: Final = 3

READY_WITHIN_S: Final = patient(limits.LEDGER_QUIET_S + KUBELET_LIST_TAKEN_S + SLACK_S)

GET: Final = """
import http.client, sys
port, path, timeout_s = sys.argv[1:]
connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=float(timeout_s))
connection.request("GET", path)
answer = connection.getresponse()
print(answer.status, answer.read().decode(), end="")
"""

SCRAPE_S: Final = patient(10.0)
"""Prometheus' own `scrape_timeout`. The first scrape loads its library, which takes this guest more than a second."""

NAMESPACES: Final = ("mnt", "net", "pid", "ipc", "uts", "cgroup")

WRITABLE: Final = ("/var/lib/kubelet/device-plugins", STATE_DIR)
"""All that is writable in the pod, besides what a runtime mounts into every container (/proc, /dev)."""

WITHOUT_CAPABILITIES: Final = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Becomes a command without capabilities. The image has no setpriv."""

ATTEMPTS: Final = """
import ctypes, errno, json, os, socket, sys
node, control = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
def called(name, *given):
    if getattr(libc, name)(*given) < 0:
        raise OSError(ctypes.get_errno(), name)
def written(path, text):
    descriptor = os.open(path, os.O_WRONLY)
    os.write(descriptor, text)
attempts = {
    "open the group's node": lambda: os.close(os.open(node, os.O_RDWR)),
    "write to sysfs": lambda: written(control, b"\\n"),
    "make a file in /": lambda: os.mkdir("/new"),
    "make a file in /tmp": lambda: os.mkdir("/tmp/new"),
    "make a file beside kubelet's socket": lambda: os.mkdir("/var/lib/kubelet/pod-resources/new"),
    "make a file in the node's /dev": lambda: os.mkdir("/host/dev/new"),
    "see other processes": lambda: os.stat("/proc/2"),
    "trace a process": lambda: called("ptrace", 16, 0, 0, 0),
    "mount": lambda: called("mount", b"new", b"/dev/shm", b"tmpfs", 0, b""),
    "a packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    # These two change what may be done after them.
    "become another user": lambda: os.setuid(65534),
    "a new user namespace": lambda: called("unshare", 0x10000000),
}
said = {}
for name, attempt in attempts.items():
    try:
        attempt()
        said[name] = "ok"
    except OSError as error:
        said[name] = errno.errorcode[error.errno]
print(json.dumps(said))
"""

REFUSALS: Final = {
    "open the group's node": "EPERM",  # the device cgroup
    "write to sysfs": "EROFS",
    "make a file in /": "EROFS",
    "make a file in /tmp": "EROFS",
    "make a file beside kubelet's socket": "EROFS",
    "make a file in the node's /dev": "EROFS",
    "see other processes": "ENOENT",
    "trace a process": "EPERM",  # seccomp, before the kernel checks which process
    "mount": "EPERM",
    "a packet socket": "EPERM",
    "become another user": "EPERM",
    "a new user namespace": "EPERM",  # seccomp: without it anybody may
}

PRIVILEGED_MAY: Final = ("open the group's node", "mount", "a new user namespace", "a packet socket")
"""The attempts are real ones: in a pod that may, they do not fail."""


def run(guest: Guest) -> None:
    """One daemon in the pod of deploy/base, with the image of deploy/Containerfile."""
    edu1, edu2 = (function_behind(guest.machine, port) for port in ("rp1", "rp2"))
    with (
        Node.with_kubelet(guest) as node,
        DaemonProcess.start(
            arguments("vendor=1234,device=11e8"), guest.artifacts / "daemon.log", pod=image_pod
        ) as daemon,
    ):
        scene = _Scene(node, daemon, edu1, edu2)
        with guest.step("it listens to the kernel from a network namespace of its own"):
            daemon.wait_until_it_listens()
        _as_the_kernel_has_it(scene)
        _it_works(scene)
        _what_is_refused(scene)
        _an_operator_asks(scene)
        _kubelet_probes(scene)
        with guest.step(
            "it ends with 0 on SIGTERM, in the memory that it may have, and takes its sockets along"
        ):
            _memory(scene)
            assert daemon.terminate() == 0
            daemon.check_one_life()
            for said in (
                "control.unavailable",
                "journal.failed",
                "holders.unavailable",
                "uevents.unavailable",
            ):
                assert not daemon.said(said), daemon.said(said)
            assert [path.name for path in node.kubelet.socket_dir.glob("*.sock")] == ["kubelet.sock"]
        with guest.step(
            "its journal says of which boot it is, though the pod does not have the node's /proc"
        ):
            first, *_ = sorted((daemon.state_dir / "journal").iterdir())
            header = json.loads(first.read_text(encoding="utf-8").splitlines()[0])
            assert (
                header["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            )


@dataclass(frozen=True, slots=True)
class _Scene:
    node: Node
    daemon: DaemonProcess
    edu1: Function
    edu2: Function

    @property
    def pod(self) -> Pod:
        return image_pod(KUBELET_DIR, self.daemon.state_dir)


def _as_the_kernel_has_it(scene: _Scene) -> None:
    pid, step = scene.daemon.process.pid, scene.node.guest.step
    with step("no capability, no new privileges, seccomp"):
        status = status_of(pid)
        assert status["Uid"].split() == ["0"] * 4
        for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb"):
            assert int(status[f"Cap{kind}"], 16) == 0, status
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"), status
    with step("namespaces of its own, but the node's user namespace"):
        for name in (*NAMESPACES, "user"):
            own, ours = (Path(f"/proc/{who}/ns/{name}").readlink() for who in (pid, "self"))
            assert (own != ours) is (name != "user"), f"{name}: {own} beside {ours}"
    with step("mounts: read-only but for kubelet's directory and its own"):
        rest = {target: "ro" in options for target, options in mounts_of(pid).items()}
        kernels = {target for target in rest if target.split("/")[1] in ("proc", "dev")}
        writable = {target for target, read_only in rest.items() if not read_only} - kernels
        assert writable == set(WRITABLE), writable
        assert {
            "/",
            "/sys",
            "/host/sys",
            "/host/dev",
            "/var/lib/kubelet/pod-resources",
        } <= rest.keys() - writable
    with step("the DaemonSet's own arguments, and no setting from elsewhere"):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        given = list(scene.pod.arguments)
        assert given[0] == "run"
        # Python, and the image's entry point.
        assert words[2 : 2 + len(given)] == given, words
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert not any(stray in environment for stray in (b"GPUACTORS_", b"PYTHONPATH="))
    with step("the image's files and nothing of this checkout's, its modules compiled"):
        root = Path(f"/proc/{pid}/root")
        assert not (root / str(CHECKOUT).lstrip("/")).exists()
        maps = {
            line.split(maxsplit=5)[5]
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            if "/" in line
        }
        assert any(path.startswith("/opt/gpuactors/lib/") for path in maps), maps


def _it_works(scene: _Scene) -> None:
    node, edu1, edu2, step = scene.node, scene.edu1, scene.edu2, scene.node.guest.step
    with step("late binds: heard, in kubelet's device lists"):
        node.timed("first_bind_to_frame_ms", edu1.bind_vfio, {edu1.address: HEALTHY}, FIRST_FRAME_WITHIN_S)
        both = {edu1.address: HEALTHY, edu2.address: HEALTHY}
        node.timed("second_bind_to_frame_ms", edu2.bind_vfio, both, FRAME_WITHIN_S)
    with step("Allocate and PreStartContainer: the nodes as the node itself names them"):
        given = node.kubelet.allocate(RESOURCE, [edu1.address], pod="vm-1")
        paths = sorted(device.host_path for device in given.devices)
        assert paths == sorted(["/dev/vfio/vfio", str(edu1.group_node)]), given
        node.kubelet.prestart(RESOURCE, [edu1.address])
    with step("an external process is seen, and its close"), Tenant.start() as external:
        held = {edu1.address: HEALTHY, edu2.address: UNHEALTHY}
        node.timed(
            "device_open_to_unhealthy_ms", lambda: external.open_device(edu2.group_node, edu2.address), held,
            SEEN_WITHIN_S,
        )  # fmt: skip
        assert "in use (enable of" in last_reason(scene.daemon, edu2.address)
        node.timed("sigkill_to_healthy_ms", external.kill, both, RELEASE_SEEN_WITHIN_S)


def _what_is_refused(scene: _Scene) -> None:
    step = scene.node.guest.step
    with step(f"a second process in such a pod is refused {len(REFUSALS)} things"):
        said = _attempted(scene, scene.pod)
        assert said == REFUSALS, said
    with step("in a privileged pod it is not: the attempts are real"):
        said = _attempted(scene, privileged_pod(KUBELET_DIR, scene.daemon.state_dir))
        assert {name: said[name] for name in PRIVILEGED_MAY} == dict.fromkeys(PRIVILEGED_MAY, "ok"), said
    with step("without seccomp anybody may make a user namespace: the filter is real"):
        said = _attempted(scene, replace(scene.pod, seccomp=False))
        assert said == {**REFUSALS, "trace a process": "ESRCH", "a new user namespace": "ok"}, said


def _attempted(scene: _Scene, pod: Pod) -> dict[str, str]:
    """What each attempt came to in a pod of that kind."""
    node = f"/host{scene.edu2.group_node}"
    control = f"/host/sys/bus/pci/devices/{scene.edu2.address}/driver_override"
    command = (*CONFINED, pod.specification, PYTHON, "-S", "-c", ATTEMPTS, node, control)
    with new_pid_namespace():
        process = subprocess.Popen(command, env=environment_of(pod), stdout=subprocess.PIPE)
    said: dict[str, str] = json.loads(process.communicate(timeout=COMMAND_TIMEOUT_S)[0])
    assert process.returncode == 0
    return said


def _an_operator_asks(scene: _Scene) -> None:
    """`kubectl exec`: a process in the very namespaces of the daemon, with no more capabilities than it has."""
    with scene.node.guest.step("explain, as through kubectl exec: answered by the running daemon"):
        command = (
            "nsenter", "--target", str(scene.daemon.process.pid), "--all",
            PYTHON, "-S", "-c", WITHOUT_CAPABILITIES, "gpuactors", "explain", scene.edu1.address, "-o", "json",
        )  # fmt: skip
        image = scene.pod.image
        assert image is not None
        for attempt in range(1, EXPLAIN_ATTEMPTS + 1):
            done = subprocess.run(
                command, env={**image.environment, **scene.pod.environment}, capture_output=True, text=True,
                timeout=COMMAND_TIMEOUT_S, check=False,
            )  # fmt: skip
            scene.node.figure("explain_attempts", attempt)
            # The command gives the daemon 3 s and its own first call of gRPC takes seconds on a busy machine: then it
            # reports that it inspected the host itself. Any other failure is one.
            if done.returncode == 0 or "read by this command itself" not in done.stderr:
                break
        assert done.returncode == 0, done
        (scene.node.guest.artifacts / "explain.json").write_text(done.stdout, encoding="utf-8")
        # Only the daemon knows kubelet's device lists; an inspection of the host would only show it as free.
        assert "allocated to pod default/vm-1" in done.stdout, done


def _kubelet_probes(scene: _Scene) -> None:
    """The DaemonSet's own probes, asked in the pod's network namespace with the loopback that a runtime brings up."""
    netns = ("nsenter", "--target", str(scene.daemon.process.pid), "--net")
    subprocess.run([*netns, "/run/busybox", "ip", "link", "set", "lo", "up"], check=True)

    def asked(path: str, port: int, timeout_s: float) -> tuple[int, str]:
        done = subprocess.run(
            [*netns, sys.executable, "-S", "-c", GET, str(port), path, str(timeout_s)],
            capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (path, done.stderr)
        status, _, text = done.stdout.partition(" ")
        return int(status), text

    readiness, liveness = (probe_of(name) for name in ("readinessProbe", "livenessProbe"))
    with scene.node.guest.step("kubelet's liveness probe, and a scrape of the metrics"):
        assert asked(liveness.path, liveness.port, patient(liveness.timeout_s)) == (200, "live\n")
        began = time.monotonic()
        status, text = asked("/metrics", liveness.port, SCRAPE_S)
        scene.node.figure("first_scrape_ms", 1000 * (time.monotonic() - began))
        assert status == 200
        owner = f'gpuactors_device_owner_info{{claim="",gpu="{scene.edu1.address}",pod_name="vm-1"'
        assert owner in text, text
        assert asked("/debug/state", liveness.port, patient(liveness.timeout_s))[0] == 403
    with scene.node.guest.step("kubelet's readiness probe: ready when kubelet's own list has been read"):
        deadline = time.monotonic() + READY_WITHIN_S
        while (found := asked(readiness.path, readiness.port, patient(readiness.timeout_s)))[0] != 200:
            assert "has not been compared" in found[1], found
            assert time.monotonic() < deadline, found
        assert found[1] == "ready\n"


def _lost_its_directory(daemon: DaemonProcess) -> bool:
    return any("delete this pod" in str(line["reason"]) for line in daemon.said("kubelet.gone"))


def _memory(scene: _Scene) -> None:
    """The most that the pod ever used, of what it may."""
    cgroups = Path("/sys/fs/cgroup")
    subprocess.run(["/run/busybox", "mount", "-t", "cgroup2", "cgroup2", str(cgroups)], check=True)
    own = cgroups / Path(f"/proc/{scene.daemon.process.pid}/cgroup").read_text().strip().split("::/", 1)[1]
    limit, peak = (int((own / f"memory.{what}").read_text()) for what in ("max", "peak"))
    assert limit == scene.pod.memory_bytes
    scene.node.figure("memory_limit_mib", limit >> 20)
    scene.node.figure("memory_peak_mib", peak >> 20)
    assert "oom_kill 0" in (own / "memory.events").read_text()
