"""The overlay `dra`: what it adds, that each path that is written can be written and no other one, and that its role
has exactly the verbs of the requests that the client makes."""

from __future__ import annotations

import copy
import os
from typing import Final

import pytest
from trio.testing import MockClock

from gpuactors import limits
from gpuactors.daemon.claims import INSTANCE_VARIABLE
from gpuactors.host.root import (
    DRIVERS_PROBE,
    GROUP_NODES,
    IOMMU_GROUPS,
    MODULES,
    NVIDIA_GPUS,
    PCI_DEVICES,
    PCI_DRIVERS,
    PERSISTENCED_SOCKET,
    PROC,
    HostRoot,
)
from gpuactors.kubelet.dra.plugin import socket_paths
from tests.deploy.manifests import DEPLOY, Manifest, configuration_of, of_kind, render, seen_at
from tests.deploy.rights import OF_CLAIMS, UID, rights_of, used_by


@pytest.fixture(scope="module")
def overlaid() -> list[Manifest]:
    return render(DEPLOY / "overlays" / "dra")


@pytest.fixture(scope="module")
def pod(overlaid: list[Manifest]) -> Manifest:
    spec: Manifest = of_kind(overlaid, "DaemonSet")["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def container(pod: Manifest) -> Manifest:
    (only,) = pod["containers"]
    assert isinstance(only, dict)
    return only


@pytest.fixture(scope="module")
def configuration(container: Manifest) -> dict[str, dict[str, object]]:
    return configuration_of(container)


# --- the pod ----------------------------------------------------------------------------------------------


def test_it_is_holders_proc_and_what_is_added_here(overlaid: list[Manifest]) -> None:
    added = {
        "ClusterRole",
        "ClusterRoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    }
    rest = copy.deepcopy([manifest for manifest in overlaid if manifest["kind"] not in added])
    pod = of_kind(rest, "DaemonSet")["spec"]["template"]["spec"]
    pod["automountServiceAccountToken"] = False
    assert pod["terminationGracePeriodSeconds"] > limits.STOP_HANDED_OVER_S
    pod["terminationGracePeriodSeconds"] = 15
    (container,) = pod["containers"]
    plain = render(DEPLOY / "overlays" / "holders-proc")
    known = of_kind(plain, "DaemonSet")["spec"]["template"]["spec"]
    for ours, theirs in (
        (pod["volumes"], known["volumes"]),
        (container["volumeMounts"], known["containers"][0]["volumeMounts"]),
        (container["env"], known["containers"][0]["env"]),
    ):
        ours[:] = [item for item in ours if item in theirs]
    assert rest == plain


def test_claims_are_on_and_what_it_needs_is_known(
    container: Manifest, configuration: dict[str, dict[str, object]]
) -> None:
    assert configuration["dra"]["value"] == "on"
    assert configuration["device_plugin"]["value"] == "on"
    assert configuration["holders"]["value"] == "proc", "a GPU is unbound when no process has it open"
    fields = {
        e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"] if "valueFrom" in e
    }
    assert fields == {"NODE_NAME": "spec.nodeName", INSTANCE_VARIABLE: "metadata.uid"}


def test_the_token_is_mounted_in_this_pod_and_in_no_other(overlaid: list[Manifest], pod: Manifest) -> None:
    account = of_kind(overlaid, "ServiceAccount")
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert pod["automountServiceAccountToken"] is True
    assert account["automountServiceAccountToken"] is False


FUNCTION: Final = "/sys/devices/pci0000:20/0000:20:01.0/0000:23:00.0"
"""What /sys/bus/pci/devices/0000:23:00.0 is a link to."""


def test_what_is_written_can_be_written_at_the_hosts_own_place(
    pod: Manifest, configuration: dict[str, dict[str, object]]
) -> None:
    value = {key: str(entry["value"]) for key, entry in configuration.items()}
    sockets = socket_paths(value["kubelet_dir"], value["driver_name"], UID)
    plugin = os.path.dirname(sockets.api)
    for path in (
        sockets.api,
        sockets.registration,
        f"{plugin}/gpuactors-checkpoint.json",
        f"{plugin}/acts/iommu-group-51.lock",
        # The container runtime mounts it, by its path on the host.
        f"{plugin}/metadata/{UID}/gpu.json",
        f"{value['cdi_dir']}/claim.json",
    ):
        assert seen_at(pod, path) == (path, True)
    root = HostRoot(value["host_root"])
    for path in (
        f"{PCI_DRIVERS}/vfio-pci/bind",
        f"{PCI_DRIVERS}/nvidia/unbind",
        DRIVERS_PROBE,
        f"{FUNCTION}/driver_override",
    ):
        assert seen_at(pod, root.real(path)) == (path, True)


def test_what_is_only_read_is_read_only(pod: Manifest, configuration: dict[str, dict[str, object]]) -> None:
    root = HostRoot(str(configuration["host_root"]["value"]))
    for path in (
        f"{PROC}/1/fd",
        f"{MODULES}/6.1.0/modules.alias",
        f"{IOMMU_GROUPS}/51",
        f"{GROUP_NODES}/51",
        NVIDIA_GPUS,
        PERSISTENCED_SOCKET,
        f"/run/nvidia/driver{PERSISTENCED_SOCKET}",
        "/sys/module/vfio/parameters",
        "/sys/kernel/security",
        "/sys/fs/cgroup",
    ):
        assert seen_at(pod, root.real(path)) == (path, False)
    assert seen_at(pod, root.real(f"{PCI_DEVICES}/0000:23:00.0"))[0] == f"{PCI_DEVICES}/0000:23:00.0"


def test_a_directory_is_made_only_where_it_may_be_missing(pod: Manifest) -> None:
    made = {v["hostPath"]["path"] for v in pod["volumes"] if v["hostPath"]["type"] == "DirectoryOrCreate"}
    assert made == {
        "/var/lib/gpuactors",
        "/var/lib/kubelet/plugins/gpu.nvidia.com",
        "/var/run/cdi",
        "/run/nvidia-persistenced",
        "/run/nvidia",
    }


def test_the_readme_says_of_each_mount_and_right_why_it_is_there(pod: Manifest) -> None:
    section = (DEPLOY / "README.md").read_text().split("\n## Claims (DRA)\n", 1)[1].split("\n## ", 1)[0]
    base = of_kind(render(DEPLOY / "base"), "DaemonSet")["spec"]["template"]["spec"]
    known = {volume["name"] for volume in base["volumes"]}
    for volume in pod["volumes"]:
        if volume["name"] not in known:
            assert f"`{volume['hostPath']['path']}`" in section
    for name in pod["containers"][0]["securityContext"]["capabilities"]["add"]:
        assert name in section


# --- the API server ---------------------------------------------------------------------------------------


async def test_the_role_has_exactly_the_verbs_that_the_client_uses(
    overlaid: list[Manifest], autojump_clock: MockClock
) -> None:
    granted = rights_of([of_kind(overlaid, "ClusterRole")])
    assert sorted(granted) == sorted(await used_by(OF_CLAIMS))


def test_the_role_is_given_to_the_pods_account_alone(overlaid: list[Manifest]) -> None:
    account, binding = of_kind(overlaid, "ServiceAccount"), of_kind(overlaid, "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == of_kind(overlaid, "ClusterRole")["metadata"]["name"]
    name, namespace = account["metadata"]["name"], account["metadata"]["namespace"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": namespace}]


def test_the_policy_is_about_the_pods_account_and_every_write_of_slices(overlaid: list[Manifest]) -> None:
    account, policy = of_kind(overlaid, "ServiceAccount"), of_kind(overlaid, "ValidatingAdmissionPolicy")
    user = f"^system:serviceaccount:[^:]+:{account['metadata']['name']}$"
    (condition,) = policy["spec"]["matchConditions"]
    assert condition["expression"] == f'request.userInfo.username.matches("{user}")'
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    written = {
        verb
        for _, (_, resource, verb) in rights_of([of_kind(overlaid, "ClusterRole")])
        if resource == "resourceslices"
    }
    assert {operation.lower() for operation in rule["operations"]} == written - {"list", "watch", "get"}
    binding = of_kind(overlaid, "ValidatingAdmissionPolicyBinding")
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
