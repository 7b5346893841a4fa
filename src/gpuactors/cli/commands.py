"""The command line. It parses the arguments, calls the one function that does the work, and turns errors into exit
codes.

Exit codes: 0 done; 1 a simulated scenario failed, there is no such GPU, a replay differs, or `doctor` has a FAIL; 2
wrong usage; 65 no journal that can be replayed (EX_DATAERR); 69 the host cannot be read, kubelet's directory was never
there, or gpuactors[simulation] is not installed (EX_UNAVAILABLE); 70 a bug in gpuactors (EX_SOFTWARE); 73 a file or
standard output cannot be written (EX_CANTCREAT); 78 wrong configuration (EX_CONFIG, sysexits.h); 141 whoever reads the
output has closed the pipe, as `head` does: as if SIGPIPE had ended the command.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar

import click

from gpuactors.cli import completion
from gpuactors.cli.ending import EX_CANTCREAT, EX_CONFIG, EX_DATAERR, EX_UNAVAILABLE, fail, first
from gpuactors.cli.examples import epilog
from gpuactors.cli.formats import Format, either
from gpuactors.cli.output import columns_of, wants_colour
from gpuactors.cli.progress import Progress
from gpuactors.cli.settings import resolved, resolving
from gpuactors.config import CONFIG_FILE_VARIABLE, Config, ConfigError, file_schema
from gpuactors.config.options import Configured, ConfiguredDaemon, Suggesting
from gpuactors.core.values.quote import quoted, quoted_id, quoted_name
from gpuactors.limits import QUOTED_NAME_CHARS_MAX
from gpuactors.observe import stdout
from gpuactors.ports.errors import ControlError, HostError

EX_PIPE: Final = 128 + signal.SIGPIPE

F = TypeVar("F", bound=Callable[..., Any])


def _output(*formats: Format) -> Callable[[F], F]:
    choices = click.Choice([str(name) for name in formats])
    return click.option(
        "-o", "output", type=choices, default=choices.choices[0], show_default=True, help="Output format."
    )


class _Quoting(click.Group):
    """Quotes the words of the command line in the errors of click, which repeats them as they are, of any length."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse as click does."""
        with _quoted_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, which parses its own words, as click does."""
        with _quoted_errors():
            return super().invoke(ctx)


@contextmanager
def _quoted_errors() -> Iterator[None]:
    try:
        yield
    except click.UsageError as exc:
        message = _LONG_WORD.sub(lambda word: quoted_name(word[0]), exc.format_message())
        raise click.UsageError(quoted(" ".join(message.splitlines())), exc.ctx) from None


_LONG_WORD: Final = re.compile(rf"\S{{{QUOTED_NAME_CHARS_MAX + 1},}}")


@click.group(
    cls=_Quoting,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=epilog(""),
)
@click.version_option(package_name="gpuactors", prog_name="gpuactors")
def cli() -> None:
    """Device plugin for GPUs that are passed through to virtual machines.

    Each setting is a flag, an environment variable GPUACTORS_… and a key of the configuration file.
    """


@cli.command(cls=ConfiguredDaemon, epilog=epilog("run"))
def run(**flags: object) -> None:
    """Run the device plugin until a signal stops it."""
    from gpuactors.cli import start

    start.run(resolved(flags, starts=True), resolving(flags))


@cli.command(cls=Configured, epilog=epilog("inspect"))
@_output(Format.TABLE, Format.WIDE, Format.JSON, Format.YAML)
@click.option(
    "-w", "--watch", is_flag=True, help="Show the running daemon's view as it changes, until Ctrl-C."
)
def inspect(output: str, watch: bool, **flags: object) -> None:
    """Show the GPUs, claims and compute domains of this node.

    For each GPU it shows driver, IOMMU group, health and reason.

    The view is the running daemon's. Without a daemon this command reads the node itself, and shows what a daemon with
    these settings would list.

    With --watch the daemon must run. On a terminal the screen is kept up to date, and its last line names the keys:
    one row is selected, Enter explains it, q ends. Elsewhere a line, or with -o json or yaml a document, is written
    for each change. Terminals get colours unless NO_COLOR is set.
    """
    from gpuactors.cli.inspect import colours, report, view

    config = _config(flags)
    if watch:
        _watch(config, Format(output))
        return
    try:
        inspected = view.inspect(config, Progress(sys.stderr))
    except HostError as exc:
        fail(str(exc), EX_UNAVAILABLE)
    paint = colours.coloured if wants_colour(sys.stdout, os.environ) else colours.plain
    match output:
        case Format.TABLE:
            click.echo(report.as_table(inspected, _columns(), paint))
        case Format.WIDE:
            click.echo(report.as_wide(inspected, _columns(), paint))
        case _:
            click.echo(either(output, report.as_json(inspected)))


def _watch(config: Config, output: Format) -> None:
    from gpuactors.cli.live import run as live

    try:
        live.watch(
            config, output, out=sys.stdout, keys=sys.stdin, aside=lambda text: click.echo(text, err=True)
        )
    except ControlError as exc:
        fail(f"nothing to watch: {exc}", EX_UNAVAILABLE)


@cli.command(cls=Configured, epilog=epilog("explain"))
@click.argument("address", metavar="ADDRESS|RESOURCE|NAME|UID", shell_complete=completion.explainable)
@_output(Format.TEXT, Format.JSON, Format.YAML)
def explain(address: str, output: str, **flags: object) -> None:
    """Explain one GPU, resource, pod, VM, claim or compute domain.

    For a GPU it shows owner, holders, health with the reason, and history.

    ADDRESS is the GPU's PCI address; you can omit the PCI domain (23:00.0). RESOURCE is the name of an extended
    resource. NAME is NAMESPACE/NAME of a pod that has a GPU, of its KubeVirt virtual machine, of a ResourceClaim or of
    a ComputeDomain; UID is that of a claim or domain. A virtual machine needs no NAMESPACE. If several have one name,
    pod/NAMESPACE/NAME is the pod, and vm/NAMESPACE/NAME the virtual machine. The view is the running daemon's. Without
    a daemon this command reads the node itself, and has no history and no claims.
    """
    from gpuactors.cli.inspect import report, view

    config = _config(flags)
    try:
        explained = view.explain(config, quoted(address), Progress(sys.stderr))
    except view.UnknownAddressError as exc:
        fail(str(exc), 1)
    except HostError as exc:
        fail(str(exc), EX_UNAVAILABLE)
    if output == Format.TEXT:
        click.echo(report.explained_text(explained, _columns()))
    else:
        click.echo(either(output, report.explained_json(explained)))


@cli.command(cls=Configured, epilog=epilog("doctor"))
@click.option(
    "--pre",
    is_flag=True,
    help="Before installation: check only the host and other plugins; expect no daemon.",
)
@click.option(
    "--before-nvidia",
    is_flag=True,
    help="Before NVIDIA's DRA driver is started on this node: check that nothing here is in use.",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait until nothing is a FAIL, for at most so long.",
)
@click.option(
    "--kubevirt",
    metavar="FILE",
    help="KubeVirt's custom resource, as kubectl prints it; - is standard input. Check what it permits.",
)
@_output(Format.TEXT, Format.JSON, Format.YAML)
def doctor(
    pre: bool, before_nvidia: bool, wait_s: float, kubevirt: str | None, output: str, **flags: object
) -> None:
    """Find the problems of this node, and name the remedies.

    It checks the IOMMU, drivers, nodes, kubelet, the daemon, claims, and what KubeVirt must permit. Each finding is
    PASS, WARN or FAIL. The settings are the running daemon's, unless they are given here. The command changes nothing
    on the node. Exit code 1: something is a FAIL.
    """
    from gpuactors.cli.doctor.run import examined

    if pre and before_nvidia:
        raise click.UsageError(
            "--pre expects no daemon, and --before-nvidia asks the running one: give one of them"
        )
    examination = examined(
        resolved(flags),
        pre=pre,
        progress=Progress(sys.stderr),
        wait_s=wait_s,
        kubevirt=kubevirt,
        before_nvidia=before_nvidia,
    )
    if output == Format.TEXT:
        click.echo(examination.text(_columns(), colour=wants_colour(sys.stdout, os.environ)))
    else:
        click.echo(either(output, examination.json()))
    sys.exit(1 if examination.is_failed else 0)


@cli.command(cls=Suggesting, epilog=epilog("simulate"))
@click.option(
    "--scenario",
    default="incident",
    show_default=True,
    metavar="NAME",
    help="Which scenario to play.",
    shell_complete=completion.scenarios,
)
@click.option("--list", "list_only", is_flag=True, help="List the scenarios and exit.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random choices.")
@click.option("--speed", default=1.0, show_default=True, help="Speed on a terminal; 2 is twice as fast.")
@_output(Format.TEXT, Format.JSON)
def simulate(scenario: str, list_only: bool, seed: int, speed: float, output: str) -> None:
    """Play a scenario: the real daemon on a fake node. Needs no root.

    The node's files and its kubelet are fake, the sockets between kubelet and daemon are real. It needs the package
    gpuactors[simulation]. Exit code 1: kubelet received a wrong device list, or a claim got a wrong GPU.
    """
    _need_simulation()
    from gpuactors_simulation import run as simulation

    if list_only:
        for name, line in simulation.list_scenarios():
            click.echo(f"{name:<18} {line}")
        return
    if scenario not in dict(simulation.list_scenarios()):
        names = ", ".join(name for name, _ in simulation.list_scenarios())
        raise click.BadParameter(
            f"there is no scenario '{quoted_id(scenario)}'; there are {names}", param_hint="--scenario"
        )
    if speed <= 0:
        raise click.BadParameter("must be greater than 0", param_hint="--speed")
    sys.exit(
        simulation.simulate(
            scenario=scenario,
            seed=seed,
            speed=speed,
            json_lines=output == "json",
            out=sys.stdout,
            columns=_columns(),
        )
    )


@cli.command(cls=Suggesting, epilog=epilog("replay"))
@click.argument("journal", metavar="FILE|DIR", type=click.Path(exists=True))
@click.option(
    "--since",
    metavar="T",
    default=None,
    help="Begin here: seconds after the start of the journal, or a time (ISO 8601).",
)
@click.option("--until", metavar="T", default=None, help="End here, written as for --since.")
@click.option(
    "--device",
    metavar="ADDRESS|NAME",
    default=None,
    help="Show only this PCI device, or this device of compute domains (channel-0).",
)
@click.option(
    "--diff", "only_differences", is_flag=True, help="Show only the differences from the recording."
)
@click.option(
    "--html",
    metavar="FILE",
    default=None,
    help="Write a page with the timeline of each device to FILE instead; - is standard output. Needs "
    "gpuactors[simulation].",
)
@_output(Format.TEXT, Format.JSON)
def replay(
    journal: str,
    since: str | None,
    until: str | None,
    device: str | None,
    only_differences: bool,
    html: str | None,
    output: str,
) -> None:
    """Replay a journal, and show the differences from the recording.

    The same core processes the recorded events again. FILE is one file of a journal; DIR is a directory of such files,
    or the daemon's state directory. Exit code 1: there are differences.
    """
    from gpuactors.replay import reading, run

    page_file = None
    if html is not None:
        _need_simulation()
        from gpuactors_simulation.replay_page.page import Page

        page_file = run.PageFile(html, Page)
    try:
        code = run.replay(
            journal,
            begin=since,
            end=until,
            device=device,
            progress=Progress(sys.stderr),
            only_differences=only_differences,
            page_file=page_file,
            json_lines=output == "json",
            echo=click.echo,
        )
    except reading.JournalError as exc:
        fail(str(exc), EX_DATAERR)
    except run.TimeError as exc:
        raise click.BadParameter(str(exc), param_hint=exc.option) from None
    except run.DeviceError as exc:
        raise click.BadParameter(str(exc), param_hint="--device") from None
    except run.PageError as exc:
        fail(str(exc), EX_CANTCREAT)
    sys.exit(code)


@cli.command(cls=Configured, epilog=epilog("bundle"))
def bundle(**flags: object) -> None:
    """Write what a report of a fault needs, as one archive (tar.gz).

    The archive goes to standard output, and the list of its files to standard error. It has the journal, the doctor,
    the settings, the view, the metrics and the versions. It has names of pods, claims and PCI addresses, but no secret.
    The command changes nothing on the node. The error of a part that cannot be had takes its place.
    """
    if sys.stdout is None:
        fail("standard output is closed, and the archive goes there", EX_CANTCREAT)
    if sys.stdout.isatty():
        raise click.UsageError(
            "the archive is not for a terminal: write it to a file, as in gpuactors bundle > gpuactors-NODE.tar.gz"
        )
    from gpuactors.cli.bundle import archive, parts
    from gpuactors.cli.simulation import unavailable

    settings = resolved(flags)
    directory = parts.directory_of(settings)
    archive.write(
        sys.stdout.buffer,
        directory,
        parts.parts(settings, Progress(sys.stderr), None if unavailable() else _page_of),
        parts.readme(directory),
        lambda line: click.echo(line, err=True),
    )


def _page_of(journal: str) -> str:
    """Return the page of the journal in this directory. Raises `reading.JournalError`."""
    from gpuactors.replay import run
    from gpuactors_simulation.replay_page.page import Page

    pages: list[str] = []
    run.replay(
        journal,
        end=None,
        only_differences=False,
        page_file=run.PageFile(run.STANDARD_OUTPUT, Page),
        json_lines=False,
        echo=pages.append,
    )
    return "".join(pages)


@cli.group(name="config", epilog=epilog("config"))
def config_group() -> None:
    """Show the settings, or check a configuration file."""


@config_group.command(cls=Configured, epilog=epilog("config show"))
@_output(Format.TABLE, Format.JSON, Format.YAML)
def show(output: str, **flags: object) -> None:
    """Show each setting: key, value, and where the value came from.

    The settings are the running daemon's. Without a daemon in this state directory, or with any other flag, they
    are those of a daemon that is started now with the same flags and environment.
    """
    from gpuactors.cli import shown_settings
    from gpuactors.cli.inspect import view

    settings = resolved(flags)
    shown = view.Shown(view.settings_of(settings))
    if {key for key, value in flags.items() if value not in (None, ())} <= {"state_dir"}:
        shown = view.shown(settings, Progress(sys.stderr))
    if output != Format.TABLE:
        click.echo(either(output, shown_settings.as_json(shown.settings)))
        return
    if shown.heading:
        click.echo(f"{shown.heading}\n")
    click.echo("\n".join(shown_settings.as_table(shown.settings)))


@config_group.command(name="schema", cls=Suggesting, epilog=epilog("config schema"))
def show_schema() -> None:
    """Print the JSON Schema of the configuration file."""
    click.echo(json.dumps(file_schema(), indent=2, ensure_ascii=False))


@config_group.command(name="check", cls=Suggesting, epilog=epilog("config check"))
@click.option(
    "--config",
    "path",
    metavar="FILE",
    help=f"Configuration file.  [env var: {CONFIG_FILE_VARIABLE}]",
)
@click.option("--node", metavar="NAME", help="Show the settings of the node of this name.")
@click.option("--labels", metavar="KEY=VALUE,…", help="All labels of that node, which entries may match.")
@click.option(
    "--nodes",
    metavar="FILE|-",
    help="Check the settings of each node: the output of kubectl get nodes -o json.",
)
@_output(Format.TABLE, Format.JSON, Format.YAML)
def check_config(
    path: str | None, node: str | None, labels: str | None, nodes: str | None, output: str
) -> None:
    """Check a configuration file for all its nodes.

    The file alone is checked: flags and variables of this machine do not count.
    """
    from gpuactors.cli import config_check

    path = path or os.environ.get(CONFIG_FILE_VARIABLE)
    if path is None:
        raise click.UsageError("name the configuration file by --config")
    if labels is not None and node is None:
        raise click.UsageError("--labels are those of a node: name it by --node")
    try:
        lines = config_check.report(path, node, labels, nodes, output)
    except (ConfigError, config_check.NodesError) as exc:
        fail(str(exc), EX_CONFIG)
    click.echo("\n".join(lines))


@cli.command(name="completion", cls=Suggesting, epilog=epilog("completion"))
@click.argument("shell", type=click.Choice(completion.SHELLS))
def completion_script(shell: str) -> None:
    """Print the script for completion in a shell.

    GPUs, claims and compute domains that `explain` takes come from the running daemon.
    """
    click.echo(completion.script(cli, shell))


def main() -> NoReturn:
    """Run the command of the command line, and end the process."""
    if sys.stdout is not None:
        sys.stdout = stdout.opened()
    try:
        try:
            if completion.VARIABLE in os.environ:
                completion.register()
            cli(prog_name=completion.PROGRAM)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except Exception as exc:
        cause = first(exc)
        if not isinstance(cause, stdout.StdoutError):
            raise
        stdout.give_up()
        if cause.errno == errno.EPIPE:  # `gpuactors … | head`: the reader has closed the pipe
            sys.exit(EX_PIPE)
        fail(
            f"standard output cannot be written: {cause.strerror}; free the disk, or write elsewhere",
            EX_CANTCREAT,
        )
    raise AssertionError("click ends the process itself")


def _need_simulation() -> None:
    """End the command unless `gpuactors_simulation` can be imported."""
    from gpuactors.cli.simulation import unavailable

    if why := unavailable():
        fail(why, EX_UNAVAILABLE)


def _columns() -> int:
    return columns_of(sys.stdout, os.environ)


def _config(flags: dict[str, object]) -> Config:
    return resolved(flags).config
