"""The command line. It reads its words, calls the one function that does the work, and turns faults into exit codes.

Exit codes: 0 done; 1 a simulated scenario failed, there is no such GPU, or a replay differs; 2 wrong usage; 65 no
journal that could be replayed (EX_DATAERR); 69 the host cannot be read, or kubelet's directory was never there
(EX_UNAVAILABLE); 70 a bug in gpuactors (EX_SOFTWARE); 73 a file or standard output cannot be written (EX_CANTCREAT); 78
wrong configuration (EX_CONFIG, sysexits.h).
"""

from __future__ import annotations

import errno
import json
import os
import sys
from contextlib import suppress
from typing import Any, Final, NoReturn

import click
import trio

from gpuactors import allocator
from gpuactors.config import DECLARATIONS, Config, ConfigError, Declaration, Resolved, resolve, schema
from gpuactors.observe import log, stdout
from gpuactors.ports import HostError

EX_DATAERR: Final = 65
EX_UNAVAILABLE: Final = 69
EX_SOFTWARE: Final = 70
EX_CANTCREAT: Final = 73
EX_CONFIG: Final = 78


def _option(setting: Declaration) -> click.Option:
    """The flag of a setting. Its value is taken as it is written: whether it is right is the configuration's to say."""
    return click.Option(
        [f"{setting.flag}/--no-{setting.flag[2:]}" if setting.is_switch else setting.flag, setting.key],
        metavar=None if setting.is_switch else setting.metavar,
        default=None,
        multiple=setting.is_list,
        help=setting.described.description,
    )


class Configured(click.Command):
    """A command that takes every setting as a flag."""

    def __init__(self, name: str | None, *, params: list[click.Parameter], **kwargs: Any) -> None:
        file = click.Option(["--config"], metavar="FILE", help="Configuration file, .toml or .yaml.")
        settings = map(_option, DECLARATIONS.values())
        super().__init__(name, params=[*params, file, *settings], **kwargs)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="gpuactors", prog_name="gpuactors")
def cli() -> None:
    """Tells kubelet the truth about every GPU of this node that is passed through to virtual machines.

    Every flag is also a variable GPUACTORS_… and a key of the configuration file. A flag wins over the
    environment, the environment over the file, the file over the default.
    """


@cli.command(cls=Configured)
def run(**flags: object) -> None:
    """Run the daemon."""
    resolved = _resolved(flags)
    config, sources = resolved.config, {key: str(source) for key, source in resolved.provenance.items()}
    from gpuactors import app  # what only the daemon needs is not loaded for the other commands
    from gpuactors.absence import AbsentError

    log.configure(config.log_format, config.log_level, node=app.node_of(config))

    allocator.give_back()
    allocator.keep_the_start()
    try:
        trio.run(app.run_until_signal, config, sources)
    except Exception as exc:
        # Not except*: on Python 3.11.2 an exit from within it is grouped, and the exit code is another one.
        cause = _first(exc)
        if isinstance(cause, AbsentError):
            log.get_logger().error("daemon.gave_up", reason=str(cause))
            sys.exit(EX_UNAVAILABLE)
        if isinstance(cause, HostError):
            _fail(str(cause), EX_CONFIG)
        log.get_logger().error("daemon.died", exc_info=exc)
        _fail(f"internal error, please report it: {cause!r}", EX_SOFTWARE)


@cli.command(cls=Configured)
@click.option("-o", "output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def inspect(output: str, **flags: object) -> None:
    """Show the GPUs of this node, what kubelet would be told about each, and why."""
    from gpuactors import inspection

    config = _config(flags)
    try:
        found = inspection.inspect(config)
    except HostError as exc:
        _fail(str(exc), EX_UNAVAILABLE)
    click.echo(inspection.as_json(found) if output == "json" else inspection.as_table(found))


@cli.command(cls=Configured)
@click.argument("address")
@click.option("-o", "output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def explain(address: str, output: str, **flags: object) -> None:
    """Explain one GPU: whose it is, who holds it, why kubelet is told what it is told, and what happened to it.

    ADDRESS is its PCI address; the domain may be left out (23:00.0). The running daemon is asked; without one
    this command looks for itself, and knows no history.
    """
    from gpuactors import inspection

    config = _config(flags)
    try:
        found = inspection.explain(config, address)
    except inspection.UnknownAddressError as exc:
        _fail(str(exc), 1)
    except HostError as exc:
        _fail(str(exc), EX_UNAVAILABLE)
    click.echo(inspection.explanation_json(found) if output == "json" else inspection.explanation(found))


@cli.command()
@click.option(
    "--scenario", default="incident", show_default=True, metavar="NAME", help="Which story to play."
)
@click.option("--list", "list_only", is_flag=True, help="List the scenarios and end.")
@click.option("--seed", default=0, show_default=True, help="Seed of everything that comes in no fixed order.")
@click.option("--speed", default=1.0, show_default=True, help="How fast the story runs on a terminal.")
@click.option(
    "--json", "json_lines", is_flag=True, help="One JSON object per step instead of the live table."
)
@click.option(
    "--script",
    default=None,
    metavar="'KIND@SLOT+WAIT; …'",
    help="Play this order of events instead of a story, in simulated time, with the books after each.",
)
def simulate(
    scenario: str, list_only: bool, seed: int, speed: float, json_lines: bool, script: str | None
) -> None:
    """Play a story: the real daemon against a fake node and a fake kubelet, over real sockets. Needs no root.

    Ends with exit code 1 if what kubelet was told was not what it should have been. With --script it plays one
    order of events in memory and in simulated time: the line that `just fuzz` prints of what it found.
    """
    if script is not None:
        sys.exit(_replay_script(script, seed, json_lines=json_lines))
    from gpuactors.simulation import run as simulation

    if list_only:
        for name, line in simulation.list_scenarios():
            click.echo(f"{name:<18} {line}")
        return
    if scenario not in dict(simulation.list_scenarios()):
        names = ", ".join(name for name, _ in simulation.list_scenarios())
        raise click.BadParameter(f"no scenario {scenario!r}; there are {names}", param_hint="--scenario")
    if speed <= 0:
        raise click.BadParameter("must be greater than 0", param_hint="--speed")
    sys.exit(
        simulation.simulate(scenario=scenario, seed=seed, speed=speed, json_lines=json_lines, out=sys.stdout)
    )


def _replay_script(script: str, seed: int, *, json_lines: bool) -> int:
    from gpuactors.simulation.histories import events, replay
    from gpuactors.simulation.histories.script import ScriptError, parse_script

    try:
        steps = events.check_names(parse_script(script))
    except ScriptError as exc:
        raise click.BadParameter(str(exc), param_hint="--script") from exc
    return replay.replay(steps, seed, json_lines=json_lines, out=sys.stdout)


@cli.command()
@click.argument("journal", metavar="FILE|DIR", type=click.Path(exists=True))
@click.option(
    "--since",
    metavar="T",
    default=None,
    help="From so many seconds after the beginning on, or a time (ISO 8601).",
)
@click.option("--until", metavar="T", default=None, help="Up to such a time.")
@click.option("--device", metavar="ADDRESS", default=None, help="Only what concerns this PCI device.")
@click.option(
    "--diff", "only_differences", is_flag=True, help="Show only what differs from what was recorded."
)
@click.option(
    "--html", metavar="FILE", default=None, help="Write one page with the timeline of every device instead."
)
@click.option("-o", "output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def replay(
    journal: str,
    since: str | None,
    until: str | None,
    device: str | None,
    only_differences: bool,
    html: str | None,
    output: str,
) -> None:
    """Replay what the daemon recorded: feed its events to the core again, and show what followed.

    FILE is one file of a journal, DIR a directory of them, or the state directory of the daemon. Ends with exit
    code 1 if anything differs from what was recorded.
    """
    from gpuactors.replay import reading, run

    try:
        code = run.replay(
            journal,
            begin=since,
            end=until,
            device=device,
            progress=sys.stderr,
            only_differences=only_differences,
            html=html,
            json_lines=output == "json",
            echo=click.echo,
        )
    except reading.JournalError as exc:
        _fail(str(exc), EX_DATAERR)
    except run.TimeError as exc:
        raise click.BadParameter(str(exc), param_hint=exc.option) from None
    except run.DeviceError as exc:
        raise click.BadParameter(str(exc), param_hint="--device") from None
    except run.PageError as exc:
        _fail(str(exc), EX_CANTCREAT)
    sys.exit(code)


@cli.group(name="config")
def config_group() -> None:
    """The configuration: what is set and from where, and what can be set."""


@config_group.command(cls=Configured)
@click.option("-o", "output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def show(output: str, **flags: object) -> None:
    """Show every key, its value, and where the value came from.

    The running daemon is asked for its own, wherever it got them from. If none runs with this --state-dir, or any other
    flag is given, this shows what a daemon would have that is started now with the same flags and environment.
    """
    from gpuactors import inspection

    resolved = _resolved(flags)
    shown = inspection.Shown(inspection.settings_of(resolved))
    if not _given(flags).keys() - {"state_dir"}:
        shown = inspection.shown(resolved)
    if output == "json":
        known = {s.key: {"value": json.loads(s.value), "from": s.source} for s in shown.settings}
        click.echo(json.dumps(known, indent=2, ensure_ascii=False))
        return
    if shown.heading:
        click.echo(f"{shown.heading}\n")
    key_width = max(len(s.key) for s in shown.settings)
    value_width = max(len(s.value) for s in shown.settings)
    for s in shown.settings:
        click.echo(f"{s.key:<{key_width}}  {s.value:<{value_width}}  {s.source}".rstrip())


@config_group.command(name="schema")
def show_schema() -> None:
    """Print the JSON schema of the configuration file."""
    click.echo(json.dumps(schema(), indent=2, ensure_ascii=False))


def main() -> NoReturn:
    """Runs the command that the process was given, and ends the process."""
    if sys.stdout is not None:
        sys.stdout = stdout.opened()
    try:
        try:
            cli(prog_name="gpuactors")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except Exception as exc:
        cause = _first(exc)
        if not isinstance(cause, stdout.StdoutError):
            raise
        stdout.give_up()
        if cause.errno == errno.EPIPE:  # `gpuactors … | head`: whoever read has seen enough
            sys.exit(1)
        _fail(
            f"standard output cannot be written: {cause.strerror}; free the disk, or write elsewhere",
            EX_CANTCREAT,
        )
    raise AssertionError("click ends the process itself")


def _config(flags: dict[str, object]) -> Config:
    return _resolved(flags).config


def _resolved(flags: dict[str, object]) -> Resolved:
    try:
        return resolve(_given(flags), os.environ)
    except ConfigError as exc:
        _fail(str(exc), EX_CONFIG)


def _given(flags: dict[str, object]) -> dict[str, object]:
    """The flags that were on the command line."""
    return {key: value for key, value in flags.items() if value is not None and value != ()}


def _fail(text: str, code: int) -> NoReturn:
    with suppress(OSError):  # the code says it where nobody can read the sentence
        click.echo(f"gpuactors: {text}", err=True)
    sys.exit(code)


def _first(exc: BaseException) -> BaseException:
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc
