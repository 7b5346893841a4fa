"""The same script and the same seed are the same history, to the last byte: in one process, and in another."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import trio._core._run as trio_run

from tests.histories.draw import drawn
from tests.histories.play import Played, play, play_chosen

HISTORIES = 3

_PLAY = f"""
import random
from tests.histories.draw import drawn
from tests.histories.play import play_chosen
for seed in reversed(range({HISTORIES})):
    print(seed, play_chosen(drawn(random.Random(seed)), seed).digest)
"""


def by_seed(seed: int, *, keep_trace: bool = False) -> Played:
    return play_chosen(drawn(random.Random(seed)), seed, keep_trace=keep_trace)


def test_a_history_is_the_same_again_here_and_elsewhere() -> None:
    first = [by_seed(seed) for seed in range(HISTORIES)]
    assert len({played.digest for played in first}) == HISTORIES
    assert [play(played.script, played.seed).digest for played in first] == [p.digest for p in first]
    done = subprocess.run(
        [sys.executable, "-c", _PLAY],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    elsewhere = dict(line.split() for line in done.stdout.splitlines())
    assert elsewhere == {str(played.seed): played.digest for played in first}


def test_the_seed_alone_changes_the_schedule() -> None:
    script = by_seed(3).script
    assert play(script, 3).digest != play(script, 5).digest


def test_what_happened_is_kept_on_request() -> None:
    kept = by_seed(2, keep_trace=True)
    assert kept.digest == by_seed(2).digest
    assert any("resource.appeared" in line for line in kept.trace)
    assert any("kubelet.sock > " in line for line in kept.trace)
    assert any("daemon 1: HostScanned, " in line for line in kept.trace)
    assert by_seed(2).trace == ()


def test_a_history_leaves_the_process_as_it_was() -> None:
    random.seed(1)
    trio_run._r.seed(1)
    before = random.getstate(), trio_run._r.getstate()
    descriptors = os.listdir("/proc/self/fd")
    for seed in range(1, 6):
        by_seed(seed)
    assert (random.getstate(), trio_run._r.getstate()) == before
    assert os.listdir("/proc/self/fd") == descriptors
