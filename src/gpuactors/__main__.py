"""The entry point of `gpuactors` and `python -m gpuactors`: sets the signals' handlers before the slow imports.

A file of its own: Python runs the package by this name.
"""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

from gpuactors.process import betterproto2_version, startup_signals


def main() -> NoReturn:
    """Run the command line."""
    betterproto2_version.put_in()
    if sys.argv[1:2] == ["run"]:
        startup_signals.guard()
        gc.disable()  # the imports make 50,000 objects that stay; `malloc.keep_the_start` switches it on
        from gpuactors.cli import settings, start

        if (flags := start.flags_of(sys.argv[2:])) is not None:
            start.run(settings.resolved(flags, starts=True), settings.resolving(flags))
            sys.exit()
    from gpuactors.cli import commands

    commands.main()


if __name__ == "__main__":
    main()
