"""The files by which a host says what it has of IMEX, as its kernel, NVIDIA's driver and GPU Feature Discovery write
them."""

from __future__ import annotations

from pathlib import Path
from typing import Final, final

from gpuactors.host.root import DEVICE_NUMBERS, FABRIC_IMEX_MGMT, GPU_FEATURES

CHANNELS_MAJOR: Final = 236
CAPS_MAJOR: Final = 235
MGMT_MINOR: Final = 4323

CLIQUE: Final = "6e4e1f2a-3b5c-4d7e-8f90-0a1b2c3d4e5f.32766"
"""Of a node on a fabric."""


@final
class ImexTree:
    """The files below a host's root. At first NVIDIA's driver is not loaded, and the node is on no fabric."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unload()

    def load(self) -> None:
        """Load NVIDIA's driver."""
        loaded = f"195 nvidia\n{CAPS_MAJOR} nvidia-caps\n{CHANNELS_MAJOR} nvidia-caps-imex-channels\n"
        self._number(loaded)
        self._write(
            FABRIC_IMEX_MGMT, f"DeviceFileMinor: {MGMT_MINOR}\nDeviceFileMode: 256\nDeviceFileModify: 1\n"
        )

    def unload(self) -> None:
        """Unload NVIDIA's driver."""
        self._number("")
        self.path(FABRIC_IMEX_MGMT).unlink(missing_ok=True)

    def join(self, clique_id: str = CLIQUE) -> None:
        """Put the node on a fabric, as GPU Feature Discovery shows it."""
        self._write(GPU_FEATURES, f"nvidia.com/gpu.clique={clique_id}\nnvidia.com/gpu.count=4\n")

    def leave(self) -> None:
        """Take the node off its fabric."""
        self._write(GPU_FEATURES, "nvidia.com/gpu.count=4\n")

    def path(self, path: str) -> Path:
        """Return the real path of the host's `path`."""
        return self.root / path.lstrip("/")

    def _number(self, loaded: str) -> None:
        # A block device may have the same number, and nothing keeps it from having the same name.
        self._write(
            DEVICE_NUMBERS,
            f"Character devices:\n  1 mem\n{loaded}\nBlock devices:\n  7 loop\n254 nvidia-caps-imex-channels\n",
        )

    def _write(self, path: str, text: str) -> None:
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
