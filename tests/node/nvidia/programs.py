"""Where NVIDIA's own programs are: the kubelet plugins of its DRA driver, its device plugin, and a mock of NVML.

None of them is in this repository or in the kit: whoever has them names their directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

PROGRAMS_VARIABLE: Final = "K8S_NVIDIA_PROGRAMS"

GPU_PLUGIN: Final = "gpu-kubelet-plugin"
DOMAIN_PLUGIN: Final = "compute-domain-kubelet-plugin"
DEVICE_PLUGIN: Final = "nvidia-device-plugin"
NVML: Final = "libnvidia-ml.so.1"
"""That of k8s-test-infra, which says what a file says: no GPU is needed."""

NEEDED: Final = (GPU_PLUGIN, DOMAIN_PLUGIN, DEVICE_PLUGIN, NVML)


def directory() -> Path:
    """Where the programs are, or would be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(PROGRAMS_VARIABLE) or cache / "nvidia" / "bin")


def missing() -> str:
    """Why no scenario with them can be played, in one sentence; empty if they are all there."""
    where = directory()
    gone = [name for name in NEEDED if not (where / name).is_file()]
    if not gone:
        return ""
    return (
        f"{where / gone[0]} is missing: put {', '.join(NEEDED[:-1])} and the mock {NVML} there, or name their "
        f"directory in {PROGRAMS_VARIABLE} (tests/node/README.md)"
    )
