"""A replay of a node that serves claims: in text, as a page, and of one device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuactors.core.events.claims import SlicesPublished
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.state import NodeState
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.core.values.model import PciAddress
from gpuactors.core.values.slices import Publication, ServerKeeps
from gpuactors_simulation.replay_page.lanes import statuses
from tests.core.builders import gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, name
from tests.observe.recording import RecordedSteps, write
from tests.replay.replayed import replayed

A, B, C = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"


class RecordedClaims(RecordedSteps, ClaimCore):
    """`ClaimCore`, whose steps are kept."""


def story() -> RecordedClaims:
    """A GPU on its host's driver is claimed, another claim waits for it, both end; another GPU has a claim as well."""
    core = RecordedClaims(gpu(A, group=1, driver="nvidia"), gpu(B, group=2, driver="nvidia"), gpu(C, group=3))
    core.feed(KubeletAppeared("kubelet"))
    core.created(*(allocated(name(n), a) for n, a in (("one", A), ("two", A), ("other", B))))
    core.prepare(name("one"))
    core.prepare(name("other"))
    core.pass_time(1.0)
    core.prepare(name("two"))
    core.pass_time(1.0)
    core.unprepare(name("one"))
    core.changed(replace(core.functions[PciAddress(A)]))
    core.pass_time(1.0)
    core.unprepare(name("two"))
    core.unprepare(name("other"))
    core.changed(core.functions[PciAddress(A)], core.functions[PciAddress(B)])
    core.pass_time(1.0)
    core.feed(
        SlicesPublished(
            Publication("gpu.nvidia.com", ServerKeeps.YES, True, 2, 1, (), (), {}, ""), ClaimsOf.GPUS
        )
    )
    return core


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("journal")
    write(directory, *story().steps)
    return directory


def test_the_life_of_a_claim_is_told(journal: Path) -> None:
    told = "\n".join(replayed(journal))
    for words in (
        "NodePrepareResources of claim default/one, UID uid-one",
        "claim default/one is allocated gpu-0000-01-00-0",
        "claim.waiting",
        f"{A} on vfio-pci",
        f"{A} on nvidia",
        "prepared gpu-0000-01-00-0",
        "NodeUnprepareResources of claim default/one",
        "claim.unprepared",
        "slices of gpu.nvidia.com: 1, as offered",
    ):
        assert words in told, words


def test_of_one_device_its_claims_are_shown_and_no_others(journal: Path) -> None:
    told = replayed(journal, device=A)
    shown = "\n".join(told)
    assert "default/one" in shown
    assert "default/two" in shown, "it waits for the device, and gets it"
    assert "default/other" not in shown
    # Lines that have the device's address nowhere: the call that ends the claim, its answer, the act on its files.
    assert any("NodeUnprepareResources of claim default/one" in line for line in told)
    assert any("unprepared" in line and "answer" in line for line in told)
    assert len(told) < len(replayed(journal)) * 2 / 3


def test_the_page_shows_who_has_a_gpu(journal: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    replayed(journal, html=page)
    text = page.read_text()
    assert "offered to claims, on nvidia" in text
    assert "claim default/one: Prepared" in text
    assert "claim default/one: Releasing" in text
    assert "NodePrepareResources of claim default/two done" in text
    assert re.search(r"\.k-offered \{", text), "each kind has its pattern"
    assert 'class="swatch k-offered"' in text


def kinds(state: NodeState) -> dict[str, tuple[str, str]]:
    return {address: (kind, text) for address, _, kind, text in statuses(state)}


def test_a_band_says_whether_a_gpu_is_offered_or_claimed() -> None:
    core = RecordedClaims(gpu(A, group=1, driver="nvidia"), gpu(C, group=3))
    core.created(allocated(name("one"), A))
    assert kinds(core.state) == {A: ("offered", "offered to claims, on nvidia"), C: ("free", "free")}
    core.held_back = {"device"}
    core.prepare(name("one"))
    assert kinds(core.state)[A] == ("claimed", "claim default/one: Binding")
    core.release("device")
    core.changed(core.functions[PciAddress(A)])
    kind, text = kinds(core.state)[A]
    assert (kind, text) == ("claimed", "in use by the claim default/one\nclaim default/one: Prepared")
