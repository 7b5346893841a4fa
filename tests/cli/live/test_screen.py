"""One screen of `inspect --watch`: of states that the real core made, at the sizes that terminals have."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors.cli.live.rows import NEW_S
from gpuactors.cli.live.text import Style, cut, end, padded
from gpuactors.cli.live.watched import Watched
from gpuactors.core.events.kubelet import KubeletGone
from gpuactors.core.values.model import pci_address
from tests.cli.live.seen import QEMU, SIZES, held, node, running, shown, styled, texts, watched
from tests.core.builders import Core, gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, name


def text(seen: Watched, at: float, columns: int = 100, rows: int = 30, *, wide: bool = False) -> list[str]:
    """The screen, with neither margin nor mark: those have tests of their own."""
    lines = texts(shown(seen, at, columns, rows, wide=wide), columns, rows)
    return [line[2:] if line[:2] in ("> ", "  ") else line for line in lines]


@pytest.mark.parametrize(("columns", "rows"), [(100, 30), (80, 24)])
def test_sixteen_gpus_fit(columns: int, rows: int) -> None:
    core = node()
    core.enabled["0000:13:00.0"] = 1
    core.holders[0x13] = (QEMU,)
    core.ledger["0000:14:00.0"] = "vm-1"
    core.pass_time(60)
    lines = text(watched(core), core.at, columns, rows)
    assert lines[0].startswith("Node gpu-17  gpuactors 1.2.3, process 7, serving")
    assert lines[0].endswith("2026-11-21T22:00:00Z")
    head = next(i for i, line in enumerate(lines) if line.startswith("RESOURCE"))
    assert lines[head].split() == ["RESOURCE", "CAPACITY", "ALLOCATABLE", "ALLOCATED", "FREE", "UNHEALTHY"]
    assert lines[head + 1].split()[1:6] == ["16", "15", "1", "14", "1"]
    assert sum(line.startswith("0000:") for line in lines) == 16
    held = of_gpu(lines, "0000:13:00.0")
    assert "Unhealthy" in held
    assert "IOMMU group 19 is held by" in held
    assert any("allocated to pod default/vm-1" in line for line in lines)
    assert lines[-1] == "Enter: explain  q: end  Up Down PgUp PgDn Home End: select", "all is in view"


def test_the_cause_of_what_is_unhealthy_stands_beside_the_counts_where_there_is_room() -> None:
    core = node()
    core.enabled["0000:13:00.0"] = 1
    core.holders[0x13] = (QEMU,)
    core.pass_time(60)
    assert text(watched(core), core.at)[4].endswith("1  HeldByOther 1")


def test_the_causes_stand_below_the_counts_where_only_there_is_room() -> None:
    core = node(range(0x10, 0x14))
    for slot in (0x12, 0x13):
        core.enabled[f"0000:{slot:02x}:00.0"] = 1
        core.holders[slot] = (QEMU,)
    core.pass_time(60)
    seen = watched(core)
    assert "  HeldByOther 2" in text(seen, core.at, 80, 24)
    assert "  HeldByOther 2" not in text(seen, core.at, 80, 12), "the GPUs need the lines"


def test_of_more_than_fit_what_is_unhealthy_comes_first() -> None:
    core = node(range(0x10, 0x90))
    core.enabled["0000:8f:00.0"] = 1
    core.holders[0x8F] = (QEMU,)
    core.pass_time(60)
    lines = text(watched(core), core.at)
    shown = [line[:12] for line in lines if line.startswith("0000:")]
    assert shown[:3] == ["0000:8f:00.0", "0000:10:00.0", "0000:11:00.0"]
    assert lines[-1].endswith(" of 133")


def test_the_parts_of_a_card_stand_below_it_and_further_in() -> None:
    pf = replace(gpu("10:00.0", driver="nvidia"), has_virtual_functions=True)
    vf = replace(gpu("10:00.4", 0x40), physical=pci_address("0000:10:00.0"))
    core = Core(pf, vf, gpu("11:00.0"))
    lines = text(watched(core), core.at)
    at = lines.index(of_gpu(lines))
    below = [line for line in lines[at + 1 :] if "0000:" in line]
    assert below[0].startswith("  0000:10:00.4  vfio-pci")
    assert below[1].startswith("0000:11:00.0 ")


def of_gpu(lines: list[str], address: str = "0000:10:00.0") -> str:
    return next(line for line in lines if line.startswith(address))


def test_ages_grow_without_a_word_from_the_daemon() -> None:
    core = node()
    core.pass_time(30)
    seen = watched(core)
    assert "30 s" in of_gpu(text(seen, core.at))
    assert "2 min" in of_gpu(text(seen, core.at + 90))
    assert text(seen, core.at + 90)[1].startswith("last change 2 min ago: ")


def test_what_changes_stands_out_for_some_seconds_and_is_named() -> None:
    core = node()
    core.pass_time(30)
    seen = watched(core)
    core.enabled["0000:13:00.0"] = 1
    core.holders[0x13] = (QEMU,)
    core.pass_time(10)
    seen.heard(running(core), core.at)
    assert text(seen, core.at)[1] == "last change 0 s ago: 0000:13:00.0  Unhealthy  HeldByOther"

    def is_new(at: float) -> list[str]:
        lines = styled(shown(seen, at, 100, 30), 100, 30)[2:]
        return [text for line in lines for style, text in line if style == Style.NEW and "0000:" in text]

    assert [text[:12] for text in is_new(core.at)] == ["0000:13:00.0"]
    assert is_new(core.at + NEW_S) == []


def test_the_health_has_its_colour() -> None:
    core = node(range(0x10, 0x13))
    core.enabled["0000:11:00.0"] = 1
    core.holders[0x11] = (QEMU,)
    core.pass_time(60)
    lines = styled(shown(watched(core), core.at, 100, 30), 100, 30)
    styles = {text.strip(): style for line in lines for style, text in line}
    assert (styles["Healthy"], styles["Unhealthy"]) == (Style.GOOD, Style.BAD)


def test_a_daemon_that_is_gone_is_said_to_be_with_what_it_said_last() -> None:
    core = node()
    seen = watched(core)
    assert seen.lost(core.at, "no daemon runs")
    assert not seen.lost(core.at, "no daemon runs")
    lines = text(seen, core.at + 3)
    assert lines[1] == "the daemon is gone since 3 s; still trying; this is what it said last"
    assert lines[2] == "no daemon runs"
    assert sum(line.startswith("0000:") for line in lines) == 16
    changes = seen.heard(running(core, pid=8), core.at + 4)
    assert [change[:2] for change in changes] == [("daemon", "process 8, version 1.2.3")]
    assert "process 8" in text(seen, core.at + 4)[0]
    assert "gone" not in text(seen, core.at + 4)[1]


def test_problems_of_the_node_and_of_a_registration_are_said() -> None:
    core = node()
    core.feed(KubeletGone("no socket"))
    lines = text(watched(core), core.at)
    assert "kubelet: no socket" in lines
    assert any("not registered with kubelet: " in line for line in lines)


def test_the_wide_screen_has_the_columns_of_the_wide_table() -> None:
    core = node()
    lines = text(watched(core), core.at, 200, wide=True)
    head = next(line for line in lines if line.startswith("ADDRESS"))
    assert head.split()[:9] == [
        "ADDRESS",
        "ID",
        "DRIVER",
        "GROUP",
        "CDEV",
        "NUMA",
        "HEALTH",
        "CAUSE",
        "SINCE",
    ]


def test_without_gpus_that_is_said() -> None:
    assert any("no GPU to offer" in line for line in text(watched(Core()), 0))


def test_a_wide_screen_cuts_no_driver_and_folds_no_claim_before_its_edge() -> None:
    core = ClaimCore(
        gpu("0000:10:00.0", group=1), gpu("0000:11:00.0", group=2, driver="nvgrace_gpu_vfio_pci")
    )
    for words in ("one", "two"):
        core.prepare(allocated(name(words), "0000:10:00.0"))
    core.pass_time(3)
    seen = watched(core)
    why = "delete one of the two pods, so that it is scheduled anew"
    narrow, roomy = text(seen, core.at, 80), text(seen, core.at, 200)
    assert "nvgrace_gpu_v…" in of_gpu(narrow, "0000:11:00.0")
    assert "nvgrace_gpu_vfio_pci" in of_gpu(roomy, "0000:11:00.0")
    assert not any(line.endswith(why) for line in narrow)
    assert any(line.endswith(why) for line in roomy)


HELD = (
    "IOMMU group 19 is held by process 4711 (qemu-system-x86) of the pod with UID 0b0f-uid, "
    "and kubelet has given it to no pod"
)


@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("gpus", [4, 30, 32, 256])
def test_no_reason_is_cut_while_there_is_an_empty_line(gpus: int, columns: int, rows: int) -> None:
    seen, at = held(gpus)
    lines = text(seen, at, columns, rows)
    shown = " ".join(" ".join(lines).split()).replace("group 254", "group 19")
    is_last_line_empty = not lines[-2]
    assert (HELD in shown) == (gpus + 9 <= rows)
    assert is_last_line_empty == (gpus == 4)
    assert any("…" in line for line in lines if line.startswith("0000:")) == (HELD not in shown)
    assert lines[-1].endswith(" of 261") == (gpus == 256), "the place in a list that is longer"


def test_a_reason_that_ends_at_the_edge_is_seen_to_be_cut() -> None:
    core = node()
    core.ledger["0000:10:00.0"] = "vm-1"
    core.pass_time(60)
    seen = watched(core)
    whole = of_gpu(text(seen, core.at, 90, 12))
    assert whole.endswith("allocated to pod default/vm-1")
    for columns in range(60, 2 + len(whole)):
        assert of_gpu(text(seen, core.at, columns, 12)) == whole[: columns - 3] + "…"
    assert of_gpu(text(seen, core.at, 2 + len(whole), 12)) == whole


def test_any_size_is_kept_to() -> None:
    core = node()
    for columns, rows in ((1, 1), (20, 5), (40, 10), (300, 100)):
        text(watched(core), core.at, columns, rows)


def test_text_is_cut_by_what_a_terminal_shows_of_it() -> None:
    assert [cut("abcdef", n) for n in (6, 5, 1, 0)] == ["abcdef", "abcd…", "…", ""]
    assert cut("世界世界", 5) == "世界…"
    assert padded("世", 4) == "世  "
    assert end("nvidia.com/X", 6) == "…com/X"
    assert cut("a\x1b[31mb\n", 20) == "a?[31mb?"
