"""The clique of the node's fabric: who is asked, in which order, and what counts when they do not know."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

from gpuactors.core.domains.clique import GpuFabric, Said, found_by, of_gpus, parsed
from gpuactors.host.imex import CliqueOfClaims, HostImex, Operators
from gpuactors.host.nvml import NvmlClique
from gpuactors.host.root import HostRoot
from gpuactors_simulation.host.imex import CLIQUE, ImexTree

OTHER = CLIQUE.replace(".32766", ".4")
CLUSTER, _, NUMBER = CLIQUE.partition(".")
ZERO = "00000000-0000-0000-0000-000000000000"
JOINED = GpuFabric("completed", 0, CLUSTER, int(NUMBER))
WITHIN_S = 30.0


class Source:
    """Implements `CliqueSource`."""

    def __init__(self, said: Said) -> None:
        self.it_says = said
        self.asked = 0

    async def said(self) -> Said:
        await trio.lowlevel.checkpoint()
        self.asked += 1
        return self.it_says


# --- which source counts --------------------------------------------------------------------------------------------


def test_the_first_source_that_knows_counts() -> None:
    found = found_by([Said("NVML", why="is away"), Said("the label", OTHER), Said("the file", CLIQUE)])
    assert (found.clique_id, found.source, found.unknown) == (OTHER, "the label", "")


def test_that_there_is_no_fabric_is_known() -> None:
    found = found_by([Said("NVML", ""), Said("the label", OTHER)])
    assert (found.clique_id, found.source, found.unknown) == ("", "NVML", "")


def test_where_nobody_knows_each_is_named_and_what_to_do() -> None:
    found = found_by([Said("NVML", why="is not asked"), Said("the label", why="is not there")])
    assert found.clique_id == ""
    assert "is not known: NVML is not asked; the label is not there. To do: set --clique" in found.unknown


def test_a_source_that_knows_that_it_is_not_known_yet_is_the_last_one() -> None:
    found = found_by([of_gpus("NVML", [GpuFabric("in progress", 0, ZERO, 0)]), Said("the label", OTHER)])
    assert found.clique_id == ""
    assert "NVML says that a GPU has not joined its fabric yet (in progress" in found.unknown


@pytest.mark.parametrize("text", ["7", "../../etc.1", f"{CLIQUE}/..", CLIQUE.upper(), "", "None"])
def test_what_is_no_clique_is_never_taken(text: str) -> None:
    said = parsed("the label", text)
    assert (said.clique_id, said.is_last) == (None, True)


# --- NVML -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "clique"),
    [
        ([JOINED, JOINED], CLIQUE),
        ([GpuFabric("not supported", 0, "", 0)], ""),
        ([GpuFabric("completed", 0, ZERO, 0)], ""),
        ([], None),
        ([JOINED, GpuFabric("completed", 0, CLUSTER, 4)], None),
        ([JOINED, GpuFabric("not supported", 0, "", 0)], None),
        ([JOINED, GpuFabric("in progress", 0, ZERO, 0)], None),
        ([GpuFabric("not started", 0, ZERO, 0)], None),
        ([GpuFabric("completed", 15, CLUSTER, 4)], None),
        ([GpuFabric("completed", 0, "../../etc", 4)], None),
    ],
)
def test_all_gpus_must_agree(gpus: list[GpuFabric], clique: str | None) -> None:
    assert of_gpus("NVML", gpus).clique_id == clique


PYNVML = """
from ctypes import Structure, c_uint, c_uint8
NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND = 3, 13
class NVMLError(Exception):
    def __init__(self, value): self.value = value
    def __str__(self): return f"error {{self.value}}"
class c_nvmlGpuFabricInfoV_t(Structure):
    _fields_ = [("version", c_uint), ("clusterUuid", c_uint8 * 16), ("status", c_uint), ("cliqueId", c_uint),
                ("state", c_uint8), ("healthMask", c_uint)]
c_nvmlGpuFabricInfo_t = c_nvmlGpuFabricInfoV_t
def nvmlInit(): {init}
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(number): return number
def fill(info):
    info._obj.clusterUuid[:] = bytes.fromhex("{cluster}")
    info._obj.cliqueId, info._obj.state = {clique}, {state}
def nvmlDeviceGetGpuFabricInfo(handle, info): fill(info)
def nvmlDeviceGetGpuFabricInfoV(handle, info):
    {fabric}
    fill(info)
"""
"""The part of NVIDIA's binding that is used, as of its 13.615.71."""


def nvml(
    directory: Path, *, init: str = "pass", fabric: str = "pass", state: int = 3, deadline_s: float = WITHIN_S
) -> NvmlClique:
    """Our child with a binding of this kind."""
    text = PYNVML.format(
        init=init, fabric=fabric, cluster=CLUSTER.replace("-", ""), clique=NUMBER, state=state
    )
    (directory / "pynvml.py").write_text(text)
    begin = (
        f"import sys; sys.path.insert(0, {str(directory)!r}); "
        "from gpuactors.host import nvml_child; sys.exit(nvml_child.main())"
    )
    return NvmlClique((sys.executable, "-c", begin), deadline_s=deadline_s)


async def said_by(source: NvmlClique) -> Said:
    with trio.fail_after(2 * WITHIN_S):
        return await source.said()


async def test_nvml_says_the_clique(tmp_path: Path) -> None:
    assert await said_by(nvml(tmp_path)) == Said("NVML", CLIQUE)


async def test_an_older_driver_is_asked_by_the_older_function(tmp_path: Path) -> None:
    assert await said_by(nvml(tmp_path, fabric="raise NVMLError(13)")) == Said("NVML", CLIQUE)


async def test_a_gpu_that_supports_no_fabric_has_none(tmp_path: Path) -> None:
    assert await said_by(nvml(tmp_path, fabric="raise NVMLError(3)")) == Said("NVML", "")


@pytest.mark.parametrize(
    ("init", "fabric", "words"),
    [
        ("raise NVMLError(9)", "pass", "does not answer (error 9)"),
        ("pass", "raise NVMLError(15)", "does not answer (error 15)"),
        ("import os; os.abort()", "pass", "does not answer (status -6)"),
        ("print('nonsense')", "pass", "says nothing that can be read"),
    ],
)
async def test_nvml_that_fails_says_nothing_of_the_clique(
    tmp_path: Path, init: str, fabric: str, words: str
) -> None:
    assert await said_by(nvml(tmp_path, init=init, fabric=fabric)) == Said("NVML", why=words)


async def test_nvml_that_hangs_is_given_up_and_ended(tmp_path: Path) -> None:
    source = nvml(tmp_path, init="import time; time.sleep(3600)", deadline_s=0.5)
    assert "has not answered within 0.5 s" in (await said_by(source)).why


# --- together -------------------------------------------------------------------------------------------------------


async def test_the_sources_are_asked_in_their_order_and_no_further_than_needed(tmp_path: Path) -> None:
    tree = ImexTree(tmp_path)
    tree.load()
    tree.join(CLIQUE)
    away, known, never = (
        Source(Said("one", why="is away")),
        Source(Said("two", OTHER)),
        Source(Said("three", CLIQUE)),
    )
    imex = HostImex(HostRoot(str(tmp_path)), sources=(away, known, never))
    facts = await imex.read()
    assert (facts.clique_id, facts.clique_source) == (OTHER, "two")
    assert (away.asked, known.asked, never.asked) == (1, 1, 0)
    await imex.read()
    assert known.asked == 2, "anew at each read"


async def test_the_operators_word_outranks_the_file(tmp_path: Path) -> None:
    tree = ImexTree(tmp_path)
    tree.load()
    tree.join(CLIQUE)
    facts = await HostImex(HostRoot(str(tmp_path)), sources=(Operators("none"),)).read()
    assert (facts.clique_id, facts.clique_source, facts.unknown) == ("", "--clique", "")


def loaded(path: Path) -> HostRoot:
    ImexTree(path).load()
    return HostRoot(str(path))


async def test_a_label_that_went_with_nvidias_plugin_is_remembered_and_what_nvml_denies_is_not(
    tmp_path: Path,
) -> None:
    label = Source(Said("the label", CLIQUE))
    nvml = Source(Said("NVML", why="knows no GPU of the host's driver"))
    imex = HostImex(loaded(tmp_path), sources=(nvml, label))
    assert (await imex.read()).clique_id == CLIQUE
    label.it_says = Said("the label", why="is not there")
    found = await imex.read()
    assert (found.clique_id, found.clique_is_past, found.unknown) == (CLIQUE, True, "")
    assert found.clique_source == "the label (as it was read before)"
    found = await imex.read()
    assert found.clique_source == "the label (as it was read before)", "once"
    nvml.it_says = Said("NVML", why="says that a GPU has not joined its fabric yet", is_last=True)
    found = await imex.read()
    assert found.clique_id == ""
    assert "has not joined" in found.unknown


@pytest.mark.parametrize(
    "form", ["  - CLIQUE_ID={}\n", '{{"env": ["CLIQUE_ID={}", "X=1"]}}'], ids=["theirs", "ours"]
)
async def test_a_daemon_that_starts_after_the_label_went_takes_the_clique_of_the_claims_here(
    tmp_path: Path, form: str
) -> None:
    cdi = tmp_path / "cdi"
    claims = CliqueOfClaims(str(cdi), "compute-domain.nvidia.com")
    imex = HostImex(loaded(tmp_path), sources=(Source(Said("the label", why="is not there")),), claims=claims)
    assert "cannot be listed" in (await imex.read()).unknown
    cdi.mkdir()
    (cdi / "k8s.gpu.nvidia.com-claim_a.yaml").write_text(form.format(OTHER))
    (cdi / "k8s.compute-domain.nvidia.com-claim_b.yaml").write_text(form.format(""))
    assert (await imex.read()).clique_id == "", "empty is not known: it was another one's setting"
    (cdi / "k8s.compute-domain.nvidia.com-claim_c.yaml").write_text(form.format(CLIQUE))
    found = await imex.read()
    assert (found.clique_id, found.clique_is_past) == (CLIQUE, True)
    (cdi / "k8s.compute-domain.nvidia.com-claim_d.yaml").write_text(form.format(OTHER))
    assert "name several cliques" in (await imex.read()).unknown
