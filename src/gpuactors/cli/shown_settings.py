"""Settings with their values and sources, as commands print them. A file of its own: `config show` and `config check`
both need it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gpuactors.control.about import Setting


def as_json(settings: Sequence[Setting]) -> str:
    """Return the settings by key, each with its value and source."""
    by_key = {s.key: {"value": json.loads(s.value), "from": s.source} for s in settings}
    return json.dumps(by_key, indent=2, ensure_ascii=False)


def as_table(settings: Sequence[Setting]) -> list[str]:
    """Return a line for each setting: key, value and source."""
    key_width = max((len(s.key) for s in settings), default=0)
    value_width = max((len(s.value) for s in settings), default=0)
    return [f"{s.key:<{key_width}}  {s.value:<{value_width}}  {s.source}".rstrip() for s in settings]
