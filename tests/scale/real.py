"""The same daemons against a real API server, as many as this machine bears: what it counts itself, and what it costs.

Runs inside the namespaces of a node kit with etcd and kube-apiserver up (`run.py` brings them up). The daemons are
those of a service account, so priority and fairness treats them as it does pods; over TLS, each request with a
connection of its own. Nothing is judged here.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import sys
import urllib.request
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import trio
import yaml

from gpuactors.actors.api_retry import backoff_s
from gpuactors.actors.slice_publisher import TAINTS_ASKED_LOST_S
from gpuactors.core.claims.pool import wanted_pool
from gpuactors.core.values.slices import ServerKeeps, SliceSpec
from gpuactors.kube import objects
from gpuactors.kube.client import ApiClient
from gpuactors.kube.config import FileAccess, Server
from gpuactors.kube.slices import KubeSlices
from gpuactors.ports.kube import ApiError
from tests.kube.cluster import DRIVER
from tests.node.cluster import NODES, SLICES, Api, component, eventually
from tests.scale.fleet import GPUS, Daemon, Served, gpu_offer, node_name

_ACCOUNT: Final = "gpuactors-scale"
_METRIC: Final = re.compile(r"([a-z_]+)(?:\{(.*)\})? ([0-9.e+-]+)(?: \d+)?")
_LABEL: Final = re.compile(r'([a-z_]+)="([^"]*)"')
_IDLE_S: Final = 65.0
_WATCHES: Final = {"verb": "WATCH", "resource": "resourceslices"}


def main() -> None:
    nodes, watches, daemons = (int(text) for text in sys.argv[1:4])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    random.seed(1)
    api = Api()
    account(api)
    for number in range(nodes):
        api.create(NODES, {"metadata": {"name": node_name(number)}})
    trio.run(some_daemons, api, daemons)
    many_slices(api, nodes)
    trio.run(many_watches, api, min(watches, nodes, most - 200))


def account(api: Api) -> None:
    """The daemons' service account; it may do everything, as rights are not the subject."""
    api.create("/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": _ACCOUNT}})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    subject = {"kind": "ServiceAccount", "namespace": "default", "name": _ACCOUNT}
    api.create(
        "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        {"metadata": {"name": _ACCOUNT}, "roleRef": role, "subjects": [subject]},
    )


def client(api: Api) -> ApiClient:
    """The daemon's own client, with a token of the account."""
    path = f"/api/v1/namespaces/default/serviceaccounts/{_ACCOUNT}/token"
    token = api.create(path, {"spec": {"expirationSeconds": 7200}})["status"]["token"]
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    cluster = config["clusters"][0]["cluster"]
    url = urlsplit(cluster["server"])
    authority = b64decode(cluster["certificate-authority-data"]).decode()
    assert url.hostname is not None
    return ApiClient(FileAccess(Server("https", url.hostname, url.port or 443), token=token, ca=authority))


# --- the server's own counts ------------------------------------------------------------------------------

Metrics = dict[tuple[str, frozenset[tuple[str, str]]], float]


def metrics(api: Api) -> Metrics:
    """Every metric of the API server."""
    _, text = api.raw("GET", "/metrics")
    found: Metrics = {}
    for line in text.splitlines():
        if (parsed := _METRIC.fullmatch(line)) is not None:
            name, labels, value = parsed.groups()
            found[name, frozenset(_LABEL.findall(labels or ""))] = float(value)
    return found


def total(found: Metrics, name: str, **labels: str) -> float:
    """The sum of a metric over all other labels."""
    wanted = set(labels.items())
    return sum(value for (of, has), value in found.items() if of == name and wanted <= has)


_OURS: Final = ("resourceslices", "nodes", "deviceclasses")


def requests(before: Metrics, after: Metrics) -> dict[str, int]:
    """By verb and resource, as the server counts them; watches that go on are counted where they run."""
    found: dict[str, int] = {}
    for (name, labels), value in after.items():
        has = dict(labels)
        if name == "apiserver_request_total" and has["resource"] in _OURS and has["verb"] != "WATCH":
            key = f"{has['verb'].lower()} {has['resource']}" + (" (dry run)" if has["dry_run"] else "")
            grown = value - before.get((name, labels), 0.0)
            found[key] = found.get(key, 0) + round(grown)
    for of in _OURS:
        running = total(after, "apiserver_longrunning_requests", verb="WATCH", resource=of)
        found[f"watch {of}"] = round(
            running - total(before, "apiserver_longrunning_requests", verb="WATCH", resource=of)
        )
    return {what: count for what, count in sorted(found.items()) if count}


def grown(before: Metrics, after: Metrics, name: str) -> float:
    """By how much a metric has grown, of ResourceSlices where it has the label."""
    of = {"resource": "resourceslices"} if "watch_events" in name else {}
    return total(after, name, **of) - total(before, name, **of)


def cpu_s(before: Metrics, after: Metrics) -> float:
    return grown(before, after, "process_cpu_seconds_total")


def memory_mib(found: Metrics) -> float:
    return total(found, "process_resident_memory_bytes") / 2**20


# --- whole daemons ----------------------------------------------------------------------------------------


@asynccontextmanager
async def fleet(api: Api, daemons: int) -> AsyncIterator[list[Daemon]]:
    found = [
        Daemon(node_name(number), client_, Served()) for number, client_ in enumerate([client(api)] * daemons)
    ]
    async with trio.open_nursery() as nursery:
        for daemon in found:
            nursery.start_soon(daemon.run)
        yield found
        nursery.cancel_scope.cancel()


async def settled(daemons: list[Daemon]) -> None:
    with trio.fail_after(120.0):
        for daemon in daemons:
            while not daemon.settled:
                await daemon.changed.wait()


async def some_daemons(api: Api, daemons: int) -> None:
    """They start at once, are idle, and lose the server; it is back 10 s after its end."""
    before = metrics(api)
    async with fleet(api, daemons) as found:
        await settled(found)
        await trio.sleep(2.0)
        started = metrics(api)
        say(f"{daemons} daemons start, requests a node", per(requests(before, started), daemons))
        say("processor time of the API server a node", f"{1000 * cpu_s(before, started) / daemons:.1f} ms")
        await trio.sleep(_IDLE_S)
        after = metrics(api)
        say(f"idle for {_IDLE_S:g} s, requests of all", requests(started, after))
        events = (grown(started, after, f"apiserver_watch_events_{of}") for of in ("total", "sizes_sum"))
        say("events of watches (bookmarks), and their bytes", tuple(events))
        await trio.to_thread.run_sync(component, "down.sh", "api")
        await trio.sleep(10.0)
        await trio.to_thread.run_sync(component, "up.sh", "api")
        await settled(found)
        await trio.sleep(TAINTS_ASKED_LOST_S + 5.0)
        say("API server away for 10 s, requests a node", per(requests({}, metrics(api)), daemons))


def per(counts: Mapping[str, int], nodes: int) -> dict[str, float]:
    return {what: round(count / nodes, 2) for what, count in counts.items()}


# --- slices and watches -----------------------------------------------------------------------------------


def many_slices(api: Api, nodes: int) -> None:
    """A slice of each node: what they take in etcd, in the API server and on the way to a scheduler."""
    made = {s["spec"]["nodeName"] for s in api.items(SLICES)}
    before, etcd = metrics(api), etcd_mib()
    todo = [number for number in range(nodes) if node_name(number) not in made]
    for number in todo:
        name = node_name(number)
        devices = wanted_pool(gpu_offer(name), ServerKeeps.NO).devices
        spec = SliceSpec(DRIVER, name, name, 1, 1, devices)
        api.create(SLICES, json.loads(objects.written_slice(spec, objects.Meta(generate_name=f"{name}-"))))
    after = metrics(api)
    say(f"{len(todo)} slices of {GPUS} GPUs, etcd's data", f"{etcd:.1f} to {etcd_mib():.1f} MiB")
    say("the API server's memory", f"{memory_mib(before):.0f} to {memory_mib(after):.0f} MiB")
    say("its processor time a slice", f"{1000 * cpu_s(before, after) / len(todo):.1f} ms")
    _, text = api.raw("GET", SLICES)
    say(f"a list of all {nodes}", f"{len(text) / 2**20:.1f} MiB of JSON, {len(text) // nodes} bytes each")


def etcd_mib() -> float:
    with urllib.request.urlopen("http://127.0.0.1:2379/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(r"^etcd_mvcc_db_total_size_in_use_in_bytes (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1]) / 2**20


async def many_watches(api: Api, watches: int) -> None:
    """Each node lists and watches by its selector: what that costs, and who gets one change."""
    our, seen, refused, watching, all_watch = client(api), 0, 0, 0, trio.Event()

    async def node(number: int) -> None:
        nonlocal seen, refused, watching
        for failures in count(1):
            try:
                async with KubeSlices(our, DRIVER, node_name(number)).follow() as events:
                    await anext(events)
                    watching += 1
                    if watching == watches:
                        all_watch.set()
                    async for _ in events:
                        seen += 1
            except ApiError as exc:
                refused += 1
                await trio.sleep(backoff_s(failures, exc))

    before = metrics(api)
    async with trio.open_nursery() as nursery:
        for number in range(watches):
            nursery.start_soon(node, number)
        with trio.fail_after(300.0):
            await all_watch.wait()
        during = await trio.to_thread.run_sync(
            eventually, lambda: _with_watches(metrics(api), watches), "all watches in the server's count"
        )
        used_mib = memory_mib(during) - memory_mib(before)
        say(f"{watches} nodes list and watch at once, tries that failed", refused)
        rejected = grown(before, during, "apiserver_flowcontrol_rejected_requests_total")
        say("refused by priority and fairness", rejected)
        say("processor time of the API server a node", f"{1000 * cpu_s(before, during) / watches:.1f} ms")
        say("its memory", f"{used_mib:.0f} MiB more, {used_mib * 1024 / watches:.0f} KiB a watch")
        changed = api.items(SLICES, fieldSelector=f"spec.nodeName={node_name(7)}")[0]
        path = f"{SLICES}/{changed['metadata']['name']}"
        api.merge(path, {"metadata": {"labels": {"touched": "once"}}})
        await trio.sleep(5.0)
        say("one slice changes, watches that get it", f"{seen} of {watches}")
        nursery.cancel_scope.cancel()


def _with_watches(found: Metrics, watches: int) -> Metrics:
    """These, if so many watches go on; else none."""
    return found if total(found, "apiserver_longrunning_requests", **_WATCHES) >= watches else {}


def say(what: str, found: object) -> None:
    print(f"{what}: {found}", flush=True)


if __name__ == "__main__":
    main()
