"""The command line as a process: exit codes, the sentence that says what is wrong, and what each command prints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pytest

from gpuactors.config import KEYS
from gpuactors.observe.journal import Anchor
from gpuactors_simulation.host.tree import HostTree, PciSpec
from tests.core.builders import gpu
from tests.observe.recording import WALL, RecordedCore, files
from tests.process.daemon import gpuactors
from tests.process.node import A100, H100, HEALTHY, address, open_node

EX_USAGE, EX_UNAVAILABLE, EX_CANTCREAT, EX_CONFIG = 2, 69, 73, 78


# --- wrong input ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """A wrong command line: what `code` it ends with, and what must be `named` in the sentence."""

    words: tuple[str, ...]
    code: int
    named: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


WRONG = (
    Wrong(("run", "--kubelet-dri=/x"), EX_USAGE, ("--kubelet-dri", "--kubelet-dir")),
    Wrong(("inspect", "-o", "xml"), EX_USAGE, ("xml", "table", "json")),
    Wrong(("simulate", "--scenario=no-story"), EX_USAGE, ("--scenario", "no-story", "incident")),
    Wrong(("run", "--resync-interval-s=soon"), EX_CONFIG, ("resync_interval_s", "'soon'", "--resync-interval-s")),
    Wrong(("run", "--uevents=unix:"), EX_CONFIG, ("uevents", "unix:PATH")),
    Wrong(("run", "--select=colour=green"), EX_CONFIG, ("select", "colour")),
    Wrong(("run", "--pci-ids=/no/pci.ids"), EX_CONFIG, ("/no/pci.ids", "--pci-ids")),
    Wrong(("run", "--config=/no/file.toml"), EX_CONFIG, ("/no/file.toml", "--config")),
    Wrong(("inspect", "--host-root=/no/host"), EX_UNAVAILABLE, ("/no/host/sys", "--host-root")),
    Wrong(
        ("run",), EX_CONFIG, ("GPUACTORS_KUBELET_DRI", "GPUACTORS_KUBELET_DIR"), {"GPUACTORS_KUBELET_DRI": "/x"}
    ),
    Wrong(
        ("run",), EX_CONFIG, ("resync_interval_s", "'-1'", "GPUACTORS_RESYNC_INTERVAL_S"),
        {"GPUACTORS_RESYNC_INTERVAL_S": "-1"},
    ),
    Wrong(("run", "--config=FILES/key.toml"), EX_CONFIG, ("kubelet_dri", "key.toml", "kubelet_dir")),
    Wrong(("run", "--config=FILES/value.yaml"), EX_CONFIG, ("log_level", "'loud'", "value.yaml")),
    Wrong(("run", "--config=FILES/syntax.toml"), EX_CONFIG, ("syntax.toml", "line 1")),
)  # fmt: skip


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "key.toml").write_text('kubelet_dri = "/x"')
    (tmp_path / "value.yaml").write_text("log_level: loud")
    (tmp_path / "syntax.toml").write_text("log_level = = 1")

    def ended(wrong: Wrong) -> subprocess.CompletedProcess[str]:
        words = (word.replace("FILES", str(tmp_path)) for word in wrong.words)
        # Not the machine's own state directory: another daemon may have it, and not everybody may write there.
        return gpuactors(*words, env={"GPUACTORS_STATE_DIR": str(tmp_path), **wrong.environment})

    with ThreadPoolExecutor(3) as pool:
        for wrong, done in zip(WRONG, pool.map(ended, WRONG), strict=True):
            assert (done.returncode, done.stdout) == (wrong.code, ""), wrong
            assert all(part in done.stderr for part in wrong.named), (wrong, done.stderr)
            assert "Traceback" not in done.stderr, wrong
            if wrong.code != EX_USAGE:  # click's own messages show the usage as well
                assert re.fullmatch(r"gpuactors: .+\n", done.stderr), (wrong, "one sentence")


# --- standard output that cannot be written -----------------------------------------------------------------

PRINTING = (
    ("inspect", "--host-root=NODE", "--state-dir=NODE/s"),
    ("inspect", "-o", "json", "--host-root=NODE", "--state-dir=NODE/s"),
    ("explain", "23:00.0", "--host-root=NODE", "--state-dir=NODE/s"),
    (
        "doctor",
        "--pre",
        "--host-root=NODE",
        "--device-plugin-dir=NODE/k/device-plugins",
        "--state-dir=NODE/s",
    ),
    ("replay", "NODE/journal"),
    ("simulate", "--list"),
    ("simulate", "--scenario", "late-binding", "-o", "json"),
    ("config", "show"),
    ("config", "schema"),
    ("run", "--help"),
    ("--version",),
)


def test_a_full_disk_behind_standard_output_is_said_in_a_sentence(tmp_path: Path) -> None:
    HostTree(tmp_path).plug(PciSpec("0000:23:00.0", "10de", "2330", "030200", 0x23, driver="vfio-pci"))
    core = RecordedCore(gpu("23:00.0"))
    journal = files(tmp_path / "journal")
    journal.write(core.steps, Anchor(core.at, WALL))
    journal.close()

    def ended(words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        with Path("/dev/full").open("w") as full:
            return gpuactors(*(word.replace("NODE", str(tmp_path)) for word in words), stdout=full)

    with ThreadPoolExecutor(3) as pool:
        for words, done in zip(PRINTING, pool.map(ended, PRINTING), strict=True):
            assert done.returncode == EX_CANTCREAT, (words, done.stderr)
            (line,) = done.stderr.splitlines()
            assert line.startswith(
                "gpuactors: standard output cannot be written: No space left on device; "
            ), words


def test_a_reader_that_has_seen_enough_is_no_trouble() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = gpuactors("config", "schema", stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


# --- run --------------------------------------------------------------------------------------------------


def test_run_goes_on_without_a_host_and_without_uevents_and_recovers() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        sys, away = node.tree.root / "sys", node.directory / "away"
        sys.rename(away)
        nowhere = f"unix:{node.directory}/no/such/directory/u"
        with node.daemon(f"--uevents={nowhere}", tolerated={"scan.failed"}) as daemon:
            daemon.wait_event("scan.failed", has=[f"{sys}/bus/pci/devices", "--host-root"])
            daemon.wait_event("uevents.unavailable", has=["no/such/directory/u", "must exist"])
            assert node.device_lists() == {}
            away.rename(sys)
            node.wait_device_lists({H100: {address(0x23): HEALTHY}})
            done = gpuactors(
                "inspect", f"--host-root={node.tree.root}", f"--state-dir={node.directory / 's'}"
            )
            assert "\nuevents: not received: " in done.stdout
            assert "must exist" in " ".join(done.stdout.split())
            node.assert_sound(daemon)


def test_settings_come_from_flag_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('log_level = "warning"\nkubelet_dir = "/from/file"\nresync_interval_s = 7\n')
    environment = {"GPUACTORS_KUBELET_DIR": "/from/environment", "GPUACTORS_CONFIG": str(file)}
    done = gpuactors("config", "show", "-o", "json", "--log-level=error", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert tuple(shown) == KEYS
    assert shown["log_level"] == {"value": "error", "from": "flag --log-level"}
    assert shown["kubelet_dir"] == {
        "value": "/from/environment",
        "from": "environment GPUACTORS_KUBELET_DIR",
    }
    assert shown["resync_interval_s"] == {"value": 7.0, "from": f"file {file}"}
    assert shown["uevents"] == {"value": "kernel", "from": "default"}

    done = gpuactors("config", "show", f"--state-dir={tmp_path}")  # the machine's own may have a daemon
    assert done.returncode == 0
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert tuple(lines) == KEYS
    assert lines.pop("state_dir").endswith("  flag --state-dir")
    assert len({line.rindex("  default") for line in lines.values()}) == 1, "the columns are aligned"

    done = gpuactors("config", "schema")
    assert done.returncode == 0
    schema = json.loads(done.stdout)
    assert tuple(schema["properties"]) == (*KEYS, "nodes")
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("absent", ["host", "kubelet"])
def test_run_ends_where_what_it_needs_was_never_there(tmp_path: Path, absent: str) -> None:
    """The bounds are minutes; this daemon's are shorter."""
    host, kubelet = tmp_path / "h", tmp_path / "k/device-plugins"
    if absent == "kubelet":
        HostTree(host).plug(PciSpec("0000:23:00.0", "10de", "2330", "030200", 0x23, driver="vfio-pci"))
    else:
        kubelet.mkdir(parents=True)
    flags = (
        f"--host-root={host}",
        f"--device-plugin-dir={kubelet}",
        f"--state-dir={tmp_path / 's'}",
        "--uevents=off",
    )
    done = gpuactors(
        "run",
        *flags,
        bounds={
            "daemon.startup_checks.HOST_ABSENT_S": 1.5,
            "daemon.startup_checks.KUBELET_DIR_ABSENT_S": 1.5,
        },
    )
    assert done.returncode == EX_UNAVAILABLE, done.stderr
    last = json.loads(done.stderr.splitlines()[-1])
    assert (last["event"], last["level"]) == ("daemon.gave_up", "error")
    place, flag = {
        "host": (f"{host}/sys", "--host-root"),
        "kubelet": (str(kubelet), "--device-plugin-dir"),
    }[absent]
    assert place in last["reason"]
    assert flag in last["reason"]
    assert not [path for path in tmp_path.rglob("*") if path.is_socket()]


# --- the running daemon -----------------------------------------------------------------------------------


def test_config_show_tells_what_the_daemon_runs_with() -> None:
    with open_node() as node:
        where = f"--state-dir={node.directory / 's'}"
        with node.daemon("--node-name=gpu-17", "--select=!address=23:00.0") as daemon:
            daemon.wait_event("daemon.serving")
            done = gpuactors("config", "show", "-o", "json", where)
            shown = json.loads(done.stdout)
            assert tuple(shown) == KEYS
            assert shown["node_name"] == {"value": "gpu-17", "from": "flag --node-name"}
            assert shown["select"]["value"][-1] == "!address=0000:23:00.0"
            assert shown["kubelet_dir"] == {"value": str(node.kubelet_dir), "from": "flag --kubelet-dir"}
            table = gpuactors("config", "show", where).stdout.splitlines()
            assert table[0].startswith(f"Settings of the running daemon (process {daemon.pid}, version ")
            assert table[0].endswith(" on node gpu-17")
            assert tuple(line.split()[0] for line in table[2:]) == KEYS
            # With any other flag it shows what that would give.
            own = json.loads(gpuactors("config", "show", "-o", "json", where, "--log-level=error").stdout)
            assert own["log_level"] == {"value": "error", "from": "flag --log-level"}
            assert own["node_name"]["value"] == ""


def test_a_daemon_that_hangs_is_said_to() -> None:
    with open_node() as node, node.daemon() as daemon:
        daemon.wait_event("daemon.serving")
        daemon.signal(signal.SIGSTOP)
        try:
            where = (f"--host-root={node.tree.root}", f"--state-dir={node.directory / 's'}")
            assert "does it hang" in " ".join(gpuactors("inspect", *where).stdout.split())
            known = json.loads(gpuactors("inspect", "-o", "json", *where).stdout)
            assert (known["source"], "does it hang" in known["source_problem"]) == ("inspection", True)
            shown = gpuactors("config", "show", where[1]).stdout
            assert "does it hang" in shown.splitlines()[0]
        finally:
            daemon.signal(signal.SIGCONT)


def test_a_normal_start_says_nothing_of_being_unregistered_and_a_device_that_goes_says_why() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        node.plug(0x24, "2330", driver="vfio-pci")
        with node.daemon() as daemon:
            daemon.wait_event("plugin.registered")
            assert not [line for line in daemon.log if line["event"] == "plugin.unregistered"]
            node.tell(node.tree.unplug(address(0x23)))
            daemon.wait_event("device.gone", device=address(0x23), has=["the PCI function is gone"])
            node.tell(node.tree.unbind(address(0x24)))
            daemon.wait_event("device.gone", device=address(0x24), has=["bound to no driver"])


# --- inspect ----------------------------------------------------------------------------------------------


def test_inspect_shows_what_is_there_and_why(tmp_path: Path) -> None:
    with open_node() as node:
        node.plug(0x23, "2330", numa_node=1, driver="vfio-pci")
        node.plug(0x23, "1aef", function=1, class_code="040300", driver="vfio-pci")
        node.plug(0x24, "2330", driver="nvidia")
        node.plug(0x31, "20b0", driver="vfio-pci")
        node.plug(0x31, "1aef", function=1, class_code="040300", driver="snd_hda_intel")
        node.plug(0x41, "29ff")
        node.plug(0x42, "1050", vendor="1af4", driver="vfio-pci")
        root = f"--host-root={node.tree.root}"
        done = gpuactors("inspect", root, "-o", "json")
        assert (done.returncode, done.stderr) == (0, "")
        shown = json.loads(done.stdout)
        assert shown["source"] == "inspection"
        assert shown["devices"] == [
                _device(
                    0x23, "2330", "vfio-pci", "GH100 [H100 SXM5 80GB]", H100, "Healthy", "Free", "free",
                    numa_node=1, group_members=[address(0x23), address(0x23, 1)],
                ),
                _device(
                    0x24, "2330", "nvidia", "GH100 [H100 SXM5 80GB]", H100, "Unhealthy", "NotBound",
                    "bound to nvidia, which is no vfio driver; bind it to vfio-pci to offer it",
                ),
                _device(
                    0x31, "20b0", "vfio-pci", "GA100 [A100 SXM4 40GB]", A100, "Unhealthy", "GroupNotViable",
                    "IOMMU group 49 is not viable: 0000:31:00.1 is bound to snd_hda_intel; "
                    "bind it to vfio-pci or to no driver",
                    group_members=[address(0x31), address(0x31, 1)],
                ),
                _device(
                    0x41, "29ff", None, None, "nvidia.com/29ff", "Unhealthy", "NotBound",
                    "bound to no driver; bind it to vfio-pci to offer it",
                ),
        ]  # fmt: skip

        done = gpuactors("inspect", root)
        assert done.returncode == 0
        lines = done.stdout.splitlines()
        assert [line for line in lines if line.startswith("nvidia.com/")] == ["nvidia.com/29ff", A100, H100]
        header = next(line for line in lines if "ADDRESS" in line)
        rows = [line for line in lines if line.startswith("  0000:")]
        assert [row.split()[0] for row in rows] == [address(slot) for slot in (0x41, 0x31, 0x23, 0x24)]
        for title, cells in (
            ("ID", ["10de:29ff", "10de:20b0", "10de:2330", "10de:2330"]),
            ("GROUP", ["65", "49", "35", "36"]),
            ("NUMA", ["-", "-", "1", "-"]),
            ("HEALTH", ["not", "Unhealthy", "Healthy", "not"]),
        ):
            at = header.index(title)
            assert [row[at:].split()[0] for row in rows] == cells, "the columns are aligned"
            assert all(row[at - 2 : at] == "  " for row in rows)

        ids = tmp_path / "pci.ids"
        ids.write_text("10de  NVIDIA Corporation\n\t2330  Named By The Operator\n")
        done = gpuactors("inspect", root, "-o", "json", f"--pci-ids={ids}", "--select=address=0000:23:00.0")
        (device,) = json.loads(done.stdout)["devices"]
        assert (device["model"], device["resource"]) == (
            "Named By The Operator",
            "nvidia.com/NAMED_BY_THE_OPERATOR",
        )
        done = gpuactors("inspect", root, "--select=vendor=1002")
        assert done.returncode == 0
        assert "selectors" in done.stdout.splitlines()[-1]


def _device(
    slot: int, device: str, driver: str | None, model: str | None, resource: str, health: str, cause: str,
    reason: str, *, numa_node: int | None = None, group_members: list[str] | None = None,
) -> dict[str, object]:  # fmt: skip
    return {
        "address": address(slot),
        "vendor": "10de",
        "device": device,
        "class": "030200",
        "driver": driver,
        "iommu_group": slot,
        "group_members": group_members or [address(slot)],
        "numa_node": numa_node,
        "model": model,
        "resource": resource,
        "kind": "pci-function",
        "parent": None,
        "profile": None,
        "vm": None,
        "egm": None,
        "partitions": [],
        "listed": not reason.startswith("bound to"),
        "health": health,
        "cause": cause,
        "needs_hand": health == "Unhealthy" and not reason.startswith("bound to"),
        "reason": reason,
        "owner": None,
        "holders": [],
        "for_claims": None,
        "nodes": [f"/dev/vfio/{slot}"] if driver == "vfio-pci" else [],
        "since_s": None,
    }


# --- simulate and the rest --------------------------------------------------------------------------------


def test_simulate_lists_and_plays_its_stories() -> None:
    done = gpuactors("simulate", "--list")
    assert done.returncode == 0
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert names >= {"late-binding", "new-model", "unplug", "kubelet-restart", "incident"}

    done = gpuactors("simulate", "--scenario", "late-binding", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) > 2
    assert all(isinstance(line, dict) for line in lines)


def test_version_and_help() -> None:
    done = gpuactors("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert version("gpuactors") in done.stdout
    done = gpuactors("run", "--help")
    assert done.returncode == 0
    flags = {f"--{key.replace('_', '-')}" for key in KEYS}
    assert all(flag in done.stdout for flag in flags)
