"""The virtual machine's scenarios read the manifests without kubectl: it must come to what kubectl renders."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.vm.guest import pod as vm

RENDER_TIMEOUT_S = 60
NODE = (Path("/run/kubelet"), Path("/run/state"))


def rendered(directory: Path) -> vm.Pod:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.fail("kubectl is not on PATH; ./do test installs it where it may")
    done = subprocess.run(
        [kubectl, "kustomize", str(directory)], capture_output=True, text=True, timeout=RENDER_TIMEOUT_S,
        check=True,
    )  # fmt: skip
    (found,) = (item for item in yaml.safe_load_all(done.stdout) if item["kind"] == "DaemonSet")
    return vm.pod_of(found["spec"]["template"]["spec"], *NODE)


def unordered(pod: vm.Pod) -> dict[str, object]:
    """A strategic merge keeps no order of volumes."""
    fields = {name: getattr(pod, name) for name in vm.Pod.__slots__}
    return fields | {"mounts": set(pod.mounts), "capabilities": set(pod.capabilities)}


@pytest.mark.parametrize(
    ("directory", "made"),
    [
        (vm.BASE.parent, vm.base_pod),
        (vm.HOLDERS_PROC.parent, vm.holders_proc_pod),
        (vm.DRA.parent, vm.dra_pod),
    ],
    ids=["base", "holders-proc", "dra"],
)
def test_the_same_pod(directory: Path, made: vm.MakePod) -> None:
    assert unordered(made(*NODE)) == unordered(rendered(directory))


def test_every_volume_is_the_guests_own() -> None:
    sources = {mount.target: mount.source for mount in vm.base_pod(*NODE).mounts}
    assert sources["/var/lib/kubelet/device-plugins"] == "/run/kubelet/device-plugins"
    assert sources["/var/lib/gpuactors"] == "/run/state"
    assert sources["/host/sys"] == "/sys"


def test_a_directory_is_mounted_before_what_is_below_it() -> None:
    targets = [mount.target for mount in vm.dra_pod(*NODE).mounts]
    assert targets.index("/host/sys") < min(
        targets.index("/host/sys/devices"), targets.index("/host/sys/bus/pci")
    )


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        ((), vm.base_pod),
        (("--holders", "passive"), vm.base_pod),
        (("--select", "x", "--holders", "proc"), vm.holders_proc_pod),
        (("--holders", "open"), vm.privileged_pod),
        (("--dra", "on"), vm.dra_pod),
        (("--dra", "off"), vm.base_pod),
    ],
)
def test_the_pod_that_arguments_need(arguments: tuple[str, ...], made: vm.MakePod) -> None:
    assert vm.pod_for(arguments, *NODE) == made(*NODE)
