"""The rules of who may import whom (`pyproject.toml`, import-linter) find what breaks them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PLANTED = {
    "layers": ("host.sysfs", "actors.udev_watcher"),
    "commands": ("cli.doctor.run", "cli.live.run"),
    "inspect": ("cli.inspect.claims_report", "cli.inspect.view"),
    "daemon": ("daemon.startup_checks", "daemon.claims"),
    "ports": ("ports.node", "ports.kube"),
    "process": ("process.malloc", "process.plain_files"),
    "the core's floors": ("core.claims.machine", "core.gpus.driver"),
    "core is pure": ("core.values.selector", "yaml"),
    "configuration is values": ("config.settings", "ports.node"),
    "gRPC is spoken": ("actors.plugin", "grpc_trio.unix"),
    "there is one writer": ("actors.registry", "acts.checkpoint"),
    "the API server is spoken to": ("host.reader", "httpcore"),
    "a daemon does not replay": ("daemon.app", "replay.run"),
    "a command that looks": ("cli.doctor.run", "simulation.script"),
}
"""For each contract, by how its name begins: importer and imported, below `gpuactors` unless it is somebody else's."""


def test_an_import_against_each_contract_is_found_and_so_is_a_package_without_a_place(tmp_path: Path) -> None:
    """That the contracts are kept as things are is `lint-imports` in `just check`."""
    shutil.copytree(
        ROOT / "src/gpuactors", tmp_path / "gpuactors", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "gpuactors/newcomer.py").touch()
    wanted = set()
    for importer, imported in PLANTED.values():
        full = imported if imported in {"yaml", "httpcore"} else f"gpuactors.{imported}"
        module = tmp_path / "gpuactors" / f"{importer.replace('.', '/')}.py"
        module.write_text(f"{module.read_text()}\n\nimport {full}\n")  # a module that has moved fails here
        wanted.add((f"gpuactors.{importer}", full))
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
