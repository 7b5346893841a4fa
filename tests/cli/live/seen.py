"""What a command that watches has seen: states that the real core made, and the screen of them as text and styles."""

from __future__ import annotations

from collections.abc import Hashable
from datetime import UTC, datetime

from urwid.testing import press, render_runs

from gpuactors.cli.live.screen import View
from gpuactors.cli.live.text import width
from gpuactors.cli.live.watched import Watched
from gpuactors.control.about import About
from gpuactors.control.client import Running
from gpuactors.control.node_view import view_of
from gpuactors.core.events.host import UeventsOpened
from gpuactors.core.values.model import Holder
from tests.core.builders import Core, gpu
from tests.core.gpus.claim_core import ClaimCore

WALL = datetime(2026, 11, 21, 22, 0, tzinfo=UTC).timestamp()
QEMU = Holder(4711, "qemu-system-x86", "0b0f-uid")
SIZES = [(80, 24), (120, 40)]
SLOTS = range(0x10, 0x20)


def node(slots: range = SLOTS) -> Core:
    core = Core(*(gpu(f"{slot:02x}:00.0", numa_node=slot % 2) for slot in slots))
    core.feed(UeventsOpened())
    return core


def running(core: Core | ClaimCore, pid: int = 7) -> Running:
    return Running(pid, "1.2.3", About("gpu-17"), view_of(core.state, core.at))


def watched(core: Core | ClaimCore) -> Watched:
    seen = Watched()
    seen.heard(running(core), core.at)
    return seen


def shown(
    seen: Watched, at: float, columns: int, rows: int, *keys: str, wide: bool = False, has_keys: bool = True
) -> View:
    """The screen after these keys, each on what the one before left."""
    view = View(seen, wide=wide, keys=has_keys)
    view.show(at, WALL, (columns, rows))
    for key in keys:
        texts(view, columns, rows)
        assert press(view, (columns, rows), key) == []
    return view


def texts(view: View, columns: int, rows: int) -> list[str]:
    lines = ["".join(text for _, text in runs) for runs in styled(view, columns, rows)]
    assert [width(line) for line in lines] == [columns] * rows, "it fills the screen, and no more"
    return [line.rstrip() for line in lines]


def styled(view: View, columns: int, rows: int) -> list[list[tuple[Hashable, str]]]:
    """Each line in pieces of one style."""
    return render_runs(view, (columns, rows), focus=True)


def held(gpus: int) -> tuple[Watched, float]:
    """A node of so many GPUs, the last but one of them with a reason longer than any of these lines."""
    core = node(range(0x13 - gpus + 2, 0x15) if gpus < 16 else range(0x100 - gpus, 0x100))
    slot = 0x13 if gpus < 16 else 0xFE
    core.enabled[f"0000:{slot:02x}:00.0"] = 1
    core.holders[slot] = (QEMU,)
    core.pass_time(60)
    return watched(core), core.at
