"""The pages pass the check of spelling and sentences, which finds what it is for."""

from __future__ import annotations

from pathlib import Path

from tests.prose import WORDS, faults, pages, words

LONG = "word " * 41


def test_no_page_has_a_misspelled_word_or_a_long_sentence() -> None:
    assert faults(pages(), words()) == []


def test_the_words_are_in_order() -> None:
    found = WORDS.read_text().split()
    assert found == sorted(set(found), key=str.lower)


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
