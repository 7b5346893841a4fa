"""Configuration: what an operator may choose, where each value came from, and words for what is wrong with
one.

Four sources, the first that speaks wins: flag, environment (`GPUACTORS_…`), file (`--config FILE`), default.
Every key has one name in all of them: `host_root` is `--host-root` and `GPUACTORS_HOST_ROOT`. A name that
means nothing is an error, because a setting that silently does nothing costs more than one that is refused.

Must not hold bounds (they are in `limits.py`) and must not look at the host beyond reading the file it was
given.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import reprlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gpuactors.core.selector import Selector, parse_selector
from gpuactors.limits import (
    CONFIG_FILE_MAX_BYTES,
    JOURNAL_MAX_BYTES,
    RESYNC_INTERVAL_MAX_S,
    SOCKET_PATH_MAX_BYTES,
)

ENVIRONMENT_PREFIX: Final = "GPUACTORS_"
CONFIG_FILE_VARIABLE: Final = "GPUACTORS_CONFIG"
NODE_NAME_VARIABLE: Final = "NODE_NAME"
"""What manifests commonly call the node's name where the downward API gives it (`spec.nodeName`)."""

SELECT_SEPARATOR: Final = ";"
"""Between the selectors of one text (an environment variable, or a file's text instead of a list): the comma is taken
inside a selector."""

DEFAULT_SELECTORS: Final = ("vendor=10de,class=03", "vendor=10de,class=0680")
"""NVIDIA's display controllers, and its NVSwitch bridges."""

_NODE_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")

Holders: TypeAlias = Literal["passive", "proc", "open"]
LogFormat: TypeAlias = Literal["json", "console"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class ConfigError(Exception):
    """The configuration cannot be used; the text says which key, from where, and what would be right.

    The command line ends with code 78 (EX_CONFIG, sysexits.h) on it.
    """


@dataclass(frozen=True, slots=True)
class KernelUevents:
    """Uevents come from the kernel's netlink multicast group."""


@dataclass(frozen=True, slots=True)
class NoUevents:
    """No uevents: what changes is found by the periodic scan alone."""


@dataclass(frozen=True, slots=True)
class SocketUevents:
    """Uevents, in the kernel's own format, come as datagrams to a unix socket that the daemon binds at
    `path`."""

    path: Path


UeventSource: TypeAlias = KernelUevents | NoUevents | SocketUevents


def _path(default: str) -> Any:
    # A factory, because msgspec cannot write a Path into a schema as a default; `schema` puts it there as
    # text.
    return msgspec.field(default_factory=lambda: Path(default))


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of gpuactors. Units are in the names (`_s`: seconds)."""

    host_root: Annotated[
        Path, Meta(description="Prefix under which the host's /sys, /dev and /proc are read.")
    ] = _path("/")
    kubelet_dir: Annotated[
        Path, Meta(description="Kubelet's directory; holds `device-plugins/` and `pod-resources/`.")
    ] = _path("/var/lib/kubelet")
    state_dir: Annotated[Path, Meta(description="Where the daemon keeps what must outlive it.")] = _path(
        "/var/lib/gpuactors"
    )
    pci_ids: Annotated[
        Path | None,
        Meta(description="The pci.ids file that names the models; else the shipped one, never the host's."),
    ] = None
    uevents: Annotated[
        str,
        Meta(
            description=(
                "Where uevents come from: `kernel`, `off` (periodic scan only), or `unix:PATH` "
                "(a datagram socket bound at PATH, for test rigs)."
            ),
            pattern="^(kernel|off|unix:.+)$",
        ),
    ] = "kernel"
    resync_interval_s: Annotated[
        float,
        Meta(
            description=(
                "Seconds between two full scans that nothing asked for; at most "
                f"{RESYNC_INTERVAL_MAX_S:.0f}, a day."
            ),
            gt=0,
            le=RESYNC_INTERVAL_MAX_S,
        ),
    ] = 300.0
    select: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Which PCI functions are looked at, each `KEY=VALUE,…` with the keys vendor, device, class "
                "(the start of the class code) and address. A function that meets one of them is chosen, unless it "
                "meets one that begins with `!`. Where all begin so, they leave out of the default."
            ),
            min_length=1,
        ),
    ] = DEFAULT_SELECTORS
    pre_start_gate: Annotated[
        bool,
        Meta(description="Whether kubelet is asked to call PreStartContainer before a container starts."),
    ] = True
    holders: Annotated[
        Holders,
        Meta(
            description=(
                "How it is found out whether a GPU is in use, and by whom: `passive` (`enable` and "
                "`power/runtime_status` in sysfs; opens nothing), `proc` (also /proc/*/fd, which names the process; "
                "needs the host's PID namespace, CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE), or `open` (as `passive`, "
                "and as a last resort opens the IOMMU group of a GPU that nobody was given)."
            )
        ),
    ] = "passive"
    journal: Annotated[
        bool,
        Meta(
            description=(
                "Whether everything that happens is recorded in `state_dir`, for `gpuactors replay`: "
                f"the last {JOURNAL_MAX_BYTES >> 20} MiB of it."
            )
        ),
    ] = True
    node_name: Annotated[
        str,
        Meta(
            description=(
                "The node's name, in the log, the journal and what `inspect` and `explain` print; else the variable "
                "NODE_NAME, else the host's own name."
            )
        ),
    ] = ""
    log_format: Annotated[LogFormat, Meta(description="How log lines look: `json` or `console`.")] = "json"
    log_level: Annotated[
        LogLevel, Meta(description="The least level that is logged: `debug`, `info`, `warning` or `error`.")
    ] = "info"

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """`select`, parsed. Raises ValueError only for a Config that was not made by `load`."""
        return tuple(parse_selector(text) for text in self.select)

    @property
    def uevent_source(self) -> UeventSource:
        """`uevents`, parsed. Raises ValueError only for a Config that was not made by `load`."""
        return _uevent_source(self.uevents)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a value came from: `kind`, and `name` of the flag, variable or file (empty for a default)."""

    kind: Literal["flag", "environment", "file", "default"]
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


@dataclass(frozen=True, slots=True)
class Resolved:
    """A Config and, for each of its keys, where the value came from."""

    config: Config
    provenance: Mapping[str, Provenance]


def load(flags: Mapping[str, object], environ: Mapping[str, str]) -> Config:
    """The configuration from all sources; `resolve` says where each value came from. Raises ConfigError."""
    return resolve(flags, environ).config


def resolve(flags: Mapping[str, object], environ: Mapping[str, str]) -> Resolved:
    """The configuration from all sources, with the provenance of each key.

    `flags` has the keys' names, and `config` for the file; a flag that is None or an empty tuple was not
    given (as click hands them over). `environ` is usually `os.environ`. Paths are taken as they are written,
    relative ones from the working directory. Raises ConfigError for an unknown key, a bad value or an
    unreadable file.
    """
    given_flags = {name: value for name, value in flags.items() if value is not None and value != ()}
    if unknown := given_flags.keys() - set(KEYS) - {"config"}:
        raise ConfigError(f"there is no setting for the flag {_flag(min(unknown))}")
    variables = _variables(environ)
    from_file, file_source = _file(given_flags.pop("config", None), variables.pop("config", None))

    values: dict[str, object] = {}
    provenance: dict[str, Provenance] = {}
    for key in KEYS:
        if key in given_flags:
            raw, source, as_text = given_flags[key], Provenance("flag", _flag(key)), True
        elif key in variables:
            raw, source, as_text = variables[key], Provenance("environment", _variable(key)), True
        elif key in from_file:
            raw, source, as_text = from_file[key], file_source, False
        elif key == "node_name" and environ.get(NODE_NAME_VARIABLE):
            raw, as_text = environ[NODE_NAME_VARIABLE], True
            source = Provenance("environment", NODE_NAME_VARIABLE)
        else:
            provenance[key] = Provenance("default")
            continue
        values[key] = _value(key, raw, source, as_text=as_text)
        provenance[key] = source
    return Resolved(config=Config(**values), provenance=provenance)  # type: ignore[arg-type]


def as_dict(config: Config) -> dict[str, object]:
    """The settings as JSON would hold them; a file with this content gives the same Config."""
    return msgspec.json.decode(msgspec.json.encode(config, enc_hook=_encode), type=dict[str, object])


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a configuration file, with the defaults."""
    (_, components) = msgspec.json.schema_components([Config], schema_hook=_path_schema)
    body = components["Config"]
    selectors = body["properties"]["select"]
    body["properties"]["select"] = {
        "description": selectors.pop("description"),
        "anyOf": [selectors, {"type": "string", "description": "Several are separated by `;`."}],
    }
    for key, default in as_dict(Config()).items():
        body["properties"][key]["default"] = default
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **body}


def describe(key: str) -> str:
    """What a key means, in one sentence: the text of `--help`, of the schema and of the README."""
    return str(schema()["properties"][key]["description"])


KEYS: Final[tuple[str, ...]] = Config.__struct_fields__
"""Every key, in the order in which they are shown."""

_FIELD_TYPES: Final[Mapping[str, Any]] = {field.name: field.type for field in msgspec.structs.fields(Config)}

_ALLOWED: Final[Mapping[str, str]] = {
    "host_root": "a path, not empty and without NUL",
    "kubelet_dir": "a path, not empty and without NUL",
    "state_dir": "a path, not empty and without NUL",
    "pci_ids": "the path of a pci.ids file, not empty and without NUL",
    "uevents": f"kernel, off or unix:PATH, with a PATH of at most {SOCKET_PATH_MAX_BYTES} bytes",
    "resync_interval_s": f"a number of seconds above 0, and at most {RESYNC_INTERVAL_MAX_S:.0f} (a day)",
    "select": "one or more selectors KEY=VALUE,… or !KEY=VALUE,… with the keys vendor, device, class and address",
    "pre_start_gate": "true or false",
    "holders": "passive, proc or open",
    "journal": "true or false",
    "node_name": "a node's name of at most 253 letters, digits, `-` and `.`",
    "log_format": "json or console",
    "log_level": "debug, info, warning or error",
}


# --- values -----------------------------------------------------------------------------------------------


def _value(key: str, raw: object, source: Provenance, *, as_text: bool) -> object:
    """One value, checked. `as_text`: a flag or a variable, where a number is still text."""
    try:
        value = msgspec.convert(
            _untyped(key, raw, source), _FIELD_TYPES[key], strict=not as_text, dec_hook=_decode
        )
        return _CHECKS.get(key, _unchanged)(value)
    except (msgspec.ValidationError, ValueError) as error:
        # msgspec's words ("Expected `float` > 0.0") are for programmers; what our own checks say is for
        # operators.
        detail = "" if isinstance(error, msgspec.ValidationError) else f" ({error})"
        raise ConfigError(f"{key} is {_shown(raw)} ({source}), but must be {_ALLOWED[key]}{detail}") from None


def _untyped(key: str, raw: object, source: Provenance) -> object:
    """The value in the shape in which a file would hold it."""
    match raw:
        case os.PathLike():
            return os.fspath(raw)
        case str() if key == "select":
            return [part.strip() for part in raw.split(SELECT_SEPARATOR) if part.strip()]
        case False if key == "uevents" and source.kind == "file":
            return "off"  # YAML 1.1 reads a bare `off` as false, and nothing else can have been meant
        case _:
            return raw


def _checked_selectors(texts: tuple[str, ...]) -> tuple[str, ...]:
    """As they are written out. Selectors that only leave out leave out of the default, which is written out as well."""
    selectors = tuple(parse_selector(text) for text in texts)
    chosen = () if any(not selector.exclude for selector in selectors) else DEFAULT_SELECTORS
    return (*chosen, *map(str, selectors))


def _checked_node_name(text: str) -> str:
    # A Kubernetes node's name is a DNS subdomain. The host's own name may be anything, and is not checked here.
    if text and not _NODE_NAME.fullmatch(text):
        raise ValueError("it is a DNS name, as kubectl get nodes shows it")
    return text


def _checked_uevents(text: str) -> str:
    _uevent_source(text)
    return text


def _unchanged(value: object) -> object:
    return value


_CHECKS: Final[Mapping[str, Callable[[Any], object]]] = {
    "select": _checked_selectors,
    "uevents": _checked_uevents,
    "node_name": _checked_node_name,
}


def _uevent_source(text: str) -> UeventSource:
    scheme, _, path = text.partition(":")
    match scheme:
        case "kernel" if text == scheme:
            return KernelUevents()
        case "off" if text == scheme:
            return NoUevents()
        case "unix" if path:
            if len(os.fsencode(path)) > SOCKET_PATH_MAX_BYTES:
                raise ValueError(f"the path has {len(os.fsencode(path))} bytes")
            if "\0" in path:
                raise ValueError("the path holds a NUL character")
            return SocketUevents(Path(path))
        case _:
            raise ValueError(f"{text!r} is none of these")


def _decode(kind: type, raw: object) -> object:
    if kind is not Path:
        raise NotImplementedError(f"no setting is of the type {kind}")
    if not isinstance(raw, str):
        raise ValueError(f"a {type(raw).__name__} is not a path")  # noqa: TRY004 - msgspec wraps ValueError alone
    if not raw or "\0" in raw:
        raise ValueError("a path is neither empty nor does it hold a NUL character")
    return Path(raw)


def _encode(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"no setting is of the type {type(value)}")


def _path_schema(kind: type) -> dict[str, object]:
    if kind is not Path:
        raise NotImplementedError(f"no setting is of the type {kind}")
    return {"type": "string", "minLength": 1}


def _shown(raw: object) -> str:
    """The value for an error message: short, whatever a file holds (YAML's aliases can make a short text
    huge)."""
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring, brief.maxother = 2, 200, 200
    return brief.repr(os.fspath(raw) if isinstance(raw, os.PathLike) else raw)


# --- environment ------------------------------------------------------------------------------------------

# Kubernetes describes every Service of the namespace to each container in variables that begin with the
# Service's name (kubelet pkg/kubelet/envvars/envvars.go: FromServices, makeLinkVariables). A Service called
# gpuactors, or gpuactors-something, must not stop the daemon, so variables of exactly these shapes are passed
# over.
_SERVICE_VARIABLE = re.compile(
    r"GPUACTORS_(?:\w+_)?(?:"
    r"SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?"
    r")"
)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings in the environment by key, and `config` for the file. Raises ConfigError for an unknown
    one."""
    found: dict[str, str] = {}
    known = {_variable(key): key for key in KEYS} | {CONFIG_FILE_VARIABLE: "config"}
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if name in known:
            found[known[name]] = environ[name]
        elif not _SERVICE_VARIABLE.fullmatch(name):
            raise ConfigError(f"unknown variable {name} in the environment{_instead(name, known)}")
    return found


# --- file -------------------------------------------------------------------------------------------------


def _file(flag: object | None, variable: str | None) -> tuple[dict[str, object], Provenance]:
    """What the configuration file holds, if there is one. Raises ConfigError."""
    name = flag if flag is not None else variable
    if name is None:
        return {}, Provenance("default")
    path = Path(str(name))
    origin = "--config" if flag is not None else CONFIG_FILE_VARIABLE
    values = _parsed(path, origin, _read(path, origin))
    for key in values:
        if key not in KEYS:
            raise ConfigError(f"unknown key {key!r} in file {path}{_instead(str(key), KEYS)}")
    return values, Provenance("file", str(path))


def _read(path: Path, origin: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(CONFIG_FILE_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {str(path)!r} ({origin}): {error.strerror}"
        ) from None
    if len(content) > CONFIG_FILE_MAX_BYTES:
        raise ConfigError(
            f"the configuration file {path} ({origin}) has more than "
            f"{CONFIG_FILE_MAX_BYTES} bytes; is it the right one?"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {path} ({origin}) is not UTF-8: {error}") from None


def _parsed(path: Path, origin: str, text: str) -> dict[str, object]:
    try:
        match path.suffix:
            case ".toml":
                values: object = tomllib.loads(text)
            case ".yaml" | ".yml":
                from gpuactors import strict_yaml  # 20 ms that only a YAML file is worth

                values = strict_yaml.load(text)
                values = {} if values is None else values
            case _:
                raise ConfigError(
                    f"the configuration file {path} ({origin}) must end in .toml, .yaml or .yml, "
                    "so that its language is known"
                )
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the configuration file {path} ({origin}) cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"the configuration file {path} ({origin}) must hold keys with values")
    return values


# --- names ------------------------------------------------------------------------------------------------


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _variable(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.upper()


def _instead(name: str, known: Iterable[str]) -> str:
    """What may have been meant; else everything there is. The prefix would make all variables look alike."""
    names = {full.removeprefix(ENVIRONMENT_PREFIX): full for full in known}
    close = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), names, n=2, cutoff=0.7)
    if close:
        return f"; did you mean {' or '.join(names[short] for short in close)}?"
    return f"; there is {', '.join(names.values())}"
