"""What the pod may do, in base and every overlay: each has the privilege that is named here for it, and the README
gives the reason. The chart renders the same (test_chart.py). RBAC to the verb is compared with the client's requests
in test_dra.py, test_compute_domains_overlay.py, test_events_overlay.py and test_fleet_overlay.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pytest

from tests.deploy.manifests import DEPLOY, Manifest, of_kind, render
from tests.deploy.rights import rights_of

READERS_OF_PROCESSES: Final = ("DAC_READ_SEARCH", "SYS_PTRACE")
LOADERS_OF_MODULES: Final = ("SYS_CHROOT", "SYS_MODULE")

SOCKETS: Final = frozenset({"/var/lib/kubelet/device-plugins", "/var/lib/gpuactors"})
CDI: Final = "/var/run/cdi"
CLAIMS: Final = SOCKETS | {
    "/host/sys/bus/pci",
    "/host/sys/devices",
    "/var/lib/kubelet/plugins/gpu.nvidia.com",
    "/var/lib/kubelet/plugins_registry",
    CDI,
}
FEATURES: Final = "/etc/kubernetes/node-feature-discovery/features.d"
DOMAINS: Final = CLAIMS | {"/var/lib/kubelet/plugins/compute-domain.nvidia.com"}


@dataclass(frozen=True, slots=True)
class Privilege:
    """All that a pod has beyond what none may have."""

    written: frozenset[str] = SOCKETS
    """Mounts that are not read-only."""

    processes: bool = False
    modules: bool = False
    token: bool = False
    rights: int = 0
    """How many pairs of a resource and a verb."""

    @property
    def capabilities(self) -> list[str]:
        read, load = READERS_OF_PROCESSES, LOADERS_OF_MODULES
        return sorted((read if self.processes else ()) + (load if self.modules else ()))

    @property
    def se_linux(self) -> str:
        beyond = self.processes or not self.written.isdisjoint({FEATURES, CDI})
        return "spc_t" if beyond else "container_device_plugin_t"


ALLOWED: Final = {
    "base": Privilege(),
    "overlays/example": Privilege(),
    "overlays/k0s": Privilege(frozenset({"/var/lib/kubelet/device-plugins", "/var/lib/gpuactors"})),
    "overlays/openshift": Privilege(),
    "overlays/events": Privilege(token=True, rights=2),
    "overlays/node-features": Privilege(SOCKETS | {FEATURES}),
    "overlays/fleet": Privilege(token=True, rights=1),
    "overlays/kata": Privilege(SOCKETS | {CDI}),
    "overlays/holders-proc": Privilege(processes=True),
    "overlays/dra": Privilege(CLAIMS, processes=True, token=True, rights=8),
    "overlays/load-modules": Privilege(CLAIMS, processes=True, modules=True, token=True, rights=8),
    "overlays/openshift-dra": Privilege(CLAIMS, processes=True, token=True, rights=8),
    "overlays/compute-domains": Privilege(DOMAINS, processes=True, token=True, rights=13),
    "overlays/compute-domains-host-managed": Privilege(DOMAINS, processes=True, token=True, rights=13),
}


@dataclass(frozen=True, slots=True)
class Rendered:
    """One of them, by kubectl."""

    name: str
    objects: list[Manifest]
    allowed: Privilege

    @property
    def pod(self) -> Manifest:
        spec: Manifest = of_kind(self.objects, "DaemonSet")["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Manifest:
        assert not self.pod.keys() & {"initContainers", "ephemeralContainers"}
        (only,) = self.pod["containers"]
        assert isinstance(only, dict)
        return only


@pytest.fixture(scope="module", params=ALLOWED)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return Rendered(request.param, render(DEPLOY / request.param), ALLOWED[request.param])


def test_every_overlay_has_its_privilege_named_here() -> None:
    assert {f"overlays/{path.name}" for path in (DEPLOY / "overlays").iterdir()} == {*ALLOWED} - {"base"}


def test_the_container_can_gain_nothing(rendered: Rendered) -> None:
    rights = dict(rendered.container["securityContext"])
    capabilities = rights.pop("capabilities")
    assert capabilities["drop"] == ["ALL"]
    assert sorted(capabilities.get("add", ())) == rendered.allowed.capabilities
    assert rights == {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "seLinuxOptions": {"type": rendered.allowed.se_linux},
    }
    assert rendered.container["ports"] == [{"name": "http", "containerPort": 9400}], "none of the host's"
    assert not rendered.container.keys() & {"volumeDevices", "lifecycle", "envFrom", "command"}


def test_the_pod_is_root_for_kubelets_directory_alone_and_under_seccomp(rendered: Rendered) -> None:
    """No other user may make a socket in a directory that belongs to root (0750); the README says so."""
    assert rendered.pod["securityContext"] == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    told = (DEPLOY / "README.md").read_text()
    assert "| user | uid 0, because kubelet's `device-plugins` directory belongs to root (0750) |" in told


def test_the_host_is_shared_as_far_as_is_named(rendered: Rendered) -> None:
    pod = rendered.pod
    assert (pod["hostNetwork"], pod["hostIPC"], pod["hostPID"]) == (False, False, rendered.allowed.processes)
    assert pod["enableServiceLinks"] is False
    written = {
        mount["mountPath"] for mount in rendered.container["volumeMounts"] if not mount.get("readOnly", False)
    }
    assert written == rendered.allowed.written
    propagated = [mount for mount in rendered.container["volumeMounts"] if "mountPropagation" in mount]
    for mount in propagated:  # what the container of NVIDIA's driver mounts when it starts
        assert (mount["name"], mount["mountPropagation"]) == ("driver-root", "HostToContainer")
        assert mount["readOnly"]
    files = [volume for volume in pod["volumes"] if "configMap" in volume]
    assert [volume["name"] for volume in files] == ["config"] * (rendered.name == "overlays/fleet")
    shared = [volume for volume in pod["volumes"] if volume not in files]
    assert all(volume.keys() == {"name", "hostPath"} for volume in shared)
    assert not {volume["hostPath"]["path"] for volume in shared} & {"/", "/etc", "/var", "/var/lib"}


def test_there_is_a_token_only_with_rights_and_no_right_is_a_wildcard(rendered: Rendered) -> None:
    allowed = rendered.allowed
    assert of_kind(rendered.objects, "ServiceAccount")["automountServiceAccountToken"] is False
    assert rendered.pod["automountServiceAccountToken"] is allowed.token
    rights = [right for _, right in rights_of(one for one in rendered.objects if "rules" in one)]
    assert len(set(rights)) == len(rights) == allowed.rights
    for group, resource, verb in rights:
        assert "*" not in {group, resource, verb}
        assert resource not in {"secrets", "pods", "serviceaccounts", "configmaps"}
        assert verb not in {"escalate", "bind", "impersonate", "deletecollection"}


def test_what_may_be_written_to_all_nodes_objects_is_limited_to_the_pods_own_node(rendered: Rendered) -> None:
    """RBAC cannot say "of its own node": whoever may write slices or nodes has a policy that does."""
    written = {
        resource
        for _, (_, resource, verb) in rights_of(one for one in rendered.objects if "rules" in one)
        if verb in {"create", "update", "patch", "delete"}
    }
    policies = [one for one in rendered.objects if one["kind"] == "ValidatingAdmissionPolicy"]
    limited = {
        resource
        for policy in policies
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]
        for resource in rule["resources"]
    }
    assert written == limited
    bound = [one for one in rendered.objects if one["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert {one["spec"]["policyName"] for one in bound} == {one["metadata"]["name"] for one in policies}
    for policy in policies:
        assert policy["spec"]["failurePolicy"] == "Fail"
        assert "authentication.kubernetes.io/node-name" in str(policy["spec"]["variables"])


def test_openshift_is_asked_to_allow_what_the_pod_has_and_nothing_else(rendered: Rendered) -> None:
    constraints = [one for one in rendered.objects if one["kind"] == "SecurityContextConstraints"]
    if "openshift" not in rendered.name:
        assert constraints == []
        return
    (found,) = constraints
    account = of_kind(rendered.objects, "ServiceAccount")["metadata"]
    assert found["users"] == ["system:serviceaccount:{namespace}:{name}".format(**account)]
    assert "groups" not in found
    template = of_kind(rendered.objects, "DaemonSet")["spec"]["template"]
    assert template["metadata"]["annotations"] == {"openshift.io/required-scc": found["metadata"]["name"]}
    pod, rights = rendered.pod, rendered.container["securityContext"]
    assert {
        key: value for key, value in found.items() if key.startswith(("allow", "default", "readOnly"))
    } == {
        "allowHostDirVolumePlugin": True,
        "allowHostIPC": pod["hostIPC"],
        "allowHostNetwork": pod["hostNetwork"],
        "allowHostPID": pod["hostPID"],
        "allowHostPorts": False,
        "allowPrivilegeEscalation": rights["allowPrivilegeEscalation"],
        "allowPrivilegedContainer": rights["privileged"],
        "defaultAllowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": rights["readOnlyRootFilesystem"],
        **({"allowedCapabilities": added} if (added := rendered.allowed.capabilities) else {}),
    }
    assert found["requiredDropCapabilities"] == rights["capabilities"]["drop"]
    assert found["runAsUser"] == {"type": "MustRunAs", "uid": pod["securityContext"]["runAsUser"]}
    assert found["seccompProfiles"] == ["runtime/default"]
    assert found["volumes"] == ["hostPath", *(["projected"] if rendered.allowed.token else [])]
    # Labelled for containers by kubelet: in /var/lib, SELinux would refuse each write.
    (state,) = (volume["hostPath"] for volume in pod["volumes"] if volume["name"] == "state")
    assert state == {"path": "/var/lib/kubelet/plugins/gpuactors", "type": "DirectoryOrCreate"}
