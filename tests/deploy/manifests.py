"""The manifests of deploy/, as kubectl renders them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any, Final

import pytest
import yaml

from tests.deploy.tools import KUBECTL
from tests.process.daemon import gpuactors

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = Path(os.environ.get("TEST_DEPLOY") or ROOT / "deploy")
"""The manifests; a copy where a bug was planted in them."""
RENDER_TIMEOUT_S: Final = 60

Manifest = dict[str, Any]


def kustomize(directory: Path) -> subprocess.CompletedProcess[str]:
    """What kubectl makes of a directory. A missing kubectl is a failure, as a skipped check looks like a passed one."""
    if not KUBECTL.is_file():
        pytest.fail(f"{KUBECTL} is missing: python -m tests.deploy.tools")
    return subprocess.run(
        [KUBECTL, "kustomize", str(directory)],
        capture_output=True,
        text=True,
        timeout=RENDER_TIMEOUT_S,
        check=False,
    )


def render(directory: Path) -> list[Manifest]:
    """What `kubectl apply -k` would send. A warning, such as that of a deprecated field, is a failure."""
    done = kustomize(directory)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    """The only manifest of this kind."""
    (found,) = (manifest for manifest in manifests if manifest["kind"] == kind)
    return found


def normal(objects: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    """The objects by kind and name. A list of named things has no order: volumes, mounts, variables."""

    def ordered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: ordered(inner) for key, inner in value.items()}
        if isinstance(value, list):
            items = [ordered(item) for item in value]
            named = all(isinstance(item, dict) and "name" in item for item in items)
            return sorted(items, key=lambda item: item["name"]) if named else items
        return value

    found = {(one["kind"], one["metadata"]["name"]): ordered(one) for one in objects}
    assert len(found) == len(objects)
    return found


def seen_at(pod: Manifest, path: str) -> tuple[str, bool]:
    """The host's path of what the container sees at `path`, and whether it can be written."""
    (container,) = pod["containers"]
    over = [m for m in container["volumeMounts"] if PurePosixPath(path).is_relative_to(m["mountPath"])]
    mount = max(over, key=lambda m: len(m["mountPath"]))
    (volume,) = (v for v in pod["volumes"] if v["name"] == mount["name"])
    rest = PurePosixPath(path).relative_to(mount["mountPath"])
    return str(PurePosixPath(volume["hostPath"]["path"]) / rest), not mount.get("readOnly", False)


def configuration_of(container: Manifest) -> dict[str, dict[str, object]]:
    """What the real command line makes of the container's arguments and variables."""
    _, *flags = container["args"]
    env = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    done = gpuactors("config", "show", "-o", "json", *flags, env=env)
    assert done.returncode == 0, done.stderr
    shown: dict[str, dict[str, object]] = json.loads(done.stdout)
    return shown
