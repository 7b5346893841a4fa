"""The scenarios of `gpuactors simulate`, each played with the real daemon over real sockets, and their expectations."""

from __future__ import annotations

import io
import json
import random
import re
from functools import cache
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from gpuactors.config import Config
from gpuactors.core.values.cause import Cause
from gpuactors.daemon import app
from gpuactors_simulation import run
from gpuactors_simulation.expectations import (
    Counts,
    HeldByExternal,
    HeldUp,
    NobodyRefused,
    Orphaned,
    Refused,
    Runs,
    Sound,
    Unhealthy,
    Waits,
)
from gpuactors_simulation.kubelet.device_manager import (
    Allocated,
    DeviceManager,
    KubeletView,
    ListedDevice,
    Phase,
)
from gpuactors_simulation.scenarios import SCENARIOS
from gpuactors_simulation.scenarios.parts import H100, VFIO, h100s, start_node
from gpuactors_simulation.script import Scenario, Step
from gpuactors_simulation.show import DEVICES, ScenarioResult, Show, aligned, changed_lines
from gpuactors_simulation.situation import Expectation, Situation
from gpuactors_simulation.world import World

NAMES = [scenario.name for scenario in SCENARIOS]


class Terminal(io.StringIO):
    """A terminal, as far as `isatty` knows."""

    def isatty(self) -> bool:
        return True


@cache  # a story takes seconds, and its output is only read
def played(scenario: str) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Exit code, steps and result of a story in JSON lines."""
    out = io.StringIO()
    code = run.simulate(scenario=scenario, seed=0, speed=1.0, json_lines=True, out=out)
    *steps, result = [json.loads(line) for line in out.getvalue().splitlines()]
    return code, steps, result


# --- the scenarios -----------------------------------------------------------------------------------------------


def test_the_scenarios_that_must_be_there() -> None:
    names = [name for name, _ in run.list_scenarios()]
    assert names == NAMES
    assert {
        "late-binding",
        "new-model",
        "unplug",
        "kubelet-restart",
        "incident",
        "external-holder",
        "claims",
        "prebound",
    } <= set(names)
    assert all(len(line) < 100 for _, line in run.list_scenarios())


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_as_expected(name: str) -> None:
    code, steps, result = played(name)
    assert result["unmet"] == []
    assert (code, result["result"], result["seed"]) == (run.EXIT_OK, "ok", 0)
    assert [step["step"] for step in steps] == list(range(1, result["of"] + 1))
    for step in steps:
        assert step["ok"]
        assert step["expected"]
        assert all(figures["free"] >= 0 for figures in step["resources"].values())


def test_the_incident_shows_the_counts_that_the_field_did_not() -> None:
    _, steps, _ = played("incident")
    counts = [tuple(step["resources"][H100].values()) for step in steps]
    assert counts == [
        (6, 6, 0, 6),
        (6, 6, 6, 0),
        (8, 8, 6, 2),  # two are bound late
        (8, 8, 6, 2),  # the daemon is restarted
        (8, 8, 6, 2),  # and upgraded
        (8, 8, 7, 1),
        (8, 8, 6, 2),
        (8, 7, 5, 2),  # a pod is deleted by force, its process lives on
        (8, 8, 5, 3),
        (8, 8, 8, 0),
        (8, 8, 8, 0),
        (8, 8, 8, 0),  # another one is, and its GPU is the next pod's
        (8, 8, 8, 0),
        (8, 8, 7, 1),
        (8, 7, 7, 0),  # an external process takes the free one
        (8, 7, 7, 0),
        (8, 8, 8, 0),  # and closes it
        *[(8, 8, 8, 0)] * 5,
    ]
    assert not any(
        "UnexpectedAdmissionError" in pod["message"] for step in steps for pod in step["pods"].values()
    )


def test_the_incident_names_who_holds_a_gpu() -> None:
    _, steps, _ = played("incident")
    reasons = [[d["reason"] for d in step["devices"] if d["health"] == "Unhealthy"] for step in steps]
    (left,), (external,) = reasons[7], reasons[14]
    assert re.fullmatch(
        r"IOMMU group \d+ is still held by process 40\d\d \(qemu-system-x86\) of the pod with UID [0-9a-f-]{36}: "
        r"pod default/vm-\d is gone from kubelet's ledger, its process is not",
        left,
    )
    assert re.fullmatch(
        r"IOMMU group \d+ is held by process 1717 \(python3\), and kubelet has given it to no pod", external
    )
    # Between steps, too: nothing else was ever left Unhealthy.
    # But kubelet's file still names the pod whose GPU was pulled, and both have just started: for LEDGER_SETTLE_S.
    assert [n for n, found in enumerate(reasons, start=1) if found] in ([8, 15, 16], [8, 15, 16, 22])


def test_a_device_that_is_not_healthy_is_shown_with_its_reason() -> None:
    _, steps, _ = played("new-model")
    (device,) = [d for d in steps[2]["devices"] if d["health"] == "Unhealthy"]
    assert device["id"] == "0000:a1:00.0"
    assert "0000:a1:00.1 is bound to snd_hda_intel" in device["reason"]


def test_the_seed_decides_the_text_and_nothing_else_does() -> None:
    def text(seed: int) -> str:
        out = io.StringIO()
        assert run.simulate(scenario="late-binding", seed=seed, speed=1.0, json_lines=False, out=out) == 0
        untimed = re.sub(r"[\d.]+ m?s\b", "TIME", out.getvalue())
        return re.sub(r" +For TIME of it.*?posted\)\.\n", "", untimed, flags=re.DOTALL)

    assert text(3) == text(3)
    assert text(3).replace("seed 3", "") != text(4).replace("seed 4", "")


def test_an_unknown_story_is_named() -> None:
    with pytest.raises(ValueError, match="no scenario 'nonsense'; there are incident"):
        run.simulate(scenario="nonsense", seed=0, speed=1.0, json_lines=True, out=io.StringIO())


# --- scenarios that fail -----------------------------------------------------------------------------------------


def story(*steps: Step) -> Scenario:
    return Scenario("test", "A story for a test.", "Its text.", lambda _: steps)


def play_only(monkeypatch: pytest.MonkeyPatch, *steps: Step, json_lines: bool = True) -> tuple[int, str]:
    """Exit code and output of a story of these steps."""
    monkeypatch.setattr(run, "SCENARIOS", (story(*steps),))
    out = io.StringIO()
    code = run.simulate(scenario="test", seed=7, speed=1.0, json_lines=json_lines, out=out)
    return code, out.getvalue()


def test_an_expectation_that_fails_ends_the_story_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Step("Boot", "", start_node(*h100s(2, VFIO)), (Counts(H100, 3, 3, 0),), within_s=0.5)
    never = replace(wrong, title="Never reached")
    code, output = play_only(monkeypatch, wrong, never, json_lines=False)
    assert code == run.EXIT_FAILED
    assert "NOT AS EXPECTED" in output
    assert "capacity 3, allocatable 3, allocated 0, free 3; but" in " ".join(output.split())
    assert "has capacity 2, allocatable 2, allocated 0, free 2" in " ".join(output.split())
    assert "Never reached" not in output
    assert "gpuactors simulate --scenario test --seed 7" in output


def test_a_step_that_cannot_be_done_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(world: World) -> None:
        await world.stop_daemon()

    code, output = play_only(monkeypatch, Step("Stop what does not run", "", act, ()))
    step, result = (json.loads(line) for line in output.splitlines())
    assert code == run.EXIT_FAILED
    assert (step["ok"], result["result"]) == (False, "failed")
    assert result["unmet"] == ["the step could not be done: the daemon does not run; start it first"]


@pytest.mark.parametrize("how", ["dies", "returns"])
def test_a_daemon_that_ends_is_found_at_once(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    real = app.run

    async def broken(config: Config, *, task_status: trio.TaskStatus[app.Daemon]) -> None:
        async with trio.open_nursery() as nursery:
            daemon: app.Daemon = await nursery.start(real, config)
            task_status.started(daemon)
            async for state in daemon.state.subscribe():
                if state.host.functions:
                    break
            nursery.cancel_scope.cancel()
        if how == "dies":
            raise ZeroDivisionError("a planted bug")

    monkeypatch.setattr(app, "run", broken)
    with_a_bug = Step("Boot", "", start_node(*h100s(2, VFIO)), (Counts(H100, 2, 2, 0),), within_s=60)
    code, output = play_only(monkeypatch, with_a_bug)
    result = json.loads(output.splitlines()[-1])
    assert code == run.EXIT_FAILED
    assert result["took_s"] < 60
    expected = "the daemon died: ZeroDivisionError" if how == "dies" else "the daemon ended by itself"
    assert any(expected in problem for problem in result["unmet"])


# --- the expectations --------------------------------------------------------------------------------------------

GPUS = ("0000:19:00.0", "0000:3b:00.0")


def view(*, opens: dict[str, str] | None = None, healthy: tuple[str, ...] = GPUS) -> KubeletView:
    """Two GPUs; each pod of `opens` runs with one, and its container is to open the address given."""
    kept = DeviceManager(random.Random(0))
    kept.boot(0.0)
    kept.connected(H100, 1, pre_start=False, preferred=False)
    kept.list_received(H100, [ListedDevice(gpu, True) for gpu in GPUS])
    for pod, address in (opens or {}).items():
        kept.submit(pod, {H100: 1}, 0.0)
        kept.place(0.0)
        choice = kept.choose(pod, H100, 1)
        assert choice is not None
        taken = kept.take(choice, ())
        environment = {"PCI_RESOURCE_X": address.replace("ITS OWN", taken[0])}
        kept.commit(choice, taken, Allocated(environment, ()))
        kept.admitted(pod)
        kept.started(pod)
    kept.list_received(H100, [ListedDevice(gpu, gpu in healthy) for gpu in GPUS])
    return kept.view(0.0)


def situation(view: KubeletView, **changes: Any) -> Situation:
    fine = Situation(view=view, truth=frozenset(GPUS), before=view, reasons={}, faults=())
    return replace(fine, **changes)


BOTH_RUN = view(opens={"vm-1": "ITS OWN", "vm-2": "ITS OWN"})
ONE_RUNS = view(opens={"vm-1": "ITS OWN"})


def test_a_sound_view_is_sound() -> None:
    assert Sound().unmet(situation(BOTH_RUN)) is None
    assert Sound().unmet(situation(ONE_RUNS)) is None


@pytest.mark.parametrize(
    ("unsound", "problem"),
    [
        pytest.param(
            situation(view(opens={"vm-1": "ITS OWN"}, healthy=()), truth=frozenset()),
            f"{H100}: free is -1",
            id="busy is Unhealthy",
        ),
        pytest.param(
            situation(view(opens={"vm-1": GPUS[0], "vm-2": GPUS[0]})),
            f"{GPUS[0]} was handed out to vm-1, vm-2",
            id="handed out twice",
        ),
        pytest.param(
            situation(view(opens={"vm-1": "0000:ff:00.0"})),
            "but its container opens 0000:ff:00.0",
            id="swapped",
        ),
        pytest.param(
            situation(ONE_RUNS, truth=frozenset({GPUS[0]})),
            f"{GPUS[1]} is offered, but no VM could open it",
            id="offered in vain",
        ),
        pytest.param(
            situation(ONE_RUNS, truth=frozenset({*GPUS, "0000:4c:00.0"})),
            "0000:4c:00.0 could be used, but is not offered",
            id="not offered",
        ),
        pytest.param(
            situation(replace(ONE_RUNS, holdings={}), before=ONE_RUNS),
            "vm-1 was running and is disturbed",
            id="disturbed",
        ),
        pytest.param(
            situation(ONE_RUNS, faults=("kubelet crashed: somewhere",)), "kubelet crashed", id="fault"
        ),
    ],
)
def test_an_unsound_view_is_found(unsound: Situation, problem: str) -> None:
    assert problem in (Sound().unmet(unsound) or "")


@pytest.mark.parametrize(
    ("expectation", "problem"),
    [
        (Counts(H100, 2, 2, 1), None),
        (Counts(H100, 2, 1, 1), f"{H100} has capacity 2, allocatable 2, allocated 1, free 1"),
        (Counts("nvidia.com/NONE", 1, 1, 0), "kubelet knows no resource nvidia.com/NONE"),
        (Runs("vm-1"), None),
        (Runs("vm-1", frozenset({"0000:ff:00.0"})), "vm-1 runs on 0000:"),
        (Runs("vm-2"), "there is no pod vm-2"),
        (Waits("vm-1"), "vm-1 is Running"),
        (Refused("vm-1", ("vfio",)), "vm-1 is Running"),
        (Unhealthy(GPUS[0], Cause.NODE_MISSING, ("vfio",)), f"{GPUS[0]} is Healthy"),
        (HeldUp("vm-1"), "vm-1 is Running"),
        (HeldUp("vm-2"), "there is no pod vm-2"),
        (NobodyRefused(), None),
        (HeldByExternal(17, "python3"), "process 17 holds nothing"),
        (Orphaned("vm-1"), "no process holds 0000:"),
        (Orphaned("vm-2"), "vm-2 had nothing"),
    ],
)
def test_an_unmet_expectation_says_what_is_there_instead(
    expectation: Expectation, problem: str | None
) -> None:
    found = expectation.unmet(situation(ONE_RUNS))
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert problem in found


NAMED = "IOMMU group 48 is held by process 17 (python3), and kubelet has given it to no pod"
LEFT = "IOMMU group 48 is still held by process 17 (qemu): pod default/vm-2 is gone from kubelet's ledger"


@pytest.mark.parametrize(
    ("expectation", "cause", "reason", "problem"),
    [
        (HeldByExternal(17, "python3"), Cause.HELD_BY_OTHER, NAMED, None),
        (HeldByExternal(17, "nvtop"), Cause.HELD_BY_OTHER, NAMED, "the reason is: IOMMU group 48"),
        (HeldByExternal(17, "python3"), Cause.ORPHANED, NAMED, "the reason is: IOMMU group 48"),
        (HeldByExternal(17, "python3"), Cause.HELD_BY_OTHER, "", "the reason is: none"),
        (Orphaned("vm-2"), Cause.ORPHANED, LEFT, None),
        (Orphaned("vm-2"), Cause.HELD_BY_OTHER, LEFT, "the reason is: IOMMU group 48"),
        (Orphaned("vm-2"), Cause.ORPHANED, NAMED, "the reason is: IOMMU group 48"),
    ],
)
def test_the_holder_must_be_named(
    expectation: Expectation, cause: Cause, reason: str, problem: str | None
) -> None:
    before = view(opens={"vm-1": "ITS OWN", "vm-2": "ITS OWN"})
    (device,) = {d for d in GPUS if d in before.holdings["vm-2", H100].devices}
    gone = view(opens={"vm-1": "ITS OWN"}, healthy=tuple(d for d in GPUS if d != device))
    found = expectation.unmet(
        situation(gone, before=before, holders={device: 17}, reasons={device: reason}, causes={device: cause})
    )
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_a_refused_pod_is_found() -> None:
    refused = {"vm-1": replace(ONE_RUNS.pods["vm-1"], phase=Phase.FAILED, message="UnexpectedAdmissionError")}
    found = NobodyRefused().unmet(situation(replace(ONE_RUNS, pods=refused)))
    assert found == "vm-1 is Failed: UnexpectedAdmissionError"


# --- how it is shown ---------------------------------------------------------------------------------------------


def boot() -> Step:
    return Step("Boot", "Two GPUs.", start_node(*h100s(2, VFIO)), (Counts(H100, 2, 2, 0),))


def test_a_terminal_gets_plain_text_with_pauses_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SCENARIOS", (story(boot()),))
    paused: list[float] = []

    async def played(scenario: Scenario, seed: int, show: Show, pause_s: float) -> ScenarioResult:
        paused.append(pause_s)
        return await play(scenario, seed, show, 0.0)

    play = run.play
    monkeypatch.setattr(run, "play", played)
    for out, json_lines in ((Terminal(), False), (Terminal(), True), (io.StringIO(), False)):
        run.simulate(scenario="test", seed=0, speed=2.0, json_lines=json_lines, out=out)
        assert "\x1b[" not in out.getvalue()
        assert ("Step 1 of 1: Boot" in out.getvalue()) is not json_lines
    assert paused == [run.PAUSE_S / 2.0, 0.0, 0.0]


def test_columns_are_aligned() -> None:
    table = aligned(("Name", "Count"), [("a", "10"), ("longer", "7")], right=frozenset({1}))
    assert table == ["Name    Count", "a          10", "longer      7"]
    assert aligned(("Name", "Count"), [], right=frozenset()) == []


def test_a_table_has_the_rows_that_changed() -> None:
    first = [("h100", "a", "0", "Healthy", ""), ("h100", "b", "0", "Healthy", "vm")]
    assert changed_lines(DEVICES, [], first) == aligned(DEVICES.head, first, right=DEVICES.right)
    assert changed_lines(DEVICES, first, first) == ["2 devices as before"]
    head, row, same, gone = changed_lines(
        DEVICES,
        [*first, ("h100", "c", "1", "Healthy", "")],
        [
            ("h100", "a", "0", "Unhealthy", ""),
            first[1],
        ],
    )
    assert (head.split(), row.split()) == ([*DEVICES.head[:4], "Pod"], ["h100", "a", "0", "Unhealthy"])
    assert (same, gone) == ("1 device as before", "gone: c")


def test_after_a_step_that_is_not_as_expected_a_table_is_whole() -> None:
    out = io.StringIO()

    async def rest(world: World) -> None:
        pass

    nothing = Step("Nothing", "Nothing happens.", rest, (Counts(H100, 2, 2, 0),))
    wrong = Step("Wrong", "Nothing happens.", rest, (Counts(H100, 9, 9, 0),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "SCENARIOS", (story(boot(), nothing, wrong),))
        assert run.simulate(scenario="test", seed=0, speed=1.0, json_lines=False, out=out) == run.EXIT_FAILED
    _, second, third = re.split(r"\nStep \d of 3: ", out.getvalue())[1:]
    assert ("2 devices as before" in second, "0000:19:00.0" in second) == (True, False)
    assert ("as before" in third, "0000:19:00.0" in third) == (False, True)
