"""The DaemonSet's pod as a value, read from the very manifests in deploy/: what the daemon in the guest runs in.

What the manifests do not grant it does not have: what is taken out of them is missing here too. `confined.py` makes it
so. Must not start anything.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml

from tests.release.image import IMAGE_DIRECTORY, image_in

CHECKOUT: Final = Path(__file__).resolve().parents[3]
BASE: Final = CHECKOUT / "deploy" / "base" / "daemonset.yaml"
HOLDERS_PROC: Final = CHECKOUT / "deploy" / "components" / "holders-proc" / "holders.yaml"
DRA: Final = CHECKOUT / "deploy" / "components" / "dra" / "dra.yaml"
LOAD_MODULES: Final = CHECKOUT / "deploy" / "components" / "load-modules" / "load-modules.yaml"

KUBELET_DIR: Final = "/var/lib/kubelet"
STATE_DIR: Final = "/var/lib/gpuactors"
"""As the manifests name them on the node. The guest keeps several of each, elsewhere."""

HOSTS_OWN: Final = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64")
"""What stands in for it, besides this checkout and the Python that runs it: no /root, /home, /tmp, /run or /var."""

_UNITS: Final = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True, slots=True)
class PodMount:
    """A volume in the container: `source` on the node, `target` in the container."""

    source: str
    target: str
    read_only: bool
    recursive_read_only: bool


@dataclass(frozen=True, slots=True)
class ContainerImage:
    """What the image of deploy/Containerfile brings along: its files on the host, and its configuration."""

    root: str
    entry_point: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Pod:
    """What the container may do and see. `capabilities` are without CAP_; the environment is the manifest's own.

    Without an `image` the container has this checkout, and what of the host that needs: nothing is to be built then.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    mounts: tuple[PodMount, ...]
    capabilities: tuple[str, ...]
    no_new_privileges: bool
    read_only_root: bool
    seccomp: bool
    memory_bytes: int
    host_pid: bool
    host_network: bool
    privileged: bool
    user_namespace: bool
    """Kubernetes' `hostUsers: false`, which the manifests do not ask for."""
    image: ContainerImage | None = None

    @property
    def specification(self) -> str:
        """For `confined.py`, together with what the container's files are."""
        hosts = dict.fromkeys((*HOSTS_OWN, str(CHECKOUT), sys.prefix, sys.base_prefix))
        return json.dumps({**asdict(self), "hosts": list(hosts)})


MakePod: TypeAlias = Callable[[Path, Path], Pod]
"""From kubelet's directory and the state directory on this node."""


def base_pod(kubelet_dir: Path, state_dir: Path) -> Pod:
    """deploy/base, on a node whose kubelet is at `kubelet_dir`."""
    return pod_of(_manifest(BASE), kubelet_dir, state_dir)


def image_pod(kubelet_dir: Path, state_dir: Path) -> Pod:
    """deploy/base, with the image that was built on the host (`Machine.image`)."""
    image = image_in(IMAGE_DIRECTORY)
    configuration = image.configuration()["config"]
    environment = dict(variable.split("=", 1) for variable in configuration["Env"])
    built = ContainerImage(str(image.tree), tuple(configuration["Entrypoint"]), environment)
    return replace(base_pod(kubelet_dir, state_dir), image=built)


def holders_proc_pod(kubelet_dir: Path, state_dir: Path) -> Pod:
    """deploy/overlays/holders-proc."""
    return pod_of(_merged(_manifest(BASE), _manifest(HOLDERS_PROC)), kubelet_dir, state_dir)


def dra_pod(kubelet_dir: Path, state_dir: Path, *, loads_modules: bool = False) -> Pod:
    """deploy/overlays/dra: on top of holders-proc. Or load-modules, on top of that."""
    patches = (HOLDERS_PROC, DRA, *([LOAD_MODULES] if loads_modules else []))
    spec = _manifest(BASE)
    for patch in patches:
        spec = _merged(spec, _manifest(patch))
    return pod_of(spec, kubelet_dir, state_dir)


def privileged_pod(kubelet_dir: Path, state_dir: Path) -> Pod:
    """deploy/base with `privileged: true`: every capability and device, no seccomp; what is mounted stays so."""
    patch = {"containers": [{"name": "gpuactors", "securityContext": {
        "privileged": True, "allowPrivilegeEscalation": True,
    }}]}  # fmt: skip
    return pod_of(_merged(_manifest(BASE), patch), kubelet_dir, state_dir)


def pod_for(arguments: Sequence[str], kubelet_dir: Path, state_dir: Path) -> Pod:
    """The pod that deploy/README.md says these arguments need."""
    if ("--dra", "on") in pairwise(arguments):
        return dra_pod(kubelet_dir, state_dir)
    match [arguments[at + 1] for at, word in enumerate(arguments[:-1]) if word == "--holders"]:
        case [*_, "proc"]:
            return holders_proc_pod(kubelet_dir, state_dir)
        case [*_, "open"]:
            return privileged_pod(kubelet_dir, state_dir)
        case _:
            return base_pod(kubelet_dir, state_dir)


# --- the manifests ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """What kubelet asks of the pod."""

    path: str
    port: int
    timeout_s: float


def probe_of(name: str) -> Probe:
    """`readinessProbe` or `livenessProbe` of deploy/base."""
    (container,) = _manifest(BASE)["containers"]
    asked, ports = container[name]["httpGet"], {p["name"]: p["containerPort"] for p in container["ports"]}
    return Probe(asked["path"], ports[asked["port"]], container[name]["timeoutSeconds"])


def _manifest(path: Path) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]["template"]["spec"]
    return spec


def _merged(base: Any, patch: Any) -> Any:
    """A strategic merge as far as our patches need it: mappings by key, lists of named things by name; another list
    of the patch replaces the base's. That kubectl comes to the same is checked by tests/deploy."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {
            **base,
            **{key: _merged(base[key], new) if key in base else new for key, new in patch.items()},
        }
    if isinstance(base, list) and isinstance(patch, list) and all(isinstance(i, dict) for i in patch):
        by_name = {item["name"]: item for item in patch}
        known = {item["name"] for item in base}
        merged = [_merged(item, by_name.get(item["name"], item)) for item in base]
        return merged + [item for item in patch if item["name"] not in known]
    return patch


def pod_of(spec: Mapping[str, Any], kubelet_dir: Path, state_dir: Path) -> Pod:
    """The pod of a PodSpec with one container, on a node with these directories."""
    (container,) = spec["containers"]
    rights = container["securityContext"]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == (0, 0)
    assert not spec["hostIPC"]
    assert rights["capabilities"]["drop"] == ["ALL"]
    sources = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"]}
    return Pod(
        arguments=tuple(container["args"]),
        environment=dict(_variable(item) for item in container.get("env", ())),
        mounts=tuple(
            PodMount(
                source=_on_this_node(sources[mount["name"]], kubelet_dir, state_dir),
                target=mount["mountPath"],
                read_only=mount.get("readOnly", False),
                recursive_read_only=mount.get("recursiveReadOnly") == "IfPossible",
            )
            # As container runtimes do: a directory before what is mounted below it.
            for mount in sorted(container["volumeMounts"], key=lambda mount: mount["mountPath"].count("/"))
        ),
        capabilities=tuple(rights["capabilities"].get("add", ())),
        no_new_privileges=not rights["allowPrivilegeEscalation"],
        read_only_root=rights["readOnlyRootFilesystem"],
        seccomp=spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault",
        memory_bytes=_bytes(container["resources"]["limits"]["memory"]),
        host_pid=spec["hostPID"],
        host_network=spec["hostNetwork"],
        privileged=rights["privileged"],
        user_namespace=not spec.get("hostUsers", True),
    )


def _variable(item: Mapping[str, Any]) -> tuple[str, str]:
    """A variable of the container, as kubelet fills it in."""
    if (source := item.get("valueFrom")) is None:
        return item["name"], item["value"]
    node = os.uname().nodename
    of_pod = {"spec.nodeName": node, "metadata.uid": str(uuid.uuid5(uuid.NAMESPACE_DNS, node))}
    assert source.keys() == {"fieldRef"}
    return item["name"], of_pod[source["fieldRef"]["fieldPath"]]


def _on_this_node(path: str, kubelet_dir: Path, state_dir: Path) -> str:
    if path == STATE_DIR:
        return str(state_dir)
    if path.startswith(f"{KUBELET_DIR}/"):
        return f"{kubelet_dir}{path.removeprefix(KUBELET_DIR)}"
    return path


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]
