"""The virtual machine's scenarios read the manifests without kubectl: it must come to what kubectl renders."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, of_kind, render
from tests.vm.guest import pod as vm

NODE = (Path("/run/kubelet"), Path("/run/state"))


def rendered(directory: Path) -> vm.Pod:
    return vm.pod_of(of_kind(render(directory), "DaemonSet")["spec"]["template"]["spec"], *NODE)


def unordered(pod: vm.Pod) -> dict[str, object]:
    """A strategic merge keeps no order of volumes."""
    fields = {name: getattr(pod, name) for name in vm.Pod.__slots__}
    return fields | {"mounts": set(pod.mounts), "capabilities": set(pod.capabilities)}


@pytest.mark.parametrize(
    ("directory", "made"),
    [
        ("base", vm.base_pod),
        ("overlays/holders-proc", vm.holders_proc_pod),
        ("overlays/dra", vm.dra_pod),
    ],
)
def test_the_same_pod(directory: str, made: vm.MakePod) -> None:
    assert unordered(made(*NODE)) == unordered(rendered(DEPLOY / directory))


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
