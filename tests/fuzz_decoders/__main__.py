"""The command."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz_decoders.run import run


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_decoders", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        counts, broken = run(
            Path(directory), options.inputs, options.seed, say=lambda line: print(line, flush=True)
        )
    for name, count in counts.most_common():
        print(f"{count:10,}  {name}")
    print(f"{counts.total():,} inputs, {len(broken)} failures, {time.monotonic() - began:.0f} s")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
