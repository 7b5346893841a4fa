"""Finds the CDI device by which a compute domain's daemon gets what comes from the host: nvidia-imex, the driver's
libraries, and all GPUs for management. NVIDIA's container toolkit makes it, in the CDI directory. Must not judge what
it contains.
"""

from __future__ import annotations

import os
import re
from typing import Final, final

from gpuactors import limits
from gpuactors.host.best_effort import names_in, text_of
from gpuactors.host.cdi import ENDINGS, KIND

AUTO: Final = "auto"
NONE: Final = "none"

KNOWN: Final = ("management.nvidia.com/gpu=all", "k8s.compute-domain.nvidia.com/device=all")
"""The names of the CDI device, by the toolkit of NVIDIA's GPU Operator, and NVIDIA's own kubelet plugin."""

_NAME: Final = re.compile(r"""["']?\bname["']?\s*:\s*["']?all["']?""")
"""A device `all`, in YAML and in JSON; only the container runtime reads the rest."""


@final
class ManagementDevice:
    """The device that the operator has named, or that is found in the CDI directory."""

    def __init__(self, setting: str, cdi_dir: str) -> None:
        self._setting = setting
        self._cdi_dir = cdi_dir

    def find(self) -> tuple[str, str]:
        """Return its CDI id, and why there is none as a sentence; both are empty where none is wanted. May block."""
        if self._setting == NONE:
            return "", ""
        if self._setting != AUTO:
            return self._setting, ""
        kinds = self._kinds()
        for candidate in KNOWN:
            if candidate.partition("=")[0] in kinds:
                return candidate, ""
        return "", (
            f"{self._cdi_dir} has no CDI device {' or '.join(KNOWN)}, which gives the daemon the host's nvidia-imex "
            "and NVIDIA's libraries. To do: let NVIDIA's container toolkit make it (GPU Operator: CDI enabled; else "
            f"`nvidia-ctk cdi generate --mode=management --vendor=management.nvidia.com --class=gpu "
            f"--output={self._cdi_dir}/management.nvidia.com-gpu.yaml`), name another one (--imex-management), or set "
            "that to none where the daemon's image brings nvidia-imex"
        )

    def _kinds(self) -> set[str]:
        """Return the kinds of the files that have a device `all`. A file that cannot be read is skipped."""
        kinds: set[str] = set()
        for name in sorted(names_in(self._cdi_dir))[: limits.CDI_SPECS_MAX]:
            if name.startswith(".") or not name.endswith(ENDINGS):
                continue
            text = text_of(os.path.join(self._cdi_dir, name), limits.CDI_SPEC_MAX_BYTES)
            if _NAME.search(text):
                kinds.update(KIND.findall(text))
        return kinds
