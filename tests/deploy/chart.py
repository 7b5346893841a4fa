"""The Helm chart of deploy/, as Helm itself renders it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any, Final

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, RENDER_TIMEOUT_S, Manifest
from tests.deploy.tools import HELM

CHART: Final = DEPLOY / "chart" / "gpuactors"

NAMESPACE: Final = "gpuactors"
"""That of the release: of deploy/base."""

RELEASE: Final = "gpuactors"
"""As deploy/base has it in a label."""

Values = Mapping[str, Any]


def helm(*arguments: str, values: Values | None = None) -> subprocess.CompletedProcess[str]:
    """Helm, with these values as a file on its standard input. A missing Helm is a failure: a skipped check looks like
    a passed one."""
    if not HELM.is_file():
        pytest.fail("there is no Helm in this environment: python -m tests.deploy.tools")
    return subprocess.run(
        [HELM, *arguments, "--values", "-"],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        timeout=RENDER_TIMEOUT_S,
        check=False,
    )


def rendered(
    values: Values | None = None, *, namespace: str = NAMESPACE, options: tuple[str, ...] = ()
) -> str:
    """What `helm install` would send with these values."""
    done = helm("template", RELEASE, str(CHART), "--namespace", namespace, *options, values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout


def template(
    values: Values | None = None, *, namespace: str = NAMESPACE, options: tuple[str, ...] = ()
) -> list[Manifest]:
    """The same as objects."""
    text = rendered(values, namespace=namespace, options=options)
    return [one for one in yaml.safe_load_all(text) if one is not None]


def refusal(values: Values, *options: str) -> str:
    """What Helm says of values that it does not take."""
    done = helm("template", RELEASE, str(CHART), *options, values=values)
    assert done.returncode != 0, done.stdout
    return done.stderr
