"""The power is cut in the middle of a bind: after the boot the claim is prepared anew, and nothing is left over.

Kubelet's directory and the driver's in it are on a disk that stays; sysfs and the CDI directory are as after any boot.
The first cut comes when the GPU has left the host's driver and its companion has not: the daemon is stopped there, so
that it is certain. Further ones come at a random moment of a node that prepares and unprepares without a pause. Each
time kubelet has its own list of what it had prepared: it prepares a claim again, by the same UID, or unprepares it.

`GPUACTORS_VM_CUTS` says how often the power is cut (1), `GPUACTORS_VM_SEED` repeats what was drawn.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.support.claims import prepare
from tests.support.kubelet_grpcio import KubeletStandIn
from tests.vm.guest.claims import (
    ACT_WITHIN_S,
    CLAIMS_MACHINE,
    COMPANION_DRIVER,
    GPU_DRIVER,
    Cluster,
    Gpus,
    override_of,
    under_way,
)
from tests.vm.guest.daemon import START_TIMEOUT_S, DaemonProcess
from tests.vm.guest.runner import Guest
from tests.vm.machine import CUT_MARKER

MACHINE: Final = replace(
    CLAIMS_MACHINE, disk_mib=128, power_cuts=int(os.environ.get("GPUACTORS_VM_CUTS", "1"))
)

DISK: Final = Path("/run/disk")
KUBELET_DIR: Final = DISK / "kubelet"
STATE_DIR: Final = DISK / "gpuactors"
PREPARED: Final = KUBELET_DIR / "prepared.json"
"""Kubelet's own list (its dra_manager_state): name → UID and address, of what it has asked to be prepared."""

LIVES: Final = "lives.jsonl"
"""Among the artifacts: what each life began with."""

WORKING_S: Final = 4.0
"""The random cut comes at most so long after the node was found to be right."""


@dataclass(frozen=True, slots=True)
class _Scene:
    guest: Guest
    draw: random.Random
    gpus: Gpus
    cluster: Cluster
    plugin: Mapping[str, Any]


def run(guest: Guest) -> None:
    """One life."""
    number, of, seed = (os.environ[f"VM_{name}"] for name in ("LIFE", "LIVES", "SEED"))
    print(f"life {number} of {of}, GPUACTORS_VM_SEED={seed}", flush=True)
    with guest.step("booted: the drivers of the host, and no CDI file"):
        _mount()
        before = _listed()
        gpus = Gpus.of(guest.machine)
    with ExitStack() as stack:
        stack.enter_context(KubeletStandIn(KUBELET_DIR, synced=True))
        cluster = stack.enter_context(Cluster.running(guest, KUBELET_DIR, seed=int(number)))
        _note(guest, cluster, before)
        for name, (uid, address) in before.items():
            cluster.api.claim(name, address, uid=uid)
        daemon = stack.enter_context(cluster.start(f"daemon-{number}", state_dir=STATE_DIR))
        scene = _Scene(
            guest,
            random.Random(f"{seed} {number}"),
            gpus,
            cluster,
            stack.enter_context(cluster.plugin(daemon)),
        )
        if number == "1":
            _cut_in_the_middle(scene, daemon)
        _finds_nothing_prepared(scene, daemon)
        _prepares_anew(scene, before)
        if number != of:
            _works_until_the_cut(scene)
        with guest.step("the last life ends in order"):
            assert daemon.terminate() == 0
            daemon.check_one_life()
            lives = (guest.artifacts / LIVES).read_text(encoding="utf-8").splitlines()
            cluster.figure("power_cuts", len(lives) - 1)
            cluster.figure("claims_that_were_cut", sum(len(json.loads(life)["listed"]) for life in lives))


def _cut_in_the_middle(scene: _Scene, daemon: DaemonProcess) -> None:
    step, cluster, gpus = scene.guest.step, scene.cluster, scene.gpus
    with step("a claim is prepared"):
        _prepare(scene, "kept", gpus.alone.address)
    with step("another one: its GPU has left the host's driver, its companion has not, and the power is cut"):
        uid = cluster.api.claim("cut", gpus.gpu.address)
        _list(_listed() | {"cut": (uid, gpus.gpu.address)})
        under_way(prepare, scene.plugin, "cut", uid)
        until = time.monotonic() + ACT_WITHIN_S
        while gpus.gpu.driver == GPU_DRIVER:  # without a pause, so that it is not missed
            assert time.monotonic() < until, "no bind"
        daemon.process.send_signal(signal.SIGSTOP)
        assert gpus.audio.driver == COMPANION_DRIVER
        assert override_of(gpus.gpu) == "vfio-pci"
        print(f"    {gpus.drivers}", flush=True)
        _announce_cut(0.05)
        time.sleep(START_TIMEOUT_S)
        raise AssertionError("the power was not cut")


def _finds_nothing_prepared(scene: _Scene, daemon: DaemonProcess) -> None:
    step, cluster, gpus = scene.guest.step, scene.cluster, scene.gpus
    with step("the checkpoint of the old boot counts as empty; all is offered, and nothing is bound"):
        cluster.wait_offered(gpus)
        read, *_ = daemon.said("checkpoint.read")
        assert read["claims"] == 0, read
        assert gpus.at_rest, gpus.drivers


def _prepares_anew(scene: _Scene, before: Mapping[str, tuple[str, str]]) -> None:
    """`kept`'s pod was deleted meanwhile, every other claim's gets a new sandbox."""
    step, cluster, gpus = scene.guest.step, scene.cluster, scene.gpus
    again = {name: claim for name, claim in before.items() if name != "kept"}
    if "kept" in before:
        with step("a claim of the old boot is unprepared: done, and no driver changes"):
            cluster.unprepared(scene.plugin, "kept", before["kept"][0])
            assert gpus.at_rest, gpus.drivers
    with step(f"prepared anew by the same UID: {', '.join(again) or 'nothing'}"):
        functions = {function.address: function for function in gpus.functions}
        for name, (uid, address) in again.items():
            figure = "prepare_after_the_boot_ms" if name == "cut" else ""
            cluster.prepared(scene.plugin, name, uid, figure)
            cluster.check_cdi(uid, functions[address])
            assert functions[address].driver == "vfio-pci"
        gpus.check_overrides()
    with step("unprepared: nothing is left over"):
        for name, (uid, _) in again.items():
            cluster.unprepared(scene.plugin, name, uid)
        _list({})
        gpus.check_nothing_is_left(cluster)


def _works_until_the_cut(scene: _Scene) -> None:
    """Prepares and unprepares, up to four GPUs at a time."""
    addresses = scene.gpus.offered
    had: dict[str, str] = {}
    _announce_cut(scene.draw.uniform(0.05, WORKING_S))
    began = time.monotonic()
    while time.monotonic() < began + START_TIMEOUT_S:
        address = scene.draw.choice(addresses)
        if (name := had.pop(address, None)) is None:
            had[address] = f"work-{len(had)}-{time.monotonic_ns()}"
            _prepare(scene, had[address], address)
        else:
            scene.cluster.unprepared(scene.plugin, name, _listed()[name][0])
            _list({other: claim for other, claim in _listed().items() if other != name})
    raise AssertionError("the power was not cut")


def _prepare(scene: _Scene, name: str, address: str) -> None:
    uid = scene.cluster.api.claim(name, address)
    _list(_listed() | {name: (uid, address)})
    scene.cluster.prepared(scene.plugin, name, uid)


def _announce_cut(after_s: float) -> None:
    print(f"{CUT_MARKER} {after_s:.3f} s", flush=True)


# --- the disk -------------------------------------------------------------------------------------------------


def _mount() -> None:
    # What is not synced is not written by the kernel of itself: only what the daemon and kubelet sync is there again.
    for name in ("dirty_expire_centisecs", "dirty_writeback_centisecs"):
        Path("/proc/sys/vm", name).write_text("60000\n", encoding="ascii")
    DISK.mkdir()
    subprocess.run(["/run/busybox", "mount", "-t", "ext4", "/dev/vda", str(DISK)], check=True)
    STATE_DIR.mkdir(exist_ok=True)
    for name in ("device-plugins", "pod-resources"):
        (KUBELET_DIR / name).mkdir(parents=True, exist_ok=True)


def _listed() -> dict[str, tuple[str, str]]:
    if not PREPARED.exists():
        return {}
    return {name: (uid, address) for name, (uid, address) in json.loads(PREPARED.read_text()).items()}


def _list(claims: Mapping[str, tuple[str, str]]) -> None:
    """Durable when it returns."""
    new = PREPARED.with_suffix(".new")
    new.write_text(json.dumps(claims), encoding="utf-8")
    _sync(new)
    new.rename(PREPARED)
    _sync(KUBELET_DIR)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _note(guest: Guest, cluster: Cluster, before: Mapping[str, tuple[str, str]]) -> None:
    """What this life begins with. The intent is on disk before the first write to sysfs, and outlives the power."""
    checkpoint = cluster.plugin_dir / "gpuactors-checkpoint.json"
    text = checkpoint.read_text(encoding="utf-8") if checkpoint.exists() else ""
    if "cut" in before:
        assert before["cut"][0] in text, text
    with (guest.artifacts / LIVES).open("a", encoding="utf-8") as lives:
        print(json.dumps({"listed": before, "checkpoint": text, "files": cluster.files}), file=lives)
