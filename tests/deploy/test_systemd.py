"""The units of deploy/systemd: systemd takes every line, and they grant what the pods of base and overlays/dra have."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from gpuactors.config import DECLARATIONS
from tests.deploy.manifests import DEPLOY, ROOT, Manifest, of_kind, render
from tests.deploy.test_hardening import ALLOWED

UNIT: Final = DEPLOY / "systemd" / "gpuactors.service"
DRA: Final = DEPLOY / "systemd" / "dra.conf"
MODULES: Final = DEPLOY / "systemd" / "load-modules.conf"
KATA: Final = DEPLOY / "systemd" / "kata.conf"

ANALYZE_TIMEOUT_S: Final = 60

EXPOSURE: Final = {UNIT: 25, DRA: 35, MODULES: 45, KATA: 25}
"""The most that `systemd-analyze security` may say, times ten; 100 is a service without any confinement."""


def settings(*files: Path) -> dict[str, list[str]]:
    """What each key is set to, the last file's values after the first one's."""
    found: dict[str, list[str]] = {}
    for line in "\n".join(file.read_text() for file in files).splitlines():
        if match := re.fullmatch(r"(\w+)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit as it would be in /etc/systemd/system, with a program that is there."""
    unit = tmp_path / UNIT.name
    text = UNIT.read_text()
    assert "ExecStart=/opt/gpuactors/bin/gpuactors run" in text
    unit.write_text(text.replace("/opt/gpuactors/bin", str(Path(sys.executable).parent)))
    return unit


def add(installed: Path, *drop_ins: Path) -> None:
    directory = installed.with_name(f"{installed.name}.d")
    directory.mkdir()
    for file in drop_ins:
        shutil.copy(file, directory)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.fail(
            "systemd-analyze is not on PATH; ./do test installs it where it may, else install systemd"
        )
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments],
        capture_output=True,
        text=True,
        timeout=ANALYZE_TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize(
    "drop_ins",
    [(), (DRA,), (DRA, MODULES), (KATA,)],
    ids=["alone", "with claims", "with modules", "with Kata"],
)
def test_systemd_takes_every_line_and_calls_it_confined(installed: Path, drop_ins: tuple[Path, ...]) -> None:
    add(installed, *drop_ins)
    verified = analyze("verify", "--man=no", "--recursive-errors=no", str(installed))
    assert (verified.returncode, verified.stderr) == (0, "")
    most = EXPOSURE[drop_ins[-1] if drop_ins else UNIT]
    rated = analyze("security", "--offline=true", f"--threshold={most}", str(installed))
    assert rated.returncode == 0, rated.stdout


def test_systemd_names_a_line_that_it_does_not_take(installed: Path) -> None:
    installed.write_text(installed.read_text().replace("ProtectClock=yes", "ProtectClok=yes"))
    verified = analyze("verify", "--man=no", "--recursive-errors=no", str(installed))
    assert "'ProtectClok' in section" in verified.stderr


def pod(directory: str) -> Manifest:
    spec: Manifest = of_kind(render(DEPLOY / directory), "DaemonSet")["spec"]["template"]["spec"]
    return spec


def capabilities(directory: str) -> list[str]:
    added = pod(directory)["containers"][0]["securityContext"]["capabilities"].get("add", ())
    return sorted(f"CAP_{name}" for name in added)


def test_the_capabilities_are_those_of_the_pods() -> None:
    base, dra = settings(UNIT), settings(DRA)
    assert base["CapabilityBoundingSet"] == [""]
    assert capabilities("base") == []
    assert sorted(dra["CapabilityBoundingSet"][0].split()) == capabilities("overlays/dra")
    # Where the host's file system is the daemon's, nobody changes it for modprobe.
    modules = settings(DRA, MODULES)["CapabilityBoundingSet"]
    assert sorted(" ".join(modules).split()) == [
        name for name in capabilities("overlays/load-modules") if name != "CAP_SYS_CHROOT"
    ]
    assert base["NoNewPrivileges"] == ["yes"]
    assert "NoNewPrivileges" not in dra


def writable(*files: Path) -> set[str]:
    found = settings(*files)
    paths = {path for value in found["ReadWritePaths"] for path in value.split()}
    paths |= {f"/var/lib/{name}" for name in found["StateDirectory"]}
    return paths | {f"/var/run/{name}" for name in found.get("RuntimeDirectory", ())}


def test_what_can_be_written_is_what_the_pods_write() -> None:
    assert settings(UNIT)["ProtectSystem"] == ["strict"]
    assert writable(UNIT) == ALLOWED["base"].written
    assert writable(UNIT, KATA) == ALLOWED["overlays/kata"].written
    of_the_pod = {path for path in ALLOWED["overlays/dra"].written if not path.startswith("/host/")}
    # The driver's own directory is below `plugins`; in /sys there is all or nothing.
    driver = "/var/lib/kubelet/plugins/gpu.nvidia.com"
    assert writable(UNIT, DRA) == of_the_pod - {driver} | {"/var/lib/kubelet/plugins"}
    assert (settings(UNIT)["ProtectKernelTunables"], settings(DRA)["ProtectKernelTunables"]) == (
        ["yes"],
        ["no"],
    )


def test_each_variable_is_a_settings() -> None:
    named = set(re.findall(r"GPUACTORS_([A-Z_]+)=", DRA.read_text() + MODULES.read_text() + KATA.read_text()))
    of_claims = {"dra", "holders", "kubeconfig", "node_name", "load_modules"}
    assert {name.lower() for name in named} == of_claims | {"preset"}
    assert {name.lower() for name in named} <= DECLARATIONS.keys()


def test_it_is_not_started_again_where_that_is_no_use() -> None:
    (never,) = settings(UNIT)["RestartPreventExitStatus"]
    codes = dict(
        re.findall(r"^\| (\d+) \| ([^|]+) \|$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    )
    assert [codes[code].strip() for code in never.split()] == ["wrong usage", "wrong configuration"]


def test_the_program_is_where_the_installation_puts_it() -> None:
    told = (ROOT / "docs/install.md").read_text()
    for line in ("python3 -m venv /opt/gpuactors", "deploy/systemd/gpuactors.service", "gpuactors.service.d"):
        assert line in told
