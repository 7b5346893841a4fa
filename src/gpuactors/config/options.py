"""The settings as options of the command line: the flags, and their lines in `--help`.

Must not read the environment, nor judge a value: `sources.py` does.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from .declaration import LIST_SEPARATOR, Declaration
from .settings import DECLARATIONS
from .sources import CONFIG_FILE_VARIABLE

PRECEDENCE: Final = (
    "A flag wins over the environment, the environment over the configuration file, the file over the default. "
    "The file is TOML (.toml) or YAML (.yaml, .yml); in it, --host-root is the key host_root."
)
"""The help text before the settings."""

_PATHS: Final = {"DIR": "dir", "FILE": "file"}
"""The kinds of path that a shell completes itself, by metavar."""

SEVERAL: Final = f"The flag may be repeated. In the variable, {LIST_SEPARATOR} separates values."
"""The help text of a setting with several values."""


class Suggesting(click.Command):
    """A command that suggests the nearest of its flags for one that it does not have."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, whose suggestions are three for most of the flags."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as exc:
            flags = [flag for parameter in self.get_params(ctx) for flag in parameter.opts]
            nearest = difflib.get_close_matches(exc.option_name, flags, n=1)
            raise click.NoSuchOption(exc.option_name, possibilities=nearest, ctx=ctx) from None


class Configured(Suggesting):
    """A command that takes every setting as a flag. Its help names the settings of the daemon by `--help-settings`."""

    settings_in_help = False

    def __init__(self, name: str | None, *, params: list[click.Parameter], **kwargs: Any) -> None:
        settings = map(_option, DECLARATIONS.values())
        super().__init__(name, params=[*params, _config_file(), *settings, _help_settings()], **kwargs)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options as click does, then its settings, or how to list them."""
        records = self._records(ctx)
        with formatter.section("Options"):
            formatter.write_dl([record for name, record in records.items() if name not in DECLARATIONS])
        if self.settings_in_help:
            self.format_settings(ctx, formatter)
        else:
            with formatter.section("Settings"):
                formatter.write_text(
                    f"Those of the running daemon. {ctx.command_path} --help-settings lists them."
                )

    def format_settings(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each setting with its variable and default."""
        records = self._records(ctx)
        with formatter.section("Settings"):
            formatter.write_text(PRECEDENCE)
            for key, setting in DECLARATIONS.items():
                formatter.write_paragraph()
                formatter.write_text(records[key][0])
                with formatter.indentation(), formatter.indentation():
                    formatter.write_text(setting.described.description)
                    if setting.is_list:
                        formatter.write_text(SEVERAL)
                    formatter.write_text(f"[env var: {setting.variable}; default: {setting.default_text()}]")

    def _records(self, ctx: click.Context) -> dict[str, tuple[str, str]]:
        """Return the flags and the help of each option, by the option's name."""
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        return {str(option.name): record for option in options if (record := option.get_help_record(ctx))}


class ConfiguredDaemon(Configured):
    """A command whose settings are its own: its help has them all."""

    settings_in_help = True


def _help_settings() -> click.Option:
    """Return the option that prints the settings and exits."""

    def show(ctx: click.Context, _parameter: click.Parameter, is_wanted: bool) -> None:
        if not is_wanted or ctx.resilient_parsing:
            return
        assert isinstance(ctx.command, Configured)
        formatter = ctx.make_formatter()
        ctx.command.format_settings(ctx, formatter)
        click.echo(formatter.getvalue().rstrip("\n"))
        ctx.exit()

    return click.Option(
        ["--help-settings"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show the settings, each with its variable and default, and exit.",
    )


def _config_file() -> click.Option:
    # If click knew the variable it would read it itself, and the source of the value would be lost.
    return click.Option(
        ["--config"], metavar="FILE", help=f"Configuration file.  [env var: {CONFIG_FILE_VARIABLE}]"
    )


def _values(setting: Declaration) -> Callable[..., list[CompletionItem[str]]]:
    """Return the function that lists the values that a shell offers: the known ones, or files."""

    def offered(
        context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        if setting.metavar in _PATHS:
            return [CompletionItem(incomplete, type=_PATHS[setting.metavar])]
        return [CompletionItem(choice) for choice in setting.choices if choice.startswith(incomplete)]

    return offered


def _option(setting: Declaration) -> click.Option:
    """Return the flag of a setting. Its value is taken as written: `sources.py` validates it."""
    return click.Option(
        [setting.flag, setting.key],
        metavar=setting.metavar,
        default=None,
        multiple=setting.is_list,
        help=setting.described.description,
        shell_complete=_values(setting),
    )
