"""One configuration file for a fleet: its entries for some nodes, and the check of it as a whole."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpuactors.cli import config_check
from gpuactors.cli.commands import cli
from gpuactors.cli.ending import EX_CONFIG
from gpuactors.config import DEFAULT_SELECTORS, KEYS, ConfigError, as_dict, file_schema, load, resolve
from gpuactors.config.declaration import OF_THE_NODE
from gpuactors.config.fleet import FleetNode, entries_of
from gpuactors.config.sources import read_file, resolved_of
from tests.support.markdown import chapter

ROOT = Path(__file__).parents[1]

FLEET = """
select: ["vendor=10de,class=03"]
log_level: warning
nodes:
- match: {names: ["gpu-a*", "gpu-b?"]}
  settings: {log_level: debug, holders: proc}
- match: {labels: {pool: hgx, nvidia.com/gpu.present: "true"}}
  settings:
    holders: open
    resource:
    - name: example.com/big
      select: ["vendor=10de,device=2330", "vendor=10de,device=2331"]
- match: {names: [gpu-a1], labels: {pool: l40s}}
  settings: {select: ["!address=0000:23:00.0"]}
"""
HGX = ("pool=hgx", "nvidia.com/gpu.present=true")

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a configuration file."""

    def write_file(content: str, name: str = "fleet.yaml") -> Path:
        path = tmp_path / name
        path.write_text(content)
        return path

    return write_file


def of_node(path: Path, node: str, *labels: str, **flags: object) -> Any:
    return load({"config": path, "node_name": node, "node_labels": labels or ("none=",), **flags}, {})


# --- which entries count ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "labels", "level", "holders"),
    [
        ("cpu-1", (), "warning", "passive"),
        ("gpu-a17", (), "debug", "proc"),
        ("GPU-A17", (), "debug", "proc"),
        ("gpu-b1", (), "debug", "proc"),
        ("gpu-b17", (), "warning", "passive"),
        ("cpu-1", HGX, "warning", "open"),
        ("cpu-1", (*HGX, "zone=a"), "warning", "open"),
        ("cpu-1", HGX[:1], "warning", "passive"),
        ("cpu-1", ("pool=l40s", HGX[1]), "warning", "passive"),
        ("gpu-a17", HGX, "debug", "open"),
    ],
)
def test_a_node_has_the_settings_of_the_entries_that_match_it_and_the_last_one_wins(
    write: Write, node: str, labels: tuple[str, ...], level: str, holders: str
) -> None:
    config = of_node(write(FLEET), node, *labels)
    assert (config.log_level, config.holders) == (level, holders)


def test_the_same_in_toml(write: Write) -> None:
    toml = '[[nodes]]\nmatch = {names = ["a*"]}\n[nodes.settings]\ndra = true\n'
    path = write(toml, "fleet.toml")
    assert (of_node(path, "a1").dra, of_node(path, "b1").dra) == ("on", "off")


def test_an_entry_with_names_and_labels_needs_both(write: Write) -> None:
    path, excluded = write(FLEET), "!address=0000:23:00.0"
    assert excluded in of_node(path, "gpu-a1", "pool=l40s").select
    assert excluded not in of_node(path, "gpu-a2", "pool=l40s").select
    assert excluded not in of_node(path, "gpu-a1", "pool=hgx").select


def test_flags_and_variables_win_over_entries_and_entries_over_the_file(write: Write) -> None:
    flags: dict[str, object] = {"config": write(FLEET), "node_labels": HGX}
    resolved = resolve({**flags, "node_name": "gpu-a1"}, {"GPUACTORS_HOLDERS": "passive"})
    assert resolved.config.holders == "passive"
    entry = "entry 1 (names gpu-a*, gpu-b?)"
    assert str(resolved.provenance["log_level"]) == f"file {flags['config']}, {entry}"
    assert str(resolved.provenance["select"]) == f"file {flags['config']}"
    assert resolve({**flags, "node_name": "gpu-a1", "log_level": "error"}, {}).config.log_level == "error"


def test_the_nodes_name_is_that_of_kubernetes(write: Write) -> None:
    path = write("nodes: [{match: {names: gpu-17}, settings: {dra: on}}]")
    assert resolve({"config": path}, {"NODE_NAME": "gpu-17"}).config.dra == "on"
    assert resolve({"config": path}, {"NODE_NAME": "gpu-1"}).config.dra == "off"


def test_without_a_name_of_its_own_a_node_is_called_as_its_host(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Host:
        nodename = " GPU-17"

    monkeypatch.setattr("os.uname", Host)
    path = write("nodes: [{match: {names: [gpu-17]}, settings: {dra: on}}]")
    assert load({"config": path}, {}).dra == "on"


def test_labels_that_are_not_known_are_no_labels_that_are_not_there(write: Write) -> None:
    path = write(FLEET)
    with pytest.raises(
        ConfigError, match=r"entry 2 \(labels pool=hgx, .*those of the node gpu-x are not known"
    ):
        resolve({"config": path, "node_name": "gpu-x"}, {})
    by_name = write("nodes: [{match: {names: [a], labels: {b: c}}, settings: {dra: on}}]")
    assert load({"config": by_name, "node_name": "x"}, {}).dra == "off", "its name decides"


# --- exclusions of one node -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("", (*DEFAULT_SELECTORS, "!address=0000:23:00.0")),
        ("select: class=12", ("class=12", "!address=0000:23:00.0")),
        ("select: ['!class=12']", (*DEFAULT_SELECTORS, "!class=12", "!address=0000:23:00.0")),
    ],
)
def test_what_one_node_excludes_is_added_to_what_all_select(
    write: Write, select: str, expected: tuple[str, ...]
) -> None:
    entry = "nodes: [{match: {names: [a]}, settings: {select: ['!address=23:00.0']}}]"
    path = write(f"{select}\n{entry}")
    assert of_node(path, "a").select == expected
    assert "!address=0000:23:00.0" not in of_node(path, "b").select


def test_two_entries_exclude_together_and_other_selectors_replace(write: Write) -> None:
    entries = [
        {"match": {"names": ["a*"]}, "settings": {"select": value}}
        for value in (["class=12"], "!device=2330", ["!device=2331"])
    ]
    path = write(json.dumps({"select": ["class=03"], "nodes": entries}))
    assert of_node(path, "a1").select == ("class=12", "!device=2330", "!device=2331")


# --- what is refused, on every node -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("{}", "nodes must be a list of entries"),
        ("[]", "nodes must be a list of entries"),
        ("", "nodes must be a list of entries"),
        ("[x]", "entry 1 of nodes must have match and settings"),
        ("[{settings: {dra: on}}]", "match in entry 1 of nodes must have names and labels"),
        ("[{match: {}, settings: {dra: on}}]", "match in entry 1 of nodes must have names and labels"),
        ("[{match: {name: a}, settings: {dra: on}}]", "has name, but may have names and labels only"),
        ("[{match: {names: [a]}}]", "settings in entry 1 of nodes must have keys with values"),
        ("[{match: {names: [a]}, setting: {dra: on}}]", "has setting, but may have match and settings only"),
        ("[{match: {names: []}, settings: {dra: on}}]", "must be a list of node names"),
        ("[{match: {names: [1]}, settings: {dra: on}}]", "must be a list of node names"),
        ("[{match: {labels: [a]}, settings: {dra: on}}]", "labels in entry 1 of nodes must be labels with"),
        (
            "[{match: {labels: {a: true}}, settings: {dra: on}}]",
            "label a in entry 1 .*write its value in quotes",
        ),
        ("[{match: {labels: {'a b': c}}, settings: {dra: on}}]", "no Node has the label a b=c"),
        (
            "[{match: {names: [a]}, settings: {node_name: b}}]",
            "cannot have node_name: entries are chosen by it",
        ),
        (
            "[{match: {names: [a]}, settings: {hostroot: /}}]",
            r"unknown key 'hostroot' in entry 1 .*host_root\?",
        ),
        ("[{match: {names: [a]}, settings: {nodes: []}}]", "unknown key 'nodes' in entry 1"),
        (
            "[{match: {names: [b]}, settings: {dra: on}}, {match: {names: [a]}, settings: {dra: 1}}]",
            r"dra is 1 \(file .*fleet\.yaml, entry 2 \(names a\)\), but must be on or off",
        ),
        (
            "[{match: {names: [a]}, settings: {resource: [{name: a.b/c}]}}]",
            "a mapping has a name, and a list",
        ),
    ],
)
def test_an_entry_that_is_wrong_is_refused_on_each_node(write: Write, nodes: str, said: str) -> None:
    path = write(f"nodes: {nodes}")
    for node in ("a", "another"):
        with pytest.raises(ConfigError, match=said):
            of_node(path, node)


@pytest.mark.parametrize("key", OF_THE_NODE)
def test_a_file_for_several_nodes_has_neither_a_name_nor_labels_for_all(write: Write, key: str) -> None:
    value = {"node_name": "a", "node_labels": ["a=b"]}[key]
    entry = {"match": {"names": ["a"]}, "settings": {"dra": "on"}}
    with pytest.raises(ConfigError, match=f"{key} cannot be in a file with nodes: all would have the same"):
        load({"config": write(json.dumps({key: value, "nodes": [entry]}))}, {})


def test_names_that_kubevirt_cannot_use_together_are_refused(write: Write) -> None:
    mixed = {"resource": ["a.b/c=mdev=nvidia-593"]}
    path = write(
        json.dumps(
            {"resource_name": ["10de:2330=a.b/c"], "nodes": [{"match": {"names": ["a"]}, "settings": mixed}]}
        )
    )
    assert of_node(path, "b").resource == ()
    with pytest.raises(ConfigError, match=r"a\.b/c would have mediated devices \(mdev=nvidia-593\)"):
        of_node(path, "a")
    refused = checked("--config", str(path))
    assert refused.exit_code == EX_CONFIG, "for all nodes at once"
    assert "entry 1 (names a): a.b/c would have mediated devices" in refused.output


def test_a_selector_has_one_name(write: Write) -> None:
    twice = ("a.b/c=device=2330", "a.b/c=device=0x2330")
    assert load({"resource": twice}, {}).resource == ("a.b/c=device=2330",)
    with pytest.raises(ConfigError, match=r"a\.b/d=device=2330 has the name a\.b/c already"):
        load({"resource": ("a.b/c=device=2330", "a.b/d=device=2330")}, {})


def test_rules_select_beside_selectors() -> None:
    config = load({"resource": ("a.b/c=device=2330",), "select": ("class=12", "!device=2331")}, {})
    assert [*map(str, config.selectors)] == ["class=12", "!device=2331", "a.b/c=device=2330"]


def test_aliases_in_yaml_cannot_make_endless_rules(write: Write) -> None:
    one = f"&a {{name: a.b/c, select: [{', '.join(['class=03'] * 5000)}]}}"
    with pytest.raises(ConfigError, match=r"^resource is a mapping, .*\(it has more than 10,000 items\)$"):
        load({"config": write(f"resource: [{one}{', *a' * 5000}]")}, {})


# --- the check --------------------------------------------------------------------------------------------------------


def checked(*words: str, **kwargs: Any) -> Result:
    return CliRunner().invoke(cli, ["config", "check", *words], **kwargs)


def test_the_check_shows_what_a_node_gets_and_from_where(write: Write) -> None:
    path = write(FLEET)
    labels = ",".join(HGX)
    shown = checked("--config", str(path), "--node", "gpu-a1", "--labels", labels)
    assert shown.exit_code == 0, shown.output
    first, _, *lines = shown.stdout.splitlines()
    assert first == (
        "node gpu-a1: entry 1 (names gpu-a*, gpu-b?), entry 2 (labels pool=hgx, nvidia.com/gpu.present=true)"
    )
    assert [line.split()[0] for line in lines] == ["resource", "select", "holders", "node_name", "log_level"]
    assert lines[2].split(maxsplit=2)[1:] == [
        '"open"',
        f"file {path}, entry 2 (labels pool=hgx, nvidia.com/gpu.present=true)",
    ]
    as_json = json.loads(
        checked("--config", str(path), "--node", "gpu-a1", "--labels", labels, "-o", "json").stdout
    )
    assert tuple(as_json) == KEYS
    of_daemon = as_dict(of_node(path, "gpu-a1", *HGX))
    assert {k: v["value"] for k, v in as_json.items()} | {"node_labels": [*HGX]} == of_daemon


def test_the_check_of_a_node_needs_its_labels_as_the_daemon_does(write: Write) -> None:
    refused = checked("--config", str(write(FLEET)), "--node", "gpu-a1")
    assert refused.exit_code == EX_CONFIG
    assert "are not known" in refused.output
    assert checked("--config", str(write(FLEET)), "--node", "gpu-a1", "--labels", "").exit_code == 0


@pytest.mark.parametrize(
    ("content", "first", "second"),
    [
        ("select: [vendor=10de]", "no entries of nodes", "Without reload"),
        (
            "nodes: [{match: {names: [a]}, settings: {log_level: debug}}]",
            "1 entry of nodes",
            "Without reload",
        ),
        ("nodes: [{match: {names: [a]}, settings: {reload: on}}]", "1 entry of nodes", "With reload"),
        (
            "reload: on\n" + FLEET,
            "3 entries of nodes",
            "With reload a change of resource_name, resource, vgpu_type",
        ),
    ],
)
def test_the_check_of_a_valid_file_counts_entries_and_says_what_needs_a_restart(
    write: Write, content: str, first: str, second: str
) -> None:
    path = write(content)
    shown = checked("--config", str(path)).stdout.splitlines()
    assert shown[0] == f"{path} is valid: {first}"
    assert shown[1].startswith(second)


def test_variables_of_this_machine_do_not_count(write: Write) -> None:
    environ = {"GPUACTORS_HOLDERS": "open", "NODE_NAME": "gpu-a1", "GPUACTORS_CONFIG": str(write(FLEET))}
    shown = checked("--node", "cpu-1", "--labels", "", env=environ)
    assert shown.exit_code == 0, shown.output
    assert "holders" not in shown.stdout
    assert shown.stdout.startswith("node cpu-1: no entry of nodes\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name the configuration file by --config"),
        (("--config", "FILE", "--labels", "a=b"), "name it by --node"),
        (("--config", "FILE", "--node", "a", "--labels", "x"), "--labels is 'x': 'x' is not KEY=VALUE"),
        (("--config", "FILE", "--node", "a", "--labels", "a=b,a=c"), "a has two values"),
        (("--config", "FILE", "--nodes", "FILE"), "not what kubectl get nodes -o json prints"),
        (("--config", "FILE", "--nodes", "/nowhere"), "/nowhere cannot be read: No such file"),
    ],
)
def test_wrong_words_are_refused(write: Write, words: tuple[str, ...], said: str) -> None:
    path = str(write(FLEET))
    refused = checked(*(path if word == "FILE" else word for word in words))
    assert refused.exit_code in (2, EX_CONFIG)
    assert said in " ".join(refused.output.split())


def nodes(*named: tuple[str, dict[str, str]]) -> str:
    items = [{"kind": "Node", "metadata": {"name": name, "labels": labels}} for name, labels in named]
    return json.dumps({"kind": "List", "items": items})


def test_the_check_of_a_fleet_counts_the_nodes_of_each_set_of_entries(write: Write) -> None:
    hgx = dict(label.split("=") for label in HGX)
    listed = nodes(("cpu-2", {}), ("gpu-a3", hgx), ("gpu-a2", {}), ("cpu-1", {}), ("gpu-a1", {}))
    shown = checked("--config", str(write(FLEET)), "--nodes", "-", input=listed)
    assert shown.exit_code == 0, shown.output
    assert [line.split(maxsplit=2) for line in shown.stdout.splitlines()[2:5]] == [
        ["ENTRIES", "NODES", "NAMES"],
        ["none", "2", "cpu-1, cpu-2"],
        ["1", "2", "gpu-a1, gpu-a2"],
    ]
    assert "1, 2         1  gpu-a3" in shown.stdout
    assert shown.stdout.endswith("entry 3 (names gpu-a1; labels pool=l40s) matches no node of the list\n")


def test_a_node_whose_settings_cannot_be_used_together_is_named(write: Write) -> None:
    entries = [
        {"match": {"names": ["a*"]}, "settings": {"resource": ["x.y/z=mdev=nvidia-593"]}},
        {"match": {"labels": {"b": "c"}}, "settings": {"resource_name": ["10de:2330=x.y/z"]}},
    ]
    path = write(json.dumps({"nodes": entries}))
    assert checked("--config", str(path)).exit_code == 0
    refused = checked("--config", str(path), "--nodes", "-", input=nodes(("a1", {}), ("a2", {"b": "c"})))
    assert refused.exit_code == EX_CONFIG
    assert "node a2: x.y/z would have mediated devices" in refused.output


def test_5000_nodes_of_12_kinds_read_the_file_once_and_resolve_12_times(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [
        {"match": {"labels": {"kind": f"k{n}"}}, "settings": {"resource": [f"a.b/k{n}=vendor=10de,class=03"]}}
        for n in range(12)
    ]
    file = read_file(str(write(json.dumps({"nodes": entries}))))
    resolutions: list[object] = []

    def counting(given: Any) -> Any:
        resolutions.append(given)
        return resolved_of(given)

    monkeypatch.setattr("gpuactors.cli.config_check.resolved_of", counting)
    fleet = config_check.of_fleet(file, (FleetNode(f"gpu-{n}", {"kind": f"k{n % 12}"}) for n in range(5000)))
    assert len(resolutions) == len(fleet.sorts) == 12
    assert sum(len(sort.names) for sort in fleet.sorts) == 5000
    assert fleet.unused == ()


# --- the page, and the example ----------------------------------------------------------------------------------------

PAGE = ROOT / "docs/operate.md"
CONFIGURATION = ROOT / "docs/reference.md"
EXAMPLE = ROOT / "deploy/examples/fleet/gpuactors.yaml"


def blocks(page: Path, section: str, language: str) -> list[str]:
    text = chapter(page.read_text(), section)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_page_shows_what_the_check_prints(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = blocks(PAGE, "The file of a fleet", "yaml")
    write(file)
    monkeypatch.chdir(tmp_path)
    listed = nodes(("gpu-a1", {}), ("cpu-1", {}), ("gpu-a2", {}), ("gpu-b1", {"example.com/kind": "l40s"}))
    shown = blocks(PAGE, "Check the file", "console")
    assert len(shown) == 3
    for block in shown:
        command, _, output = block.partition("\n")
        words = shlex.split(command.partition("gpuactors ")[2])
        done = CliRunner().invoke(cli, words, input=listed)
        assert (done.exit_code, done.output) == (0, output), command


def test_the_resources_of_the_page_are_those_of_its_flags(write: Write) -> None:
    section = "Resources of your own"
    (file,) = blocks(CONFIGURATION, section, "yaml")
    by_file = load({"config": write(file)}, {})
    text = chapter(CONFIGURATION.read_text(), section)
    (line,) = re.findall(r"As flags: `(.*?)`", text)
    flags = tuple(word for word in shlex.split(line) if word != "--resource")
    assert load({"resource": flags}, {}).resource == by_file.resource[:2]
    assert len(by_file.resource) == 4


def test_the_example_is_valid_and_each_of_its_twelve_entries_matches_a_node() -> None:
    file = read_file(str(EXAMPLE))
    kinds = [FleetNode("gpu-17", entry.labels) for entry in file.entries if entry.labels]
    fleet = config_check.of_fleet(file, (*kinds, FleetNode("login-1", {}), FleetNode("gpu-02", {})))
    assert (len(file.entries), len(fleet.sorts), fleet.unused) == (12, 12, ())
    assert "vendor=10de,device=2941" in str(config_check.of_node(file, kinds[3]).config.resource)
    assert checked("--config", str(EXAMPLE)).exit_code == 0


# --- the schema -------------------------------------------------------------------------------------------------------


def test_the_schema_of_the_file_has_the_settings_and_the_entries() -> None:
    properties = file_schema()["properties"]
    assert tuple(properties) == (*KEYS, "nodes")
    entry = properties["nodes"]["items"]["properties"]
    assert set(entry["settings"]["properties"]) == {*KEYS} - {*OF_THE_NODE}
    assert all("default" not in of_key for of_key in entry["settings"]["properties"].values())
    assert set(entry["match"]["properties"]) == {"names", "labels"}
    assert properties["resource"]["anyOf"][0]["items"]["anyOf"][1]["required"] == ["name", "select"]


def test_an_entry_shows_what_it_matches_in_a_bounded_sentence() -> None:
    many = {"match": {"names": [f"node-{n}" for n in range(1000)]}, "settings": {"dra": "on"}}
    (entry,) = entries_of([many])
    assert str(entry).startswith("entry 1 (names node-0, node-1, ")
    assert len(str(entry)) < 500
