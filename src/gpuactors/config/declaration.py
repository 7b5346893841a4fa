"""How a setting is declared: once, as a field of a struct, `key: Annotated[TYPE, Described(…)] = DEFAULT`.

Everything else that names the setting is derived from it: its flag and its variable, its lines in `--help`, its
property in the schema, its row in docs/reference.md, and the sentence that refuses a value. Must not know any
setting (they are in `settings.py`) and must not read a value (`sources.py` does).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec
from msgspec import Struct

ENVIRONMENT_PREFIX: Final = "GPUACTORS_"

CONFIG_FILE_KEY: Final = "config"
"""The key of the flag and the variable that name the configuration file. It is no setting: a file cannot name
itself."""

NODES_KEY: Final = "nodes"
"""The key of the entries in a file. It is no setting: it has neither a flag nor a variable."""

OF_THE_NODE: Final = ("node_name", "node_labels")
"""The settings that an entry cannot have: entries are chosen by them."""

LIST_SEPARATOR: Final = ";"
"""The separator of the values of a list that is written as one text (a variable, or a file's text instead of a
list)."""

_SWITCHED: Final[Mapping[object, str]] = MappingProxyType(
    {
        "on": "on",
        "true": "on",
        "yes": "on",
        True: "on",
        "off": "off",
        "false": "off",
        "no": "off",
        False: "off",
    }
)
"""The ways to write `on` and `off`, in lower case, each with its meaning."""

_KEY: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")

_SERVICE_WORDS: Final = frozenset({"port", "service"})
"""The words in the variables with which kubelet describes a Service: a setting's own could be mistaken for one of
them."""


def flag_of(key: str) -> str:
    """Return the flag of a key: `host_root` is `--host-root`."""
    return "--" + key.replace("_", "-")


def variable_of(key: str) -> str:
    """Return the variable of a key: `host_root` is `GPUACTORS_HOST_ROOT`."""
    return ENVIRONMENT_PREFIX + key.upper()


class Described(Struct, frozen=True):
    """The parts of a setting that its type does not have."""

    description: str
    """The setting's meaning: one sentence or more, Markdown."""
    metavar: str = ""
    """The placeholder of the value in the help. A choice shows its values."""
    must_be: str = ""
    """The valid values: the end of the sentence that refuses another one. A choice names its own."""
    default: str = ""
    """The meaning of the default, where its value does not show it (`None`, an empty text)."""
    check: Callable[[Any], object] | None = None
    """The function that takes a value of the right type and returns the stored form. Raises ValueError."""
    fallback_variable: str = ""
    """A variable without gpuactors' prefix, read when no flag, prefixed variable or file has the setting."""
    is_followed: bool = False
    """True if a running daemon can use a change, with `reload` `on` (`reload.py`)."""
    may_be_off: bool = False
    """True if `off` is one of the values. A choice says so itself."""
    texts_of: Callable[[object], Sequence[object]] | None = None
    """For a list: the function that returns the texts of one item of a file, which may also have the form of
    `item_schema`. Raises ValueError. None: an item is a text."""
    item_schema: Mapping[str, object] | None = None
    """The JSON Schema of that other form."""
    pattern: str = ""
    """For a list: how each text begins, as a regular expression of the schema, so that an editor and Helm refuse what
    `check` would. Empty: any text."""
    extends: Callable[[Sequence[object]], bool] | None = None
    """For a list: the function that says whether such a list, in an entry of `nodes`, is added to the one that it would
    replace. None: it replaces."""


class Declaration(Struct, frozen=True):
    """One setting. Making one without a required part raises TypeError, which names the part."""

    key: str
    """The name in a configuration file."""
    type: Any
    default: object
    described: Described

    def __post_init__(self) -> None:
        words = self.key.split("_")
        description = self.described.description
        parts = {
            "a key in snake_case": _KEY.fullmatch(self.key),
            f"a key other than {CONFIG_FILE_KEY}, which names the file": self.key != CONFIG_FILE_KEY,
            f"a key without {' and '.join(sorted(_SERVICE_WORDS))}": _SERVICE_WORDS.isdisjoint(words),
            "a description that ends with a full stop": description.strip(" .") and description.endswith("."),
            "a metavar": self.metavar,
            "what a value must be": self.must_be,
            "a default": self.default is not msgspec.NODEFAULT,
            "what its default means": self.default is msgspec.NODEFAULT or self.default_text(),
        }
        if missing := [part for part, is_present in parts.items() if not is_present]:
            raise TypeError(f"the setting {self.key!r} needs {' and '.join(missing)}")

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return flag_of(self.key)

    @property
    def variable(self) -> str:
        """The environment variable."""
        return variable_of(self.key)

    @property
    def is_list(self) -> bool:
        """True if it has several values: its flag may be repeated, and one text holds several."""
        return get_origin(_plain(self.type)) is tuple

    @property
    def metavar(self) -> str:
        """The placeholder of the value in the help: `DIR`, `json|console`."""
        return self.described.metavar or "|".join(self.choices)

    @property
    def must_be(self) -> str:
        """The valid values, in words: `json or console`."""
        return self.described.must_be or _or(self.choices)

    @property
    def spellings(self) -> tuple[object, ...]:
        """Further ways to write `on` and `off` in a file, where they are its values: YAML 1.1 reads a bare one as a
        boolean."""
        return tuple(way for way, value in _SWITCHED.items() if way != value and self._is_value(value))

    def switched(self, raw: object) -> object:
        """Return `on` or `off` for each way to write it, where that is one of the values; else `raw`."""
        way = raw.lower() if isinstance(raw, str) else raw
        value = _SWITCHED.get(way) if isinstance(raw, str | bool) else None
        return value if value is not None and self._is_value(value) else raw

    def _is_value(self, word: str) -> bool:
        return word in self.choices or (word == "off" and self.described.may_be_off)

    @property
    def default_values(self) -> tuple[str, ...]:
        """The default as an operator would write it, each value of a list apart; none for `None` and an empty text."""
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        return tuple(filter(None, map(_written, values)))

    def default_text(self, form: str = "{}") -> str:
        """Return the default for people, each value in `form`; its meaning where the value does not show it."""
        text = self.described.default or " and ".join(map(form.format, self.default_values))
        fallback = self.described.fallback_variable
        return f"{form.format(fallback)}, else {text}" if fallback and text else text

    @property
    def choices(self) -> tuple[str, ...]:
        """The values, if there are so few that each has a name."""
        plain = _plain(self.type)
        return get_args(plain) if get_origin(plain) is Literal else ()


def declared(struct: type[msgspec.Struct]) -> Mapping[str, Declaration]:
    """Return the settings that the fields of a struct declare, by key and in order. Raises TypeError for a field that
    is no whole declaration."""
    return MappingProxyType({f.name: _declaration(f) for f in msgspec.structs.fields(struct)})


def _declaration(field: msgspec.structs.FieldInfo) -> Declaration:
    notes = field.type.__metadata__ if get_origin(field.type) is Annotated else ()
    described = [note for note in notes if isinstance(note, Described)]
    if len(described) != 1:
        raise TypeError(f"the setting {field.name!r} needs one Described(…) in its annotation")
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return Declaration(field.name, field.type, default, described[0])


def _plain(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _written(value: object) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def _or(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
