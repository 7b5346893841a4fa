"""The node's name and the settings, as the daemon reports them. A file of its own: commands report them, too."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from gpuactors.config import Config, as_dict
from gpuactors.control.about import About, Setting
from gpuactors.core.values.names import node_name_of
from gpuactors.core.values.text import encodable


def node_of(config: Config) -> str:
    """Return the node's name: the configured one, else the hostname (in a pod the pod's), normalized as by kubelet."""
    return encodable(config.node_name or node_name_of(os.uname().nodename))


def about(config: Config, sources: Mapping[str, str]) -> About:
    """Return the daemon's settings and node name; `sources` has the source of each setting."""
    settings = tuple(
        Setting(key, json.dumps(value, ensure_ascii=False), sources.get(key, ""))
        for key, value in as_dict(config).items()
    )
    return About(node_of(config), settings)
