"""What the host says of IMEX, from files as its kernel and NVIDIA's driver write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from gpuactors.core.domains.model import ImexFacts
from gpuactors.host.imex import HostImex, character_majors
from gpuactors.host.imex_ctl import ImexCtl
from gpuactors.host.root import DEVICE_NUMBERS, FABRIC_IMEX_MGMT, GPU_FEATURES, HostRoot
from gpuactors.ports import HostError
from tests.support.patience import patient

DEVICES = """\
Character devices:
  1 mem
195 nvidia
235 nvidia-caps
236 nvidia-caps-imex-channels
509 nvidia-uvm

Block devices:
  7 loop
254 nvidia-caps-imex-channels
"""

MGMT = "DeviceFileMinor: 4323\nDeviceFileMode: 256\nDeviceFileModify: 1\n"

CLIQUE = "6e4e1f2a-3b5c-4d7e-8f90-0a1b2c3d4e5f.32766"

FEATURES = f"""\
nvidia.com/gfd.timestamp=1763850000
nvidia.com/gpu.clique={CLIQUE}
nvidia.com/gpu.count=4
nvidia.com/gpu.product=NVIDIA-GB200
"""

WITHIN_S = patient(20.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, DEVICE_NUMBERS, DEVICES)
    write(tmp_path, FABRIC_IMEX_MGMT, MGMT)
    write(tmp_path, GPU_FEATURES, FEATURES)
    return tmp_path


def write(root: Path, path: str, text: str) -> Path:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def host(root: Path, clique_file: str = GPU_FEATURES) -> HostImex:
    return HostImex(HostRoot(str(root)), clique_file=clique_file)


async def read(imex: HostImex) -> ImexFacts:
    with trio.fail_after(WITHIN_S):
        return await imex.read()


async def test_a_node_of_a_fabric_has_numbers_and_a_clique(root: Path) -> None:
    assert await read(host(root)) == ImexFacts(
        channel_major=236, caps_major=235, mgmt_minor=4323, clique_id=CLIQUE
    )


def test_a_block_device_of_that_name_is_no_channel() -> None:
    assert character_majors(DEVICES)["nvidia-caps-imex-channels"] == 236
    assert character_majors(DEVICES.replace("236 nvidia-caps-imex-channels\n", "")) == {
        "mem": 1,
        "nvidia": 195,
        "nvidia-caps": 235,
        "nvidia-uvm": 509,
    }


async def test_a_node_without_imex_says_why_in_one_sentence(root: Path) -> None:
    path = write(root, DEVICE_NUMBERS, "Character devices:\n  1 mem\n\nBlock devices:\n  7 loop\n")
    facts = await read(host(root))
    assert facts == ImexFacts(absent=facts.absent)
    assert facts.absent.startswith(f"{path} has no nvidia-caps-imex-channels")
    assert "--compute-domains off" in facts.absent


async def test_a_driver_that_is_loaded_later_is_seen_and_so_is_another_clique(root: Path) -> None:
    path = write(root, DEVICE_NUMBERS, "Character devices:\n  1 mem\n")
    imex = host(root)
    assert (await read(imex)).absent
    path.write_text(DEVICES)
    assert (await read(imex)).clique_id == CLIQUE
    write(root, GPU_FEATURES, FEATURES.replace(".32766", ".4"))
    assert (await read(imex)).clique_id.endswith(".4")


@pytest.mark.parametrize(
    "features",
    [
        None,
        "",
        "nvidia.com/gpu.count=4\n",
        "nvidia.com/gpu.clique=00000000-0000-0000-0000-000000000000.0\n",
        "nvidia.com/gpu.clique=\n",
    ],
)
async def test_a_node_without_fabric_has_no_clique(root: Path, features: str | None) -> None:
    (root / GPU_FEATURES.lstrip("/")).unlink()
    if features is not None:
        write(root, GPU_FEATURES, features)
    assert await read(host(root)) == ImexFacts(channel_major=236, caps_major=235, mgmt_minor=4323)


async def test_a_file_of_the_operators_names_the_clique_alone(root: Path) -> None:
    write(root, "/run/clique", f"{CLIQUE.replace('.32766', '.1')}\n")
    assert (await read(host(root, "/run/clique"))).clique_id.endswith(".1")


@pytest.mark.parametrize(
    "value", ["7", "../../etc.1", f"{CLIQUE}/..", CLIQUE.replace(".", "-"), CLIQUE.upper()]
)
async def test_a_clique_that_is_none_is_named_and_never_taken(root: Path, value: str) -> None:
    path = write(root, GPU_FEATURES, f"nvidia.com/gpu.clique={value}\n")
    with pytest.raises(HostError) as said:
        await read(host(root))
    assert str(said.value).startswith(f"{path} names the clique {value}, which is none")


async def test_a_driver_without_the_capability_has_no_minor_number(root: Path) -> None:
    (root / FABRIC_IMEX_MGMT.lstrip("/")).unlink()
    assert (await read(host(root))).mgmt_minor is None
    path = write(root, FABRIC_IMEX_MGMT, "DeviceFileMode: 256\n")
    with pytest.raises(HostError, match=f"{path} has no DeviceFileMinor"):
        await read(host(root))


async def test_without_the_hosts_proc_nothing_is_said_of_imex(root: Path) -> None:
    (root / DEVICE_NUMBERS.lstrip("/")).unlink()
    with pytest.raises(HostError, match="mount of the host's /proc"):
        await read(host(root))
    (root / DEVICE_NUMBERS.lstrip("/")).mkdir()
    with pytest.raises(HostError, match="cannot be read: Is a directory"):
        await read(host(root))


async def test_a_read_that_hangs_is_given_up_and_no_second_one_begins_beside_it(root: Path) -> None:
    path = root / DEVICE_NUMBERS.lstrip("/")
    first, second = root / "first", root / "second"
    path.unlink()
    os.mkfifo(path)
    imex = HostImex(HostRoot(str(root)), deadline_s=0.2)
    with trio.fail_after(WITHIN_S):
        with pytest.raises(HostError, match=f"{path} .*a read hangs"):
            await imex.read()
        path.rename(first)
        os.mkfifo(path)
        with pytest.raises(HostError, match="a read hangs"):
            await imex.read()
        path.rename(second)
        path.write_text(DEVICES)
        with pytest.raises(OSError, match="No such device or address"):
            os.open(second, os.O_WRONLY | os.O_NONBLOCK)  # nobody has it open
        os.close(os.open(first, os.O_WRONLY))
        while (facts := await answered(imex)) is None:
            pass
    assert facts.channel_major == 236


async def answered(imex: HostImex) -> ImexFacts | None:
    """None while the read that hung has not come to its end."""
    try:
        return await imex.read()
    except HostError:
        return None


async def test_the_hosts_daemon_is_asked_where_there_are_channels_alone(root: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    tool = script(tmp_path, f"echo asked >> {asked}; echo NOT_READY")
    imex = HostImex(HostRoot(str(root)), ctl=ImexCtl(str(tool)))
    facts = await read(imex)
    assert (facts.channel_major, "says NOT_READY" in facts.host_problem) == (236, True)
    write(root, DEVICE_NUMBERS, "Character devices:\n  1 mem\n")
    assert (await read(imex)).host_problem == ""
    assert asked.read_text() == "asked\n"


def script(directory: Path, text: str) -> Path:
    """A control tool that does this."""
    tool = directory / "nvidia-imex-ctl"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    return tool
