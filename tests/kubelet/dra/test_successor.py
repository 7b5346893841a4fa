"""The successor's DRA API, found by its socket beside ours and called over real sockets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuactors.core.values.claim import ClaimName, ClaimUid, Prepared, PreparedDevice, Unprepared
from gpuactors.core.values.effects import Refused
from gpuactors.grpc_trio import connect_unix
from gpuactors.kubelet.dra.successor import UnixSuccessor, later_sockets
from tests.kubelet.dra.serving import DRIVER, Core, refused, serving, short_directory

OLD, NEW = "00000000-0000-0000-0000-00000000000a", "00000000-0000-0000-0000-00000000000b"
ONE = ClaimName("default", "one", ClaimUid("c3b4e3fb-f21a-1b89-c001-2df840c9726e"))
SHARED = PreparedDevice(
    ("a", "b"), "node-1", "gpu-0000-01-00-0", ("k8s.x/claim=1", "k8s.x/claim=2"), "share-1"
)


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


def successor_of(path: Path) -> UnixSuccessor:
    return UnixSuccessor(str(path), later_sockets, connect_unix)


async def test_its_answers_come_as_they_are(kubelet_dir: Path) -> None:
    core = Core(prepared={ONE.uid: Prepared((SHARED,))})
    async with serving(kubelet_dir, instance=OLD) as old, serving(kubelet_dir, core, instance=NEW):
        successor = successor_of(old.api)
        assert await successor.prepare(ONE) == Prepared((SHARED,))
        core.prepared[ONE.uid] = refused("the GPU is gone")
        answer = await successor.prepare(ONE)
        assert isinstance(answer, Refused)
        assert answer.reason == "the GPU is gone"
        assert await successor.unprepare(ONE) == Unprepared()
        assert core.asked == [("prepare", ONE), ("prepare", ONE), ("unprepare", ONE)]
        assert old.core.asked == []


async def test_the_newer_of_two_asks_nobody_so_that_no_two_ask_each_other(kubelet_dir: Path) -> None:
    async with serving(kubelet_dir, instance=OLD) as old, serving(kubelet_dir, instance=NEW) as new:
        assert await successor_of(new.api).prepare(ONE) is None
        assert old.core.asked == []


async def test_nobody_there_or_a_dead_socket_is_no_answer(kubelet_dir: Path) -> None:
    async with serving(kubelet_dir, instance=OLD) as old:
        assert await successor_of(old.api).prepare(ONE) is None
        async with serving(kubelet_dir, instance=NEW) as new:
            os.link(new.api, old.api.with_name(f"dra-{DRIVER}.sock"))  # it stays when nobody listens any more
        assert len(later_sockets(str(old.api))) == 1
        assert await successor_of(old.api).unprepare(ONE) is None


def test_only_sockets_of_other_instances_count(kubelet_dir: Path) -> None:
    directory = kubelet_dir / "plugins" / DRIVER
    assert later_sockets(str(directory / f"dra-{OLD}.sock")) == ()
    directory.mkdir(parents=True)
    (directory / f"dra-{NEW}.sock").write_text("no socket")
    assert later_sockets(str(directory / f"dra-{OLD}.sock")) == ()
