"""NVIDIA's driver as its programs find it on the fake host: a root with a mock of NVML that says what sysfs says.

NVML and sysfs are two sources, and a driver that finds a GPU in both on vfio would offer it twice. The mock shows the
GPU with index N while `/dev/nvidiaN` is there, which the fake host therefore removes where a GPU leaves the driver;
only when no such node is there it shows all. A GPU that is on no driver of NVIDIA's yet is listed with the number that
the host would give it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from gpuactors_simulation.host.kernel import NVIDIA, uuid_of
from tests.node.domains import CLIQUE, MGMT_MINOR
from tests.node.fake_host import FakeHost
from tests.node.nvidia.programs import NVML, directory
from tests.node.real_tenants import NVIDIA_MAJOR

ROOT: Final = Path("/run/k8s/nvidia/driver")
"""As `/run/nvidia/driver` of a driver in a container."""

CONFIG: Final = ROOT.parent / "mock-nvml.yaml"

VERSION: Final = "570.170.01"
"""Of the driver: the least for daemons of domains with DNS names is 570.158.01."""

_LIBRARIES: Final = "usr/lib/x86_64-linux-gnu"
MOST_GPUS: Final = 8
"""As many as the mock can show."""

_UVM_MAJOR: Final = 235
"""For local use, by Documentation/admin-guide/devices.txt; the kernel gives NVIDIA's driver any that is free."""

_NODES: Final = {
    "nvidiactl": (NVIDIA_MAJOR, 255),
    "nvidia-uvm": (_UVM_MAJOR, 0),
    "nvidia-uvm-tools": (_UVM_MAJOR, 1),
}


@contextmanager
def driver_root(host: FakeHost) -> Iterator[Mapping[str, str]]:
    """The driver is installed while the context is open: the variables of what uses it. `refresh` says later that GPUs
    were plugged."""
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, ROOT.parent)
        (ROOT / _LIBRARIES).mkdir(parents=True)
        library = ROOT / _LIBRARIES / f"{NVML.removesuffix('.1')}.{VERSION}"
        shutil.copy(directory() / NVML, library)
        (ROOT / _LIBRARIES / NVML).symlink_to(library.name)
        program = ROOT / "usr/bin/nvidia-smi"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/false\n")  # it is looked for, and never run
        program.chmod(0o755)
        capability = ROOT / "proc/driver/nvidia/capabilities/fabric-imex-mgmt"
        capability.parent.mkdir(parents=True)
        capability.write_text(f"DeviceFileMinor: {MGMT_MINOR}\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
        for name in ("nvidia-imex", "nvidia-imex-ctl"):
            shutil.copy(Path(os.environ["K8S_DIR"], "domains/fakes", name), program.parent)
        # nvidia-modprobe makes a GPU's node, and nothing removes it where the GPU leaves the driver.
        nodes = _NODES | {f"nvidia{number}": (NVIDIA_MAJOR, number) for number in range(MOST_GPUS)}
        (ROOT / "dev").mkdir()
        for name, numbers in nodes.items():
            os.mknod(ROOT / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(*numbers))
        refresh(host)
        yield {
            "NVIDIA_DRIVER_ROOT": str(ROOT),
            "DRIVER_ROOT_CTR_PATH": str(ROOT),
            "MOCK_NVML_CONFIG": str(CONFIG),
            # Also said to be another file than the kernel's: nothing of NVIDIA's is unmounted then.
            "ALT_PROC_DEVICES_PATH": "/proc/devices",
        }


def refresh(host: FakeHost) -> None:
    """Writes down the GPUs that are plugged, for programs that start from now on."""
    CONFIG.write_text(yaml.safe_dump(mock_config(host)))


def mock_config(host: FakeHost) -> dict[str, Any]:
    """What the mock is to say of the host's GPUs."""
    with host.lock:
        gpus = {address: host.tree.driver_of(address) for address in host.gpus()}
        minors = host.kernel.minors
    numbers = {address: minors[address] for address, driver in gpus.items() if driver == NVIDIA}
    taken = frozenset(numbers.values())
    free = (number for number in itertools.count() if number not in taken)
    numbers |= {address: next(free) for address in sorted(gpus) if address not in numbers}
    return {
        "version": "1.0",
        "system": {
            "driver_version": VERSION, "nvml_version": f"12.{VERSION}", "cuda_version": "12.8",
            "cuda_version_major": 12, "cuda_version_minor": 8,
        },
        "device_defaults": {
            "name": "NVIDIA H100 80GB HBM3", "brand": "nvidia", "architecture": "hopper",
            "compute_capability": {"major": 9, "minor": 0},
            "fabric": {
                "cluster_uuid": CLIQUE.partition(".")[0], "clique_id": int(CLIQUE.partition(".")[2]),
                "state": "completed",
            },
            "memory": {"total_bytes": 80 << 30, "free_bytes": 80 << 30, "used_bytes": 0},
            "pci": {"device_id": 0x233010DE, "subsystem_id": 0x165810DE},
            "persistence_mode": "enabled", "compute_mode": "default",
            "mig": {"mode_current": "disabled", "mode_pending": "disabled", "max_gpu_instances": 7},
        },
        "devices": [
            {"index": number, "minor_number": number, "uuid": uuid_of(address), "pci": {"bus_id": address}}
            for address, number in sorted(numbers.items(), key=lambda item: item[1])
        ],
    }  # fmt: skip
