"""The output formats of the commands. YAML has the very structure of JSON, as it is made of it.

A file of its own: the parsing of the command line and the live view both need it.
"""

from __future__ import annotations

import json
from enum import StrEnum


class Format(StrEnum):
    """The values of `-o`; each command has one of the first two, and some have WIDE."""

    TEXT = "text"
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


def yaml_of(as_json: str) -> str:
    """This JSON as YAML, with the keys in their order."""
    import yaml

    return yaml.safe_dump(json.loads(as_json), sort_keys=False, allow_unicode=True, width=100).rstrip("\n")


def either(output: str, as_json: str) -> str:
    """JSON, or the same as YAML."""
    return yaml_of(as_json) if output == Format.YAML else as_json
