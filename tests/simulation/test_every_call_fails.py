"""Every call of the daemon to the outside raises once: the daemon lives, and everything is served in the end.

Nothing is drawn: in a life each kind of call that is made raises the first time that it is made, a life for each errno
(`just test`: for four of them, `just failures`: for all).
So each act and each read is begun anew until it has failed at each of its calls. `python -m
tests.simulation.test_every_call_fails [EIO …]` plays each pair of a call and an errno in a life of its own, which takes
an hour and more. One life has claims of GPUs, one compute domains.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import trio
from trio.testing import MockClock

from gpuactors.ports import claims as ports_claims
from gpuactors.ports import kube as ports_kube
from gpuactors.ports import node as ports
from gpuactors.ports import partitions as ports_partitions
from gpuactors_simulation.kubelet.dra import worker
from gpuactors_simulation.kubelet.values import KubeletView, Phase
from tests.histories.claims import CLAIMS, ClaimsNode
from tests.histories.domains import DOMAINS, DomainsNode
from tests.histories.play import _memory_directory, _pinned
from tests.histories.trace import Trace
from tests.histories.world import MODEL, MODELS, World, open_world
from tests.support.strikes import OF_ACTORS, OF_ADAPTORS, PORTS, Call, Methods, Strikes, every_error, striking

NUMBERS: Final = every_error(
    errno.EIO, errno.EACCES, errno.ENOSPC, errno.EMFILE, errno.ENOMEM, errno.EAGAIN, errno.EBUSY, errno.ENODEV,
    errno.ENOENT, errno.EROFS, errno.ESTALE,
)  # fmt: skip

ROOT: Final = Path(__file__).parents[2]

RESOURCE: Final = MODELS[MODEL]
BOUND_LATE: Final = 3
"""The place of a card that the boot has put on its host's driver."""

PATIENCE_S: Final = 3600.0
"""Of the mock clock, for a life."""

PREPARE_AGAIN_S: Final = (2.0, 3.0)
"""Kubelet's own pause after a prepare that failed is 60 to 90 s, of which a node has fifty in a life."""

ROUNDS_MAX: Final = 60


def os_error(number: int) -> Exception:
    return OSError(number, os.strerror(number), "/struck")


class Played:
    """A life."""

    def __init__(self) -> None:
        self.calls: set[Call] = set()
        self.struck = 0
        self.problems: list[str] = []
        self.log: tuple[str, ...] = ()


def play(
    methods: Methods,
    error: Callable[[], Exception],
    *,
    system: bool,
    only: Call | None = None,
    of: int = CLAIMS,
) -> Played:
    """`of`: what the daemon serves beside the device plugin, claims of GPUs or compute domains."""
    played = Played()
    with (
        tempfile.TemporaryDirectory(prefix="gpuactors-", dir=_memory_directory()) as name,
        _pinned(1) as tail,
        striking(methods, error, system=system, only=only) as strikes,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(worker, "PREPARE_AGAIN_S", PREPARE_AGAIN_S)
        trio.run(_live, Path(name), of | 1, strikes, played, clock=MockClock(autojump_threshold=0))
        played.calls, played.struck, played.log = strikes.calls, strikes.struck, tail.complaints
    return played


async def _live(root: Path, seed: int, strikes: Strikes, played: Played) -> None:
    """Pods come and go, by the device plugin and with a claim, until no call has raised for a whole round."""
    with trio.fail_after(PATIENCE_S):
        async with open_world(root, seed, Trace(keep=False)) as world:
            struck, number = -1, 0
            while struck != strikes.struck:
                struck, number = strikes.struck, number + 1
                assert number < ROUNDS_MAX, f"calls raise for ever: {sorted(strikes.calls)[:3]}"
                await _round(world, number)
            played.problems = world.problems
            assert [d.name for d in world.daemons] == ["daemon 1"], "it lives"


def _has_begun(pod: str, view: KubeletView) -> bool:
    return view.pods[pod].phase in (Phase.RUNNING, Phase.FAILED)


async def _round(world: World, number: int) -> None:
    kubelet, claimed = world.kubelet, f"claimed-{number}"
    match world.dra:
        case ClaimsNode() as node:
            node.allocate(claimed, [world.address(BOUND_LATE)])
        case DomainsNode() as node:
            node.allocate(claimed, next(iter(node.domains.values())), node.channel_names()[0])
        case _:
            raise AssertionError("it serves no claims")
    kubelet.submit(claimed, {}, uses=(claimed,))
    attempt = 0
    while True:  # a pod whose Allocate was refused has failed, and its controller makes another one
        vm = f"vm-{number}-{attempt}"
        kubelet.submit(vm, {RESOURCE: 1})
        view = await kubelet.until(partial(_has_begun, vm))
        if view.pods[vm].phase is Phase.RUNNING:
            break
        kubelet.delete(vm)
        attempt += 1
        await trio.sleep(1)
    await kubelet.until(lambda v: v.pods[claimed].phase is Phase.RUNNING)
    for name in (vm, claimed):
        kubelet.delete(name)
    await kubelet.until(lambda v: not v.pods and v.resources[RESOURCE].free == 3)
    while world.claims is not None and not world.claims.is_on_host_driver(world.address(BOUND_LATE)):  # noqa: ASYNC110 -- the kernel tells nobody
        await trio.sleep(1)


LIVES: Final = pytest.mark.parametrize("of", [CLAIMS, DOMAINS], ids=["claims", "domains"])


@LIVES
@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
def test_every_call_of_an_adaptor_fails_once(number: int, of: int) -> None:
    """Issue 24, 2: an OSError at the wrong call ended the daemon, and every start after it."""
    played = play(OF_ADAPTORS, partial(os_error, number), system=True, of=of)
    print(f"{len(played.calls)} calls have raised {errno.errorcode[number]}")
    assert (played.problems, played.log) == ([], ())
    assert played.struck == len(played.calls) > 100


@LIVES
@pytest.mark.parametrize("bug", [RecursionError, KeyError, ValueError])
def test_every_call_of_an_actor_fails_once_by_a_bug(bug: type[Exception], of: int) -> None:
    """Issue 24, 1: a claim that nests too deep ended the daemon, whoever had decoded it."""
    played = play(OF_ACTORS, lambda: bug("a bug"), system=False, of=of)
    print(f"{len(played.calls)} calls have raised {bug.__name__}")
    assert played.problems == []
    assert played.struck == len(played.calls) == len(played.log) > 10
    restarted = [line for line in played.log if '"event": "actor.failed"' not in line]
    assert len(restarted) == 1
    assert '"actor": "checkpoint_keeper' in restarted[0], "nobody knows what is on disk: it begins anew"


NOT_MADE: Final = {
    "KubeClaims.reserved_for",  # with Events only
    "MemoryVgpuTypes.write",  # on a node with vGPUs
    "KubeSlices.delete",  # of slices that are too many
    "StoredFiles.clear_mounted",  # after a boot
}


def test_both_lives_together_make_every_call_in_the_tables() -> None:
    tables = {**OF_ADAPTORS, **OF_ACTORS}
    lives = (play(tables, Exception, system=False, only=(), of=of) for of in (CLAIMS, DOMAINS))
    made = {call[0] for played in lives for call in played.calls}
    assert made | NOT_MADE == {f"{of.__name__}.{name}" for of, names in tables.items() for name in names}


ELSEWHERE: Final[dict[type, str]] = {
    ports.PodsSeen: "tests/host/test_pod_cgroups.py",
    ports.UeventSource: "tests/actors/test_udev_watcher.py",
    ports.CdiReader: "tests/actors/test_pod_resources.py",
    ports.ConfigSource: "tests/daemon/test_config_file.py",
    ports.Observation: "tests/actors/test_sysfs_inspector.py",
    ports.Kubelet: "tests/actors/test_plugin.py",
    ports.Endpoint: "tests/actors/test_plugin.py",
    ports.Reachable: "tests/http/test_endpoints.py",
    ports_claims.ClaimsKubelet: "tests/actors/test_claims_plugin.py",
    ports_claims.ClaimsEndpoint: "tests/actors/test_claims_plugin.py",
    ports_claims.Successor: "tests/actors/test_relay.py",
    ports.Control: "tests/actors/test_hand_over.py",
    ports.HeldControl: "tests/actors/test_hand_over.py",
    ports.FeatureFile: "tests/actors/test_feature_keeper.py",
    ports.SetsReader: "tests/actors/test_sets_reader.py",
    ports.SpecDirectory: "tests/actors/test_spec_keeper.py",
    ports_partitions.FabricManager: "tests/actors/test_partition_worker.py",
    ports_partitions.PartitionIntentsFile: "tests/actors/test_partition_worker.py",
    ports_claims.TouchedFiles: "tests/actors/test_cdi_watcher.py",
    ports.Journal: "tests/observe/test_journal.py",
    ports_kube.EventApi: "tests/actors/test_event_poster.py",
    ports_kube.DeviceClassApi: "tests/actors/test_class_reader.py",
}
"""Where the failures of the other ports are tried: sockets, watches, and what a node in memory lacks."""

OF_THE_CORE: Final = {ports.Caller, ports_claims.ClaimCaller}
"""They call the daemon."""


def test_the_failures_of_every_port_are_tried() -> None:
    found = {
        port
        for module in (ports, ports_claims, ports_kube, ports_partitions)
        for port in vars(module).values()
        if getattr(port, "_is_protocol", False) and port.__module__ == module.__name__
    }
    assert found == {*PORTS.values(), *ELSEWHERE, *OF_THE_CORE}
    assert {path for path in ELSEWHERE.values() if not (ROOT / path).is_file()} == set()


def _all_pairs() -> int:
    lives = {of: play(OF_ADAPTORS, Exception, system=True, only=(), of=of).calls for of in (CLAIMS, DOMAINS)}
    calls = [(call, of) for of, made in lives.items() for call in sorted(made)]
    failed = 0
    numbers = [getattr(errno, name) for name in sys.argv[1:]] or NUMBERS
    for call, of in calls:
        for number in numbers:
            try:
                played = play(OF_ADAPTORS, partial(os_error, number), system=True, only=call, of=of)
                wrong = [*played.problems, *played.log]
                if played.struck != 1:
                    wrong.append("it was not made")
            except Exception as error:
                wrong = [repr(error)]
            if wrong:
                failed += 1
                print(errno.errorcode[number], call, wrong, flush=True)
    print(
        f"{len(calls)} calls, {len(numbers)} errors each: {failed} of {len(calls) * len(numbers)} pairs failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(_all_pairs())
