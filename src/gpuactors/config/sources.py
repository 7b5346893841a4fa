"""The sources of the values: flags, the environment, a configuration file with its entries for some nodes
(`fleet.py`); each checked, with error messages.

Must not know the meaning of a setting: that is in its declaration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.values.names import node_name_of
from gpuactors.core.values.quote import first_of, quoted
from gpuactors.process.plain_files import read_plain

from .declaration import (
    CONFIG_FILE_KEY,
    ENVIRONMENT_PREFIX,
    LIST_SEPARATOR,
    NODES_KEY,
    OF_THE_NODE,
    Declaration,
    flag_of,
    variable_of,
)
from .settings import DECLARATIONS, PRESETS, Config, conflict_of

if TYPE_CHECKING:
    from .fleet import Entry, FleetNode

CONFIG_FILE_MAX_BYTES: Final = 1024 * 1024
"""The most bytes of a configuration file, which has a few hundred; a device or a log named by mistake must not be read
for ever."""

_ITEMS_MAX: Final = 10_000
"""The most items that the mappings in a list may stand for: with YAML's aliases a short file has billions."""

_SHOWN_BITS_MAX: Final = 128
"""The most bits of a number that an error message writes out."""

_SHOWN_CHARS_MAX: Final = 200
"""The most characters of a text that an error message quotes."""

CONFIG_FILE_VARIABLE: Final = variable_of(CONFIG_FILE_KEY)


class ConfigError(Exception):
    """The configuration cannot be used; the text names the key, its source, and the values allowed.

    The command line ends with code 78 (EX_CONFIG, sysexits.h) on it.
    """


class Provenance(Struct, frozen=True):
    """The source of a value: `kind`, and `name` of the flag, variable, file, Node or preset (empty for a default)."""

    kind: Literal["flag", "environment", "file", "node", "preset", "default"]
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


class Resolved(Struct, frozen=True):
    """A Config and, for each of its keys, the source of the value."""

    config: Config
    provenance: Mapping[str, Provenance]
    file: str = ""
    """The path of the configuration file; empty without one."""


def load(flags: Mapping[str, object], environ: Mapping[str, str]) -> Config:
    """Return the configuration from all sources; `resolve` also returns the source of each value. Raises
    ConfigError."""
    return resolve(flags, environ).config


SourcedLabels: TypeAlias = tuple[Mapping[str, str], Provenance]
"""The labels of the node, and where they are from."""

ReadLabels: TypeAlias = Callable[[Config], SourcedLabels]
"""Reads them; of the Config the keys in `_OF_READING` are set. Raises ConfigError."""

_OF_READING: Final = (*OF_THE_NODE, "state_dir", "kubeconfig")
"""The settings with which the labels of the node are read. They are those without entries."""


def resolve(
    flags: Mapping[str, object], environ: Mapping[str, str], read_labels: ReadLabels | None = None
) -> Resolved:
    """Return the configuration from all sources, with the provenance of each key.

    `flags` has the keys' names, and `config` for the file; a flag that is None or an empty tuple was not given (as
    click hands them over). `environ` is usually `os.environ`. Paths are taken as they are written, relative ones from
    the working directory. `read_labels` is called if entries of the file depend on labels that no setting has; None:
    that is an error. Raises ConfigError for an unknown key, a bad value or an unreadable file.
    """
    flags_set = {name: value for name, value in flags.items() if value is not None and value != ()}
    if unknown := flags_set.keys() - DECLARATIONS.keys() - {CONFIG_FILE_KEY}:
        raise ConfigError(f"there is no setting for the flag {flag_of(min(unknown))}")
    variables = _variables(environ)
    file = _file(flags_set.pop(CONFIG_FILE_KEY, None), variables.pop(CONFIG_FILE_KEY, None))
    given = _given(flags_set, variables, file.values, environ)
    if file.entries:
        values = _for_this_node(file, given, read_labels)
        given = _given(flags_set, variables, values, environ)
    return replace(resolved_of(given), file=file.source.name)


Sourced = tuple[object, Provenance]
"""A value as its source has it."""


class File(Struct, frozen=True):
    """The content of a configuration file. Its entries are checked, and the values beside them are not yet."""

    values: Mapping[str, Sourced]
    entries: tuple[Entry, ...] = ()
    source: Provenance = Provenance("default")


def for_node(file: File, node: FleetNode) -> Mapping[str, Sourced]:
    """Return the values of the file for one node. Raises ConfigError if labels are needed that are not known."""
    from .fleet import EntryError, matching  # a file without entries needs nothing of it

    try:
        return with_entries(file, matching(file.entries, node))
    except EntryError as error:
        raise ConfigError(str(error)) from None


def with_entries(file: File, entries: Iterable[Entry]) -> Mapping[str, Sourced]:
    """Return the values of the file for a node that these entries match: of several that have a key, the last one
    wins."""
    values = dict(file.values)
    for entry in entries:
        for key, raw in entry.settings.items():
            values[key] = _overridden(DECLARATIONS[key], values.get(key), raw), _of_entry(file.source, entry)
    return values


def read_file(name: str) -> File:
    """Return the content of the configuration file of this name, as `--config` would. Raises ConfigError."""
    return _file(name, None)


def resolved_of(given: Mapping[str, Sourced]) -> Resolved:
    """Return the configuration of these values, each checked, and all of them together. Raises ConfigError."""
    values = {key: _value(DECLARATIONS[key], raw, source) for key, (raw, source) in given.items()}
    preset = str(values.get("preset", DECLARATIONS["preset"].default))
    of_preset = {key: value for key, value in PRESETS[preset].items() if key not in values}
    config = Config(**values, **of_preset)  # type: ignore[arg-type]
    if (conflict := conflict_of(config)) is not None:
        raise ConfigError(conflict)
    provenance = dict.fromkeys(DECLARATIONS, Provenance("default"))
    provenance |= dict.fromkeys(of_preset, Provenance("preset", preset))
    return Resolved(config, provenance | {key: source for key, (_, source) in given.items()})


def _given(
    flags: Mapping[str, object],
    variables: Mapping[str, str],
    of_file: Mapping[str, Sourced],
    environ: Mapping[str, str],
) -> dict[str, Sourced]:
    """Return the value of each key that a source has, from the first one."""
    given: dict[str, Sourced] = {}
    for key, setting in DECLARATIONS.items():
        if key in flags:
            given[key] = flags[key], Provenance("flag", setting.flag)
        elif key in variables:
            given[key] = variables[key], Provenance("environment", setting.variable)
        elif key in of_file:
            given[key] = of_file[key]
        elif fallback := environ.get(setting.described.fallback_variable):
            given[key] = fallback, Provenance("environment", setting.described.fallback_variable)
    return given


def _for_this_node(
    file: File, given: Mapping[str, Sourced], read_labels: ReadLabels | None
) -> Mapping[str, Sourced]:
    """Return the values of the file for this node, with the labels that were read for it. Raises ConfigError."""
    from .fleet import FleetNode, deciding_labels, labels_of  # as in `for_node`

    own = resolved_of({key: value for key, value in given.items() if key in _OF_READING}).config
    name = own.node_name or node_name_of(os.uname().nodename)
    keys = deciding_labels(file.entries, name)
    if own.node_labels or not keys or read_labels is None:
        labels = labels_of(own.node_labels) if own.node_labels else None
        return for_node(file, FleetNode(name, labels))
    read, source = read_labels(own)
    labels = {key: value for key, value in sorted(read.items()) if key in keys}
    texts = [f"{key}={value}" for key, value in labels.items()]
    return {**for_node(file, FleetNode(name, labels)), "node_labels": (texts, source)}


def _overridden(setting: Declaration, before: Sourced | None, raw: object) -> object:
    """Return the value of an entry in the place of the one before it, or added to that."""
    extends, items = setting.described.extends, _untyped(setting, raw)
    if extends is None or not isinstance(items, list) or not extends(items):
        return raw
    base = _untyped(setting, before[0]) if before is not None else setting.default
    return [*base, *items] if isinstance(base, list | tuple) else raw


# --- values -----------------------------------------------------------------------------------------------


def _value(setting: Declaration, raw: object, source: Provenance) -> object:
    """Check one value. In a flag or a variable a number is still text; a file has types."""
    try:
        value = msgspec.convert(
            _untyped(setting, raw), setting.type, strict=source.kind == "file", dec_hook=_decode
        )
        check = setting.described.check
        return value if check is None or value is None else check(value)
    except RecursionError:
        raise ConfigError(f"{setting.key} nests too deep ({source}), but must be {setting.must_be}") from None
    except (msgspec.ValidationError, ValueError) as error:
        # msgspec's messages ("Expected `float` > 0.0") are for programmers; those of our own checks are for operators.
        detail = "" if isinstance(error, msgspec.ValidationError) else f" ({quoted(str(error))})"
        raise ConfigError(
            f"{setting.key} is {_shown(raw)} ({source}), but must be {setting.must_be}{detail}"
        ) from None


def _untyped(setting: Declaration, raw: object) -> object:
    """Return the value in the shape in which a file would hold it."""
    match raw:
        case os.PathLike():
            return os.fspath(raw)
        case str() if setting.is_list:
            return [part.strip() for part in raw.split(LIST_SEPARATOR) if part.strip()]
        case list() if (texts_of := setting.described.texts_of) is not None:
            texts = list(islice(chain.from_iterable(map(texts_of, raw)), _ITEMS_MAX + 1))
            if len(texts) > _ITEMS_MAX:
                raise ValueError(f"it has more than {_ITEMS_MAX:,} items")
            return texts
        case _:
            return setting.switched(raw)


def _decode(kind: type, raw: object) -> object:
    if kind is not Path:
        raise NotImplementedError(f"no setting is of the type {kind}")
    if not isinstance(raw, str):
        raise ValueError(f"a {type(raw).__name__} is not a path")  # noqa: TRY004 - msgspec wraps only ValueError
    if not raw or "\0" in raw:
        raise ValueError("a path is neither empty nor does it hold a NUL character")
    return Path(raw)


def _shown(raw: object) -> str:
    """Write the value for an error message, as an operator wrote it: short for any file (YAML's aliases can make a
    short text huge)."""
    match raw:
        case list() | tuple():
            return ", ".join(first_of([_shown_item(item) for item in raw])) or "an empty list"
        case _:
            return _shown_item(raw)


def _shown_item(raw: object) -> str:
    match raw:
        case os.PathLike() | str():
            return f"'{quoted(str(raw), _SHOWN_CHARS_MAX)}'"
        case None:
            return "empty"
        case bool():
            return str(raw).lower()
        case int():  # Python refuses to write out one of more than 4,300 digits
            return (
                str(raw) if raw.bit_length() <= _SHOWN_BITS_MAX else f"a number of {raw.bit_length():,} bits"
            )
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case set() | bytes():
            return "neither a text nor a number"
        case _:  # a number, a time
            return str(raw)


# --- environment ------------------------------------------------------------------------------------------

# Kubernetes describes every Service of the namespace to each container in variables that begin with the
# Service's name (kubelet pkg/kubelet/envvars/envvars.go: FromServices, makeLinkVariables). A Service called
# gpuactors, or gpuactors-something, must not stop the daemon, so variables of exactly these shapes are passed
# over.
_SERVICE_VARIABLE: Final = (
    r"GPUACTORS_(?:\w+_)?(?:"
    r"SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?"
    r")"
)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in the environment by key, and `config` for the file. Raises ConfigError for an unknown
    one."""
    values: dict[str, str] = {}
    keys = {setting.variable: key for key, setting in DECLARATIONS.items()}
    keys[CONFIG_FILE_VARIABLE] = CONFIG_FILE_KEY
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if name in keys:
            values[keys[name]] = environ[name]
        elif not re.fullmatch(_SERVICE_VARIABLE, name):
            raise ConfigError(f"unknown variable {name} in the environment{_similar(name, keys)}")
    return values


# --- file -------------------------------------------------------------------------------------------------


def _file(flag: object | None, variable: str | None) -> File:
    """Read the configuration file, if there is one, and check its entries for some nodes. Raises ConfigError."""
    name = flag if flag is not None else variable
    if name is None:
        return File({})
    path = Path(str(name))
    origin = flag_of(CONFIG_FILE_KEY) if flag is not None else CONFIG_FILE_VARIABLE
    content = _parsed(path, origin, _read(path, origin))
    source = Provenance("file", str(path))
    entries = _entries(content.pop(NODES_KEY), source) if NODES_KEY in content else ()
    if entries and (common := [key for key in OF_THE_NODE if key in content]):
        raise ConfigError(f"{common[0]} cannot be in a file with nodes: all would have the same ({source})")
    for key in content:
        if key not in DECLARATIONS:
            raise ConfigError(
                f"unknown key {_shown(key)} in file {path}{_similar(str(key), (*DECLARATIONS, NODES_KEY))}"
            )
    return File({key: (raw, source) for key, raw in content.items()}, entries, source)


def _entries(content: object, file: Provenance) -> tuple[Entry, ...]:
    """Return the entries of a file, each with its keys and values checked, for whatever node they are. Raises
    ConfigError."""
    from .fleet import EntryError, entries_of  # as in `for_node`

    try:
        entries = entries_of(content)
    except EntryError as error:
        raise ConfigError(f"{error} ({file})") from None
    for entry in entries:
        for key, raw in entry.settings.items():
            if key not in DECLARATIONS:
                raise ConfigError(
                    f"unknown key {_shown(key)} in {entry} of file {file.name}{_similar(str(key), DECLARATIONS)}"
                )
            _value(DECLARATIONS[key], raw, _of_entry(file, entry))
    return entries


def _of_entry(file: Provenance, entry: Entry) -> Provenance:
    return Provenance("file", f"{file.name}, {entry}")


def _read(path: Path, origin: str) -> str:
    try:
        content = read_plain(path, CONFIG_FILE_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {quoted(str(path))} ({origin}): {error.strerror}"
        ) from None
    if len(content) > CONFIG_FILE_MAX_BYTES:
        raise ConfigError(
            f"the configuration file {path} ({origin}) has more than "
            f"{CONFIG_FILE_MAX_BYTES} bytes; is it the right one?"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"the configuration file {path} ({origin}) is not UTF-8: line {line} has the byte "
            f"0x{content[error.start]:02x}"
        ) from None


def _parsed(path: Path, origin: str, text: str) -> dict[str, object]:
    try:
        match path.suffix:
            case ".toml":
                values: object = _toml(text)
            case ".yaml" | ".yml":
                from . import strict_yaml  # 20 ms that only a YAML file is worth

                values = strict_yaml.load(text)
                values = {} if values is None else values
            case _:
                raise ConfigError(
                    f"the configuration file {path} ({origin}) must end in .toml, .yaml or .yml, "
                    "so that its language is known"
                )
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"the configuration file {path} ({origin}) cannot be read: {quoted(str(error))}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"the configuration file {path} ({origin}) must hold keys with values")
    return values


_PLACE: Final = r"(?P<what>.*) \(at (?P<place>line \d+, column \d+|end of document)\)"
"""The form of the errors of `tomllib`."""


def _toml(text: str) -> dict[str, object]:
    """Parse TOML. Raises ValueError, with the line."""
    import tomllib  # as strict_yaml above

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.fullmatch(_PLACE, str(error), re.DOTALL)
        if match is None:
            raise
        place = match["place"].replace(
            "end of document", f"line {text.rstrip().count(chr(10)) + 1}, the last one"
        )
        raise ValueError(f"{place}: {match['what']}") from None


def _similar(name: str, names: Iterable[str]) -> str:
    """Return similar names; else all names. The prefix would make all variables look alike."""
    import difflib  # for errors alone

    by_short_name = {full.removeprefix(ENVIRONMENT_PREFIX): full for full in names}
    close = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), by_short_name, n=2, cutoff=0.7)
    if close:
        return f"; did you mean {' or '.join(by_short_name[short] for short in close)}?"
    return f"; there is {', '.join(by_short_name.values())}"
