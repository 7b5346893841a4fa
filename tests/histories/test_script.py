"""The one line that a history is written in."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.histories.__main__ import main
from tests.histories.events import ALL, KINDS, check_names
from tests.histories.kinds import SLOTS
from tests.histories.script import (
    Script,
    ScriptError,
    Step,
    format_script,
    parse_script,
    replay_line,
)

STEPS = st.builds(
    Step,
    st.sampled_from(sorted(KINDS)),
    st.integers(0, SLOTS - 1),
    st.sampled_from([0.0, 0.001, 0.05, 0.3, 3.0, 11.0, 300.0]),
)


@given(st.lists(STEPS, max_size=20).map(tuple))
def test_a_script_is_read_as_it_was_written(script: Script) -> None:
    assert check_names(parse_script(format_script(script))) == script
    words = shlex.split(replay_line(7, script))
    assert words[:4] == ["./do", "fuzz", "--seed", "7"]
    assert parse_script(words[5]) == script


def test_slot_and_wait_may_be_left_out_and_spaces_do_not_matter() -> None:
    assert parse_script(" a pod comes ;; unbind @ 2 + 0.5;kubelet stops+3; ") == (
        Step("a pod comes"),
        Step("unbind", 2, 0.5),
        Step("kubelet stops", 0, 3.0),
    )
    assert parse_script("") == ()


@pytest.mark.parametrize("text", ["unbind@x", "unbind@-1", "@3", "unbind+", "unbind@1+2+3"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ScriptError, match="step 2"):
        parse_script(f"a pod comes; {text}")


def test_an_unknown_kind_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--script", "a cat comes@1"])
    assert "there is no kind of event called 'a cat comes'" in capsys.readouterr().err


def test_no_two_kinds_have_one_name() -> None:
    assert [kind.name for kind in ALL] == [*KINDS]


def test_every_kind_can_be_written_in_a_line() -> None:
    for name in KINDS:
        assert not set(name) & set("@+;'\"\\"), f"{name!r} would have to be quoted"
