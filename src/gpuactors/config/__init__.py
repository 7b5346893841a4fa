"""Configuration: the settings, the source of each value, and error messages for wrong ones.

Four sources, the first that has a value wins: flag, environment (`GPUACTORS_…`), file (`--config FILE`), default. Each
setting is declared once, in `settings.py`; its names, help, schema and row in the README are derived
(`declaration.py`). An unknown name is an error, because a setting without effect costs more than a refused one.

Must not hold bounds of the running program, and must not read the host except for the configuration file.
"""

from .declaration import Declaration
from .schema import as_dict, file_schema, schema
from .settings import (
    DECLARATIONS,
    DEFAULT_SELECTORS,
    KEYS,
    Config,
    EverywhereHttp,
    HttpAddress,
    TcpHttp,
    UnixHttp,
)
from .sources import CONFIG_FILE_VARIABLE, ConfigError, Provenance, Resolved, SourcedLabels, load, resolve

__all__ = [
    "CONFIG_FILE_VARIABLE",
    "DECLARATIONS",
    "DEFAULT_SELECTORS",
    "KEYS",
    "Config",
    "ConfigError",
    "Declaration",
    "EverywhereHttp",
    "HttpAddress",
    "Provenance",
    "Resolved",
    "SourcedLabels",
    "TcpHttp",
    "UnixHttp",
    "as_dict",
    "file_schema",
    "load",
    "resolve",
    "schema",
]
