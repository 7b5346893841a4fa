"""The rules of who may import whom (`pyproject.toml`, import-linter) find what breaks them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = ("gpuactors", "gpuactors_simulation")

PLANTED = {
    "layers": ("gpuactors.host.sysfs", "gpuactors.actors.udev_watcher"),
    "commands": ("gpuactors.cli.doctor.run", "gpuactors.cli.live.run"),
    "inspect": ("gpuactors.cli.inspect.claims_report", "gpuactors.cli.inspect.view"),
    "daemon": ("gpuactors.daemon.startup_checks", "gpuactors.daemon.claims"),
    "ports": ("gpuactors.ports.node", "gpuactors.ports.kube"),
    "process": ("gpuactors.process.malloc", "gpuactors.process.plain_files"),
    "the core's floors": ("gpuactors.core.claims.machine", "gpuactors.core.gpus.driver"),
    "core is pure": ("gpuactors.core.values.selector", "yaml"),
    "configuration is values": ("gpuactors.config.settings", "gpuactors.ports.node"),
    "gRPC is spoken": ("gpuactors.actors.plugin", "gpuactors.grpc_trio.unix"),
    "there is one writer": ("gpuactors.actors.registry", "gpuactors.acts.checkpoint"),
    "the API server is spoken to": ("gpuactors.host.reader", "httpcore"),
    "a daemon does not replay": ("gpuactors.daemon.app", "gpuactors.replay.run"),
    "only the command line": ("gpuactors.cli.doctor.run", "gpuactors_simulation.script"),
    "the simulation is a node": ("gpuactors_simulation.script", "gpuactors.cli.output"),
}
"""For each contract, by how its name begins: importer and imported."""


def test_an_import_against_each_contract_is_found_and_so_is_a_package_without_a_place(tmp_path: Path) -> None:
    """That the contracts are kept as things are is `lint-imports` in `just check`."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / "src" / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "gpuactors/newcomer.py").touch()
    wanted = set()
    for importer, imported in PLANTED.values():
        module = tmp_path / f"{importer.replace('.', '/')}.py"
        module.write_text(
            f"{module.read_text()}\n\nimport {imported}\n"
        )  # a module that has moved fails here
        wanted.add((importer, imported))
    status, said = linted(tmp_path)
    assert status == 1
    # A chain is told one import a line.
    found = set(re.findall(r"([\w.]+)\s+->\s+([\w.]+)\s+\(l\.", said))
    assert wanted <= found, f"not found: {sorted(wanted - found)}"
    assert "- gpuactors.newcomer" in said
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [c["name"] for c in contracts if not c["name"].startswith(tuple(PLANTED))] == []
    assert len(contracts) == len(PLANTED)
    assert f"Contracts: 0 kept, {len(contracts)} broken." in said


def linted(directory: Path) -> tuple[int, str]:
    """What lint-imports returns and says there, unwrapped."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        check=False,
        cwd=directory,
        env={"COLUMNS": "500", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr
