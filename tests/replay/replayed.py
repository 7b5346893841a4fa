"""What `gpuactors replay` prints of a journal, and how tests look into one and damage it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from gpuactors.replay.play import play
from gpuactors.replay.reading import files_to_read
from gpuactors.replay.run import PageFile, replay
from gpuactors_simulation.replay_page.page import Page


class Replayed:
    """What `gpuactors replay` prints, and its exit code."""

    def __init__(
        self,
        path: Path,
        *,
        begin: str | None = None,
        end: str | None = None,
        device: str | None = None,
        diff: bool = False,
        as_json: bool = False,
        html: Path | str | None = None,
    ) -> None:
        self.lines: list[str] = []
        self.code = replay(
            str(path),
            begin=begin,
            end=end,
            device=device,
            only_differences=diff,
            page_file=PageFile(str(html), Page) if html is not None else None,
            json_lines=as_json,
            echo=self.lines.append,
        )

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def replayed(
    journal: Path, *, device: str | None = None, html: Path | None = None, as_json: bool = False
) -> list[str]:
    """The lines of a replay that shows no difference."""
    shown = Replayed(journal, device=device, html=html, as_json=as_json)
    assert shown.code == 0, "no differences"
    return shown.lines


def moments(path: Path) -> list[object]:
    files, damaged = files_to_read(str(path))
    return [*damaged, *play(files)]


def change(path: Path, number: int, how: Callable[[dict[str, object]], object]) -> None:
    """Changes one line of a file; `number` counts from 0, from the end if negative."""
    lines = path.read_bytes().splitlines(keepends=True)
    line = json.loads(lines[number])
    how(line)
    lines[number] = json.dumps(line).encode() + b"\n"
    path.write_bytes(b"".join(lines))
