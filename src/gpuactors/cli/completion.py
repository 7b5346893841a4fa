"""Completion in the shell: the script that a shell reads, and the values that only a node knows.

Must be quick and silent: it runs while somebody types. What cannot be had in time is not offered.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from gpuactors.config import KEYS, Config, ConfigError, resolve
from gpuactors.config.declaration import CONFIG_FILE_KEY

COMPLETION_S: Final = 0.5
"""The deadline of the running daemon's answer, in seconds, while a command is typed; it takes milliseconds."""

PROGRAM: Final = "gpuactors"
VARIABLE: Final = "_GPUACTORS_COMPLETE"
"""The variable that a shell sets to ask for completions; click reads it."""

SHELLS: Final = ("bash", "zsh", "fish")

_BASH: Final = r"""
%(complete_func)s() {
    local line="${COMP_LINE:0:$COMP_POINT}" type value word before=""
    # Bash ends a word at each colon, and PCI addresses have some: what is before the last one is on the line already.
    word="${line##*[[:space:]]}"
    [[ $COMP_WORDBREAKS == *:* ]] && before="${word%%"${word##*:}"}"
    COMPREPLY=()
    while IFS=',' read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$before"}") ;;
        esac
    done < <(COMP_WORDS="$line" %(complete_var)s=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class ColonBash(BashComplete):
    """Click's completion for bash, for words with colons."""

    source_template = _BASH

    def source(self) -> str:
        """Return the script. That of click starts a shell first, to look at its version."""
        return self.source_template % self.source_vars()

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one that is completed, and what is typed of that."""
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)
        incomplete = words.pop() if words and not line[-1].isspace() else ""
        return words[1:], incomplete


def register() -> None:
    """Use this script and these words for bash instead of click's."""
    add_completion_class(ColonBash, "bash")


def script(cli: click.Command, shell: str) -> str:
    """Return the completion script for a shell."""
    register()
    completion = get_completion_class(shell)
    assert completion is not None
    return completion(cli, {}, PROGRAM, VARIABLE).source().strip("\n")


def explainable(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """List the arguments of `explain` that the running daemon knows; empty if none answers at once."""
    try:
        flags = {k: v for k, v in context.params.items() if k in (*KEYS, CONFIG_FILE_KEY)}
        config = resolve(flags, os.environ).config
    except ConfigError:
        return []
    items = [CompletionItem(name, help=description) for name, description in _explainable(config)]
    fitting = [item for item in items if item.value.startswith(incomplete)]
    # Without the PCI domain, as it is typed.
    short = [CompletionItem(item.value.removeprefix(_DOMAIN), help=item.help) for item in items]
    return fitting or [item for item in short if incomplete and item.value.startswith(incomplete)]


_DOMAIN: Final = "0000:"


def scenarios(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return the names of the scenarios; none where the simulation is not installed."""
    from gpuactors.cli.simulation import unavailable

    if unavailable():
        return []
    from gpuactors_simulation.run import list_scenarios

    return [CompletionItem(name, help=line) for name, line in list_scenarios() if name.startswith(incomplete)]


def _explainable(config: Config) -> Iterator[tuple[str, str]]:
    from gpuactors.control.client import read_status
    from gpuactors.control.path import socket_path
    from gpuactors.ports.errors import ControlError

    within_s = COMPLETION_S / 2  # for each of the two
    try:
        view = read_status(socket_path(str(config.state_dir)), within_s, within_s).view
    except ControlError:
        return
    for device in view.devices:
        yield device.address, f"{device.model or 'GPU'}, {device.health}"
    for resource in view.resources:
        yield resource.name, f"resource, {resource.free} free"
    for pod in view.pods:
        yield str(pod), f"pod, {len(pod.devices)} GPUs"
        if pod.vm:
            yield pod.vm, f"virtual machine, {len(pod.devices)} GPUs"
    for claims in view.drivers:
        for claim in claims.claims:
            yield str(claim), f"claim, {claim.state}"
    for domain in view.domains.domains if view.domains is not None else ():
        yield str(domain), f"ComputeDomain, {domain.status}"
