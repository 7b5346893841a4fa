"""The start of the daemon, by `gpuactors run`, without what only other commands need.

`__main__` calls it with the plain words of a manifest. Any other command line (`--help`, an unknown flag) is
parsed by click in `commands.py`, which takes 30 ms more, and says what is wrong with it. Must not import click.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import trio

from gpuactors.cli.ending import EX_CONFIG, EX_SOFTWARE, EX_UNAVAILABLE, fail, first
from gpuactors.config import DECLARATIONS, Resolved
from gpuactors.config.declaration import CONFIG_FILE_KEY, flag_of
from gpuactors.observe import log
from gpuactors.ports.errors import HostError
from gpuactors.process import malloc
from gpuactors.process.logger import get_logger

if TYPE_CHECKING:
    from gpuactors.daemon.config_file import ConfigFile

_NO_FILE: Final = (
    "reload is on, and there is no configuration file to read again: name it by --config, or leave reload off"
)


def flags_of(words: Sequence[str]) -> dict[str, object] | None:
    """Return the flags as click would hand them over; None if they are not all written out as `--flag=VALUE` or `--flag
    VALUE`."""
    keys = {setting.flag: key for key, setting in DECLARATIONS.items()}
    keys[flag_of(CONFIG_FILE_KEY)] = CONFIG_FILE_KEY
    flags: dict[str, object] = {}
    lists: dict[str, tuple[str, ...]] = {}
    remaining = iter(words)
    for word in remaining:
        flag, has_value, value = word.partition("=")
        if not has_value:
            value = next(remaining, "-")
        key = keys.get(flag)
        if key is None or (not has_value and value.startswith("-")):
            return None
        if key in DECLARATIONS and DECLARATIONS[key].is_list:
            lists[key] = (*lists.get(key, ()), value)
        else:
            flags[key] = value
    return flags | lists


def run(resolved: Resolved, again: Callable[[], Resolved]) -> None:
    """Run the daemon until a signal stops it. Ends the process with a code where it fails. `again` as in
    `daemon.config_file.ConfigFile`."""
    config, sources = resolved.config, {key: str(source) for key, source in resolved.provenance.items()}
    from gpuactors.daemon import app
    from gpuactors.daemon.about import node_of
    from gpuactors.daemon.startup_checks import AbsentError

    file: ConfigFile | None = None
    if config.reload == "on":
        if not resolved.file:
            fail(_NO_FILE, EX_CONFIG)
        from gpuactors.daemon.config_file import ConfigFile

        file = ConfigFile(resolved, again)
    log.configure(config.log_format, config.log_level, node=node_of(config))

    malloc.give_back()
    malloc.keep_the_start()
    try:
        trio.run(app.run_until_signal, config, sources, file)
    except Exception as exc:
        # Not except*: on Python 3.11.2 an exit from within it is grouped, and the exit code is another one.
        cause = first(exc)
        if isinstance(cause, AbsentError):
            get_logger().error("daemon.gave_up", reason=str(cause))
            sys.exit(EX_UNAVAILABLE)
        if isinstance(cause, HostError):
            fail(str(cause), EX_CONFIG)
        get_logger().error("daemon.died", exc_info=exc)
        fail(f"internal error, please report it: {type(cause).__name__}: {cause}", EX_SOFTWARE)
