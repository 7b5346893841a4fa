"""A daemon process whose configuration file has an entry for its node, by a label that the API server knows."""

from __future__ import annotations

import json

from gpuactors.cli.ending import EX_CONFIG
from tests.process.daemon import gpuactors
from tests.process.node import HEALTHY, address, open_node
from tests.support.claims import NODE, Api, write_kubeconfig

ENTRY = {"match": {"labels": {"kind": "hgx"}}, "settings": {"resource": ["example.com/big=device=2330"]}}
BIG = "example.com/big"


def test_a_daemon_serves_by_the_entry_of_its_label_and_again_while_the_api_server_is_away() -> None:
    with open_node() as node:
        file, kubeconfig = node.directory / "gpuactors.yaml", node.directory / "kubeconfig"
        file.write_text(json.dumps({"nodes": [ENTRY]}))
        words = (f"--config={file}", f"--kubeconfig={kubeconfig}", f"--node-name={NODE}")
        node.plug(0x23, "2330", driver="vfio-pci")
        write_kubeconfig(kubeconfig, 1)  # where nobody listens
        state = f"--state-dir={node.directory / 's'}"
        refused = gpuactors("config", "show", *words, state)
        assert refused.returncode == EX_CONFIG
        assert "cannot be read: could not read the node" in refused.stderr
        with Api() as api:
            write_kubeconfig(kubeconfig, api.port)
            api.do(api.server.label_node, NODE, "kind", "hgx")
            with node.daemon(*words):
                node.wait_device_lists({BIG: {address(0x23): HEALTHY}})
                shown = json.loads(gpuactors("config", "show", "-o", "json", *words, state).stdout)
        assert shown["node_labels"]["value"] == ["kind=hgx"]
        with node.daemon(*words) as daemon:
            registered = daemon.wait_event("plugin.registered", resource=BIG)
        assert registered["node"] == NODE
