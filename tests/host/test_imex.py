"""What the host says of IMEX, from files as its kernel and NVIDIA's driver write them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from gpuactors.core.values.domain import ImexFacts
from gpuactors.host.imex import HostImex, ImexFiles, Operators, character_majors
from gpuactors.host.imex_ctl import ImexCtl
from gpuactors.host.root import DEVICE_NUMBERS, FABRIC_IMEX_MGMT, GPU_FEATURES, NVIDIA_PARAMS, HostRoot
from gpuactors.ports.claims import ImexReader
from gpuactors.ports.errors import HostError
from gpuactors_simulation.host.imex import CHANNELS_MAJOR, CLIQUE, ImexTree
from tests.support.inline_host import InlineImex
from tests.support.patience import patient

WITHIN_S = patient(20.0)


@pytest.fixture
def tree(tmp_path: Path) -> ImexTree:
    """A node of a fabric, with NVIDIA's driver."""
    tree = ImexTree(tmp_path)
    tree.load()
    tree.join()
    return tree


def root(tree: ImexTree) -> HostRoot:
    return HostRoot(str(tree.root))


def files(tree: ImexTree, clique_file: str = GPU_FEATURES) -> ImexFiles:
    return ImexFiles(root(tree), clique_file)


async def read(imex: ImexReader) -> ImexFacts:
    with trio.fail_after(WITHIN_S):
        return await imex.read()


@pytest.mark.parametrize("kind", [HostImex, InlineImex])
async def test_a_node_of_a_fabric_has_numbers_and_a_clique(
    tree: ImexTree, kind: Callable[[HostRoot], ImexReader]
) -> None:
    assert await read(kind(root(tree))) == ImexFacts(
        channel_major=236,
        caps_major=235,
        mgmt_minor=4323,
        clique_id=CLIQUE,
        clique_source=GPU_FEATURES,
    )


def test_a_block_device_of_that_name_is_no_channel(tree: ImexTree) -> None:
    loaded = tree.path(DEVICE_NUMBERS).read_text()
    assert character_majors(loaded)["nvidia-caps-imex-channels"] == CHANNELS_MAJOR
    tree.unload()
    assert character_majors(tree.path(DEVICE_NUMBERS).read_text()) == {"mem": 1}


def test_a_node_without_imex_says_why_in_one_sentence(tree: ImexTree) -> None:
    tree.unload()
    facts = files(tree).read()
    assert facts == ImexFacts(absent=facts.absent)
    assert facts.absent.startswith(f"{tree.path(DEVICE_NUMBERS)} has no nvidia-caps-imex-channels")
    assert "--compute-domains off" in facts.absent


async def test_a_driver_that_is_loaded_later_is_seen_and_so_is_another_clique(tree: ImexTree) -> None:
    tree.unload()
    imex = HostImex(root(tree))
    assert (await read(imex)).absent
    tree.load()
    assert (await read(imex)).clique_id == CLIQUE
    tree.join(CLIQUE.replace(".32766", ".4"))
    assert (await read(imex)).clique_id.endswith(".4")
    tree.leave()
    facts = await read(imex)
    assert (
        facts.clique_id,
        facts.unknown.startswith("the clique of this node's NVLink fabric is not known"),
    ) == (
        "",
        True,
    )


@pytest.mark.parametrize(
    "features",
    [
        None,
        "",
        "nvidia.com/gpu.count=4\n",
        "nvidia.com/gpu.clique=\n",
    ],
)
def test_a_file_without_a_clique_says_nothing_of_it(tree: ImexTree, features: str | None) -> None:
    tree.path(GPU_FEATURES).unlink()
    if features is not None:
        tree.path(GPU_FEATURES).write_text(features)
    assert files(tree).read() == ImexFacts(channel_major=236, caps_major=235, mgmt_minor=4323)
    assert files(tree).clique().clique_id is None


def test_a_cluster_of_zeros_is_no_fabric(tree: ImexTree) -> None:
    tree.join("00000000-0000-0000-0000-000000000000.0")
    assert files(tree).clique().clique_id == ""


def test_the_driver_says_how_many_channels_it_has(tree: ImexTree) -> None:
    assert files(tree).read().channels == 2048
    tree.path(NVIDIA_PARAMS).write_text("ModifyDeviceFiles: 1\nImexChannelCount: 64\n")
    assert files(tree).read().channels == 64


def test_a_file_of_the_operators_names_the_clique_alone(tree: ImexTree) -> None:
    tree.path("/clique").write_text(f"{CLIQUE.replace('.32766', '.1')}\n")
    assert str(files(tree, "/clique").clique().clique_id).endswith(".1")


@pytest.mark.parametrize(
    "value", ["7", "../../etc.1", f"{CLIQUE}/..", CLIQUE.replace(".", "-"), CLIQUE.upper()]
)
async def test_a_clique_that_is_none_is_named_and_never_taken(tree: ImexTree, value: str) -> None:
    tree.join(value)
    facts = await read(HostImex(root(tree)))
    assert facts.clique_id == ""
    assert f"{GPU_FEATURES} names the clique {value}, which is none" in facts.unknown


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
async def test_what_is_no_file_in_the_features_files_place_costs_that_source_only(
    tree: ImexTree, make: Callable[[Path], None]
) -> None:
    tree.path(GPU_FEATURES).unlink()
    make(tree.path(GPU_FEATURES))
    assert f"{GPU_FEATURES} cannot be read (it is a" in (await read(HostImex(root(tree)))).unknown
    told = await read(HostImex(root(tree), sources=(Operators(CLIQUE),)))
    assert (told.clique_id, told.clique_source, told.channel_major) == (CLIQUE, "--clique", 236)


def test_a_driver_without_the_capability_has_no_minor_number(tree: ImexTree) -> None:
    path = tree.path(FABRIC_IMEX_MGMT)
    path.unlink()
    assert files(tree).read().mgmt_minor is None
    for said in ("DeviceFileMode: 256\n", f"DeviceFileMinor: {'9' * 5000}\n"):
        path.write_text(said)
        with pytest.raises(HostError, match=f"{path} has no DeviceFileMinor"):
            files(tree).read()


def test_without_the_hosts_proc_nothing_is_said_of_imex(tree: ImexTree) -> None:
    path = tree.path(DEVICE_NUMBERS)
    path.unlink()
    with pytest.raises(HostError, match="mount of the host's /proc"):
        files(tree).read()
    path.mkdir()
    with pytest.raises(HostError, match="cannot be read: Is a directory"):
        files(tree).read()


async def test_a_read_that_hangs_is_given_up_and_no_second_one_begins_beside_it(tree: ImexTree) -> None:
    path = tree.path(DEVICE_NUMBERS)
    first, second = tree.root / "first", tree.root / "second"
    path.unlink()
    os.mkfifo(path)
    imex = HostImex(root(tree), deadline_s=0.2)
    with trio.fail_after(WITHIN_S):
        with pytest.raises(HostError, match=f"{path} .*a read hangs"):
            await imex.read()
        path.rename(first)
        os.mkfifo(path)
        with pytest.raises(HostError, match="a read hangs"):
            await imex.read()
        path.rename(second)
        tree.load()
        with pytest.raises(OSError, match="No such device or address"):
            os.open(second, os.O_WRONLY | os.O_NONBLOCK)  # nobody has it open
        os.close(os.open(first, os.O_WRONLY))
        while (facts := await answered(imex)) is None:
            pass
    assert facts.channel_major == CHANNELS_MAJOR


async def answered(imex: HostImex) -> ImexFacts | None:
    """None while the read that hung has not come to its end."""
    try:
        return await imex.read()
    except HostError:
        return None


async def test_the_hosts_daemon_is_asked_where_there_are_channels_alone(
    tree: ImexTree, tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    tool = script(tmp_path, f"echo asked >> {asked}; echo NOT_READY")
    imex = HostImex(root(tree), ctl=ImexCtl(str(tool)))
    facts = await read(imex)
    assert (facts.channel_major, "says NOT_READY" in facts.host_problem) == (CHANNELS_MAJOR, True)
    tree.unload()
    assert (await read(imex)).host_problem == ""
    assert asked.read_text() == "asked\n"
    inline = InlineImex(root(tree))
    inline.host_problem = "not ready"
    assert (await read(inline)).host_problem == ""
    tree.load()
    assert (await read(inline)).host_problem == "not ready"


def script(directory: Path, text: str) -> Path:
    """A control tool that does this."""
    tool = directory / "nvidia-imex-ctl"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    return tool


def test_a_number_of_thousands_of_digits_is_none() -> None:
    """Python refuses to make an int of it by a ValueError, which ended the read."""
    assert character_majors("Character devices:\n" + "9" * 5000 + " x\n195 nvidia\n") == {"nvidia": 195}
