"""The check of the pages' spelling finds what it is for, and its list of words is not longer than it must be."""

from __future__ import annotations

import re
from pathlib import Path

from tests.prose import WORDS, faults, pages, words

LONG = "word " * 41


def test_no_page_has_a_misspelled_word_or_a_long_sentence() -> None:
    assert faults(pages(), words()) == []


def test_a_misspelled_word_and_a_long_sentence_are_found(tmp_path: Path) -> None:
    fine, wrong = tmp_path / "fine.md", tmp_path / "wrong.md"
    fine.write_text("# A page\n\nThe kubelet's list has `a nmae` and HeldByOther, for 30 s.\n")
    wrong.write_text(f"# Another\n\nThe second line is mispelled.\nThis {LONG}ends.\n")
    assert faults([fine], ["kubelet"]) == []
    found = faults([fine, wrong], ["kubelet"])
    assert [(line.partition(": ")[0], "mispelled" in line) for line in sorted(found)] == [
        (f"{wrong}:3", True),
        (f"{wrong}:4", False),
    ]


def test_every_word_of_the_list_is_in_a_page() -> None:
    text = " ".join(page.read_text(encoding="utf-8") for page in pages()).lower()
    known = {*re.findall(r"[a-z]+", text), *re.findall(r"[a-z]+'s|[a-z]/[a-z]", text)}
    assert [word for word in WORDS.read_text(encoding="utf-8").split() if word.lower() not in known] == []
