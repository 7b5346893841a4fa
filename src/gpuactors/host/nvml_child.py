"""The process that asks NVML for the fabric of each GPU of the host's driver, and prints that as JSON: `python -m
gpuactors.host.nvml_child`. A call into NVIDIA's driver may hang, or end the process.

By NVIDIA's own binding, `nvidia-ml-py` (the extra `nvml`), which loads the driver's libnvidia-ml.so.1.
"""

from __future__ import annotations

import importlib
import json
import sys
import uuid
from ctypes import byref
from typing import Any, Final

_STATES: Final = ("not supported", "not started", "in progress", "completed")
"""The names of NVML_GPU_FABRIC_STATE_…, by value."""


def main() -> int:
    """Print a list, of `{"state", "status", "cluster", "clique"}`; on failure a sentence on standard error."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        sys.stderr.write("nvidia-ml-py is not installed")
        return 3
    try:
        pynvml.nvmlInit()
        handles = (pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount()))
        fabrics = [_fabric(pynvml, handle) for handle in handles]
    except pynvml.NVMLError as error:
        sys.stderr.write(str(error))
        return 4
    sys.stdout.write(json.dumps(fabrics))
    return 0


def _fabric(pynvml: Any, handle: Any) -> dict[str, object]:
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    try:
        try:
            pynvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
            info = pynvml.c_nvmlGpuFabricInfo_t()  # of older drivers
            pynvml.nvmlDeviceGetGpuFabricInfo(handle, byref(info))
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        return {"state": _STATES[0], "status": 0, "cluster": "", "clique": 0}
    cluster = str(uuid.UUID(bytes=bytes(info.clusterUuid[:16])))
    state = _STATES[info.state] if info.state < len(_STATES) else f"state {info.state}"
    return {"state": state, "status": info.status, "cluster": cluster, "clique": info.cliqueId}


if __name__ == "__main__":
    sys.exit(main())
