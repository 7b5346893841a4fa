"""The settings as JSON holds them, and the JSON Schemas of the settings and of a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from .declaration import LIST_SEPARATOR, NODES_KEY, OF_THE_NODE
from .settings import DECLARATIONS, Config


def as_dict(config: Config) -> dict[str, object]:
    """Return the settings as JSON would hold them; a file with this content gives the same Config."""
    return msgspec.json.decode(msgspec.json.encode(config, enc_hook=_encode), type=dict[str, object])


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the settings, with the defaults: each a value, or a list of texts."""
    (_, components) = msgspec.json.schema_components([Config], schema_hook=_path_schema)
    body = components["Config"]
    defaults = as_dict(Config())
    for key, declaration in DECLARATIONS.items():
        values = body["properties"][key]
        values.pop("default", None)
        if declaration.is_list:
            pattern = {"pattern": of} if (of := declaration.described.pattern) else {}
            values = {**values, "items": {**values["items"], **pattern}}
            one_text = {
                "type": "string",
                "description": f"Several are separated by `{LIST_SEPARATOR}`.",
                **pattern,
            }
            values = {"anyOf": [values, one_text]}
        if spellings := declaration.spellings:
            values = _with_spellings(values, spellings)
        described = {"description": declaration.described.description}
        body["properties"][key] = {**described, **values, "default": defaults[key]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **body}


def file_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a configuration file: the settings, and the entries for some nodes."""
    from .fleet import ENTRIES_SCHEMA, entry_schema  # as in `sources.py`

    body = schema()
    for key, declaration in DECLARATIONS.items():
        if (item := declaration.described.item_schema) is not None:
            values, *others = body["properties"][key]["anyOf"]
            both = {**values, "items": {"anyOf": [values["items"], item]}}
            body["properties"][key]["anyOf"] = [both, *others]
    # Without defaults: what an entry does not have is as without it.
    settings = {
        key: {name: value for name, value in described.items() if name != "default"}
        for key, described in body["properties"].items()
        if key not in OF_THE_NODE
    }
    body["properties"] |= {NODES_KEY: {**ENTRIES_SCHEMA, "items": entry_schema(settings)}}
    return body


def _with_spellings(values: dict[str, Any], spellings: tuple[object, ...]) -> dict[str, Any]:
    if "enum" in values:
        return {**values, "enum": [*values["enum"], *spellings]}
    return {"anyOf": [values, {"enum": [*spellings]}]}


def _encode(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"no setting is of the type {type(value)}")


def _path_schema(kind: type) -> dict[str, object]:
    if kind is not Path:
        raise NotImplementedError(f"no setting is of the type {kind}")
    return {"type": "string", "minLength": 1}
