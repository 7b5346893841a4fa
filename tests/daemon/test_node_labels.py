"""The labels of the Node, by which entries of a configuration file match: read from the API server at the start, and
kept on disk for commands, and for a start while the server is away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpuactors.cli.commands import cli
from gpuactors.config import Config, ConfigError, Resolved, resolve
from gpuactors.daemon import node_labels
from gpuactors_simulation.kube.server import ApiFault
from tests.support.claims import NODE, Api, write_kubeconfig

BY_LABEL = {"match": {"labels": {"kind": "l40s"}}, "settings": {"log_level": "debug"}}
BY_NAME = {"match": {"names": ["other-*"], "labels": {"zone": "a"}}, "settings": {"holders": "proc"}}


@dataclass
class Site:
    """A node with a configuration file, and its API server."""

    api: Api
    directory: Path

    def resolve(self, read: Any = node_labels.read, **flags: object) -> Resolved:
        return resolve({**self.flags, **flags}, {}, read)

    @property
    def flags(self) -> dict[str, object]:
        return {
            "config": self.directory / "gpuactors.yaml",
            "kubeconfig": self.directory / "kubeconfig",
            "state_dir": self.directory / "state",
            "node_name": NODE,
        }

    @property
    def kept(self) -> Path:
        return self.directory / "state/node-labels.json"

    def file(self, *entries: dict[str, Any]) -> None:
        (self.directory / "gpuactors.yaml").write_text(json.dumps({"nodes": entries}))

    def label(self, label: str, value: str | None) -> None:
        self.api.do(self.api.server.label_node, NODE, label, value)

    def requests(self) -> list[tuple[str, str]]:
        found = [*self.api.server.requests]
        self.api.server.requests.clear()
        return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Api() as api:
        write_kubeconfig(tmp_path / "kubeconfig", api.port)
        site = Site(api, tmp_path)
        site.file(BY_LABEL, BY_NAME)
        site.label("kind", "l40s")
        yield site


def test_the_node_is_read_once_and_its_labels_that_decide_are_the_setting(site: Site) -> None:
    site.label("zone", "a")
    resolved = site.resolve()
    assert (resolved.config.log_level, resolved.config.holders) == ("debug", "passive")
    assert resolved.config.node_labels == ("kind=l40s",), "not zone: no entry for this name has it"
    assert str(resolved.provenance["node_labels"]) == f"node {NODE}"
    assert site.requests() == [("GET", f"/api/v1/nodes/{NODE}")]


@pytest.mark.parametrize(
    ("entries", "flags"),
    [
        ((BY_NAME,), {}),
        (({"match": {"names": [NODE]}, "settings": {"dra": "on"}},), {}),
        ((BY_LABEL,), {"node_labels": ("kind=t4",)}),
    ],
    ids=["labels of other names", "names alone", "labels that are set"],
)
def test_where_nothing_depends_on_the_nodes_labels_no_request_is_made(
    site: Site, entries: tuple[dict[str, Any], ...], flags: dict[str, object]
) -> None:
    site.file(*entries)
    assert site.resolve(**flags).config.log_level == "info"
    assert site.requests() == []
    assert not site.kept.exists()


@pytest.mark.parametrize("fault", [ApiFault.OVERLOADED, ApiFault.BROKEN, ApiFault.UNAVAILABLE, None])
def test_while_the_server_is_away_a_daemon_starts_with_the_labels_that_were_read_last(
    site: Site, fault: ApiFault | None
) -> None:
    site.resolve()
    site.label("kind", "t4")
    if fault is not None:
        site.api.do(site.api.server.order, fault)
    else:
        write_kubeconfig(site.directory / "kubeconfig", 1)  # where nobody listens
    resolved = site.resolve()
    assert resolved.config.log_level == "debug"
    assert str(resolved.provenance["node_labels"]) == f"file {site.kept}"
    write_kubeconfig(site.directory / "kubeconfig", site.api.port)
    assert site.resolve().config.node_labels == ("kind=t4",), "asked again at each start"


def test_without_the_right_the_start_fails_and_names_each_remedy(site: Site) -> None:
    site.resolve()  # labels of earlier rights are none of now
    site.api.do(site.api.server.order, ApiFault.FORBIDDEN)
    with pytest.raises(ConfigError) as refused:
        site.resolve()
    said = str(refused.value)
    for part in ("403 Forbidden", "could not read the node", "component fleet", "node_labels", "by names"):
        assert part in said


def test_without_an_api_server_the_start_fails_as_without_the_right(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="cannot be read: the API server's address is not known"):
        site.resolve(kubeconfig=None)


@pytest.mark.parametrize("content", ["", "[]", '{"node": "another", "labels": {"kind": "l40s"}}'])
def test_a_file_that_is_damaged_or_of_another_node_is_none(site: Site, content: str) -> None:
    site.resolve()
    site.kept.write_text(content)
    site.api.do(site.api.server.order, ApiFault.BROKEN)
    with pytest.raises(ConfigError, match="500 InternalError"):
        site.resolve()


def test_a_state_directory_that_cannot_be_written_does_not_end_the_start(site: Site) -> None:
    (site.directory / "state").write_text("")
    assert site.resolve().config.log_level == "debug"


def test_a_command_has_the_labels_of_the_daemon_without_a_request(site: Site) -> None:
    site.resolve()
    site.label("kind", "t4")
    site.requests()
    assert site.resolve(node_labels.read_kept).config.node_labels == ("kind=l40s",)
    assert site.requests() == []


def test_a_command_on_a_node_without_a_daemon_asks_and_keeps_nothing(site: Site) -> None:
    words = [f"--{key.replace('_', '-')}={value}" for key, value in site.flags.items()]
    shown = CliRunner().invoke(cli, ["config", "show", "-o", "json", *words])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["node_labels"] == {"value": ["kind=l40s"], "from": f"node {NODE}"}
    assert not site.kept.exists()


def test_the_labels_of_a_node_that_is_not_known_cannot_be_read(site: Site) -> None:
    with pytest.raises(ConfigError, match="404 NotFound"):
        node_labels.read(Config(node_name="elsewhere", kubeconfig=site.directory / "kubeconfig"))
