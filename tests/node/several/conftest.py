"""What the scenarios of several nodes have: gpuactors on each, and NVIDIA's controller once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import pytest

from tests.node import daemonset, domains
from tests.node.lane import lanes
from tests.node.run import DIRECTORY, NODES
from tests.node.several.nodes import Nodes

PREPARE_FAILED: Final = "Failed to prepare dynamic resources"
"""Begins kubelet's event (pkg/kubelet/kubelet.go, SyncPod)."""


@pytest.fixture(scope="session")
def all_nodes() -> Iterator[Nodes]:
    """For the whole session; scenarios take `nodes`."""
    (first,) = lanes(1, DIRECTORY)
    with ExitStack() as members, ExitStack() as stack:  # also one that joins outlives gpuactors
        began = time.monotonic()
        found = Nodes((first, *first.workers[: int(os.environ[NODES])]), members)
        found.said(f"the fake hosts are there after {time.monotonic() - began:.1f} s")
        stack.enter_context(domains.controller())
        installed = found.install()
        stack.callback(daemonset.wait_gone, found.api)
        stack.callback(daemonset.uninstall, installed)
        for one in found.members:
            one.ask("plug", one.slot)
        stack.enter_context(found.history.recording())
        found.said(f"gpuactors is ready on each after {time.monotonic() - began:.1f} s")
        yield found


@pytest.fixture
def nodes(all_nodes: Nodes) -> Iterator[Nodes]:
    """Without a pod or a domain, before and afterwards."""
    all_nodes.begin()
    yield all_nodes
    values = {one.name: all_nodes.history.label(all_nodes.api, one.name) for one in all_nodes.members}
    all_nodes.said(f"labels: {values}")
    all_nodes.clear()


@pytest.fixture
def asking_again() -> Iterator[None]:
    """Kubelet asks again at once where a claim was not prepared, and not after 60 to 90 s: the API server has refused
    it the claim, or gpuactors was away."""
    with domains.asking_again(PREPARE_FAILED):
        yield
