"""Configuration: which source wins, what each value may be, and that every refusal names key, value and
source."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuactors.config import (
    DEFAULT_SELECTORS,
    KEYS,
    Config,
    ConfigError,
    EverywhereHttp,
    TcpHttp,
    UnixHttp,
    as_dict,
    load,
    resolve,
    schema,
)
from gpuactors.config.sources import CONFIG_FILE_MAX_BYTES
from gpuactors.core.values.domain import DRIVER
from gpuactors.core.values.selector import Selector
from gpuactors.limits import SOCKET_PATH_MAX_BYTES

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a configuration file of the given name and content."""

    def write_file(name: str, content: str) -> Path:
        path = tmp_path / name
        path.write_text(content)
        return path

    return write_file


# Per key: the value in a file (as TOML and YAML), as text in the environment, and as the flag that wins over
# both.
CLIQUE = "c0ffee00-0000-4000-8000-000000000001.7"

SOURCES: list[tuple[str, str, str, str, object, object]] = [
    ("host_root", '"/file"', "/file", "/env", "/flag", Path("/flag")),
    ("kubelet_dir", '"/file"', "/file", "/env", Path("/flag"), Path("/flag")),
    ("device_plugin_dir", '"/file"', "/file", "/env", Path("/flag"), Path("/flag")),
    ("state_dir", '"/file"', "/file", "/env", "/flag", Path("/flag")),
    ("pci_ids", '"/file"', "/file", "/env", "/flag", Path("/flag")),
    (
        "resource_name",
        '["0x10DE:2330 = a.example/h100"]',
        "[10de:2330=a.example/h100]",
        "10de:2330=b.example/x;10de:2335=b.example/x",
        ("10de:2330=nvidia.com/H100",),
        ("10de:2330=nvidia.com/H100",),
    ),
    (
        "resource",
        '["a.example/big = vendor=0x10DE,device=2330"]',
        "[{name: a.example/big, select: ['vendor=10de,device=2330']}]",
        "b.example/x=class=0302;b.example/x=address=23:00.0",
        ("c.example/y=mdev=nvidia-593",),
        ("c.example/y=mdev=nvidia-593",),
    ),
    (
        "vgpu_type",
        '["1147=NVIDIA L40S-1Q"]',
        "[1147=NVIDIA L40S-1Q]",
        "1147=NVIDIA L40S-2Q;0000:3b:00.0/1147=NVIDIA L40S-4Q",
        ("1148=NVIDIA L40S-2Q",),
        ("1148=NVIDIA L40S-2Q",),
    ),
    ("uevents", '"kernel"', "kernel", "unix:/env", "off", "off"),
    ("resync_interval_s", "1.5", "1.5", "2", 3, 3.0),
    ("select", '["class=01"]', "[class=01]", "class=02;class=12", ("class=03",), ("class=03",)),
    ("pre_start_gate", '"on"', "on", "true", "no", "off"),
    ("preset", '"kata"', "kata", "kata", "kubevirt", "kubevirt"),
    ("allocate_as", '"cdi"', "cdi", "nodes", "cdi", "cdi"),
    ("wait_in", '"allocate"', "allocate", "pre-start", "allocate", "allocate"),
    ("holders", '"proc"', "proc", "open", "passive", "passive"),
    ("device_plugin", '"off"', "off", "on", "off", "off"),
    ("dra", '"on"', "on", "off", "on", "on"),
    ("driver_name", '"a.example"', "a.example", "b.example", "c.example", "c.example"),
    ("kubeconfig", '"/file"', "/file", "/variable", "/flag", Path("/flag")),
    ("cdi_dir", '"/file"', "/file", "/variable", "/flag", Path("/flag")),
    ("prebound", '["all"]', "[all]", "0000:23:00.0;all", ("all",), ("all",)),
    ("driver_root", '"/file"', "/file", "/variable", "/flag", Path("/flag")),
    ("load_modules", '"on"', "on", "off", "on", "on"),
    ("nvswitch", '"allow"', "allow", "refuse", "allow", "allow"),
    ("sets", '"require"', "require", "prefer", "require", "require"),
    ("sets_file", '"/file"', "/file", "/variable", "/flag", Path("/flag")),
    ("partition_command", '"/file"', "/file", "/variable", "/flag", Path("/flag")),
    ("partition_activation", '"off"', "off", "off", "off", "off"),
    ("compute_domains", '"on"', "on", "host-managed", "off", "off"),
    ("domains_driver", '"a.example"', "a.example", "b.example", "c.example", "c.example"),
    ("domains_namespace", '"file"', "file", "variable", "flag", "flag"),
    ("imex_channels", "2", "2", "3", 4, 4),
    ("imex_ctl", '"/file"', "/file", "/variable", "/flag", Path("/flag")),
    ("imex_management", '"none"', "none", "a.example/b=c", "auto", "auto"),
    ("clique", '"none"', "none", CLIQUE, "none", "none"),
    ("imex_clique", '"/file"', "/file", "/variable", "/flag", Path("/flag")),
    ("http_address", '":9400"', '":9400"', "unix:/env", "off", "off"),
    ("events", '"on"', "on", "off", "on", "on"),
    ("nfd_file", '"/file"', "/file", "/variable", "/flag", Path("/flag")),
    ("journal", "true", "true", "true", "off", "off"),
    ("node_name", '"of-file"', "of-file", "of-env", "of-flag", "of-flag"),
    ("node_labels", '["pool=hgx"]', "[pool=hgx]", "pool=b; zone=c", ("pool=d",), ("pool=d",)),
    ("reload", "true", "true", "true", "off", "off"),
    ("log_format", '"console"', "console", "console", "json", "json"),
    ("log_level", '"warning"', "warning", "error", "debug", "debug"),
]


def test_the_table_of_sources_has_every_key() -> None:
    assert tuple(row[0] for row in SOURCES) == KEYS


@pytest.mark.parametrize(("key", "toml", "yaml", "variable", "flag", "expected"), SOURCES)
def test_flag_then_environment_then_file_then_default(
    write: Write, key: str, toml: str, yaml: str, variable: str, flag: object, expected: object
) -> None:
    toml_file = write("c.toml", f"{key} = {toml}\n")
    yaml_file = write("c.yaml", f"{key}: {yaml}\n")
    name = f"GPUACTORS_{key.upper()}"
    option = "--" + key.replace("_", "-")

    by_default = resolve({}, {})
    assert str(by_default.provenance[key]) == "default"
    assert getattr(by_default.config, key) == getattr(Config(), key)

    by_toml = resolve({"config": toml_file}, {})
    by_yaml = resolve({"config": str(yaml_file)}, {})
    assert getattr(by_toml.config, key) == getattr(by_yaml.config, key)
    assert str(by_toml.provenance[key]) == f"file {toml_file}"

    by_variable = resolve({"config": toml_file}, {name: variable})
    assert str(by_variable.provenance[key]) == f"environment {name}"

    by_flag = resolve({"config": toml_file, key: flag}, {name: variable})
    assert str(by_flag.provenance[key]) == f"flag {option}"
    assert getattr(by_flag.config, key) == expected

    for other in set(KEYS) - {key}:
        assert by_flag.provenance[other].kind == "default"
        assert getattr(by_flag.config, other) == getattr(Config(), other)


def test_values_from_the_environment_are_typed() -> None:
    config = load(
        {},
        {
            "GPUACTORS_RESYNC_INTERVAL_S": "1e3",
            "GPUACTORS_PRE_START_GATE": "False",
            "GPUACTORS_SELECT": "vendor=10DE,class=03xxxx; address=23:00.0 ;",
            "GPUACTORS_PCI_IDS": "null",
            "PATH": "/bin",
        },
    )
    assert config.resync_interval_s == 1000.0
    assert config.pre_start_gate == "off"
    assert config.selectors == (
        Selector(vendor="10de", class_prefix="03"),
        Selector(address="0000:23:00.0"),
    )
    assert config.pci_ids == Path("null")  # a name like any other


@pytest.mark.parametrize("written", ["on", "true", "yes", "ON", "Yes", True])
@pytest.mark.parametrize("key", ["journal", "dra", "compute_domains"])
def test_on_is_written_in_six_ways_everywhere(write: Write, key: str, written: str | bool) -> None:
    in_a_file = json.dumps(written)
    for config in (
        load({key: written}, {}),
        load({}, {f"GPUACTORS_{key.upper()}": str(written)}),
        load({"config": write("c.yaml", f"{key}: {in_a_file}")}, {}),
        load({"config": write("bare.yaml", f"{key}: {written}")}, {}),
        load({"config": write("c.toml", f"{key} = {in_a_file}")}, {}),
    ):
        assert getattr(config, key) == "on"


@pytest.mark.parametrize("written", ["off", "false", "no", "OFF", "False", False])
@pytest.mark.parametrize("key", ["journal", "dra", "uevents", "http_address"])
def test_off_is_written_in_six_ways_everywhere(write: Write, key: str, written: str | bool) -> None:
    for config in (
        load({key: written}, {}),
        load({}, {f"GPUACTORS_{key.upper()}": str(written)}),
        load({"config": write("c.yaml", f"{key}: {written}")}, {}),
        load({"config": write("c.toml", f"{key} = {json.dumps(written)}")}, {}),
    ):
        assert getattr(config, key) == "off"


def test_every_way_to_write_a_switch_is_in_the_schema() -> None:
    properties = schema()["properties"]
    ways = {"on", "off", "true", "false", "yes", "no", True, False}
    assert set(properties["journal"]["enum"]) == set(properties["dra"]["enum"]) == ways
    assert set(properties["compute_domains"]["enum"]) == {*ways, "host-managed"}
    assert properties["uevents"]["anyOf"][1] == {"enum": ["false", "no", False]}


def test_an_address_needs_no_pci_domain() -> None:
    config = load({"prebound": ("23:00.0", "all"), "select": ("!address=23:00.1",)}, {})
    assert config.prebound == ("0000:23:00.0", "all")
    assert config.select[-1] == "!address=0000:23:00.1"
    assert load({"prebound": ("10000:E1:00.0",)}, {}).prebound == ("10000:e1:00.0",)


def test_a_flag_that_was_not_given_leaves_room_for_the_others() -> None:
    flags = dict.fromkeys(KEYS) | {"select": (), "config": None}
    assert load(flags, {"GPUACTORS_SELECT": "class=12"}).select == ("class=12",)
    assert load(flags, {}) == Config()


def test_the_file_may_be_named_by_the_environment_and_the_flag_wins(write: Write) -> None:
    first, second = write("a.yml", "log_level: debug"), write("b.toml", 'log_level = "error"')
    assert load({}, {"GPUACTORS_CONFIG": str(first)}).log_level == "debug"
    assert load({"config": second}, {"GPUACTORS_CONFIG": str(first)}).log_level == "error"


def test_selectors_are_kept_in_their_canonical_spelling() -> None:
    assert load({"select": ("class=0X0302xx,vendor=0x10DE",)}, {}).select == ("vendor=10de,class=0302",)
    assert tuple(str(selector) for selector in Config().selectors) == DEFAULT_SELECTORS


def test_a_file_may_have_one_text_instead_of_a_list_of_selectors(write: Write) -> None:
    yaml = write("c.yaml", 'select: "vendor=10de,class=0302"')
    assert load({"config": yaml}, {}).select == ("vendor=10de,class=0302",)
    toml = write("c.toml", 'select = "class=03; !vendor=1002"')
    assert load({"config": toml}, {}).select == ("class=03", "!vendor=1002")


def test_selectors_that_only_leave_out_leave_out_of_the_default() -> None:
    config = load({"select": ("!address=23:00.0",)}, {})
    assert config.select == (*DEFAULT_SELECTORS, "!address=0000:23:00.0")
    assert load({"select": ("!address=23:00.0", "class=03")}, {}).select == (
        "!address=0000:23:00.0",
        "class=03",
    )


def test_the_nodes_name_comes_from_where_kubernetes_gives_it_unless_it_is_set(write: Write) -> None:
    def named(flags: dict[str, object], environ: dict[str, str]) -> tuple[str, str]:
        resolved = resolve(flags, environ)
        return resolved.config.node_name, str(resolved.provenance["node_name"])

    file: dict[str, object] = {"config": write("c.toml", 'node_name = "of-file"')}
    kubernetes = {"NODE_NAME": "gpu-17"}
    assert named({}, {}) == ("", "default")
    assert named({}, {"NODE_NAME": ""}) == ("", "default")
    assert named({}, kubernetes) == ("gpu-17", "environment NODE_NAME")
    assert named(file, kubernetes)[0] == "of-file"
    assert named(file, {**kubernetes, "GPUACTORS_NODE_NAME": "own"}) == (
        "own",
        "environment GPUACTORS_NODE_NAME",
    )
    assert named({"node_name": "flag"}, kubernetes) == ("flag", "flag --node-name")
    assert named({"node_name": " GPU-Node01"}, {})[0] == "gpu-node01", "as kubelet's --hostname-override"
    with pytest.raises(ConfigError, match=r"node_name is 'a b' \(environment NODE_NAME\)"):
        resolve({}, {"NODE_NAME": "a b"})


def test_sources_of_uevents() -> None:
    longest = "/" + "x" * (SOCKET_PATH_MAX_BYTES - 1)
    for text in ("kernel", "off", "unix:/run/a:b", f"unix:{longest}"):
        assert load({"uevents": text}, {}).uevents == text


def test_http_addresses_are_parsed() -> None:
    assert Config().http == TcpHttp("127.0.0.1", 9400)
    assert Config(http_address="off").http is None
    assert Config(http_address=":9400").http == EverywhereHttp(9400)
    assert Config(http_address="[::1]:1").http == TcpHttp("::1", 1)
    assert Config(http_address="node.example:65535").http == TcpHttp("node.example", 65535)
    assert Config(http_address="unix:/run/a:1").http == UnixHttp(Path("/run/a:1"))
    texts = ("127.0.0.1:9400", ":9400", "[::1]:1", "unix:/run/a:1")
    assert [str(Config(http_address=text).http) for text in texts] == list(texts)


def test_yaml_reads_a_bare_off_as_false_and_it_is_still_off(write: Write) -> None:
    assert load({"config": write("c.yaml", "uevents: off")}, {}).uevents == "off"


def test_an_empty_file_is_a_file_without_settings(write: Write) -> None:
    assert load({"config": write("c.yaml", "# nothing\n")}, {}) == Config()
    assert load({"config": write("c.toml", "")}, {}) == Config()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("host_root", ""),
        ("pci_ids", ""),
        ("uevents", "udev"),
        ("uevents", "kernel:"),
        ("uevents", "unix:"),
        ("uevents", "unix:/" + "x" * SOCKET_PATH_MAX_BYTES),
        ("http_address", "9400"),
        ("http_address", "127.0.0.1"),
        ("http_address", ":0"),
        ("http_address", ":65536"),
        ("http_address", "::1:9400"),
        ("http_address", "http://127.0.0.1:9400"),
        ("http_address", "unix:"),
        ("http_address", ""),
        ("resync_interval_s", "0"),
        ("resync_interval_s", "-1"),
        ("resync_interval_s", "inf"),
        ("resync_interval_s", "nan"),
        ("resync_interval_s", "86401"),
        ("resync_interval_s", "1e300"),
        ("node_name", "a b"),
        ("node_name", "-"),
        ("node_name", "a..b"),
        ("node_name", "a" * 254),
        ("resync_interval_s", "5m"),
        ("resync_interval_s", ""),
        ("select", "class=3"),
        ("select", "; ;"),
        ("select", ""),
        ("pre_start_gate", "1"),
        ("pre_start_gate", ""),
        ("prebound", "23:00"),
        ("holders", "lsof"),
        ("holders", ""),
        ("log_format", "JSON"),
        ("log_level", "trace"),
    ],
)
def test_a_bad_value_is_refused_with_key_value_and_source(key: str, text: str) -> None:
    name = f"GPUACTORS_{key.upper()}"
    with pytest.raises(ConfigError, match=f"^{key} is .*\\(environment {name}\\), but must be ") as caught:
        load({}, {name: text})
    assert text[:20] in str(caught.value) or key == "select"
    if key != "select":  # one variable holds several selectors, one flag holds one
        option = "--" + key.replace("_", "-")
        with pytest.raises(ConfigError, match=f"^{key} is .*\\(flag {option}\\), but must be "):
            load({key: text}, {})


@pytest.mark.parametrize(
    "line",
    [
        "host_root: 3",
        "host_root: [/a]",
        'host_root: "/a\\0b"',
        'uevents: "unix:/a\\0b"',
        "pre_start_gate: 1",
        "pre_start_gate: [true]",
        "resync_interval_s: '300'",
        "resync_interval_s: true",
        "resync_interval_s: .inf",
        "holders: [proc]",
        "holders: true",
        "select: []",
        "select: 3",
        "select: [[class=03]]",
        "log_level:",
    ],
)
def test_a_file_has_types_and_they_are_held_to(write: Write, line: str) -> None:
    key = line.partition(":")[0]
    path = write("c.yaml", line)
    with pytest.raises(ConfigError) as caught:
        load({"config": path}, {})
    assert str(caught.value).startswith(f"{key} is ")
    assert f"(file {path}), but must be " in str(caught.value)


def test_a_model_has_one_name() -> None:
    twice = ("10de:2330=a.example/x", "10DE:2330=a.example/x")
    assert load({"resource_name": twice}, {}).resource_name == ("10de:2330=a.example/x",)
    with pytest.raises(
        ConfigError, match=r"has two names, a\.example/x and b\.example/x: leave one of them out"
    ):
        load({"resource_name": ("10de:2330=a.example/x", "10de:2330=b.example/x")}, {})


def test_a_bad_selector_says_what_to_write() -> None:
    with pytest.raises(
        ConfigError, match=r"flag --select.*unknown key 'driver'.*the keys are vendor, device"
    ):
        load({"select": ("vendor=10de", "driver=vfio-pci")}, {})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("GPUACTORS_HOSTROOT", "did you mean GPUACTORS_HOST_ROOT?"),
        ("GPUACTORS_LOGLEVEL", "GPUACTORS_LOG_LEVEL"),
        ("GPUACTORS_VERBOSITY", "there is GPUACTORS_HOST_ROOT, "),
        ("GPUACTORS_SERVICE", "did you mean|there is"),
        ("GPUACTORS_PORT_80", "did you mean|there is"),
        ("GPUACTORS_SERVICE_HOSTS", "did you mean|there is"),
        ("GPUACTORS_host_root", "did you mean|there is"),
    ],
)
def test_an_unknown_variable_is_refused_with_what_comes_close(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown variable {name} in the environment; .*({remedy})"):
        load({}, {name: "x"})


def test_what_kubernetes_says_about_a_service_of_our_name_is_passed_over() -> None:
    # kubelet pkg/kubelet/envvars/envvars.go for Services `gpuactors` and `gpuactors-metrics` of one named
    # port.
    environ = {
        "GPUACTORS_SERVICE_HOST": "192.0.2.11",
        "GPUACTORS_SERVICE_PORT": "9100",
        "GPUACTORS_SERVICE_PORT_HTTP_METRICS": "9100",
        "GPUACTORS_PORT": "tcp://192.0.2.11:9100",
        "GPUACTORS_PORT_9100_TCP": "tcp://192.0.2.11:9100",
        "GPUACTORS_PORT_9100_TCP_PROTO": "tcp",
        "GPUACTORS_PORT_9100_TCP_PORT": "9100",
        "GPUACTORS_PORT_9100_TCP_ADDR": "192.0.2.11",
        "GPUACTORS_METRICS_SERVICE_HOST": "192.0.2.12",
        "GPUACTORS_METRICS_SERVICE_PORT": "9100",
        "GPUACTORS_METRICS_PORT": "udp://192.0.2.12:9100",
        "GPUACTORS_METRICS_PORT_9100_UDP_ADDR": "192.0.2.12",
    }
    assert load({}, environ) == Config()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("c.yaml", "host-root: /x", r"unknown key 'host-root' in file .*c\.yaml; did you mean host_root\?"),
        ("c.toml", "hostroot = '/x'", r"unknown key 'hostroot' in file .*c\.toml; did you mean host_root\?"),
        ("c.toml", "[log]\nlevel = 'debug'", r"unknown key 'log' in file .*; "),
        ("c.yaml", "3: 4", r"unknown key 3 in file .*; there is host_root, "),
        (
            "c.yaml",
            "log_level: info\nlog_level: debug",
            r"c\.yaml .* line 2, column 1: log_level is there twice$",
        ),
        (
            "c.yaml",
            "? [a]\n: b",
            r"c\.yaml .* cannot be read: line 1, column 3: a list or a mapping is no key$",
        ),
        ("c.yaml", "a: [1\nb: 2", r"c\.yaml .* read: line 2, column 2: expected ',' or '\]', but got ':'$"),
        (
            "c.yaml",
            "a: b\n'\x01': 1",
            r"c\.yaml .* read: line 2, column 2: a YAML text has no character #x0001$",
        ),
        ("c.yaml", "[" * 100_000, r"c\.yaml .* cannot be read"),
        ("c.yaml", "\n!!python/object/apply:os.system [x]", r"c\.yaml .* cannot be read: line 2, column 1: "),
        ("c.yaml", "- host_root", r"c\.yaml .* must hold keys with values"),
        ("c.toml", "\na = ]", r"c\.toml .* cannot be read: line 2, column 5: Invalid value$"),
        ("c.toml", "\na = [1", r"c\.toml .* cannot be read: line 2, the last one: Unclosed array$"),
        ("c.json", "{}", r"c\.json .* must end in \.toml, \.yaml or \.yml"),
        ("c.yaml", "#" * (CONFIG_FILE_MAX_BYTES + 1), r"c\.yaml .* has more than 1048576 bytes"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(write: Write, name: str, content: str, words: str) -> None:
    path = write(name, content)
    with pytest.raises(ConfigError, match=words):
        load({"config": path}, {})


def test_a_file_that_is_not_text_or_not_there_is_refused_with_its_name(tmp_path: Path) -> None:
    latin = tmp_path / "c.toml"
    latin.write_bytes(b"# a\nhost_root = '/\xe9'")
    with pytest.raises(ConfigError, match=r"c\.toml \(--config\) is not UTF-8: line 2 has the byte 0xe9$"):
        load({"config": latin}, {})
    with pytest.raises(ConfigError, match=r"none\.toml \(GPUACTORS_CONFIG\): No such file"):
        load({}, {"GPUACTORS_CONFIG": str(tmp_path / "none.toml")})
    with pytest.raises(ConfigError, match=r"\(--config\): it is a directory, and a regular file"):
        load({"config": tmp_path}, {})
    with pytest.raises(ConfigError, match="it is a device, and a regular file"):
        load({"config": "/dev/zero"}, {})


@pytest.mark.timeout(20)
def test_a_fifo_as_the_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.yaml")
    with pytest.raises(
        ConfigError, match=r"cannot read the .*c\.yaml \(--config\): it is a FIFO, and a regular"
    ):
        resolve({"config": str(tmp_path / "c.yaml")}, {})


@pytest.mark.parametrize("depth", [60, 300, 5000])
@pytest.mark.parametrize("key", ["select", "log_level", "unknown"])
def test_a_deep_value_in_yaml_is_one_sentence(write: Write, key: str, depth: int) -> None:
    path = write("c.yaml", f"{key}: {'[' * depth}{']' * depth}")
    with pytest.raises(ConfigError) as caught:
        resolve({"config": path}, {})
    assert len(str(caught.value)) < 1000


def test_a_value_in_yaml_that_has_itself_in_it_is_one_sentence(write: Write) -> None:
    for value in ("&a [*a]", "&a {b: *a}"):
        with pytest.raises(ConfigError, match=r"select is .*, but must be one or more selectors"):
            resolve({"config": write("c.yaml", f"select: {value}")}, {})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "resync_interval_s: 0x" + "f" * 6000,
            "resync_interval_s is a number of 24,000 bits .*, but must be",
        ),
        ("select: [0x" + "f" * 6000 + "]", "select is a number of 24,000 bits .*, but must be"),
        ("journal: !!bool x", "line 1, column 10: the value is no bool"),
        ("node_name: !!timestamp 1", "line 1, column 12: the value is no timestamp"),
        ("node_name: 2026-13-01", "line 1, column 12: the value is no timestamp"),
        ("prebound: {}", r"prebound is a mapping \("),
        ("prebound: [[a], b, 7]", r"prebound is a list, 'b', 7 \("),
        ("log_level: []", r"log_level is an empty list \("),
        ("log_level:", r"log_level is empty \("),
        ("log_level: true", r"log_level is true \("),
        ("a: [", "^[^\\n]*$"),
    ],
)
def test_a_value_of_yaml_that_python_trips_over_is_one_sentence(write: Write, line: str, said: str) -> None:
    """The first four were tracebacks."""
    with pytest.raises(ConfigError, match=said):
        resolve({"config": write("c.yaml", line)}, {})


@pytest.mark.parametrize("key", ["select", "resource_name", "prebound", "http_address", "driver_name"])
@pytest.mark.parametrize("text", ["x", "=", ",", "!", "vendor=", ":"])
def test_a_value_of_100_kb_is_not_shown_whole(key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({key: text * 100_000}, {})
    assert len(str(caught.value)) < 2000


def test_aliases_in_yaml_cannot_make_an_endless_message(write: Write) -> None:
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    path = write("c.yaml", f"a0: &a0 [x]\n{levels}select: *a29\n".replace("a0: &a0", "log_level: &a0"))
    with pytest.raises(ConfigError) as caught:
        load({"config": path}, {})
    assert len(str(caught.value)) < 2000


def test_a_flag_without_a_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="no setting for the flag --host-rot"):
        load({"host_rot": "/"}, {})


def test_what_is_shown_can_be_loaded_again(write: Write) -> None:
    config = load(
        {"select": ("vendor=10de,device=2330",), "uevents": "off", "pci_ids": "/p", "resync_interval_s": 7},
        {},
    )
    shown = json.dumps(as_dict(config))  # which is YAML too
    assert load({"config": write("c.yaml", shown)}, {}) == config


def test_the_schema_describes_every_key_with_its_default() -> None:
    described = schema()
    assert tuple(described["properties"]) == KEYS
    assert described["additionalProperties"] is False
    assert described["properties"]["select"]["default"] == list(DEFAULT_SELECTORS)
    assert {key: value["default"] for key, value in described["properties"].items()} == as_dict(Config())


def test_the_driver_of_domains_is_by_default_the_one_that_the_core_names() -> None:
    """The settings write it out: a node without compute domains does not import the core's part for them."""
    assert Config().domains_driver == DRIVER


# --- presets ----------------------------------------------------------------------------------------------


def test_a_preset_is_weaker_than_every_other_source_and_is_named() -> None:
    kata = resolve({"preset": "kata"}, {})
    assert (kata.config.allocate_as, kata.config.wait_in) == ("cdi", "allocate")
    assert str(kata.provenance["allocate_as"]) == "preset kata"
    mixed = resolve({"preset": "kata"}, {"GPUACTORS_ALLOCATE_AS": "nodes"}).config
    assert (mixed.allocate_as, mixed.wait_in) == ("nodes", "allocate")
    assert load({"preset": "kubevirt"}, {}) == Config()


@pytest.mark.parametrize("how", [{"preset": "kata"}, {"allocate_as": "cdi"}])
def test_a_resource_that_cdi_cannot_name_is_refused_where_cdi_is_to_name_it(how: dict[str, object]) -> None:
    names = ("10de:2330=nvidia.com/H100", "10de:29ff=nvidia.com/3090")
    with pytest.raises(ConfigError, match=r"10de:29ff=nvidia\.com/3090, which with allocate_as cdi"):
        load({**how, "resource_name": names}, {})
    assert load({**how, "resource_name": names[:1]}, {}).allocate_as == "cdi"
    assert load({"resource_name": names}, {}).allocate_as == "nodes"


def test_an_activation_without_a_command_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        load({"partition_activation": "on"}, {})
    assert "partition_activation: on needs partition_command" in str(error.value)
    config = load({"partition_activation": "on", "partition_command": "/usr/bin/x"}, {})
    assert config.partition_activation == "on"
