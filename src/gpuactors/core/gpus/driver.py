"""The DRA driver of GPUs: its devices are PCI functions, which acts bind to a vfio driver and return.

A file of its own: only it imports all three parts of the driver.
"""

from __future__ import annotations

from typing import Final

from gpuactors.core.claims.driver import Driver
from gpuactors.core.gpus.acts import GpuActs
from gpuactors.core.gpus.claiming import GpuClaiming
from gpuactors.core.gpus.files import GpuFiles
from gpuactors.core.values.claim import ClaimsOf

GPUS: Final = Driver(ClaimsOf.GPUS, GpuClaiming(), GpuFiles(), GpuActs())
