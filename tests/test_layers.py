"""The rules of who may import whom (`pyproject.toml`, import-linter) find what breaks them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PLANTED = (
    ("core.values.model", "concurrency.replies"),
    ("core.step", "grpc_trio.messages"),
    ("core.values.text", "ports.node"),
    ("core.values.naming", "process.resource_exhaustion"),
    ("core.values.selector", "yaml"),
    ("core.values.model", "core.state.claims"),
    ("core.devices.index", "core.state.claims"),
    ("core.assessment.assess", "core.state"),
    ("core.assessment.assess", "core.ledger.ledger"),
    ("core.claims.machine", "core.gpus.driver"),
    ("core.gpus.driver", "core.domains.label"),
    ("core.step", "core.reports.snapshot"),
    ("limits", "core.values.model"),
    ("limits", "trio"),
    ("process.malloc", "process.plain_files"),
    ("concurrency.latest", "limits"),
    ("concurrency.replies", "core.values.model"),
    ("concurrency.supervise", "ports.node"),
    ("grpc_trio.call", "core.values.quote"),
    ("grpc_trio.client", "limits"),
    ("grpc_trio.server", "concurrency.latest"),
    ("grpc_trio.unix", "kubelet.translate"),
    ("ports.node", "host.root"),
    ("ports.node", "ports.kube"),
    ("ports.kube", "actors.caller"),
    ("core.values.slices", "ports.kube"),
    ("core.claims.pool", "httpcore"),
    ("kube.client", "kubelet.translate"),
    ("host.reader", "httpcore"),
    ("ports.node", "config"),
    ("actors.caller", "kubelet.translate"),
    ("actors.plugin", "grpc_trio.unix"),
    ("actors.registry", "observe.journal"),
    ("actors.registry", "config"),
    ("acts.driver", "actors.registry"),
    ("acts.files", "kubelet.kubelet"),
    ("actors.registry", "acts.checkpoint"),
    ("cli.commands", "acts.driver"),
    ("host.sysfs", "acts.writes"),
    ("host.sysfs", "observe.log"),
    ("host.sysfs", "actors.udev_watcher"),
    ("host.uevents", "grpc_trio.unix"),
    ("kubelet.kubelet", "host.root"),
    ("kubelet.ledger", "config"),
    ("control.server", "kubelet.translate"),
    ("control.server", "daemon.app"),
    ("observe.log", "control.view"),
    ("observe.journal", "replay.reading"),
    ("config.settings", "ports.node"),
    ("config.settings", "concurrency.latest"),
    ("config.settings", "host.root"),
    ("replay.run", "actors.registry"),
    ("replay.run", "daemon.app"),
    ("replay.run", "simulation.script"),
    ("replay.reading", "control.client"),
    ("daemon.app", "replay.run"),
    ("daemon.endpoints", "daemon.kube_events"),
    ("daemon.absence", "daemon.claims"),
    ("cli.doctor.gather", "acts.driver"),
    ("cli.doctor.run", "simulation.script"),
    ("cli.inspect.view", "cli.doctor.run"),
    ("daemon.app", "simulation.script"),
    ("cli.inspect.view", "replay.run"),
    ("cli.inspect.view", "cli.commands"),
    ("cli.inspect.claims_report", "cli.inspect.view"),
    ("cli.progress", "cli.completion"),
    ("cli.doctor.run", "cli.live.run"),
    ("decoding", "limits"),
)
"""Importer and imported, below `gpuactors` unless it is somebody else's package."""


def test_an_import_against_the_rules_is_found_and_so_is_a_package_without_a_place(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "src/gpuactors", tmp_path / "gpuactors", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert linted(tmp_path)[0] == 0, "the rules are kept as things are"

    (tmp_path / "gpuactors/newcomer.py").touch()
    wanted = set()
    for importer, imported in PLANTED:
        full = imported if imported in {"trio", "yaml", "httpcore"} else f"gpuactors.{imported}"
        module = tmp_path / "gpuactors" / f"{importer.replace('.', '/')}.py"
        module.write_text(f"{module.read_text()}\n\nimport {full}\n")  # a module that has moved fails here
        wanted.add((f"gpuactors.{importer}", full))
    status, said = linted(tmp_path)
    assert status == 1
    # A chain is told one import a line.
    found = set(re.findall(r"([\w.]+)\s+->\s+([\w.]+)\s+\(l\.", said))
    assert wanted <= found, f"not found: {sorted(wanted - found)}"
    assert "- gpuactors.newcomer" in said


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
