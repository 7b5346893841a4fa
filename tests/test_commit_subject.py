from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commit_subject import wrong


@pytest.mark.parametrize(
    "subject",
    [
        "core: skip fact-driven phases for incoming calls",
        "core, host: delete two constants that nothing reads",
        "pass: pass a process",
        "claims: own, act on and return devices by DeviceKey",
        'Revert "core: skip fact-driven phases"',
        "Merge branch 'house'",
    ],
)
def test_a_subject_that_begins_with_area_and_verb_is_right(subject: str) -> None:
    assert not wrong(f"{subject}\n\nBecause.\n")


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("core: the phases of facts are skipped", "'the' is no verb"),
        ("core: skipping phases", "'skipping' is no verb"),
        ("core: skipped phases", "'skipped' is no verb"),
        ("core: skips phases", "'skips' is no verb"),
        ("core: skip", "must be `area: verb what`"),
        ("Skip phases", "must be `area: verb what`"),
        ("core: Skip phases", "must be `area: verb what`"),
        ("", "must be `area: verb what`"),
        ("core: " + "skip " * 14, "has 76 characters"),
    ],
)
def test_another_subject_is_refused_with_the_reason(subject: str, problem: str) -> None:
    assert problem in wrong(subject)


def test_the_hook_ends_with_1_and_says_why(tmp_path: Path) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("core: the phases are skipped\n")
    hook = subprocess.run(
        [sys.executable, "-m", "tests.commit_subject", message], capture_output=True, text=True, check=False
    )
    assert (hook.returncode, hook.stderr.startswith("'the' is no verb")) == (1, True)
    message.write_text("core: skip phases\n")
    assert (
        subprocess.run([sys.executable, "-m", "tests.commit_subject", message], check=False).returncode == 0
    )
