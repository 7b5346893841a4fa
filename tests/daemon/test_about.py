"""The node's name as the daemon reports it, and asks the API server for it."""

from __future__ import annotations

import os

import pytest

from gpuactors.config import Config
from gpuactors.daemon.about import node_of


def test_a_host_name_with_capitals_is_the_name_that_kubelet_makes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uname = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((uname[0], "GPU-Node01.Example", *uname[2:])))
    assert node_of(Config()) == "gpu-node01.example"
    assert node_of(Config(node_name="gpu-17")) == "gpu-17"
