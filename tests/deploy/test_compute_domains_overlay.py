"""The overlay `compute-domains`: what it adds to `dra`, and that its roles have exactly the verbs of the requests that
the client makes."""

from __future__ import annotations

import copy
import os
from typing import Final

import pytest
from trio.testing import MockClock

from gpuactors.core.values.domain import DRIVER, LABEL
from gpuactors.host.root import DEVICE_NUMBERS, FABRIC_IMEX_MGMT, GPU_FEATURES, HostRoot
from gpuactors.kubelet.dra.plugin import socket_paths
from tests.deploy.manifests import DEPLOY, Manifest, configuration_of, normal, of_kind, render, seen_at
from tests.deploy.rights import MADE_BY, OF_CLAIMS, OF_EVENTS, UID, rights_of, used_by

HOST: Final = HostRoot("/host")
KUBELET: Final = "/var/lib/kubelet"


@pytest.fixture(scope="module")
def claims() -> list[Manifest]:
    """The overlay that this one is on top of."""
    return render(DEPLOY / "overlays" / "dra")


@pytest.fixture(scope="module")
def overlaid() -> list[Manifest]:
    return render(DEPLOY / "overlays" / "compute-domains")


@pytest.fixture(scope="module")
def added(claims: list[Manifest], overlaid: list[Manifest]) -> list[Manifest]:
    """What is only here; the DaemonSet is in both."""
    known = {(one["kind"], one["metadata"]["name"]) for one in claims}
    return [one for one in overlaid if (one["kind"], one["metadata"]["name"]) not in known]


def pod_of(manifests: list[Manifest]) -> Manifest:
    spec: Manifest = of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def test_it_is_dra_and_what_is_added_here(
    claims: list[Manifest], overlaid: list[Manifest], added: list[Manifest]
) -> None:
    assert sorted(one["kind"] for one in added) == [
        "ClusterRole",
        "ClusterRoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ]
    rest = copy.deepcopy([one for one in overlaid if one not in added])
    pod, known = pod_of(rest), pod_of(claims)
    (switch,) = (v for v in pod["containers"][0]["env"] if v not in known["containers"][0]["env"])
    assert switch == {"name": "GPUACTORS_COMPUTE_DOMAINS", "value": "on"}
    for ours, theirs in (
        (pod["containers"][0]["env"], known["containers"][0]["env"]),
        (pod["volumes"], known["volumes"]),
        (pod["containers"][0]["volumeMounts"], known["containers"][0]["volumeMounts"]),
        (pod["containers"][0]["env"], known["containers"][0]["env"]),
    ):
        ours[:] = [item for item in ours if item in theirs]
    assert rest == claims


# --- the pod ----------------------------------------------------------------------------------------------


def test_compute_domains_are_on_with_what_the_overlay_is_made_for(overlaid: list[Manifest]) -> None:
    value = {
        key: entry["value"] for key, entry in configuration_of(pod_of(overlaid)["containers"][0]).items()
    }
    assert (value["compute_domains"], value["dra"]) == ("on", "on")
    assert value["domains_driver"] == DRIVER
    assert value["domains_namespace"] is None
    assert (value["host_root"], value["imex_clique"]) == (HOST.prefix, GPU_FEATURES)


def test_the_drivers_directory_is_written_at_the_hosts_own_place(overlaid: list[Manifest]) -> None:
    sockets = socket_paths(KUBELET, DRIVER, UID)
    for path in (
        sockets.api,
        sockets.registration,
        f"{os.path.dirname(sockets.api)}/gpuactors-checkpoint.json",
        # Mounted into the daemon of a domain, by the path on the host.
        f"{os.path.dirname(sockets.api)}/domains/{UID}",
    ):
        assert seen_at(pod_of(overlaid), path) == (path, True)


def test_what_the_host_says_of_imex_is_read_only(overlaid: list[Manifest]) -> None:
    for path in (DEVICE_NUMBERS, FABRIC_IMEX_MGMT, GPU_FEATURES):
        assert seen_at(pod_of(overlaid), HOST.real(path)) == (path, False)


def test_the_readme_says_of_each_mount_and_right_why_it_is_there(
    claims: list[Manifest], overlaid: list[Manifest], added: list[Manifest]
) -> None:
    section = (DEPLOY / "README.md").read_text().split("\n## Compute domains\n", 1)[1].split("\n## ", 1)[0]
    known = {volume["name"] for volume in pod_of(claims)["volumes"]}
    for volume in pod_of(overlaid)["volumes"]:
        if volume["name"] not in known:
            assert f"`{volume['hostPath']['path']}`" in section
    rows = [line for line in section.splitlines() if line.startswith("|")]
    for _, (_, resource, verb) in rights_of(one for one in added if "rules" in one):
        assert any(f"`{verb}`" in row and resource in row for row in rows), (verb, resource)


def test_host_managed_is_that_and_what_the_hosts_tool_needs(overlaid: list[Manifest]) -> None:
    managed = render(DEPLOY / "overlays" / "compute-domains-host-managed")
    known, pod = pod_of(overlaid), pod_of(managed)
    shown = {key: entry["value"] for key, entry in configuration_of(pod["containers"][0]).items()}
    assert shown["compute_domains"] == "host-managed"
    for path in (str(shown["imex_ctl"]), "/etc/nvidia-imex/config.cfg", "/run/nvidia-imex/ctl.sock"):
        assert seen_at(pod, path) == (path, False)
    own = [volume for volume in pod["volumes"] if volume not in known["volumes"]]
    assert [volume["name"] for volume in own] == ["imex-ctl", "imex-config", "imex-socket"]
    section = (DEPLOY / "README.md").read_text().split("\n## Compute domains\n", 1)[1].split("\n## ", 1)[0]
    assert all(f"`{volume['hostPath']['path']}`" in section for volume in own)
    pod["volumes"] = [volume for volume in pod["volumes"] if volume not in own]
    (container,), (before,) = pod["containers"], known["containers"]
    container["volumeMounts"] = [m for m in container["volumeMounts"] if m in before["volumeMounts"]]
    (switch,) = (entry for entry in container["env"] if entry not in before["env"])
    switch["value"] = "on"
    assert normal(managed) == normal(overlaid)


# --- the API server ---------------------------------------------------------------------------------------


async def test_the_roles_have_exactly_the_verbs_that_the_client_uses_beyond_claims(
    added: list[Manifest], autojump_clock: MockClock
) -> None:
    granted = rights_of(one for one in added if "rules" in one)
    used = await used_by(MADE_BY.keys() - OF_EVENTS) - await used_by(OF_CLAIMS)
    assert sorted(granted) == sorted(used)


def test_the_roles_are_given_to_the_pods_account_alone(
    overlaid: list[Manifest], added: list[Manifest]
) -> None:
    account = of_kind(overlaid, "ServiceAccount")["metadata"]
    subject = {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    role, binding = of_kind(added, "ClusterRole"), of_kind(added, "ClusterRoleBinding")
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (
        "ClusterRole",
        role["metadata"]["name"],
    )
    assert binding["subjects"] == [subject]


def test_the_policy_leaves_the_pods_account_one_label_of_its_node(
    overlaid: list[Manifest], added: list[Manifest]
) -> None:
    account, policy = of_kind(overlaid, "ServiceAccount"), of_kind(added, "ValidatingAdmissionPolicy")
    user = f"^system:serviceaccount:[^:]+:{account['metadata']['name']}$"
    spec = policy["spec"]
    (condition,) = spec["matchConditions"]
    assert condition["expression"] == f'request.userInfo.username.matches("{user}")'
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert (rule["apiGroups"], rule["resources"], rule["operations"]) == ([""], ["nodes"], ["UPDATE"])
    variables = {one["name"]: one["expression"] for one in spec["variables"]}
    assert variables["label"] == f'"{LABEL}"'
    named = {
        name for one in spec["validations"] for name in variables if f"variables.{name}" in one["expression"]
    }
    assert named == variables.keys()
    assert spec["failurePolicy"] == "Fail"
    binding = of_kind(added, "ValidatingAdmissionPolicyBinding")
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
