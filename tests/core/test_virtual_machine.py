"""Which virtual machine a pod runs, by the names that KubeVirt and the API server give."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gpuactors.core.values.model import ClaimedDevice, Pod, ResourceName
from gpuactors.core.values.names import is_subdomain
from gpuactors.core.values.owner import Allocation, owner_of, vm_of
from gpuactors.core.values.virtual_machine import runs, virtual_machine
from gpuactors_simulation.kube.status import CLAIMS
from gpuactors_simulation.kube.store import Store

SERVER = Store()
"""Names objects as the API server does (apiserver pkg/storage/names/generate.go)."""


def launcher(machine: str) -> str:
    """The name of a pod of a virtual machine."""
    asked: dict[str, Any] = {"metadata": {"generateName": f"virt-launcher-{machine}-"}}
    name: str = SERVER.named(CLAIMS, asked)["metadata"]["name"]
    return name


@pytest.mark.parametrize(
    "machine", ["db", "a", "vm-1", "db.shop", "0", "x" * 42, "virt-launcher-db", "vm-x7k2p"]
)
def test_the_pod_of_a_virtual_machine_names_it(machine: str) -> None:
    assert virtual_machine(launcher(machine)) == machine
    assert runs(launcher(machine), machine)
    assert not runs(launcher(machine), machine + "x")


@pytest.mark.parametrize("machine", ["x" * 43, "x" * 44, "x" * 43 + "-y", "x" * 63, "x" * 57 + ".y"])
def test_a_name_that_may_be_cut_is_not_said_but_found(machine: str) -> None:
    assert virtual_machine(launcher(machine)) == ""
    assert runs(launcher(machine), machine)
    assert not runs(launcher(machine), "x" * 42)


def test_of_many_pods_each_name_is_said_or_may_be_cut() -> None:
    chosen, letters = random.Random(115), "bx7-."
    for length in range(1, 64):
        for _ in range(20):
            machine = "a" + "".join(chosen.choices(letters, k=length - 1))
            if not is_subdomain(machine):
                continue
            pod = launcher(machine)
            assert virtual_machine(pod) == (machine if length < 43 else "")
            assert runs(pod, machine)


@pytest.mark.parametrize(
    "pod",
    [
        "",
        "vm-1",
        "db-x7k2p",
        "virt-launcher-",
        "virt-launcher-db",
        "virt-launcher-x7k2p",
        "virt-launcher--x7k2p",
        "virt-launcher-db-0",
        "virt-launcher-db-a7k2p",
        "virt-launcher-db-X7K2P",
        "virt-launcher-dbx7k2p",
        "virt-launcher-DB-x7k2p",
        "virt-launcher--db-x7k2p",
        "virt-launcher-d/b-x7k2p",
        "virt-launcher-d\nb-x7k2p",
        "virt-launcher-d\u202eb-x7k2p",
        "virt-launcher-d\udcffb-x7k2p",
        "virt-launcher-дб-x7k2p",
        "virt-launcher-" + "b" * 100_000 + "-x7k2p",
        "\x1b[2Jvirt-launcher-db-x7k2p",
        "virt-launcher-db-x7k2p\n",
    ],
    ids=lambda pod: ascii(pod[:30]),
)
def test_another_pod_runs_none_that_is_known(pod: str) -> None:
    assert virtual_machine(pod) == ""
    assert not any(runs(pod, machine) for machine in ("", "db", "d\nb", pod))


def test_the_owner_of_a_device_has_the_virtual_machines_of_its_pods() -> None:
    pods = [Pod("shop", launcher("db"), ""), Pod("shop", "vm-1", ""), Pod("", "", "uid-1")]
    by_plugin = [Allocation(ResourceName("r"), str(n), pod) for n, pod in enumerate(pods)]
    by_claim = Allocation(
        None, "shop/gpu", ClaimedDevice("d", "p", "gpu-0", "shop/gpu", Pod("web", launcher("db"), ""))
    )
    assert owner_of([*by_plugin, by_claim]).vm == "web/db, shop/db"
    assert owner_of(by_plugin).vm == "shop/db"
    assert owner_of(by_plugin[1:]).vm == ""
    assert owner_of([Allocation(ResourceName("r"), "0", None)]).vm == ""
    assert owner_of([Allocation(None, "c", ClaimedDevice("d", "p", "gpu-0", "shop/gpu", None))]).vm == ""
    assert vm_of(Pod("sh\u202eop", launcher("db"), "")) == r"sh\u202eop/db"
