"""The doctor on the kernel's own files: before installation on the host, and in the daemon's pod as by kubectl exec.

The host is ill as a fresh one is: nothing is bound to vfio-pci, and the real snd_hda_intel has the function beside a
GPU. Each remedy is followed, until nothing is left to be done.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.support.patience import patient
from tests.vm.guest.daemon import PYTHON_ENVIRONMENT, DaemonProcess, environment_of
from tests.vm.guest.node import KUBELET_DIR, SLACK_S, Node, arguments
from tests.vm.guest.pod import base_pod
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.scenario_groups import HOST_DRIVER, PAIRED
from tests.vm.guest.scenario_groups import MACHINE as OF_GROUPS
from tests.vm.guest.sysfs import Function, function_behind, functions_behind

MACHINE: Final = replace(OF_GROUPS, scenario_timeout_s=420.0)
"""Four Pythons start one after the other, each in 20 to 30 s of emulation."""

DOCTOR: Final = (sys.executable, "-m", "gpuactors", "doctor", "-o", "json")

COMMAND_TIMEOUT_S: Final = patient(120.0)
"""The imports take as long as the daemon's; then some reads, each with a deadline of its own."""

ATTEMPTS: Final = 3
"""A command gives the daemon 3 s, and on a busy machine its own first call of gRPC takes seconds."""

OF_THE_GUEST: Final = frozenset({"JournalSpace", "BootFramebuffer"})
"""What is wrong with this guest: its state directory is on a small file system in memory, and the firmware has used a
GPU as the display. A pod sees no addresses in /proc/iomem, so it does not know whether the framebuffer is left."""


def run(guest: Guest) -> None:
    """On the host, then in the pod of one daemon."""
    h100 = function_behind(guest.machine, "rp1")
    gpu, audio = functions_behind(guest.machine, "rp2")
    with Node.with_kubelet(guest) as node:
        eventually(
            f"{HOST_DRIVER} at {audio.address}", lambda: audio.driver == HOST_DRIVER, timeout_s=SLACK_S
        )
        _before_installation(node, h100, gpu, audio)
        with DaemonProcess.start(arguments(), guest.artifacts / "daemon.log") as daemon:
            daemon.wait_until_it_listens()
            h100.bind_vfio()
            gpu.bind_vfio()
            node.wait({h100.address: HEALTHY, gpu.address: UNHEALTHY}, SLACK_S)
            _one_is_not_viable(node, daemon, gpu, audio)
            audio.unbind()
            node.wait({h100.address: HEALTHY, gpu.address: HEALTHY}, SLACK_S)
            _well(node, daemon)
            assert daemon.terminate() == 0
            daemon.check_one_life()


def _before_installation(node: Node, h100: Function, gpu: Function, audio: Function) -> None:
    with node.guest.step("--pre on the host: the IOMMU is on, nothing is bound, a host driver is in the way"):
        kubelet = (
            "--kubelet-dir",
            str(KUBELET_DIR),
            "--device-plugin-dir",
            str(KUBELET_DIR / "device-plugins"),
        )
        command = (*DOCTOR, "--pre", *kubelet)
        code, found = _asked(node, "before", command, {**PYTHON_ENVIRONMENT})
        assert code == 1, found
        wrong = _wrong(found)
        assert [(f["cause"], f["level"]) for f in wrong] == [
            ("NotBound", "FAIL"),
            ("GroupNotViable", "WARN"),
        ], wrong
        assert wrong[0]["devices"] == [h100.address, gpu.address]
        assert f"while {audio.address} is bound to {HOST_DRIVER}" in wrong[1]["message"]
        said = {f["check"]: f["message"] for f in found["findings"]}
        assert ", by dmar" in said["IommuOn"], said
        assert said["VfioPci"] == "vfio-pci is loaded"
        assert "disable_idle_d3=N" in said["IdleD3"]
        assert said["NodeModes"] == "/dev/vfio/vfio (0666); group nodes: 0"
        assert {entry["pciVendorSelector"] for entry in found["permitted_host_devices"]} == {
            "10DE:2330",
            "10DE:2684",
        }


def _one_is_not_viable(node: Node, daemon: DaemonProcess, gpu: Function, audio: Function) -> None:
    with node.guest.step(
        "in the pod, without a flag: one GPU's group is not viable, and which function is why"
    ):
        code, found = _asked_in_the_pod(node, daemon, "not_viable")
        assert code == 1, found
        (wrong,) = _wrong(found)
        assert (wrong["cause"], wrong["level"], wrong["devices"]) == ("GroupNotViable", "FAIL", [gpu.address])
        assert f"{audio.address} is bound to {HOST_DRIVER}" in wrong["message"]
        assert found["settings"] == "of the running daemon", found["settings"]


def _well(node: Node, daemon: DaemonProcess) -> None:
    with node.guest.step("the host driver has let go: nothing is left to be done"):
        code, found = _asked_in_the_pod(node, daemon, "well")
        assert (code, _wrong(found)) == (0, []), found
        said = [f["message"] for f in found["findings"]]
        assert any(f"{PAIRED}: 1 listed, 1 Healthy" in text and "the same list" in text for text in said), (
            said
        )
        assert "/dev/vfio/vfio (0666); group nodes: 2 (0600)" in said


def _asked_in_the_pod(node: Node, daemon: DaemonProcess, name: str) -> tuple[int, Any]:
    """`kubectl exec`: a process in the very namespaces of the daemon, with no more capabilities than it has."""
    command = (
        "nsenter", "--target", str(daemon.process.pid), "--all",
        "setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", *DOCTOR,
    )  # fmt: skip
    environment = environment_of(base_pod(KUBELET_DIR, daemon.state_dir))
    for _ in range(ATTEMPTS):
        code, found = _asked(node, name, command, environment)
        if all("did not report" not in f["message"] for f in found["findings"]):
            break
    return code, found


def _asked(node: Node, name: str, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, Any]:
    """The exit code, and the report, which is kept among the artifacts."""
    done = subprocess.run(
        command, env={**environment}, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    assert done.returncode in (0, 1), done
    (node.guest.artifacts / f"doctor-{name}.json").write_text(done.stdout, encoding="utf-8")
    return done.returncode, json.loads(done.stdout)


def _wrong(found: Any) -> list[dict[str, Any]]:
    return [f for f in found["findings"] if f["level"] != "PASS" and f["check"] not in OF_THE_GUEST]
