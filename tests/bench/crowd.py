"""Many claims: prepares that come at once, those that wait for an API server that refuses all of them, calls beside a
checkpoint of many claims, and all of that at the same time.

As in `claims.py`: pre-bound GPUs, a fake API server on loopback, kubelet's calls by grpcio. A figure of what failed is
0 where all were served.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import grpc

from gpuactors_simulation.kube.server import ApiFault
from tests.bench.claims import ServedNode, claims_node, requests_of
from tests.bench.context import Bench
from tests.bench.node import DidNotWork, gpu_addresses
from tests.support.claims import prepare, unprepare
from tests.support.device_plugin_grpcio import message, stub

ALLOCATES: Final = 50
GPUS_BESIDE: Final = 8
WAIT_S: Final = 60.0
SAMPLE_S: Final = 0.02
AT_ONCE: Final = 20
TRIES: Final = 5
"""Of the claims that are only to be there."""


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    crowd, waiting, kept = bench.counts.crowd, bench.counts.waiting, bench.counts.claims_kept
    for party in bench.daemons:
        with claims_node(bench.fresh(), party, crowd) as one:
            names = [f"claim-{i}" for i in range(crowd)]
            uids = [one.api.claim(name, a) for name, a in zip(names, gpu_addresses(crowd), strict=True)]
            for call in (prepare, unprepare):
                _at_once(bench, one, call, names, uids)
        with claims_node(bench.fresh(), party, waiting) as one:
            _refused_by_server(bench, one, waiting)
        with claims_node(bench.fresh(), party, GPUS_BESIDE + crowd) as one:
            _beside(bench, one, kept)
            _together(bench, one, kept, crowd)


def _at_once(
    bench: Bench, one: ServedNode, call: Any, names: Sequence[str], uids: Sequence[str], beside: str = ""
) -> None:
    def ask(name: str, uid: str) -> tuple[float, str]:
        began = time.perf_counter()
        try:
            error = str(call(one.plugin, name, uid).error)
        except grpc.RpcError as exc:
            error = str(exc)
        return time.perf_counter() - began, error

    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(ask, names, uids))
    what, key = (
        f"{len(names)} {call.__name__}s at once{beside}",
        f"crowd.{call.__name__}.{len(names)}{_key(beside)}",
    )
    errors = [error for _, error in answers if error]
    bench.sheet.add(f"{key}.failed", f"{what}: failed", "", one.party, len(errors))
    bench.sheet.add(f"{key}.answer", f"{what}: one answer", "s", one.party, *(s for s, _ in answers))
    bench.sheet.add(
        f"{key}.last", f"{what}: until the last answer", "s", one.party, max(s for s, _ in answers)
    )
    for error in dict.fromkeys(errors[:3]):
        print(f"{one.party}: {error}", flush=True)


def _refused_by_server(bench: Bench, one: ServedNode, waiting: int) -> None:
    """The server answers every read of the claims with 429 and `Retry-After: 1`, until the prepares are answered."""
    names = [f"waiting-{i}" for i in range(waiting)]
    uids = [one.api.claim(name, a) for name, a in zip(names, gpu_addresses(waiting), strict=True)]
    one.api.do(one.api.server.order, ApiFault.THROTTLED, 10**9, "GET")
    asked, open_before = requests_of(one.api)["GET"], _descriptors(one)
    most = open_before
    with ThreadPoolExecutor(waiting) as pool:
        answers = [pool.submit(prepare, one.plugin, *of) for of in zip(names, uids, strict=True)]
        while not all(answer.done() for answer in answers):
            most = max(most, _descriptors(one))
            time.sleep(SAMPLE_S)
    made = requests_of(one.api)["GET"] - asked
    what, key = f"{waiting} claims wait for a server that answers 429", f"crowd.waiting.{waiting}"
    bench.sheet.add(f"{key}.requests", f"{what}: requests in 35 s", "", one.party, made)
    more = most - open_before
    bench.sheet.add(f"{key}.descriptors", f"{what}: descriptors more than before", "", one.party, more)


def _descriptors(one: ServedNode) -> int:
    return len(os.listdir(f"/proc/{one.pid}/fd"))


def _beside(bench: Bench, one: ServedNode, kept: int) -> None:
    """Claims with admin access are many on few GPUs."""
    addresses = gpu_addresses(GPUS_BESIDE)
    names = [f"kept-{i}" for i in range(kept)]
    uids = [one.api.claim(n, addresses[i % GPUS_BESIDE], admin=True) for i, n in enumerate(names)]
    left = list(zip(names, uids, strict=True))
    for _ in range(TRIES):
        parts = [left[i : i + AT_ONCE] for i in range(0, len(left), AT_ONCE)]
        left = [of for part in parts for of in _refused(one, part)]
        if not left:
            break
    if left:
        raise DidNotWork(f"{len(left)} claims could not be prepared")
    _allocates(bench, one, f" beside {kept} claims")
    one.node.stop()
    one.node.started()
    _allocates(bench, one, f" beside {kept} claims, after a start")


def _together(bench: Bench, one: ServedNode, kept: int, crowd: int) -> None:
    """After `_beside`: the GPUs that have no claim are prepared at once, while those that have some are allocated."""
    names = [f"crowd-{i}" for i in range(crowd)]
    free = gpu_addresses(GPUS_BESIDE + crowd)[GPUS_BESIDE:]
    uids = [one.api.claim(name, address) for name, address in zip(names, free, strict=True)]
    with ThreadPoolExecutor(1) as pool:
        allocates = pool.submit(_allocates, bench, one, f" beside {kept} claims and {crowd} prepares")
        _at_once(bench, one, prepare, names, uids, f" beside {kept} claims and {ALLOCATES} Allocates")
        allocates.result()


def _refused(one: ServedNode, part: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of these claims whose prepare fails, all asked at once."""
    with ThreadPoolExecutor(len(part)) as pool:
        answers = pool.map(lambda of: prepare(one.plugin, *of), part)
        return [of for of, answer in zip(part, answers, strict=True) if answer.error]


def _allocates(bench: Bench, one: ServedNode, beside: str) -> None:
    """One after the other, as kubelet asks."""
    what, key, failed = f"{ALLOCATES} Allocates{beside}", f"crowd.allocate{_key(beside)}", 0
    took_ms = list[float]()
    with grpc.insecure_channel(f"unix:{one.node.plugin_socket}") as channel:
        methods = stub(channel)
        for i in range(ALLOCATES):
            request = message("AllocateRequest")(
                container_requests=[{"devices_ids": [one.node.gpus[i % GPUS_BESIDE]]}]
            )
            began = time.perf_counter()
            refused = True
            with suppress(grpc.RpcError):
                methods["Allocate"](request, timeout=WAIT_S)
                refused = False
            failed += refused
            took_ms.append(1000 * (time.perf_counter() - began))
    bench.sheet.add(f"{key}.answer", f"{what}: one answer", "ms", one.party, *took_ms)
    bench.sheet.add(f"{key}.failed", f"{what}: failed", "", one.party, failed)


def _key(beside: str) -> str:
    """` beside 8 claims`, after a figure's name: `.beside_8_claims`."""
    return beside.replace(" ", ".", 1).replace(" ", "_").replace(",", "")
