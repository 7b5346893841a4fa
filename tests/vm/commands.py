"""apt and dpkg as the set-up runs them: without questions, under a deadline, with their words in the error.

Standard library only: it runs before the virtual environment has to exist.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

APT_TIMEOUT_S: Final = 900.0
"""One apt or dpkg command. 70 MB over a slow line; apt's own lock is waited for inside it."""


class ProvisionError(Exception):
    """Something the machine needs is missing; the text says what and how to get it."""


class FailedError(ProvisionError):
    """A program has ended with a status that is no success."""

    def __init__(self, argv: Sequence[str], status: int, words: str) -> None:
        super().__init__(f"`{' '.join(argv)}` failed with {status}:\n{words}")
        self.status = status
        self.words = words


def run(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    timeout_s: float = APT_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program; what it wrote to its standard output. Raises ProvisionError with what it wrote to the other.

    `environment` is added to that of this process.
    """
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    variables = {**os.environ, **quiet, **(environment or {})}
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise ProvisionError(
            f"{argv[0]} is not there: install it (on Debian 12 `./do` installs what a recipe needs)"
        ) from None
    except subprocess.TimeoutExpired:
        raise ProvisionError(f"`{' '.join(argv)}` took more than {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise FailedError(argv, done.returncode, done.stderr.strip())
    return done.stdout


def apt_get(*arguments: str, cwd: Path | None = None) -> str:
    """`apt-get`, as `run`."""
    # As root apt drops to a user that often cannot write where we are; it would only warn, at length.
    sandbox = ("-o", "APT::Sandbox::User=root") if os.geteuid() == 0 else ()
    return run(("apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300", *sandbox, *arguments), cwd=cwd)


def need_root(to_do: str) -> None:
    """Raises ProvisionError, which says what to do as root, unless this is root."""
    if os.geteuid() != 0:
        raise ProvisionError(f"this needs root: run `{to_do}` as root, then try again")


def install(*packages: str) -> None:
    """Have the machine's apt install them. Raises ProvisionError."""
    need_root(f"apt-get update && apt-get install --no-install-recommends {' '.join(packages)}")
    try:
        apt_get("install", "--no-install-recommends", *packages)
    except ProvisionError:  # no list, or a list so old that the mirror no longer has what it names
        apt_get("update")
        apt_get("install", "--no-install-recommends", *packages)
