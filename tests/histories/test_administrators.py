"""Histories of a node with a second administrator: what he does really happens, what he decided is known, and bugs that
undo it are found."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import pytest
import trio

from gpuactors.actors import cdi_watcher
from gpuactors.core.gpus.acts import GpuActs
from gpuactors.core.values import prebound
from gpuactors.core.values.claim import OriginalDriver
from gpuactors.core.values.model import PciAddress, PciFunction
from gpuactors_simulation.host.kernel import NVIDIA, FakeKernel
from gpuactors_simulation.host.tree import HostTree, PciSpec
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.administrator import LOADS_LATE, UNBINDS, VFIO, Administrator
from tests.histories.administrator_events import ADMINISTRATOR_KINDS, BESIDE
from tests.histories.claim_check import UNDONE
from tests.histories.claims import CLAIMS
from tests.histories.dra_node import CDI_DIR
from tests.histories.draw import drawn
from tests.histories.events import (
    DRAWN,
    DRAWN_WITH_ADMINISTRATORS,
    DRAWN_WITH_CLAIMS,
    KINDS,
    Serves,
    serves,
)
from tests.histories.found import FOUND_WITH_ADMINISTRATORS
from tests.histories.play import Played, play, play_chosen
from tests.histories.script import Step, parse_script
from tests.histories.world import World

BIT = Serves.ADMINISTRATORS.bit
QUICK = 16
"""The bit of a seed by which a history is neither watched for long nor replayed from its journal, if it has no higher
ones."""

HOST, PREBOUND = 3, 2
"""A place with a card on its host's driver, and one with a pre-bound card."""

GPU, OTHER, AUDIO = "0000:01:00.0", "0000:02:00.0", "0000:01:00.1"


def passes(played: Played) -> None:
    assert played.failure is None, played.failure


def seen(script: str, look: Callable[[World], object], seed: int = BIT | QUICK) -> list[object]:
    """What `look` sees at the beginning, after each step, and at the end. The history passes, and every step of it
    happens."""
    found: list[object] = []

    def on_step(world: World, _step: Step | None) -> None:
        found.append(look(world))

    played = play(parse_script(script), seed, on_step=on_step)
    passes(played)
    assert played.script == parse_script(script)
    return found


# --- what he decided --------------------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return FakeKernel(HostTree(tmp_path))


def administrator(kernel: FakeKernel) -> Administrator:
    """Of a node with two GPUs, one with an audio function."""
    home = {GPU: NVIDIA, OTHER: VFIO, AUDIO: "snd_hda_intel"}
    for address, driver in home.items():
        device, code = ("22ba", "040300") if address == AUDIO else ("2330", "030200")
        kernel.plug(PciSpec(address, "10de", device, code, int(address[5:7]), driver=driver))
    return Administrator(kernel, home)


def test_he_binds_by_override_and_by_id_and_gives_back(kernel: FakeKernel) -> None:
    him, tree = administrator(kernel), kernel.tree
    him.to_vfio(GPU, keeps_override=True)
    assert (tree.driver_of(GPU), kernel.override(GPU), {*him.at_rest(GPU)}) == (VFIO, VFIO, {VFIO})
    him.to_home(GPU)
    assert (tree.driver_of(GPU), kernel.override(GPU), {*him.at_rest(GPU)}) == (NVIDIA, "", {NVIDIA})
    him.to_vfio_by_id(GPU)
    assert (tree.driver_of(GPU), kernel.override(GPU), {*him.at_rest(GPU)}) == (VFIO, "", {VFIO})
    him.unbind(OTHER)
    assert tree.driver_of(OTHER) is None
    assert him.at_rest(OTHER) == {None}
    assert not him.has_decided(AUDIO)


def test_a_module_that_he_unloads_and_loads_is_a_decision_about_all_its_functions(kernel: FakeKernel) -> None:
    him = administrator(kernel)
    him.unload(NVIDIA)
    assert him.at_rest(GPU) == {None}
    assert him.at_rest(OTHER) == {VFIO}
    him.repair()
    assert kernel.tree.driver_of(GPU) == NVIDIA
    assert him.at_rest(GPU) == {NVIDIA}
    him.unload("snd_hda_intel")
    him.reboot()
    assert him.at_rest(AUDIO) == {"snd_hda_intel"}
    assert kernel.drivers == {VFIO, NVIDIA, "snd_hda_intel"}


def test_what_the_daemon_unbinds_after_him_is_undone_and_what_it_bound_itself_is_not(
    kernel: FakeKernel,
) -> None:
    him = administrator(kernel)
    unbind = f"/sys/bus/pci/drivers/{VFIO}/unbind"
    him.written(unbind, f"{OTHER}\n")
    assert him.undone == []
    him.to_vfio(GPU, keeps_override=False)
    him.written(unbind, f"{OTHER}\n")
    assert him.undone == []
    him.written(unbind, f"{GPU}\n")
    assert GPU in him.undone[0]
    him.undone.clear()
    him.written(f"/sys/bus/pci/drivers/{VFIO}/bind", f"{GPU}\n")
    him.written(unbind, f"{GPU}\n")
    assert him.undone == []


def test_under_a_claim_nobody_may_see_that_he_decided_so_either_way_is_right(kernel: FakeKernel) -> None:
    him = administrator(kernel)
    changed: list[str] = []
    him.on_change = changed.append
    him.claims_of = lambda address: {"uid"} if address == OTHER else set()
    him.unbind(OTHER)
    him.to_vfio(OTHER, keeps_override=False)
    assert him.at_rest(OTHER) == {VFIO, None}
    assert him.disturbed == {"uid"}
    him.written(f"/sys/bus/pci/drivers/{VFIO}/unbind", f"{OTHER}\n")
    assert him.undone == []
    assert changed == [OTHER, OTHER]


# --- what he does to a node -------------------------------------------------------------------------------


def test_his_bind_is_seen_and_a_claim_of_that_card_binds_nothing() -> None:
    def look(world: World) -> object:
        assert world.claims is not None
        binds = [path for path, text in world.claims.writes.written if text.strip() == world.address(HOST)]
        return world.driver(HOST), world.driver(HOST, 1), len(binds)

    script = f"an administrator binds a card to vfio-pci@{HOST}+5; a pod with a claim comes@{HOST}+30"
    assert seen(script, look)[:3] == [
        (NVIDIA, "snd_hda_intel", 0),
        (VFIO, "snd_hda_intel", 0),
        (VFIO, VFIO, 0),
    ]


def test_his_modules_go_and_come() -> None:
    def look(world: World) -> object:
        assert world.claims is not None
        return world.driver(HOST), world.driver(PREBOUND), sorted(world.claims.kernel.drivers)

    script = (
        "an administrator unloads nvidia+3; an administrator loads nvidia+3; "
        "an administrator unloads vfio-pci+3; an administrator loads vfio-pci+3"
    )
    assert seen(script, look)[:5] == [
        (NVIDIA, VFIO, [NVIDIA, "snd_hda_intel", VFIO]),
        (None, VFIO, ["snd_hda_intel", VFIO]),
        (NVIDIA, VFIO, [NVIDIA, "snd_hda_intel", VFIO]),
        (NVIDIA, None, [NVIDIA, "snd_hda_intel"]),
        (NVIDIA, None, [NVIDIA, "snd_hda_intel", VFIO]),
    ]


def test_his_virtual_functions_come_and_go_and_no_claim_gets_their_card_meanwhile() -> None:
    def look(world: World) -> object:
        pods = world.kubelet.view.pods.values()
        virtual = world.tree.virtual_functions(world.address(HOST))
        return len(virtual), sorted(pod.phase for pod in pods if pod.uses)

    script = (
        f"an administrator starts virtual functions@{HOST + 6}+3; a pod with a claim comes@{HOST}+30; "
        f"an administrator ends virtual functions@{HOST}+70"
    )
    assert seen(script, look)[:4] == [
        (0, []),
        (2, []),
        (2, [Phase.STARTING]),
        (0, [Phase.RUNNING]),
    ]


@pytest.mark.parametrize(
    "damage",
    [
        "an administrator removes a CDI file",
        "an administrator removes the CDI directory",
        "an administrator writes over a CDI file",
    ],
)
def test_the_cdi_files_of_a_claim_are_there_again_after_him(damage: str) -> None:
    def look(world: World) -> object:
        assert world.claims is not None
        return sum(len(content) > 10 for path, content in world.claims.disk.files.items() if CDI_DIR in path)

    script = f"a pod with a claim comes@{PREBOUND}+30; {damage}+11"
    assert seen(script, look)[:3] == [0, 2, 2]


def test_slices_that_he_brings_back_are_made_right() -> None:
    def look(world: World) -> object:
        assert world.claims is not None
        return len(world.claims.api.slices(world.claims.driver))

    script = (
        "the clock jumps+3; an administrator saves the slices+3; the slices are deleted+70; "
        "an administrator brings back the slices that he saved+70"
    )
    assert seen(script, look)[1:] == [1, 1, 1, 1, 1]


def test_a_history_with_an_administrator_is_the_same_each_time() -> None:
    first, again = (play_chosen(drawn(random.Random(1), steps_max=8), 1 | QUICK | BIT) for _ in range(2))
    assert (first.digest, first.script, first.failure) == (again.digest, again.script, again.failure)


@pytest.mark.parametrize("name", sorted(FOUND_WITH_ADMINISTRATORS))
def test_a_found_history_with_an_administrator_stays_found(name: str) -> None:
    seed, script = FOUND_WITH_ADMINISTRATORS[name]
    played = play(script, seed)
    passes(played)
    assert played.script[:-1] == script[:-1], "a step of it could not happen: it tries something else now"


# --- planted bugs -----------------------------------------------------------------------------------------


def _looks_at_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hears that a CDI file was touched."""

    async def deaf(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(cdi_watcher, "run", deaf)


def _believes_the_first_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original driver of the boot counts for ever, whoever has bound it since."""
    noted = prebound.noted

    def once(
        known: Mapping[PciAddress, OriginalDriver],
        functions: Iterable[PciFunction],
        acted: Collection[PciAddress] = (),
    ) -> Mapping[PciAddress, OriginalDriver]:
        return {**noted({}, functions), **known}

    monkeypatch.setattr(prebound, "noted", once)


def _waits_for_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release of a claim ends when the driver is loaded, and not before."""
    monkeypatch.setattr(GpuActs, "owes", lambda *_: None)


Plant = Callable[[pytest.MonkeyPatch], None]

TOUCHED = f"a pod with a claim comes@{PREBOUND}+30; an administrator removes a CDI file+11"


LATER = (
    f"a pod with a claim comes@{HOST}+30; a pod with a claim ends+30; "
    f"an administrator binds a card to vfio-pci@{HOST}+5; a pod with a claim comes@{HOST}+30"
)
UNLOADED = (
    f"a pod with a claim comes@{HOST}+30; an administrator unloads nvidia+3; a pod with a claim ends+30"
)


@pytest.mark.parametrize(
    ("plant", "script", "check"),
    [
        (_looks_at_no_files, TOUCHED, "claims do not settle"),
        (_believes_the_first_sight, LATER, UNDONE),
        (_waits_for_the_driver, UNLOADED, "something of a claim is left"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Plant, script: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes(play(parse_script(script), BIT | QUICK | LOADS_LATE))
    plant(monkeypatch)
    failure = play(parse_script(script), BIT | QUICK | LOADS_LATE).failure
    assert failure is not None
    assert failure.check == check, failure


# --- the tables -------------------------------------------------------------------------------------------


def test_every_kind_of_the_administrator_is_drawn_where_he_is_and_nowhere_else() -> None:
    his = {kind.name for kind in ADMINISTRATOR_KINDS}
    assert his | set(BESIDE) == DRAWN_WITH_ADMINISTRATORS.keys()
    assert set(BESIDE) <= KINDS.keys()
    assert his.isdisjoint({*DRAWN, *DRAWN_WITH_CLAIMS})
    assert set(UNBINDS) <= his


def test_a_seed_says_whether_there_is_one() -> None:
    assert serves(BIT | 5) is Serves.ADMINISTRATORS
    assert serves(CLAIMS | 5) is Serves.CLAIMS
    assert serves(5) is Serves.PLUGIN
