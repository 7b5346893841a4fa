"""The EGMs of a host, in both shapes of sysfs: what is wrong in one costs only that one, and none is ever opened."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from gpuactors.core.kinds.sets import NO_SETS, DeviceSet, KnownSets
from gpuactors.host import egm as host_egm
from gpuactors.host.egm import EGM_READ_S, EgmReader
from gpuactors.host.root import HostRoot
from gpuactors.ports.errors import HostError
from gpuactors.process.plain_files import read_plain
from tests.core.kinds.boards import egm, key
from tests.support.egm import Shape, make_egm, remove_egm


def with_node(name: str, *gpus: int) -> DeviceSet:
    return egm(name, *gpus, node=f"/dev/{name}")


async def read(root: Path) -> KnownSets:
    with trio.fail_after(30):
        return await EgmReader(HostRoot(str(root))).read()


@pytest.mark.parametrize("shape", Shape)
async def test_all_facts_of_an_egm(tmp_path: Path, shape: Shape) -> None:
    make_egm(tmp_path, "egm12", [key(4), key(3)], shape)
    make_egm(tmp_path, "egm4", [key(1)], shape)
    assert await read(tmp_path) == KnownSets((with_node("egm12", 3, 4), with_node("egm4", 1)))


@pytest.mark.parametrize("shape", Shape)
async def test_an_egm_without_a_gpu_yet_is_no_set(tmp_path: Path, shape: Shape) -> None:
    make_egm(tmp_path, "egm4", [], shape)
    assert await read(tmp_path) == NO_SETS


async def test_a_host_without_egm_has_none(tmp_path: Path) -> None:
    assert await read(tmp_path) == NO_SETS
    (tmp_path / "sys/class/egm").mkdir(parents=True)
    assert await read(tmp_path) == NO_SETS


@pytest.mark.parametrize("shape", Shape)
async def test_one_that_is_made_late_grows_and_goes(tmp_path: Path, shape: Shape) -> None:
    reader, found = EgmReader(HostRoot(str(tmp_path))), list[KnownSets]()
    for gpus in ([key(1)], [key(1), key(2)], None):
        if gpus is None:
            remove_egm(tmp_path, "egm4")
        else:
            make_egm(tmp_path, "egm4", gpus, shape)
        found.append(await reader.read())
    assert found == [KnownSets((with_node("egm4", 1),)), KnownSets((with_node("egm4", 1, 2),)), NO_SETS]


async def test_without_its_device_node_it_is_a_set_alone(tmp_path: Path) -> None:
    make_egm(tmp_path, "egm4", [key(1), key(2)], Shape.LIST)
    (tmp_path / "dev/egm4").unlink()
    assert await read(tmp_path) == KnownSets((egm("egm4", 1, 2),))


async def test_a_list_that_cannot_be_read_costs_that_egm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_egm(tmp_path, "egm4", [key(1)], Shape.LIST)
    make_egm(tmp_path, "egm5", ["0000:zz:00.0"], Shape.LIST)
    make_egm(tmp_path, "egm6", [key(3)], Shape.LIST)

    def failing(path: str, bytes_max: int) -> bytes:
        if "egm4/" in path:
            raise OSError(5, "Input/output error", path)
        return read_plain(path, bytes_max)

    monkeypatch.setattr(host_egm, "read_plain", failing)
    known = await read(tmp_path)
    assert known.sets == (with_node("egm6", 3),)
    unreadable, wrong = known.problems
    assert unreadable.startswith("/sys/class/egm/egm4, list of GPUs: Input/output error; it is not used")
    assert wrong.startswith("/sys/class/egm/egm5, list of GPUs: 0000:zz:00.0 is no PCI address")


async def test_a_list_that_nobody_may_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_egm(tmp_path, "egm4", [key(1)], Shape.LIST)

    def refused(path: str) -> Sequence[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(HostError, match=r"cannot read /sys/class/egm: Permission denied; check --host-root"):
        await read(tmp_path)


async def test_names_that_are_no_egm_are_passed_over(tmp_path: Path) -> None:
    make_egm(tmp_path, "egm4", [key(1)], Shape.LINKS)
    for name in ("egm", "egm4x", "other"):
        make_egm(tmp_path, name, [key(2)], Shape.LIST)
    assert await read(tmp_path) == KnownSets((with_node("egm4", 1),))


@pytest.mark.parametrize("shape", Shape)
async def test_the_device_node_is_never_opened(
    tmp_path: Path, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open of it would hang here, as nobody writes into the FIFO; on a real host it clears hundreds of GiB."""
    make_egm(tmp_path, "egm4", [key(1)], shape)
    node = tmp_path / "dev/egm4"
    node.unlink()
    os.mkfifo(node)
    monkeypatch.setattr(host_egm, "EGM_READ_S", 5.0)
    assert await read(tmp_path) == KnownSets((with_node("egm4", 1),))


async def test_a_read_that_hangs_is_given_up_and_later_ones_end_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, begun = threading.Event(), list[int]()

    def hanging(*_: object) -> bytes:
        begun.append(1)
        answers.wait(60)
        return key(1).encode()

    make_egm(tmp_path, "egm4", [key(1)], Shape.LIST)
    assert EGM_READ_S == 0.2
    monkeypatch.setattr(host_egm, "read_plain", hanging)
    monkeypatch.setattr(host_egm, "EGM_READ_S", 0.05)
    reader = EgmReader(HostRoot(str(tmp_path)))
    with trio.fail_after(30):
        with pytest.raises(HostError, match="no answer within"):
            await reader.read()
        monkeypatch.setattr(host_egm, "EGM_READ_S", 3600.0)
        with pytest.raises(HostError, match="no answer within"):
            await reader.read()
        assert len(begun) == 1, "one thread hangs there at most"
        answers.set()
        while True:
            try:
                assert await reader.read() == KnownSets((with_node("egm4", 1),))
                return
            except HostError:
                await trio.sleep(0.01)
