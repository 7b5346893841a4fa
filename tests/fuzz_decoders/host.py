"""The decoders of what the host says: its kernel, NVIDIA's driver, and the programs that are asked."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import trio

from gpuactors.acts.modprobe import Modprobe
from gpuactors.acts.persistenced import Persistenced, PersistenceError
from gpuactors.acts.state_lock import FILE_NAME as STATE_LOCK
from gpuactors.acts.state_lock import StateLock
from gpuactors.core.domains.clique import Said, found_by, is_clique, parsed
from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.core.values.model import DeviceId, Health, PciAddress, PciFunction, pci_address
from gpuactors.core.values.selector import parse_selector
from gpuactors.host import boot, modules, root, use, vfio
from gpuactors.host.asked import Ended
from gpuactors.host.group import GroupReader
from gpuactors.host.imex import ImexFiles, character_majors
from gpuactors.host.imex_ctl import ImexCtl
from gpuactors.host.management import AUTO, ManagementDevice
from gpuactors.host.modules import best
from gpuactors.host.nvidia import NvidiaGpus
from gpuactors.host.nvml import NvmlClique
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.places import Places
from gpuactors.host.procfs import ProcReader, pod_uid
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.host.uevents import hint_of, parse_datagram
from gpuactors.host.vgpu import read_vgpu
from gpuactors.kubelet.list_messages import encoded_device
from gpuactors.ports.errors import HostError
from gpuactors_simulation.host.tree import HostTree, PciSpec
from tests.fuzz_decoders.damage import of_bytes
from tests.fuzz_decoders.decoder import Decoder, Stream, at_once, of_text, sentence

UID: Final = "0f1e2d3c-0000-4000-8000-000000000001"
GPU: Final = pci_address("0000:23:00.0")
GROUP: Final = 51
CLIQUE: Final = "5a1c8f6e-0000-4000-8000-0000000000aa.1"


def of_host(directory: Path) -> tuple[Decoder, ...]:
    """Their files are in `directory`."""
    tree = HostTree(directory / "host", cdev=True)
    tree.plug(PciSpec(GPU, "10de", "2330", "030200", GROUP, numa_node=1, driver="nvidia"))
    return (*_kernel(), *_sysfs(tree), *_proc(tree.root), *_nvidia(tree.root), *_programs(directory))


# --- text of the kernel ---------------------------------------------------------------------------------------


def _uevent(datagram: bytes) -> None:
    found = parse_datagram(datagram)
    if found is not None:
        hint_of(found)


_MODALIAS: Final = "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00"


def _kernel() -> tuple[Decoder, ...]:
    uevent = (
        b"bind@/devices/pci0000:20/0000:23:00.0\0ACTION=bind\0DEVPATH=/devices/pci0000:20/0000:23:00.0\0SUBSYSTEM=pci\0"
        b"PCI_SLOT_NAME=0000:23:00.0\0SEQNUM=1\0"
    )
    group = (
        b"add@/devices/virtual/vfio/51\0ACTION=add\0DEVPATH=/devices/virtual/vfio/51\0SUBSYSTEM=vfio\0"
        b"DEVNAME=vfio/51\0"
    )
    cgroup = f"0::/../kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-x.scope\n".encode()
    aliases = (
        b"alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci\n"
        b"alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci\n"
    )
    devices = b"Character devices:\n  1 mem\n195 nvidia-caps-imex-channels\n\nBlock devices:\n  8 sd\n"
    return (
        Decoder("uevent", (uevent, group), _uevent, (), of_bytes),
        Decoder(
            "/proc/PID/cgroup",
            (cgroup, b"12:pids:/kubepods/burstable/pod" + UID.encode()),
            of_text(pod_uid),
            (),
            of_bytes,
        ),
        Decoder("modules.alias", (aliases,), lambda b: best(b, _MODALIAS), (), of_bytes),
        Decoder(
            "modalias", (_MODALIAS.encode(),), of_text(lambda text: best(aliases, text)), (), of_bytes, 5
        ),
        Decoder("/proc/devices", (devices,), of_text(character_majors), (), of_bytes, 5),
    )


# --- files ----------------------------------------------------------------------------------------------------


def _of_file(
    name: str, path: Path, content: bytes, use_it: Callable[[], object], *, weight: int = 3
) -> Decoder:
    """What reads a file, which is as before after each input."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else None

    def read(damaged: bytes) -> None:
        path.write_bytes(damaged)
        try:
            use_it()
        finally:
            if before is None:
                path.unlink()
            else:
                path.write_bytes(before)

    return Decoder(name, (content,), read, (HostError,), of_bytes, weight)


def _encoded(function: PciFunction) -> None:
    """As the journal, kubelet and a sentence have it."""
    msgspec.json.encode(function)
    encoded_device(DeviceId(GPU), Health.HEALTHY, function.numa_node)
    sentence(function.fault or "")
    assert function.numa_node is None or function.numa_node < 1 << 31, "no kernel has such a node"
    assert function.memory_bytes <= 1 << 67, "no function has so much"


def _sysfs(tree: HostTree) -> tuple[Decoder, ...]:
    host, there = HostRoot(str(tree.root)), tree.device_dir(GPU)
    names = tree.root / "pci.ids"
    names.write_bytes(b"10de  NVIDIA Corporation\n\t2330  GH100 [H100]\n")
    reader = SysfsReader(host, (parse_selector("address=0000:23:00.0"),), PciIds(names))

    def inspected() -> None:
        for function in reader.inspect(GPU):
            _encoded(function)
        group = GroupReader(host).read(GPU)
        assert group is not None
        GroupReader(host).nodes(group)
        for member in group.functions:
            best(b"alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci\n", member.modalias)
        Places(host).of_node(f"/dev/vfio/{GROUP}")

    def polled() -> None:
        msgspec.json.encode(use._passive(host, PollTarget(GROUP, (GPU,), may_open=False)))

    def typed() -> None:
        """As the facts of a virtual function have it."""
        vgpu = read_vgpu(
            str(there), lambda name: (there / name).read_bytes(), lambda _, problem: sentence(problem)
        )
        assert vgpu is not None
        sentence(vgpu.unlisted)
        msgspec.json.encode(vgpu)

    tree.set_vgpu(GPU, 1147)
    listed = b"ID    : vGPU Name\n1147  : NVIDIA L40S-1Q\nNVIDIA A40-2Q 558\n"
    bars = b"0x0000d00000000000 0x0000d0001fffffff 0x000000000014220c\n0x0 0x0 0x0\n"
    return (
        _of_file("vendor", there / "vendor", b"0x10de\n", inspected, weight=1),
        _of_file("class", there / "class", b"0x030200\n", inspected, weight=1),
        _of_file("NUMA node", there / "numa_node", b"1\n", inspected),
        _of_file("BARs", there / "resource", bars, inspected),
        _of_file("modalias of a function", there / "modalias", _MODALIAS.encode(), inspected, weight=1),
        _of_file("device number", there / "drm/card1/dev", b"226:1\n", inspected),
        _of_file("vGPU type", there / "nvidia/current_vgpu_type", b"1147\n", typed, weight=1),
        _of_file("vGPU types", there / "nvidia/creatable_vgpu_types", listed, typed),
        _of_file("enable", there / "enable", b"1\n", polled),
        _of_file("runtime_status", there / "power/runtime_status", b"active\n", polled, weight=1),
    )


def _proc(directory: Path) -> tuple[Decoder, ...]:
    host, process = HostRoot(str(directory)), directory / "proc/4711"
    (process / "fd").mkdir(parents=True)
    (process / "fd/3").symlink_to("/dev/null")
    (process / "task/4711").mkdir(parents=True)

    def held() -> None:
        proc = ProcReader(host)
        proc._is_ending(4711)
        msgspec.json.encode(proc._holder(4711))

    def release() -> None:
        modules.vfio_driver(host, _MODALIAS)

    def program() -> None:
        os.fsencode(Modprobe(host, cast("Any", None))._path())
        assert "\0" not in Modprobe(host, cast("Any", None))._path(), "no program has such a path"

    return (
        _of_file("comm", process / "comm", b"qemu-kvm\n", held),
        _of_file("stat", process / "task/4711/stat", b"4711 (qemu) S 1 1\n", held),
        _of_file(
            "boot id",
            directory / root.BOOT_ID[1:],
            UID.encode() + b"\n",
            lambda: boot.boot_id(host).encode(),
        ),
        _of_file(
            "kernel command line",
            directory / root.COMMAND_LINE[1:],
            b"ro iommu=pt\n",
            lambda: vfio.read(host),
        ),
        _of_file("release", directory / root.OS_RELEASE[1:], b"6.12.1-amd64\n", release),
        _of_file("modprobe's path", directory / root.MODPROBE[1:], b"/sbin/modprobe\n", program),
        _of_file(
            "module parameter",
            directory / root.module_parameter("vfio_pci", "disable_idle_d3")[1:],
            b"Y\n",
            lambda: vfio.read(host),
            weight=1,
        ),
    )


# --- NVIDIA's driver ------------------------------------------------------------------------------------------


def _nvidia(directory: Path) -> tuple[Decoder, ...]:
    host = HostRoot(str(directory))
    information = b"Model: \t NVIDIA H100\nGPU UUID: \t GPU-" + UID.encode() + b"\nDevice Minor: \t 0\n"

    def informed() -> None:
        uuid = NvidiaGpus(host).uuid(GPU, "nvidia")
        assert uuid is None or uuid.isascii()
        group = GroupReader(host).read(GPU)
        assert group is not None
        GroupReader(host).nodes(group)

    listed = directory / root.DEVICE_NUMBERS[1:]
    listed.parent.mkdir(parents=True, exist_ok=True)
    listed.write_bytes(
        b"Character devices:\n195 nvidia-caps-imex-channels\n238 nvidia-caps\n\nBlock devices:\n"
    )

    def facts() -> None:
        msgspec.json.encode(ImexFiles(host).read())

    return (
        _of_file(
            "NVIDIA's information",
            directory / root.NVIDIA_GPUS[1:] / GPU / "information",
            information,
            informed,
        ),
        _of_file(
            "fabric-imex-mgmt",
            directory / root.FABRIC_IMEX_MGMT[1:],
            b"DeviceFileMinor: 7\nDeviceFileMode: 256\n",
            facts,
        ),
        _of_file(
            "NVIDIA's parameters", directory / root.NVIDIA_PARAMS[1:], b"ImexChannelCount: 2048\n", facts
        ),
        _of_file(
            "features file",
            directory / root.GPU_FEATURES[1:],
            b"nvidia.com/gpu.count=8\nnvidia.com/gpu.clique=" + CLIQUE.encode(),
            lambda: _clique(ImexFiles(host).clique()),
        ),
    )


def _clique(said: Said) -> None:
    sentence(said.why)
    sentence(found_by([said]).unknown)
    assert not said.clique_id or is_clique(said.clique_id)


# --- programs that are asked ----------------------------------------------------------------------------------


def _persistenced(content: bytes) -> None:
    """One answer, the first that this daemon gets."""
    stream = cast("trio.SocketStream", Stream(content))
    at_once(Persistenced(HostRoot("/nowhere"), "/run/nvidia/driver")._ask(stream, PciAddress(GPU), on=False))


def _programs(directory: Path) -> tuple[Decoder, ...]:
    fabrics = [{"state": "completed", "status": 0, "cluster": CLIQUE[:-2], "clique": 1}]
    nvml, ctl = NvmlClique(("nvml",)), ImexCtl("/usr/bin/nvidia-imex-ctl")
    cdi, locks = directory / "cdi", directory / "locks"
    management = (
        b"---\ncdiVersion: 0.5.0\nkind: management.nvidia.com/gpu\ndevices:\n- name: all\n  containerEdits:\n"
        b"    deviceNodes:\n    - path: /dev/nvidia0\n"
    )
    accepted = struct.pack(">IIIIIIIi", 0x8000_0000 | 28, 1, 1, 0, 0, 0, 0, 0)

    def asked(judged: Callable[[Ended], object]) -> Callable[[bytes], None]:
        def answered(content: bytes) -> None:
            for answer in (Ended(0, content, b""), Ended(1, b"", content)):
                sentence(judged(answer))

        return answered

    def judged_nvml(answer: Ended) -> str:
        said = nvml._judged(answer)
        _clique(said)
        return said.why

    return (
        Decoder("NVML", (json.dumps(fabrics).encode(),), asked(judged_nvml)),
        Decoder("imex-ctl", (b"READY", b"NOT_READY"), asked(ctl._judged), (), of_bytes, 5),
        Decoder(
            "a clique",
            (CLIQUE.encode(), b"none"),
            of_text(lambda t: _clique(parsed("f", t))),
            (),
            of_bytes,
            5,
        ),
        _of_file(
            "CDI specification of another",
            cdi / "management.yaml",
            management,
            lambda: sentence(ManagementDevice(AUTO, str(cdi)).find()[0]),
        ),
        Decoder("nvidia-persistenced", (accepted,), _persistenced, (PersistenceError,), of_bytes),
        _of_file(
            "state.lock",
            locks / STATE_LOCK,
            b"0123456789abcdef      4711\n",
            lambda: sentence(StateLock(str(locks)).taken()),
        ),
    )
