"""The output formats of the commands. YAML has the very structure of JSON, as it is made of it.

A file of its own: the parsing of the command line and the live view both need it.
"""

from __future__ import annotations

import json
from enum import StrEnum

from gpuactors.core.values.quote import printable_json


class Format(StrEnum):
    """The values of `-o`; each command has one of the first two, and some have WIDE."""

    TEXT = "text"
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


def yaml_of(as_json: str) -> str:
    """Return this JSON as YAML, with the keys in their order."""
    import yaml

    content = json.loads(as_json)
    # YAML leaves some characters as they are on which a terminal acts.
    shows_all = json.dumps(content, ensure_ascii=False).isprintable()
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=shows_all, width=100).rstrip("\n")


def either(output: str, as_json: str) -> str:
    """Return JSON, or the same as YAML; of printable characters."""
    return yaml_of(as_json) if output == Format.YAML else printable_json(as_json)
