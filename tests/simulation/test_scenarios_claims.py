"""The scenarios of claims: what they show, and that their expectations find a daemon that is wrong."""

from __future__ import annotations

import io
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuactors.core.gpus import exclusion, reservation
from gpuactors.core.values.prebound import PreBound, Rule
from gpuactors_simulation import run
from gpuactors_simulation.claims import DRIVER, ClaimsSide
from gpuactors_simulation.cluster import Cluster
from gpuactors_simulation.expectations_claims import (
    Found,
    NothingLeft,
    Offered,
    OnDriver,
    PreparedOn,
    WaitsFor,
)
from gpuactors_simulation.host.kernel import FakeKernel
from gpuactors_simulation.host.tree import HostTree
from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.kubelet.device_manager import DeviceManager
from gpuactors_simulation.scenarios.claims import CLAIMS
from gpuactors_simulation.scenarios.prebound import PREBOUND
from gpuactors_simulation.situation import ClaimSeen, ClaimsSeen, Expectation, GpuSeen, Situation
from tests.support.scenarios import fails_at, steps_of

VFIO, HOST = ("vfio-pci", "vfio-pci"), ("nvidia", "snd_hda_intel")
A, B = "0000:19:00.0", "0000:3b:00.0"


def drivers(step: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {g["address"]: (g["driver"], *g["companions"].values()) for g in step["gpus"]}


def states(step: Mapping[str, Any]) -> dict[str, tuple[bool, str]]:
    return {c["name"]: (c["prepared"], c["state"]) for c in step["claims"]}


def test_a_claimed_gpu_is_bound_waited_for_handed_on_and_returned() -> None:
    booted, claimed, replaced, handed_on, ended = steps_of("claims")
    (gpu,) = claimed["claims"][0]["devices"]
    assert [drivers(step)[gpu] for step in (booted, claimed, replaced, handed_on, ended)] == [
        HOST, VFIO, VFIO, VFIO, HOST,
    ]  # fmt: skip
    assert states(replaced) == {"vm-1-gpu": (True, "Prepared"), "vm-2-gpu": (False, "Waiting")}
    (waiting,) = (c for c in replaced["claims"] if c["name"] == "vm-2-gpu")
    assert waiting["problem"].startswith(f"{gpu}: it belongs to the claim default/vm-1-gpu")
    assert states(handed_on)["vm-2-gpu"] == (True, "Prepared")
    assert not any(prepared for prepared, _ in states(ended).values())


def test_a_pre_bound_gpu_stays_on_vfio_and_its_twin_is_returned() -> None:
    booted, claimed, ended, restarted, ended_again, lost, ended_at_last = map(drivers, steps_of("prebound"))
    (prebound,) = (a for a, of_it in booted.items() if of_it == VFIO)
    (twin,) = booted.keys() - {prebound}
    assert {step[prebound] for step in map(drivers, steps_of("prebound"))} == {VFIO}
    assert [step[twin] for step in (booted, claimed, ended, restarted, ended_again)] == [
        HOST, VFIO, HOST, VFIO, HOST,
    ]  # fmt: skip
    assert (lost[twin], ended_at_last[twin]) == (VFIO, VFIO), "in doubt it counts as pre-bound"


def test_the_gpus_and_their_claims_are_a_table() -> None:
    out = io.StringIO()
    assert run.simulate(scenario="claims", seed=0, speed=1.0, json_lines=False, out=out) == run.EXIT_OK
    _, _, _, replaced, *_ = out.getvalue().split("\nStep ")
    lines = [" ".join(line.split()) for line in replaced.splitlines()]
    assert "GPU Driver Companion ResourceSlice Claim" in lines
    (row,) = (line for line in lines if "vm-2-gpu (" in line)
    assert row.endswith("vfio-pci vfio-pci offered vm-1-gpu (Prepared), vm-2-gpu (Waiting)")
    assert any(line.startswith("vm-2-gpu: 0000:") for line in lines)


# --- a daemon that is wrong is found -----------------------------------------------------------------------------


def test_a_daemon_that_returns_a_pre_bound_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> PreBound:
        return PreBound(False, Rule.ORIGINAL_DRIVER, "planted")

    monkeypatch.setattr("gpuactors.core.values.prebound.decide", never)
    monkeypatch.setattr(
        reservation,
        "_original_driver",
        lambda function, known, *, keep_on_vfio: replace(known, driver=_home(function), vfio=keep_on_vfio),
    )
    unmet = fails_at(monkeypatch, PREBOUND, 3)
    assert "is on vfio-pci, its companion on vfio-pci; but 0000:" in unmet
    assert "is on nvidia" in unmet


def _home(function: Any) -> str:
    return "nvidia" if function.class_code.startswith("03") else "snd_hda_intel"


def test_a_daemon_that_gives_a_gpu_to_two_claims_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusion, "_by_another_claim", lambda *_: None)
    monkeypatch.setattr(exclusion, "_by_holding", lambda *_, **__: None)
    unmet = fails_at(monkeypatch, CLAIMS, 3)
    assert "the prepare of vm-2-gpu waits for vm-1-gpu" in unmet


# --- the expectations --------------------------------------------------------------------------------------------

EMPTY = DeviceManager(random.Random(0)).view(0.0)
ONE = ClaimSeen("one", frozenset({A}), is_known=True, is_prepared=True, state="Prepared", problem="")
WAITING = replace(
    ONE, name="two", is_prepared=False, state="Waiting", problem=f"{A}: it belongs to default/one"
)
ON_VFIO = GpuSeen(A, "vfio-pci", ((f"{A[:-1]}1", "vfio-pci"),), is_offered=True, is_tainted=False)
AT_HOME = replace(ON_VFIO, driver="nvidia", companions=((f"{A[:-1]}1", "snd_hda_intel"),))


@pytest.mark.parametrize(
    ("expectation", "seen", "problem"),
    [
        (Found(), ClaimsSeen(), "it has not"),
        (Offered(frozenset({A})), ClaimsSeen((ON_VFIO,)), None),
        (Offered(frozenset({A, B})), ClaimsSeen((ON_VFIO,)), f"it has {A}"),
        (Offered(frozenset({A})), ClaimsSeen((replace(ON_VFIO, is_tainted=True),)), "it has nothing"),
        (OnDriver(A, "vfio-pci", "vfio-pci"), ClaimsSeen((ON_VFIO,)), None),
        (OnDriver(A, "vfio-pci", "vfio-pci"), ClaimsSeen((AT_HOME,)), f"{A} is on nvidia"),
        (OnDriver(A, "nvidia", "vfio-pci"), ClaimsSeen((AT_HOME,)), "00.1 is on snd_hda_intel"),
        (OnDriver(B, "nvidia"), ClaimsSeen((AT_HOME,)), f"{B} is gone"),
        (PreparedOn("one", frozenset({A})), ClaimsSeen(claims=(ONE,)), None),
        (PreparedOn("one", frozenset({B})), ClaimsSeen(claims=(ONE,)), f"it has {A}"),
        (PreparedOn("two", frozenset({A})), ClaimsSeen(claims=(WAITING,)), "it is Waiting: "),
        (PreparedOn("none", frozenset({A})), ClaimsSeen(claims=(ONE,)), "it is not there"),
        (WaitsFor("two", "one"), ClaimsSeen(claims=(ONE, WAITING)), None),
        (WaitsFor("two", "three"), ClaimsSeen(claims=(ONE, WAITING)), "the reason is: "),
        (WaitsFor("one", "two"), ClaimsSeen(claims=(ONE, WAITING)), "it is prepared"),
        (NothingLeft(), ClaimsSeen(claims=(replace(ONE, is_known=False),)), None),
        (NothingLeft(), ClaimsSeen(claims=(ONE,)), "kubelet still has the claim one"),
        (NothingLeft(), ClaimsSeen(left=("a.json",)), "there is a.json"),
    ],
)
def test_an_unmet_expectation_says_what_is_there_instead(
    expectation: Expectation, seen: ClaimsSeen, problem: str | None
) -> None:
    found = expectation.unmet(Situation(EMPTY, frozenset(), EMPTY, {}, (), claims=seen))
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_a_claim_that_kubelet_knows_takes_its_gpu() -> None:
    assert ClaimsSeen(claims=(ONE, replace(WAITING, devices=frozenset({B}), is_known=False))).taken == {A}


def test_a_file_that_goes_while_it_is_looked_for_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon removes a claim's files in a thread, while what is left is looked at after each change."""
    left = tmp_path / "k/plugins" / DRIVER / "metadata"
    for uid in ("uid-1", "uid-2"):
        (left / uid).mkdir(parents=True)
        (left / uid / "gpu.json").write_text("{}")
    scandir = os.scandir

    def removing(path: Any) -> Any:
        if os.path.basename(str(path)) == "uid-1":
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    (tmp_path / "h").mkdir()
    cluster = Cluster(tmp_path, FakeApiServer(), DRIVER)
    side = ClaimsSide(cluster, FakeKernel(HostTree(tmp_path / "h")))
    assert side.seen(EMPTY, None).left == ("gpu.json",)
