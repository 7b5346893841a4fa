"""`./do node-mutations`: plants a bug in the image or the manifests, and expects that a scenario on the node fails.

Each bug is a change of a few words in one file, and names the scenario that finds it. First that scenario runs without
the bug: one that fails there says nothing. Ends with 1 if a bug was not found, or does not fit its file any more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.node.planted_image import changed_image
from tests.node.run import IMAGE_VARIABLE, RED
from tests.release.image import have_image

CHECKOUT: Final = Path(__file__).resolve().parents[2]
DEPLOY_VARIABLE: Final = "TEST_DEPLOY"


@dataclass(frozen=True, slots=True)
class Planted:
    """One bug."""

    name: str
    file: str
    """Below the checkout: `src/gpuactors/…` or `deploy/…`."""
    before: str
    """Occurs once in the file. Empty: the whole file is taken away."""
    after: str
    scenario: str
    """What pytest is to run: the file, then `-k` and a word."""
    gates: str = "A"


RIGHTS: Final = "tests/node/test_rights.py -k"

BUGS: Final = (
    Planted(
        "a role lacks the right to update slices",
        "deploy/chart/gpuactors/templates/dra-rbac.yaml",
        "    verbs: [create, delete, list, update, watch]\n",
        "    verbs: [create, delete, list, watch]\n",
        f"{RIGHTS} each_right_of_every_role",
    ),
    Planted(
        "a policy is about another account",
        "deploy/chart/gpuactors/templates/_helpers.tpl",
        'request.userInfo.username == "',
        'request.userInfo.username == "-',
        f"{RIGHTS} each_policy_admits",
    ),
    Planted(
        "the readiness probe asks for a path that nobody serves",
        "deploy/base/daemonset.yaml",
        "              path: /readyz\n",
        "              path: /ready\n",
        "tests/node/test_device_plugin.py -k late_bind",
    ),
    Planted(
        "the image lacks a module that claims need",
        "src/gpuactors/kube/slices.py",
        "",
        "",
        "tests/node/test_claims.py -k several_requests",
    ),
    Planted(
        "a device list leaves out what is allocated",
        "src/gpuactors/core/deviceplugin/device_lists.py",
        "        if lost := of_pods - of_resource.keys():\n",
        "        if [of_resource.pop(i, None) for i in of_pods] and (lost := frozenset()):\n",
        "tests/node/test_device_plugin.py -k late_bind",
    ),
    Planted(
        "the gate does not wait for the process of a pod that is gone",
        "src/gpuactors/core/deviceplugin/calls.py",
        "            return None if conflicts or _held(state, call) else Ready()\n",
        "            return Ready()\n",
        "tests/node/test_device_plugin.py -k forced_deletion",
    ),
    Planted(
        "the gate does not look whose device nodes kubelet has kept",
        "src/gpuactors/core/deviceplugin/calls.py",
        "            if stale := _stale(state, call, by_id):\n",
        '            if stale := "":\n',
        "tests/node/test_device_plugin_restarts.py -k the_gate_refuses_another",
    ),
    Planted(
        "a slice that stays keeps an old generation",
        "src/gpuactors/core/claims/slice_writes.py",
        "ordered.append(Update(kept[index], spec) if",
        "ordered.append(Update(kept[index], replace(spec, generation=kept[index].spec.generation)) if",
        "tests/node/test_claims_set_b.py -k a_pool_of_several_slices",
        gates="B",
    ),
    Planted(
        "a partition that breaks up another one is as good as one that does not",
        "src/gpuactors/core/deviceplugin/set_choice.py",
        "        sum(not (ids.isdisjoint(other) or ids.issuperset(other)) for other in whole),\n",
        "",
        "tests/node/test_sets.py -k a_pod_gets_the_partition",
    ),
    Planted(
        "every device has the same partition",
        "src/gpuactors/core/kinds/sets.py",
        "    return numbers.pop() if len(numbers) == 1 else None\n",
        "    return 1 if len(numbers) == 1 else None\n",
        "tests/node/test_sets.py -k a_claim_gets_a_partition",
    ),
    Planted(
        "a container does not wait for its partition",
        "src/gpuactors/core/partitions/outputs.py",
        "    return conflict(state.partitions, owner) if state.partitions is not None else None\n",
        "    return None\n",
        "tests/node/test_partitions.py -k a_partition_is_active",
    ),
    Planted(
        "a partition stays active after its pod",
        "src/gpuactors/core/partitions/machine.py",
        "        return _E.UNWANTED if is_decided and not is_held else None\n",
        "        return None\n",
        "tests/node/test_partitions.py -k a_partition_is_active",
    ),
    Planted(
        "a CDI file that somebody has touched is not written again",
        "src/gpuactors/actors/spec_keeper.py",
        "            async for _ in touches:\n                order()\n",
        "            async for _ in touches:\n                pass\n",
        "tests/node/test_kata.py -k a_file_that_is_removed",
    ),
    Planted(
        "a GPU without its CDI file is Healthy",
        "src/gpuactors/core/deviceplugin/specs.py",
        "    if on_disk == one_backend(device.nodes):\n",
        "    if on_disk in (None, one_backend(device.nodes)):\n",
        "tests/node/test_kata.py -k no_gpu_is_healthy",
    ),
    Planted(
        "an entry of the configuration matches every node that has labels",
        "src/gpuactors/config/fleet.py",
        "node.labels is None or self.labels.items() <= node.labels.items()",
        "True",
        "tests/node/test_fleet.py -k a_daemon_takes_the_entries",
    ),
    Planted(
        "the label is removed under a live claim",
        "src/gpuactors/core/domains/label.py",
        "    if label.value in held_domains.kept or label.value not in label.removable:\n",
        "    if label.value not in label.removable:\n",
        "tests/node/test_domains.py -k a_domain_is_made_and",
    ),
    Planted(
        "a claim that NVIDIA's driver had only begun is taken over",
        "src/gpuactors/core/claims/theirs.py",
        '    if content.get("checkpointState", _PREPARED) != _PREPARED:\n',
        '    if content.get("checkpointState", _PREPARED) == "PrepareAborted":\n',
        "tests/node/test_nvidias_driver.py -k what_a_killed_driver_had",
    ),
    Planted(
        "the reader keeps the selectors of the start",
        "src/gpuactors/host/sysfs.py",
        "        wanted = (self._selectors if selectors is None else selectors), errors\n",
        "        wanted = self._selectors, errors\n",
        "tests/node/test_fleet.py -k a_changed_selector",
    ),
    Planted(
        "a refused file is not read again until it changes",
        "src/gpuactors/daemon/config_file.py",
        "        elif trio.current_time() < self._again_at:\n",
        "        else:\n",
        "tests/node/test_fleet.py -k a_label_that_changes",
    ),
    Planted(
        "a command in the pod ends with a wrong file",
        "src/gpuactors/cli/settings.py",
        "        if starts or (beside := _without_file(flags)) is None:\n",
        "        if starts or (beside := None) is None:\n",
        "tests/node/test_fleet.py -k of_a_file_that_needs_a_restart",
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Tries the bugs; the exit code."""
    parser = argparse.ArgumentParser(
        prog="./do node-mutations", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a part of a bug's name; all of them otherwise"
    )
    wanted = parser.parse_args(arguments).names
    bugs = [bug for bug in BUGS if not wanted or any(word in bug.name for word in wanted)]
    layout = have_image().layout
    for scenario, gates in dict.fromkeys((bug.scenario, bug.gates) for bug in bugs):
        if _run(scenario, gates, {IMAGE_VARIABLE: str(layout)}).returncode != 0:
            print(f"{scenario} fails without any bug: nothing can be said", file=sys.stderr)
            return 2
    missed = 0
    for bug in bugs:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="planted-") as directory:
            found = _run(bug.scenario, bug.gates, _plant(bug, layout, Path(directory)))
        verdict = {RED: "found", 0: "NOT FOUND"}.get(found.returncode, f"no verdict ({found.returncode})")
        missed += verdict != "found"
        print(f"{verdict} by {bug.scenario} in {time.monotonic() - began:.0f} s: {bug.name}", flush=True)
        told = [line for line in found.stdout.splitlines() if line.startswith(("E  ", "FAILED", "ERROR"))]
        print("\n".join(f"    {line}" for line in told[:4]), flush=True)
    return 1 if missed else 0


def _plant(bug: Planted, layout: Path, directory: Path) -> Mapping[str, str]:
    """The environment of a run with the bug. Raises AssertionError if it does not fit its file any more."""
    text = (CHECKOUT / bug.file).read_text(encoding="utf-8")
    if bug.before:
        assert text.count(bug.before) == 1, (
            f"{bug.file} has {text.count(bug.before)} places like it: {bug.name}"
        )
    changed = text.replace(bug.before, bug.after) if bug.before else None
    if bug.file.startswith("deploy/"):
        assert changed is not None, "no manifest is taken away"
        copy = directory / "deploy"
        shutil.copytree(CHECKOUT / "deploy", copy)
        (directory / bug.file).write_text(changed, encoding="utf-8")
        return {IMAGE_VARIABLE: str(layout), DEPLOY_VARIABLE: str(copy)}
    changed_image(layout, directory / "image", bug.file.removeprefix("src/gpuactors/"), changed)
    return {IMAGE_VARIABLE: str(directory / "image")}


def _run(scenario: str, gates: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "tests.node.run", "--set", gates, *scenario.split(), "-x")
    # Without CI: there a scenario that has failed would be played once more.
    once = {**os.environ, "CI": "", **environment}
    with subprocess.Popen(
        command, cwd=CHECKOUT, env=once, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    ) as running:  # fmt: skip
        try:
            said, _ = running.communicate()
        except BaseException:  # `subprocess.run` would kill it while it takes the node down
            running.terminate()
            running.wait()
            raise
    return subprocess.CompletedProcess(command, running.returncode, said)


def _interrupted(number: int, _frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupted)
    sys.exit(main(sys.argv[1:]))
