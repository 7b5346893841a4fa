"""Coverage, shrinking and campaigns."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from tests.histories import __main__ as command
from tests.histories import again, campaign, draw, found
from tests.histories.campaign import Plan, Result, history_seed, run_campaign
from tests.histories.coverage import Coverage, summary, table
from tests.histories.draw import Guide, drawn
from tests.histories.events import DRAWN, PAIRS, Serves
from tests.histories.kinds import that_can_happen
from tests.histories.play import Failure, Played, play_chosen
from tests.histories.script import Script, Step, format_script, parse_script, replay_line
from tests.histories.shrink import shrink
from tests.histories.world import World
from tests.support.patience import patient

# --- coverage ---------------------------------------------------------------------------------------------


def test_pairs_are_counted_by_neighbourhood_and_by_order() -> None:
    coverage = Coverage()
    coverage.add([Step("unbind"), Step("a pod comes"), Step("unbind")])
    coverage.add([Step("unbind"), Step("a pod comes")])
    assert coverage.adjacent == {("unbind", "a pod comes"): 2, ("a pod comes", "unbind"): 1}
    assert coverage.ordered == {
        ("unbind", "a pod comes"): 2,
        ("unbind", "unbind"): 1,
        ("a pod comes", "unbind"): 1,
    }
    assert (coverage.histories, coverage.steps) == (2, 5)
    assert coverage.adjacent_share == pytest.approx(2 / len(PAIRS))
    assert coverage.ordered_share == pytest.approx(3 / len(DRAWN) ** 2)
    assert len(coverage.missing()) == len(PAIRS) - 2
    assert summary(coverage).startswith("2 histories, without claims, 5 steps; of ")
    row = next(line for line in table(coverage).splitlines() if line.startswith("unbind  "))
    assert row.split()[:4] == ["unbind", "2", "1", str(len(DRAWN))]


def test_only_what_can_never_follow_is_left_out_of_the_pairs() -> None:
    left_out = {(a, b) for a in DRAWN for b in DRAWN} - PAIRS
    assert ("kubelet starts", "kubelet starts") in left_out
    assert ("the daemon is told to stop", "a daemon starts") in PAIRS
    assert len(left_out) < len(PAIRS) / 100


@pytest.mark.parametrize(
    ("before", "after", "can"),
    [
        # What it needs and does not change is so after it.
        ("an older plugin has given a card away", "a successor starts", False),
        ("a claim takes a card", "kubelet starts", False),
        ("kubelet stops", "a claim takes a card", False),
        # It may come of it.
        ("the second plugin goes", "a second plugin takes our resource", True),
        ("the second plugin goes", "the second plugin sends its list", True),
        ("a daemon crashes", "a daemon starts", True),
        ("a daemon crashes", "a successor starts", True),
    ],
)
def test_what_can_follow(before: str, after: str, can: bool) -> None:
    assert ((before, after) in PAIRS) is can


@pytest.mark.parametrize(
    ("never", "then_neither"),
    [
        (set(), set()),
        ({"the API server goes away"}, {"the API server is back"}),
        ({"kubelet stops"}, {"kubelet starts"}),
        ({"the next uevents are late"}, {"late uevents come"}),
        (
            {"a second plugin takes our resource"},
            {"the second plugin sends its list", "the second plugin goes"},
        ),
        # A daemon may also crash; without either there is always one.
        ({"the daemon is told to stop"}, set()),
        (
            {"the daemon is told to stop", "a daemon crashes"},
            {"a daemon starts", "an older plugin has given a card away"},
        ),
    ],
)
def test_what_no_kind_that_is_drawn_brings_about_is_not_drawn(
    never: set[str], then_neither: set[str]
) -> None:
    drawn_kinds = {kind.name for kind in that_can_happen(k for k in DRAWN.values() if k.name not in never)}
    assert DRAWN.keys() - drawn_kinds == never | then_neither


def test_what_is_left_out_really_never_happens() -> None:
    coverage = Coverage()
    for seed in range(10):
        coverage.add(play_chosen(drawn(random.Random(seed)), seed).script)
    assert coverage.adjacent.keys() <= PAIRS


def test_a_guide_brings_about_what_is_still_wanted() -> None:
    last = "the clock jumps"
    guide, guided, by_chance = Guide(), Coverage(), Coverage()
    for before, after in PAIRS:
        if after != last:
            guide.happened(before, after)
    for seed in range(4):
        guided.add(play_chosen(drawn(random.Random(seed), guide), seed).script)
        by_chance.add(play_chosen(drawn(random.Random(seed)), seed).script)
    found, left_to_chance = ({a for a, b in c.adjacent if b == last} for c in (guided, by_chance))
    assert len(found) > 3 * len(left_to_chance)
    assert not found & {name for name in DRAWN if last in guide.wanted_after(name)}


def test_what_is_in_most_of_the_wanted_pairs_is_taken_when_it_can_happen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It can happen seldom, or it would not be wanted so often still."""
    monkeypatch.setattr(draw, "_GUIDED", 1.0)
    before, seldom = "a successor starts", "the predecessor is told to stop"
    others = ("the clock jumps", "the disk is full", "inspections fail", "a pod comes", "unbind")
    chosen: list[str] = []
    guide = Guide()
    for a, b in PAIRS:
        if b != seldom and (a, b) not in ((before, other) for other in others):
            guide.happened(a, b)
    assert sorted(guide.wanted_after(before)) == sorted((seldom, *others))

    def choose(world: World) -> Iterator[Step]:
        yield Step(before)
        chosen.extend(draw._next(world, random.Random(seed), guide, before)[0] for seed in range(9))

    play_chosen(choose, 1)
    assert chosen == [seldom] * 9


def test_the_parts_of_a_guide_share_the_pairs() -> None:
    parts = [Guide(part, 3) for part in range(3)]
    wanted = [(a, b) for part in parts for a in DRAWN for b in part.wanted_after(a)]
    assert len(wanted) == len(PAIRS)
    assert set(wanted) == PAIRS


# --- shrinking --------------------------------------------------------------------------------------------

LONG: Script = tuple(
    Step(kind, 17 * n, 3.0)
    for n, kind in enumerate(
        [
            "a pod comes",
            "unbind",
            "kubelet stops",
            "inspections fail",
            "unbind",
            "kubelet starts",
            "a pod ends",
        ]
    )
)


def fails_with_two_unbinds(script: Script, seed: int) -> Played:
    """Fails if it has two unbinds, the second one late enough; in another way if there is only one."""
    unbinds = [step for step in script if step.kind == "unbind"]
    check = "two" if len(unbinds) == 2 and unbinds[1].slot >= 6 else "one"
    failure = Failure(check, "…", len(script), settled=False) if unbinds else None
    return Played(seed, script, failure, "", ())


def test_a_failure_is_made_as_short_as_it_can_be() -> None:
    failed = fails_with_two_unbinds(LONG, 5)
    shortest = shrink(failed, play_one=fails_with_two_unbinds)
    assert format_script(shortest.script) == "unbind; unbind@8"
    assert shortest.failure is not None
    assert (shortest.failure.check, shortest.seed) == ("two", 5)


def test_shrinking_ends_after_so_many_attempts() -> None:
    attempts = 0

    def count(script: Script, seed: int) -> Played:
        nonlocal attempts
        attempts += 1
        return fails_with_two_unbinds(script, seed)

    failed = fails_with_two_unbinds(LONG, 5)
    assert len(shrink(failed, attempts=3, play_one=count).script) <= len(LONG)
    assert attempts == 3


def test_what_passed_cannot_be_made_shorter() -> None:
    with pytest.raises(ValueError, match="failed"):
        shrink(Played(0, LONG, None, "", ()))


# --- the command's exit code ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "interrupted", "code"),
    [
        (["--histories", "2"], False, 0),
        (["--histories", "2"], True, 0),
        (["--histories", "3"], True, 130),
        (["--histories", "2", "--min-pairs", "95"], True, 130),
        (["--histories", "2", "--min-pairs", "95"], False, 1),
        (["--minutes", "5"], True, 0),
    ],
)
def test_an_interrupted_campaign_is_good_only_if_it_had_done_what_it_was_to(
    words: list[str], interrupted: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result(interrupted=interrupted)
    for _ in range(2):
        result.covered[Serves.PLUGIN].add(LONG)
    monkeypatch.setattr(command, "run_campaign", lambda plan, progress: result)
    assert command.main(["--seed", "1", *words]) == code


# --- known faults -----------------------------------------------------------------------------------------


def test_a_known_fault_is_counted_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = found.Known("two", "^…$", "a fault for this test", LONG)
    failed, other = fails_with_two_unbinds(LONG, 5), fails_with_two_unbinds(LONG[:2], 5)
    monkeypatch.setattr(found, "KNOWN", (fault,))
    result = Result()
    assert not campaign._count(result, failed)
    assert campaign._count(result, other)
    assert (result.known, result.failed) == ({fault.why: 1}, {"one": 1})
    assert result.failures == [other]


# --- those that were found --------------------------------------------------------------------------------


def test_a_found_history_that_tries_something_else_now_is_told_with_the_line_that_replays_it() -> None:
    script = parse_script("kubelet starts; unbind")
    problem = again.problem_of(script, 16)
    assert problem is not None
    assert "could not happen" in problem
    assert replay_line(16, script) in problem
    assert again.problem_of(script[1:], 16) is None


def test_each_found_history_is_played_under_each_schedule_in_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(again, "SCHEDULES", (16, 17, 18))
    impossible = parse_script("kubelet starts")
    problems = again.play_again(1, 2, {"sound": impossible[1:], "not so": impossible})
    assert [p.partition(":")[0] for p in problems] == ["not so", "not so"]


def test_the_command_ends_with_1_where_a_found_history_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "play_again", lambda workers, schedules: ["late binding: it is lost"])
    assert command.main(["--found", "--histories", "1"]) == 1
    assert "late binding: it is lost" in capsys.readouterr().out


# --- campaigns --------------------------------------------------------------------------------------------


def test_a_campaign_plays_the_same_histories_again() -> None:
    """The numbers of the other kinds of nodes are below; that their histories are the same again is their own test."""
    plan = Plan(seed=11, histories=4, workers=2, claims_every=2)
    first, second = run_campaign(plan), run_campaign(plan)
    assert [first.covered[of].histories for of in Serves] == [2, 2, *[0] * (len(Serves) - 2)]
    assert first.covered == second.covered
    assert first.failures == []
    assert history_seed(11, 0) != history_seed(11, 1) != history_seed(12, 1)


def test_the_histories_without_compute_domains_are_the_same_beside_those_with_them() -> None:
    plan = Plan(seed=1, workers=2, claims_every=3)
    alone, beside = campaign._numbered(plan, 1), campaign._numbered(replace(plan, domains_every=4), 1)
    played = list(islice(beside, 12))
    assert [n for of, n in played if of is Serves.DOMAINS] == [1, 3, 5]
    assert [turn for turn in played if turn[0] is not Serves.DOMAINS] == list(islice(alone, 9))


def test_the_histories_without_a_second_administrator_are_the_same_beside_those_with_one() -> None:
    plan = Plan(seed=1, workers=2, claims_every=3, domains_every=4)
    beside = campaign._numbered(replace(plan, administrators_every=4), 1)
    played = list(islice(beside, 16))
    assert [n for of, n in played if of is Serves.ADMINISTRATORS] == [1, 3, 5, 7]
    others = [turn for turn in played if turn[0] is not Serves.ADMINISTRATORS]
    for of in (Serves.DOMAINS, Serves.CLAIMS, Serves.PLUGIN):
        same = [turn for turn in others if turn[0] is of]
        assert same == list(
            islice((turn for turn in campaign._numbered(plan, 1) if turn[0] is of), len(same))
        )
        assert same


def test_the_other_histories_are_the_same_beside_those_with_parts_of_cards() -> None:
    plan = Plan(seed=1, workers=2, claims_every=3, domains_every=4, administrators_every=5)
    played = list(islice(campaign._numbered(replace(plan, parts_every=6), 1), 36))
    assert [n for of, n in played if of is Serves.PARTS] == [1, 3, 5, 7, 9, 11]
    for of in (Serves.DOMAINS, Serves.ADMINISTRATORS):
        numbers = [n for o, n in played if o is of]
        assert numbers == list(range(1, 2 * len(numbers), 2))
    same = [turn for turn in played if turn[0] in (Serves.CLAIMS, Serves.PLUGIN)]
    alone = (turn for turn in campaign._numbered(plan, 1) if turn[0] in (Serves.CLAIMS, Serves.PLUGIN))
    assert same == list(islice(alone, len(same)))


def test_the_other_histories_are_the_same_beside_those_with_vgpus() -> None:
    plan = Plan(seed=1, workers=2, claims_every=3, domains_every=4, administrators_every=5, parts_every=6)
    played = list(islice(campaign._numbered(replace(plan, vgpus_every=7), 1), 42))
    assert [n for of, n in played if of is Serves.VGPUS] == [1, 5, 9]
    assert [n for of, n in played if of is Serves.CLAIMED_VGPUS] == [3, 7, 11]
    for of in (Serves.DOMAINS, Serves.ADMINISTRATORS, Serves.PARTS):
        numbers = [n for o, n in played if o is of]
        assert numbers == list(range(1, 2 * len(numbers), 2))
    same = [turn for turn in played if turn[0] in (Serves.CLAIMS, Serves.PLUGIN)]
    alone = (turn for turn in campaign._numbered(plan, 1) if turn[0] in (Serves.CLAIMS, Serves.PLUGIN))
    assert same == list(islice(alone, len(same)))


def test_the_other_histories_are_the_same_beside_those_with_sets() -> None:
    plan = Plan(1, None, None, 2, claims_every=3, domains_every=4, administrators_every=5, parts_every=6)
    plan = replace(plan, vgpus_every=7)
    played = list(islice(campaign._numbered(replace(plan, sets_every=8), 1), 48))
    assert [n for of, n in played if of is Serves.SETS] == [1, 3, 5, 7, 9, 11]
    for of in (Serves.DOMAINS, Serves.ADMINISTRATORS, Serves.PARTS):
        numbers = [n for o, n in played if o is of]
        assert numbers == list(range(1, 2 * len(numbers), 2))
    same = [turn for turn in played if turn[0] in (Serves.CLAIMS, Serves.PLUGIN)]
    alone = (turn for turn in campaign._numbered(plan, 1) if turn[0] in (Serves.CLAIMS, Serves.PLUGIN))
    assert same == list(islice(alone, len(same)))


def test_the_other_histories_are_the_same_beside_those_with_partitions() -> None:
    plan = Plan(1, None, None, 2, claims_every=3, domains_every=4, administrators_every=5, parts_every=6)
    plan = replace(plan, vgpus_every=7)
    played = list(islice(campaign._numbered(replace(plan, fabrics_every=9), 1), 54))
    assert [n for of, n in played if of is Serves.FABRIC] == [1, 5, 9]
    assert [n for of, n in played if of is Serves.CLAIMED_FABRIC] == [3, 7, 11]
    same = [turn for turn in played if turn[0] in (Serves.CLAIMS, Serves.PLUGIN)]
    alone = (turn for turn in campaign._numbered(plan, 1) if turn[0] in (Serves.CLAIMS, Serves.PLUGIN))
    assert same == list(islice(alone, len(same)))


def test_the_other_histories_are_the_same_beside_those_with_cards_that_die() -> None:
    plan = Plan(1, None, None, 2, claims_every=3, domains_every=4, administrators_every=5, parts_every=6)
    plan = replace(plan, vgpus_every=7)
    played = list(islice(campaign._numbered(replace(plan, dead_every=9), 1), 54))
    assert [n for of, n in played if of is Serves.DEAD] == [1, 5, 9]
    assert [n for of, n in played if of is Serves.CLAIMED_DEAD] == [3, 7, 11]
    same = [turn for turn in played if turn[0] in (Serves.CLAIMS, Serves.PLUGIN)]
    alone = (turn for turn in campaign._numbered(plan, 1) if turn[0] in (Serves.CLAIMS, Serves.PLUGIN))
    assert same == list(islice(alone, len(same)))


def test_the_other_histories_are_the_same_beside_those_with_cdi_names_and_of_grace_superchips() -> None:
    plan = Plan(1, None, None, 2, claims_every=3, domains_every=4, administrators_every=5, parts_every=6)
    played = list(islice(campaign._numbered(replace(plan, kata_every=10), 1), 60))
    assert [n for of, n in played if of is Serves.KATA] == [1, 3, 5, 7, 9, 11]
    of_grace = list(islice(campaign._numbered(replace(plan, egms_every=10), 1), 60))
    assert [n for of, n in of_grace if of is Serves.EGMS] == [1, 3, 5, 7, 9, 11]
    same = [turn for turn in played if turn[0] in (Serves.CLAIMS, Serves.PLUGIN)]
    alone = (turn for turn in campaign._numbered(plan, 1) if turn[0] in (Serves.CLAIMS, Serves.PLUGIN))
    assert same == list(islice(alone, len(same)))


def test_the_command_says_what_was_played_and_covered(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--histories", "4", "--seed", "3", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "Seed 3, 1 processes, 4 histories." in out
    assert re.search(r"3 histories, without claims, \d+ steps; of \d+ ordered pairs", out)
    assert re.search(r"1 histories, with claims, \d+ steps; of \d+ ordered pairs", out)


def test_too_few_pairs_are_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--histories", "1", "--seed", "3", "--workers", "1", "--min-pairs", "95"]
    assert command.main(arguments) == 1
    assert "95 % are wanted" in capsys.readouterr().out


@pytest.mark.parametrize("missing", Serves)
def test_the_pairs_of_all_kinds_of_nodes_are_wanted(
    missing: Serves, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result()
    for of, coverage in result.covered.items():
        if of is not missing:
            coverage.adjacent.update(of.pairs)
    assert result.covered[missing].adjacent_share == 0.0
    plan = Plan(
        1,
        claims_every=4,
        domains_every=8,
        administrators_every=8,
        parts_every=8,
        vgpus_every=8,
        sets_every=8,
        fabrics_every=8,
        dead_every=8,
        kata_every=8,
        egms_every=8,
    )
    assert command._report(result, plan, min_pairs=99, show_table=False) == 1
    wanted = sum(len(of.pairs) for of in Serves)
    share = 100 * (wanted - len(missing.pairs)) / wanted
    assert f"Only {share:.1f} % of the pairs were covered" in capsys.readouterr().out


def test_a_failure_is_printed_as_the_line_that_replays_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fails_with_two_unbinds(LONG, 5)
    result = Result(failures=[failed])
    result.failed["two"] = 1
    monkeypatch.setattr(command, "shrink", lambda played: replace(played, script=LONG[1:2]))
    assert command._report(result, Plan(1), min_pairs=0, show_table=False) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "./do fuzz --seed 5 --script unbind@17+3"


def test_the_workers_of_a_campaign_that_is_killed_end() -> None:
    """They would play on for ever, on all cores."""
    campaign = (sys.executable, "-m", "tests.histories", "--minutes", "60", "--workers", "2")
    with subprocess.Popen(campaign, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            assert b"histories in" in process.stderr.readline()
            workers = _children(process.pid)
        finally:
            process.kill()
    assert len(workers) >= 2
    deadline = time.monotonic() + patient(30.0)
    while any(map(_runs, workers)):
        assert time.monotonic() < deadline, f"{[pid for pid in workers if _runs(pid)]} play on"
        time.sleep(0.05)


def test_a_campaign_that_is_asked_to_end_says_what_it_found() -> None:
    campaign = (sys.executable, "-m", "tests.histories", "--minutes", "60", "--workers", "1")
    with subprocess.Popen(campaign, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"histories in" in process.stderr.readline()
        process.terminate()
        said, _ = process.communicate(timeout=patient(30.0))
    assert b" histories, " in said
    assert process.returncode == 0


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    """Whether it runs: an ended one whose parent has not noticed is in the table still."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
