"""The power is cut at a random moment, again and again; each time the node comes up with the right device lists.

The daemon's state directory and kubelet's directory are on a disk that stays. A life begins with what the last one
left: its sockets, kubelet's ledger, a journal that may be torn. The daemon must come up without complaint, list what
the ledger says was given away (Unhealthy as long as nothing is bound, as after any boot; Healthy and allocated when it
is), and serve. Then the guest binds, allocates and ends pods as fast as it can until QEMU is killed. What its kernel
had not written is lost; it is told to write at a pace drawn anew in each life, so that something is always under way.

`GPUACTORS_VM_CUTS` says how often (2), `GPUACTORS_VM_SEED` repeats what was drawn, though never to the instant.
"""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.runner import Guest
from tests.vm.guest.sysfs import function_behind
from tests.vm.machine import CUT_MARKER, Machine, PciFunction

PORTS: Final = ("rp1", "rp2", "rp3")

MACHINE: Final = Machine(
    ports=PORTS,
    functions=tuple(PciFunction(f"edu-{port}", "edu", port) for port in PORTS),
    disk_mib=128,
    power_cuts=int(os.environ.get("GPUACTORS_VM_CUTS", "2")),
)

DISK: Final = Path("/run/disk")
KUBELET_DIR: Final = DISK / "kubelet"
STATE_DIR: Final = DISK / "gpuactors"
LIVES: Final = "lives.jsonl"
"""Among the artifacts: what each life began with."""

JOURNAL: Final = STATE_DIR / "journal"

SMALL_JOURNAL: Final = (
    "from functools import partial; from gpuactors.observe import journal; journal.JOURNAL_BATCH_S = 0.05; "
    "journal.Bounds = partial(journal.Bounds, file_bytes=24_000, all_bytes=400_000); "
    "from gpuactors.cli.commands import main; main()"
)
"""The daemon with a journal that begins a new file after a second's work, and removes old ones after a few lives."""

STARTING_S: Final = 8.0
"""A cut comes at most so long after the daemon is started, or after it was found to be right (WORKING_S)."""

WORKING_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Life:
    """Which life of the machine it is, from 1, and what it draws."""

    number: int
    of: int
    draw: random.Random

    @property
    def is_last(self) -> bool:
        return self.number == self.of


def run(guest: Guest) -> None:
    """One life."""
    number, of, seed = (os.environ[f"VM_{name}"] for name in ("LIFE", "LIVES", "SEED"))
    life = Life(int(number), int(of), random.Random(f"{seed} {number}"))
    print(f"life {number} of {of}, GPUACTORS_VM_SEED={seed}", flush=True)
    addresses = {function_behind(guest.machine, port).address for port in PORTS}
    with guest.step("the disk is mounted, and what is on it is right"):
        _mount(life)
        given = _given_away()
        with (guest.artifacts / LIVES).open("a", encoding="utf-8") as lives:
            print(
                json.dumps({"life": life.number, "seed": seed, "given": given, **_left_behind()}), file=lives
            )
        assert set(given) <= addresses, given
    if not life.is_last and life.draw.random() < 0.25:
        announce_cut(life, STARTING_S)
    arguments = (
        "--kubelet-dir", str(KUBELET_DIR), "--resync-interval-s", "3600", "--select", "vendor=1234,device=11e8",
    )  # fmt: skip
    log_file = guest.artifacts / f"daemon-{life.number}.log"
    with DaemonProcess.start(
        arguments, log_file, state_dir=STATE_DIR, program=("-c", SMALL_JOURNAL)
    ) as daemon:
        # Its imports take as long as the daemon's own start, beside which they cost nothing.
        from tests.vm.guest import power_cut

        power_cut.live(guest, life, daemon, given)


def announce_cut(life: Life, at_most_s: float) -> None:
    """From now on the power may go at any moment."""
    print(f"{CUT_MARKER} {life.draw.uniform(0.05, at_most_s):.3f} s", flush=True)


# --- the disk -------------------------------------------------------------------------------------------------


def _mount(life: Life) -> None:
    # Within the life everything between "in memory alone" and "on the disk" has to occur.
    for name, values in (
        ("dirty_expire_centisecs", (10, 50, 3000)),
        ("dirty_writeback_centisecs", (5, 20, 500)),
    ):
        Path("/proc/sys/vm", name).write_text(f"{life.draw.choice(values)}\n", encoding="ascii")
    DISK.mkdir()
    options = f"commit={life.draw.choice((1, 1, 5))}"
    subprocess.run(["/run/busybox", "mount", "-t", "ext4", "-o", options, "/dev/vda", str(DISK)], check=True)
    STATE_DIR.mkdir(exist_ok=True)
    for name in ("device-plugins", "pod-resources"):
        (KUBELET_DIR / name).mkdir(parents=True, exist_ok=True)


def _given_away() -> dict[str, str]:
    """Kubelet's ledger file, read without any code of the daemon's: it must be whole, or not there yet."""
    try:
        text = (KUBELET_DIR / "device-plugins" / "kubelet_internal_checkpoint").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    entries = json.loads(text)["Data"]["PodDeviceEntries"] or ()
    return {
        device: entry["PodUID"]
        for entry in entries
        for devices in entry["DeviceIDs"].values()
        for device in devices
    }


def sockets() -> list[Path]:
    """Those of the daemon and of kubelet, under whatever name; not what the kubelet stand-in has of its own."""
    directories = (STATE_DIR, KUBELET_DIR / "device-plugins", KUBELET_DIR / "pod-resources")
    found = (path for directory in directories for path in directory.iterdir())
    return sorted(path for path in found if stat.S_ISSOCK(path.lstat().st_mode))


def _left_behind() -> dict[str, object]:
    journal = sorted(JOURNAL.iterdir()) if JOURNAL.is_dir() else []
    return {
        "sockets": [str(path.relative_to(DISK)) for path in sockets()],
        "journal": [f"{path.name}: {path.stat().st_size}" for path in journal[-2:]],
        "journal_files": len(journal),
    }
