"""Configuration: what an operator may choose, where each value came from, and words for what is wrong with one.

Four sources, the first that speaks wins: flag, environment (`GPUACTORS_…`), file (`--config FILE`), default. Each
setting is written once, in `settings.py`; its names, help, schema and row in the README follow (`declaration.py`). A
name that means nothing is an error, because a setting that silently does nothing costs more than one that is refused.

Must not hold bounds (they are in `limits.py`) and must not look at the host beyond reading the file it was given.
"""

from .declaration import Declaration
from .schema import as_dict, schema
from .settings import (
    DECLARATIONS,
    DEFAULT_SELECTORS,
    KEYS,
    Config,
    KernelUevents,
    NoUevents,
    SocketUevents,
    UeventSource,
)
from .sources import CONFIG_FILE_VARIABLE, ConfigError, Provenance, Resolved, load, resolve

__all__ = [
    "CONFIG_FILE_VARIABLE",
    "DECLARATIONS",
    "DEFAULT_SELECTORS",
    "KEYS",
    "Config",
    "ConfigError",
    "Declaration",
    "KernelUevents",
    "NoUevents",
    "Provenance",
    "Resolved",
    "SocketUevents",
    "UeventSource",
    "as_dict",
    "load",
    "resolve",
    "schema",
]
