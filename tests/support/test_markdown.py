"""What a recipe writes into a document."""

from __future__ import annotations

import pytest

from tests.support.markdown import END, anchors, blocks, links, put_into, spans, table

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


DOCUMENT = """\
# One [thing](there.md)
See [`a` and [b]](b.md#b) and ![c](c.png), `[not](this.md)`.
## What's `said`, twice
    gpuactors run
1. a list

   ```sh
   gpuactors doctor --pre
   [nor](that.md)
   ```
```yaml
# no heading
```
## What's `said`, twice
"""


def test_what_a_document_names_is_found() -> None:
    assert anchors(DOCUMENT) == {"one-thing", "whats-said-twice", "whats-said-twice-1"}
    assert links(DOCUMENT) == ["there.md", "b.md#b", "c.png"]
    assert list(blocks(DOCUMENT)) == ["gpuactors doctor --pre", "[nor](that.md)", "gpuactors run"]
    assert spans(DOCUMENT) == ["a", "[not](this.md)", "said", "said"]
