"""The commands of the pages that an operator follows from top to bottom: `test_pages.py` plays them on the node.

Pure: a test of `./do test` says that each command is played, or named here with where else it is tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from tests.support.markdown import blocks, chapter, spans

INSTALL: Final = "docs/install.md"
UPGRADE: Final = "docs/operate.md"
FROM_NVIDIA: Final = "docs/migrate.md"
CLAIMS: Final = "docs/dra.md"

STEPS_FROM_NVIDIA: Final = "Steps from NVIDIA's plugin, node by node"
"""The section of FROM_NVIDIA that is played."""

IMAGE: Final = "registry.example/gpu/gpuactors:0.1.0"
"""As the pages and the example call it."""

PLAYED: Final[tuple[tuple[str, str], ...]] = (
    (INSTALL, "3. gpuactors"),
    (FROM_NVIDIA, STEPS_FROM_NVIDIA),
    (UPGRADE, "Upgrade"),
    (UPGRADE, "Roll back"),
    (UPGRADE, "Uninstall"),
)
"""Page and section, in the order in which an operator comes to them."""

ELSEWHERE: Final[Mapping[str, str]] = {
    f"podman build -f deploy/Containerfile -t {IMAGE} .": "./do image builds it without an engine",
    f"podman push {IMAGE}": "there is no registry here",
    f"kubectl debug node/NODE --image={IMAGE} --profile=sysadmin -it -- gpuactors doctor --pre"
    " --host-root=/host --kubelet-dir=/host/var/lib/kubelet"
    " --device-plugin-dir=/host/var/lib/kubelet/device-plugins": "test_operators.py",
    "gpuactors doctor --pre": "test_operators.py",
    "gpuactors inspect": "test_operators.py has doctor, which reads the node in the same way",
    "helm upgrade gpuactors deploy/chart/gpuactors -n gpuactors -f values.yaml": "by hand: it needs the host's /sys",
    "helm uninstall gpuactors -n gpuactors": "by hand",
    "kubectl delete namespace gpuactors": "by hand, after the one before",
}
"""Commands that are not played here, and where they are tried."""


def section(text: str, heading: str) -> str:
    """What is directly below a heading, without what is below deeper ones. Raises LookupError if there is none."""
    return re.split(r"^#+ ", chapter(text, heading), maxsplit=1, flags=re.MULTILINE)[0]


def commands(text: str) -> list[str]:
    """The lines of the blocks of code, without the comments after them."""
    return [line for line in (re.sub(r"(?:^|\s+)#.*", "", block) for block in blocks(text)) if line]


def selecting_expressions(text: str) -> list[str]:
    """The expressions of CEL about a device in the tables of a page."""
    rows = (line for line in text.splitlines() if line.startswith("|"))
    return [one for row in rows for one in spans(row) if re.search(r"\bdevice\.[a-z]", one)]
