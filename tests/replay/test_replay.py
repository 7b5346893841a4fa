"""Replay: the same core has the same results; where it has not, or the journal is damaged, that is reported."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuactors.cli.progress import Progress
from gpuactors.core.events.daemon import PredecessorGone
from gpuactors.core.host import usage
from gpuactors.core.step import step
from gpuactors.core.values.effects import Level, Log
from gpuactors.core.values.model import PciAddress
from gpuactors.core.values.vgpu import CardTypes
from gpuactors.observe.journal import Bounds, Missed
from gpuactors.observe.journal_format import FORMAT
from gpuactors.replay.counts import Counts, counts_of
from gpuactors.replay.play import Began, Played, Resumed
from gpuactors.replay.progress import ReplayProgress
from gpuactors.replay.reading import Damage, JournalError, Meter, files_to_read
from gpuactors.replay.run import DeviceError, TimeError, wall_of
from tests.core.builders import H100
from tests.observe.recording import QuietNode, RecordedCore, story, write
from tests.replay.replayed import Replayed, change, moments

# --- the same, or not -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_what_was_recorded_comes_out_again(tmp_path: Path, seed: int) -> None:
    core = story(gpus=4, events=300, seed=seed)
    write(tmp_path, *core.steps, bounds=Bounds(file_bytes=20_000))
    found = moments(tmp_path)
    played = [m for m in found if isinstance(m, Played)]
    assert len(played) == len(core.steps)
    assert not any(m.differences for m in played)
    assert [m.state for m in played][-1] == core.state
    assert [tuple(m.effects) for m in played] == [tuple(step.effects) for step in core.steps]
    resumed = [m for m in found if isinstance(m, Resumed)]
    assert resumed  # the next files, whose states are those that were computed
    assert all(m.missed == 0 and not m.differences for m in resumed)
    assert Replayed(tmp_path).code == 0


def test_the_names_of_vgpu_types_come_out_again(tmp_path: Path) -> None:
    """Their keys are numbers, in an event and in the next file's state."""
    core = story()
    names = {PciAddress("0000:3b:00.0"): CardTypes(7, {1147: ("NVIDIA L40S-1Q",)})}
    core.feed(PredecessorGone("", {}, names))
    core.pass_time(30.0)
    write(tmp_path, *core.steps, bounds=Bounds(file_bytes=20_000))
    found = moments(tmp_path)
    assert [m.event for m in found if isinstance(m, Played)] == [step.event for step in core.steps]
    assert not any(m.differences for m in found if isinstance(m, Played | Resumed))


RECORDING = """
import sys
from pathlib import Path
from gpuactors.core.events.host import HostScanned
from tests.core.builders import gpu
from tests.observe.recording import story, write

core = story(gpus=6, events=120)
for functions in ([], [gpu(f"{0x10 + i:02x}:00.0", cdev=i) for i in range(12)], []):  # all at once come and go
    core.pass_time(301.0)
    core.feed(HostScanned(core.state.host.inspections.whole.outstanding, tuple(functions)))
    core.pass_time(700.0)
write(Path(sys.argv[1]), *core.steps)
"""


def test_no_order_comes_from_a_set(tmp_path: Path) -> None:
    """Strings hash differently in each process: a journal is written under one seed and replayed under others."""
    root = Path(__file__).parents[2]
    replayed = ["-m", "gpuactors", "replay", str(tmp_path)]
    for words, hash_seed in (
        (["-c", RECORDING, str(tmp_path)], "0"), (replayed, "1"), (replayed, "2"), (replayed, "3")
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, *words],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert words is not replayed or done.stdout.endswith(": no differences\n")


def test_another_effect_differs(tmp_path: Path) -> None:
    steps = story().steps
    at = next(i for i, step in enumerate(steps) if step.effects)
    steps[at] = replace(steps[at], effects=[*steps[at].effects, Log(Level.INFO, "never.said", {})])
    write(tmp_path, *steps)
    shown = Replayed(tmp_path, diff=True)
    assert shown.code == 1
    assert sum("DIFFERS" in line for line in shown.lines) == 1
    assert 'DIFFERS: no longer: {"say":"never.said"' in shown.text
    assert f"#{at + 1} " in shown.text
    assert shown.lines[-1].endswith("1 difference")


def test_another_snapshot_differs(tmp_path: Path) -> None:
    (path,) = write(tmp_path, *story().steps)
    change(path, -1, lambda line: line.update(digest="0123456789abcdef"))
    shown = Replayed(tmp_path)
    assert shown.code == 1
    assert "DIFFERS: the snapshot was 0123456789abcdef, and is " in shown.text


def test_folded_steps_come_out_again_with_every_state_between_them(tmp_path: Path) -> None:
    node = QuietNode("one held externally")
    node.steps.clear()
    node.pass_time(600.0)
    (path,) = write(tmp_path, *node.steps)
    assert path.read_bytes().count(b"\n") < 12
    played = [m for m in moments(tmp_path) if isinstance(m, Played)]
    assert [(m.at, m.event, m.before) for m in played] == [(s.at, s.event, s.before) for s in node.steps]
    assert played[-1].state == node.state
    assert Replayed(tmp_path).code == 0


def test_a_core_that_does_otherwise_in_folded_steps_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = QuietNode("one held externally")
    node.steps.clear()
    node.pass_time(120.0)
    write(tmp_path, *node.steps)
    monkeypatch.setattr(usage, "POLL_S", 3.0)
    shown = Replayed(tmp_path, diff=True)
    assert shown.code == 1
    assert "DIFFERS: this was requested, and is not now" in shown.text


def test_another_snapshot_after_folded_steps_differs(tmp_path: Path) -> None:
    node = QuietNode("in use")
    node.steps.clear()
    node.pass_time(60.0)
    (path,) = write(tmp_path, *node.steps)
    change(path, -1, lambda line: line.update(digest="0123456789abcdef"))
    shown = Replayed(tmp_path)
    assert shown.code == 1
    assert "DIFFERS: the snapshot was 0123456789abcdef, and is " in shown.text


@pytest.mark.parametrize("older", [1, 2, 3, 4])
def test_a_journal_of_an_older_format_is_reported_in_a_sentence(older: int, tmp_path: Path) -> None:
    """The first two have no causes, and states and reads of the ledger have other parts in the others."""
    (path,) = write(tmp_path, *story().steps[:3])
    path.write_bytes(path.read_bytes().replace(b'{"journal":%d' % FORMAT, b'{"journal":%d' % older, 1))
    reads = f"this gpuactors reads format {FORMAT}; replay it with the version that wrote it"
    with pytest.raises(JournalError, match=f"a journal of format {older}, and {reads}"):
        Replayed(tmp_path)


def test_another_order_of_effects_differs(tmp_path: Path) -> None:
    steps = story().steps
    at = next(i for i, step in enumerate(steps) if len(step.effects) > 1)
    steps[at] = replace(steps[at], effects=steps[at].effects[::-1])
    write(tmp_path, *steps)
    assert "DIFFERS: the same effects in another order" in Replayed(tmp_path, diff=True).text


def test_another_state_in_the_next_file_differs(tmp_path: Path) -> None:
    found = write(tmp_path, *story(events=200).steps, bounds=Bounds(file_bytes=20_000))
    change(found[1], 1, lambda line: line["state"]["kubelet"].update(missing="eaten"))  # type: ignore[index]
    shown = Replayed(tmp_path)
    assert shown.code == 1
    assert "DIFFERS: the state in the journal has other kubelet.missing than was computed" in shown.text


def test_a_bug_that_ended_the_daemon_is_met_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = story().steps
    bug = replace(steps[-1], effects=(), outputs=None, failure="AssertionError('two owners')")
    write(tmp_path, *steps[:-1], bug)
    mended = Replayed(tmp_path)
    assert mended.code == 1
    assert "DIFFERS: it raised AssertionError('two owners'), and raises nothing now" in mended.text

    def fails(state: object, event: object, at: float) -> object:
        if at == bug.at and state == bug.before:
            raise AssertionError("two owners")
        return step(state, event, at)  # type: ignore[arg-type]

    monkeypatch.setattr("gpuactors.replay.play.step", fails)
    same = Replayed(tmp_path)
    assert same.code == 0
    assert "RAISES AssertionError('two owners')" in same.text


# --- damage -----------------------------------------------------------------------------------------------


def test_a_torn_tail_is_skipped_wherever_it_was_torn(tmp_path: Path) -> None:
    (path,) = write(tmp_path, *story(events=12).steps)
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    for size in range(header, len(whole) + 1, 41):
        path.write_bytes(whole[:size])
        found = moments(path)
        complete = whole[:size].splitlines(keepends=True)[2:]
        steps = sum(len(json.loads(line).get("again", "-")) for line in complete if line.endswith(b"\n"))
        assert sum(isinstance(m, Played) for m in found) == steps
        assert sum(isinstance(m, Damage) for m in found) == (not whole[:size].endswith(b"\n"))
        assert Replayed(path).code == 0
    path.write_bytes(whole[:-1])
    assert "not written to its end" in Replayed(path).text


def test_a_tail_of_zeros_after_a_power_failure_is_skipped(tmp_path: Path) -> None:
    (path,) = write(tmp_path, *story().steps)
    with path.open("ab") as file:
        file.write(bytes(4096))
    assert any(isinstance(m, Damage) and m.bytes_skipped == 4096 for m in moments(path))
    assert Replayed(path).code == 0


def test_after_damage_in_the_middle_it_goes_on_from_the_next_state(tmp_path: Path) -> None:
    steps = story(events=100).steps
    (path,) = write(tmp_path, *steps[:40], Missed(3), *steps[43:80])
    lines = path.read_bytes().splitlines(keepends=True)
    lines[10] = b'{"at": 1, "event": garbage\n'
    path.write_bytes(b"".join(lines))
    found = moments(path)
    (damage,) = [m for m in found if isinstance(m, Damage)]
    assert damage.line == 11
    (resumed,) = [m for m in found if isinstance(m, Resumed)]
    assert resumed.missed is None  # the state has 3, but lines are lost as well
    assert resumed.state == steps[43].before
    assert sum(isinstance(m, Played) for m in found) == 8 + 37
    assert not any(m.differences for m in found if isinstance(m, Played | Resumed))


def test_a_gap_is_reported_and_compared_with_nothing(tmp_path: Path) -> None:
    steps = story(events=100).steps
    write(tmp_path, *steps[:40], Missed(3), *steps[43:])
    shown = Replayed(tmp_path)
    assert shown.code == 0
    assert "-- 3 steps missing here; going on from a state in the journal" in shown.text
    assert "1 gap (3 steps known to be missing)" in shown.lines[-1]


def test_a_file_that_is_gone_is_a_gap(tmp_path: Path) -> None:
    found = write(tmp_path, *story(events=200).steps, bounds=Bounds(file_bytes=8_000))
    found[2].unlink()
    gaps = [m for m in moments(tmp_path) if isinstance(m, Resumed) and m.missed != 0]
    assert [m.missed for m in gaps] == [None]
    assert Replayed(tmp_path).code == 0


def test_an_empty_file_beside_others_is_reported(tmp_path: Path) -> None:
    write(tmp_path, *story().steps)
    (tmp_path / "00000002.jsonl").touch()
    shown = Replayed(tmp_path)
    assert shown.code == 0
    assert "00000002.jsonl" in shown.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty: nothing of it was on the disk when the node went down"),
        (b"PK\x03\x04", "it is no line of a journal"),
        (b'{"name": "a JSON file of another program"}\n', "it is no line of a journal"),
        (
            b'{"journal":%d,"version":"","run":"","part":1,"boot":"","pid":1,"wall":"noon","at":1.0}\n'
            % FORMAT,
            "does not begin with a journal's header",
        ),
        (b'{"journal":4,"anything":1}\n', f"a journal of format 4, and this gpuactors reads format {FORMAT}"),
    ],
)
def test_a_file_that_is_no_journal_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "00000001.jsonl"
    path.write_bytes(content)
    for where in (path, tmp_path):
        with pytest.raises(JournalError, match=message) as error:
            Replayed(where)
        assert str(path) in str(error.value)


def test_a_directory_without_a_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=f"there is no journal in {tmp_path}"):
        Replayed(tmp_path)


@pytest.mark.parametrize(
    ("line", "how", "message"),
    [
        (2, {"event": "NeverHeardOf"}, "this version knows no event NeverHeardOf"),
        (2, {"fields": {"more": 1}}, "has no more"),
        (2, {"event": "HostChanged", "fields": {}}, "its HostChanged is not one of this version's"),
        (1, {"state": {"device_lists": 3}}, "its state is not one of this version's"),
    ],
)
def test_what_another_version_wrote_is_reported(
    tmp_path: Path, line: int, how: dict[str, object], message: str
) -> None:
    (path,) = write(tmp_path, *story().steps)
    change(path, line, lambda found: found.update(how))
    with pytest.raises(JournalError, match=message) as error:
        Replayed(path)
    assert "it was written by gpuactors 0.1.0: replay it with that version" in str(error.value)


# --- what is shown ----------------------------------------------------------------------------------------


def test_until_a_time(tmp_path: Path) -> None:
    steps = story(events=200).steps
    write(tmp_path, *steps)
    early = [s for s in steps if s.at <= steps[0].at + 10.0]
    shown = Replayed(tmp_path, end="10")
    assert 0 < len(early) < len(steps)
    assert shown.lines[-1].startswith(f"{len(early)} steps")
    began = next(m.wall for m in moments(tmp_path) if isinstance(m, Began))
    for text in ("2026-11-21T06:20:10", "2026-11-21T06:20:10Z", "2026-11-21T08:20:10+02:00"):
        assert wall_of(text, began, "--until") == 1_795_242_010.0
    assert wall_of("1.5", 100.0, "--since") == 101.5
    with pytest.raises(TimeError, match="neither seconds since the beginning nor a time"):
        wall_of("soon", 0.0, "--since")


def numbers(shown: Replayed) -> list[tuple[float, str]]:
    """Time and event of each step that is shown, as JSON."""
    found = map(json.loads, shown.lines)
    return [(line["at"], line["event"]) for line in found if "step" in line]


def test_since_a_time(tmp_path: Path) -> None:
    """Issue 10, 23."""
    steps = story(events=400).steps
    paths = write(tmp_path, *steps, bounds=Bounds(file_bytes=20_000))
    middle = steps[len(steps) // 2].at
    shown = Replayed(tmp_path, begin=str(middle - steps[0].at - 0.0005), as_json=True)
    assert numbers(shown) == [(s.at, type(s.event).__name__) for s in steps if s.at >= middle]
    assert "began" in json.loads(shown.lines[0]), "with the process that it is of"
    assert shown.code == 0
    between = Replayed(tmp_path, begin="30", end="40", as_json=True)
    first = steps[0].at
    assert numbers(between) == [(s.at, type(s.event).__name__) for s in steps if 30.0 <= s.at - first <= 40.0]
    # What is before it is not even read: each file can be replayed by itself.
    paths[0].write_bytes(paths[0].read_bytes().splitlines(keepends=True)[0] + b"rubbish\n")
    again = Replayed(tmp_path, begin=str(middle - steps[0].at - 0.0005), as_json=True)
    assert numbers(again) == numbers(shown)
    assert not any("damage" in line for line in again.lines)
    with pytest.raises(TimeError, match="neither seconds") as error:
        Replayed(tmp_path, begin="soon")
    assert error.value.option == "--since"


def test_a_process_that_ended_before_the_time_is_not_read(tmp_path: Path) -> None:
    steps = story(events=100).steps
    write(tmp_path, *steps[:20], run="first")
    write(tmp_path, *steps[20:], run="second")
    shown = Replayed(tmp_path, begin=str(steps[-1].at - steps[0].at - 0.001))
    assert shown.text.count("process 4711") == 1
    assert shown.code == 0


def test_one_device(tmp_path: Path) -> None:
    """Issue 10, 23."""
    write(tmp_path, *story(gpus=3, events=400).steps)
    everything, of_it = Replayed(tmp_path), Replayed(tmp_path, device="0000:11:00.0")
    assert of_it.code == 0
    assert 0 < len(of_it.lines) < len(everything.lines) / 2
    for line in of_it.lines:
        if "Allocate " in line or "uevent" in line or "PreStartContainer" in line:
            assert "0000:11:00.0" in line
    allocated = [line for line in everything.lines if "Allocate " in line and "0000:11:00.0" in line]
    assert allocated
    assert all(line in of_it.lines for line in allocated)
    answers = [line for line in of_it.lines if "answer  call" in line]
    assert len(answers) >= len(allocated)
    page = tmp_path / "page.html"
    Replayed(tmp_path, device="0000:11:00.0", html=page)
    assert "<td>0000:11:00.0</td>" in page.read_text()
    assert "<td>0000:10:00.0</td>" not in page.read_text()
    with pytest.raises(DeviceError, match=r"0000:99:00\.0 is in no state of this journal"):
        Replayed(tmp_path, device="0000:99:00.0")
    with pytest.raises(DeviceError, match="is neither a PCI address"):
        Replayed(tmp_path, device="11")


@pytest.mark.parametrize("terminal", [True, False])
def test_how_far_it_has_come_is_shown_now_and_then(terminal: bool) -> None:
    """Issue 10, 23: a replay of a month printed nothing for minutes."""

    class Out(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    out, now, meter = Out(), [0.0], Meter()
    progress = ReplayProgress(meter, 4 << 20, Progress(out), clock=lambda: now[0])
    moment = Damage("x", 1, 1, "y")

    def moments() -> Iterator[Damage]:
        for _ in range(1000):
            now[0] += 0.01
            meter.bytes_read += 4194
            yield moment

    assert sum(1 for _ in progress.over(moments())) == 1000
    printed = out.getvalue()
    if terminal:
        assert "\r\x1b[Kreplayed 64 steps, 6 % of 4.0 MiB" in printed
        assert printed.endswith("\r\x1b[K"), "gone when it is over"
    else:
        assert printed == ""


def test_the_counts_are_those_of_kubelet() -> None:
    core = RecordedCore()
    assert counts_of(core.state) == {}
    core = story(gpus=4, events=500)
    free = set()
    for state in (recorded.before for recorded in core.steps):
        counts = counts_of(state).get(H100)
        if counts is not None:
            device_list = state.published.device_lists[H100]
            assert counts.capacity == len(device_list)
            assert counts.allocatable == sum(a.health == "Healthy" for a in device_list)
            assert counts.free == counts.allocatable - counts.allocated
            free.add(counts.free)
    assert len(free) > 3
    assert str(Counts(8, 7, 2)) == "capacity 8, allocatable 7, allocated 2, free 5"


def test_the_text_says_what_happened_and_counts_what_is_routine(tmp_path: Path) -> None:
    write(tmp_path, *story(events=300).steps)
    text = Replayed(tmp_path).text
    assert "process 4711 of gpuactors 0.1.0" in text
    for part in (
        "scan 1 found 3 functions",
        "kubelet.sock appeared",
        "Allocate nvidia.com/GH100_H100_SXM5_80GB",
        "answer  call 1: ",
        "list    nvidia.com/GH100_H100_SXM5_80GB: 3 devices, 3 Healthy",
        "counts  nvidia.com/GH100_H100_SXM5_80GB: capacity 3, allocatable 3, allocated 1, free 2",
        "… nothing new in",
        "no differences",
    ):
        assert part in text, part


def test_json_has_every_step(tmp_path: Path) -> None:
    steps = story(events=100).steps
    write(tmp_path, *steps[:50], Missed(1), *steps[51:])
    lines = [json.loads(line) for line in Replayed(tmp_path, as_json=True).lines]
    assert lines[0]["version"] == "0.1.0"
    assert [line["resumed"] for line in lines if "resumed" in line] == [1]
    steps_shown = [line for line in lines if "step" in line]
    assert [line["event"] for line in steps_shown] == [
        type(s.event).__name__ for s in (*steps[:50], *steps[51:])
    ]
    assert steps_shown[-1]["resources"][H100].keys() == {"capacity", "allocatable", "allocated", "free"}
    assert not any(line["differences"] for line in steps_shown)
    assert any(line["device_lists"] for line in steps_shown)


def test_the_processes_of_a_directory_come_one_after_the_other(tmp_path: Path) -> None:
    steps = story().steps
    small = Bounds(file_bytes=4_000)
    write(tmp_path, *steps[:30], run="first", bounds=small)
    write(tmp_path, *steps[:30], run="second", bounds=small)
    # A daemon that handed over goes on writing beside its successor.
    names = sorted(tmp_path.iterdir())
    names[-1].rename(tmp_path / "x")
    names[0].rename(names[-1])
    (tmp_path / "x").rename(names[0])
    files, _ = files_to_read(str(tmp_path))
    order = [(file.header.run, file.header.part) for file in files]
    assert [run for i, (run, _) in enumerate(order) if i == 0 or order[i - 1][0] != run] == [
        "second",
        "first",
    ]
    assert all(a[1] < b[1] for a, b in pairwise(order) if a[0] == b[0])
    assert sum(isinstance(m, Began) for m in moments(tmp_path)) == 2
    assert Replayed(tmp_path).code == 0
