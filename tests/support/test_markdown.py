"""What a recipe writes into a document."""

from __future__ import annotations

import pytest

from tests.support.markdown import END, put_into, table

BEGIN = "<!-- from here -->"


def test_only_what_is_between_the_marks_is_written() -> None:
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n{END}\n"
    once = put_into(document, BEGIN, "new")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n{END}\n"
    assert put_into(once, BEGIN, "new") == once


@pytest.mark.parametrize("document", ["nothing", BEGIN, END, f"{END}\n{BEGIN}"])
def test_a_document_without_the_marks_is_not_written(document: str) -> None:
    with pytest.raises(ValueError, match="needs a line"):
        put_into(document, BEGIN, "new")


def test_a_table_has_a_line_for_each_row() -> None:
    assert table(["a", "b"], [["1", "2"], ["3", "4"]]) == [
        "| a | b |", "| --- | --- |", "| 1 | 2 |", "| 3 | 4 |",
    ]  # fmt: skip
