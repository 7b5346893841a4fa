"""`./do soak --hours N`: a real node, on which pods, claims and compute domains come and go while components restart.

It plays events from a seed, judges the books of all GPUs all the time, and samples what the daemon takes. At the end it
draws that, and writes a summary. It needs root and the programs of the real node (tests/node/README.md). Ctrl-C ends it
after its round, with its summary.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.node.lane import EndedError, lanes, wait
from tests.node.run import CHECKOUT, DIRECTORY, Run, on_lanes
from tests.soak.audit import arguments as audited

RESULTS: Final = CHECKOUT / "var" / "soak"
COMMAND: Final = "./do soak"
END_S: Final = 900.0
"""From Ctrl-C to the end of a round, of all pods, and of what was installed."""


def main(words: Sequence[str]) -> int:
    """1 where a rule of the books was broken, a pod has not run, or descriptors leak."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hours", type=float, default=1.0, help="how long; a fraction of an hour is allowed")
    parser.add_argument("--seed", type=int, help="of an earlier soak: plays its events again")
    parser.add_argument("--output", type=Path, help="directory of what it leaves; by default one in var/soak")
    given = parser.parse_args(words)
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    directory = (given.output or RESULTS / time.strftime("%Y-%m-%d-%H%M%S")).resolve()
    return on_lanes(COMMAND, lanes(1, DIRECTORY), lambda run: _soak(run, given.hours, seed, directory))


def _soak(run: Run, hours: float, seed: int, directory: Path) -> int:
    print(f"{COMMAND}: seed {seed}, {hours:g} hours, {directory}", flush=True)
    run.install()
    directory.mkdir(parents=True, exist_ok=True)
    more = f"{os.environ.get('K8S_APISERVER_ARGS', '')} {audited(directory)}"
    run.environment |= {"K8S_APISERVER_ARGS": more.strip()}
    with run.up("A"):
        return _wait(
            run,
            run.program(
                "tests.soak.day", "--seconds", str(hours * 3600), "--seed", str(seed), "--directory", str(directory)
            ),
        )  # fmt: skip


def _wait(run: Run, day: subprocess.Popen[str]) -> int:
    """Its exit code. The first signal is passed on to it, the second one ends the node at once."""
    try:
        return wait(day, None, run.signals)
    except EndedError:
        print(f"{COMMAND}: ends after this round; once more: at once", flush=True)
        run.signals.asked = False
        day.send_signal(signal.SIGINT)
        return wait(day, END_S, run.signals)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
