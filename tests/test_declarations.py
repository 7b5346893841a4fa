"""A setting is written once: what follows from its declaration, and that no part of one can be left out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import msgspec
import pytest
from click.testing import CliRunner

from gpuactors.cli.commands import cli
from gpuactors.cli.examples import EXAMPLES
from gpuactors.config import (
    CONFIG_FILE_VARIABLE,
    DECLARATIONS,
    KEYS,
    Config,
    ConfigError,
    Declaration,
    load,
    resolve,
    schema,
)
from gpuactors.config.declaration import LIST_SEPARATOR, Described, declared
from gpuactors.config.options import Configured
from tests.test_documents import parse

each_setting = pytest.mark.parametrize("setting", DECLARATIONS.values(), ids=KEYS)


def all_commands(group: click.Group = cli, words: str = "") -> Mapping[str, click.Command]:
    """Every command, and group of commands, by the words that call it."""
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        found[f"{words}{name}"] = command
        if isinstance(command, click.Group):
            found |= all_commands(command, f"{words}{name} ")
    return found


def configured_commands() -> Mapping[str, click.Command]:
    """The commands that take the settings, by the words that call them."""
    return {words: command for words, command in all_commands().items() if isinstance(command, Configured)}


def test_these_commands_take_the_settings() -> None:
    assert list(configured_commands()) == ["run", "inspect", "explain", "doctor", "bundle", "config show"]


def test_every_field_of_the_configuration_is_a_declared_setting() -> None:
    assert Config.__struct_fields__ == KEYS
    assert tuple(schema()["properties"]) == KEYS


@each_setting
def test_every_setting_is_a_flag_of_each_command_that_takes_the_settings(setting: Declaration) -> None:
    for name, command in configured_commands().items():
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert setting.flag in flags, name


@pytest.mark.parametrize(
    "setting",
    [setting for setting in DECLARATIONS.values() if setting.default_values],
    ids=lambda setting: setting.key,
)
def test_a_default_that_is_written_out_is_the_default(setting: Declaration, tmp_path: Path) -> None:
    written = LIST_SEPARATOR.join(setting.default_values)
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({setting.key: schema()["properties"][setting.key]["default"]}))
    for resolved in (resolve({}, {setting.variable: written}), resolve({"config": file}, {})):
        assert resolved.provenance[setting.key].kind != "default"
        assert resolved.config == Config()


@each_setting
def test_every_refusal_says_what_the_value_must_be(setting: Declaration) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, {setting.variable: "\0"})
    start = f"{setting.key} is '\\x00' (environment {setting.variable}), but must be {setting.must_be}"
    assert str(caught.value).startswith(start)


# --- help -------------------------------------------------------------------------------------------------

at_each_width = pytest.mark.parametrize("columns", [80, 100])


def help_of(words: str, columns: int, option: str = "--help") -> str:
    """What a help option prints in a terminal of so many columns (click leaves two of them free)."""
    done = CliRunner().invoke(cli, [*words.split(), option], terminal_width=columns - 2)
    assert done.exit_code == 0, done.output
    return done.stdout


@at_each_width
@pytest.mark.parametrize("words", configured_commands())
def test_help_shows_flag_variable_and_default_of_every_setting(words: str, columns: int) -> None:
    text = " ".join(help_of(words, columns, "--help-settings").split())
    for setting in DECLARATIONS.values():
        shown = re.search(
            rf" {setting.flag} (?P<values>.*?) \[env var: (?P<variable>\w+); default: (?P<default>.*?)\]",
            text,
        )
        assert shown, setting.flag
        assert (shown["variable"], shown["default"]) == (setting.variable, setting.default_text())
        assert setting.described.description in shown["values"]
    own = " ".join(help_of(words, columns).split())
    assert f"[env var: {CONFIG_FILE_VARIABLE}]" in own
    assert (text in own) is (words == "run")
    assert words == "run" or f"gpuactors {words} --help-settings lists them." in own.replace(
        "cli ", "gpuactors "
    )


@at_each_width
@pytest.mark.parametrize("words", ["", *all_commands()])
def test_help_fits_the_terminal_and_breaks_no_word(words: str, columns: int) -> None:
    for line in help_of(words, columns).splitlines():
        assert len(line) <= columns - 2
        assert not re.search(r"\w-$", line), "a word is broken at its hyphen: reword the text"
        assert not line.endswith("...") or line.startswith("Usage:"), "a command's line is cut short"


def test_every_option_has_a_text_in_the_help() -> None:
    for words, command in all_commands().items():
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help, f"{words}: {option.opts}"


# --- a declaration ----------------------------------------------------------------------------------------


def declare(annotation: Any, key: str = "key", **default: Any) -> Declaration:
    """The declaration `key: annotation = default`."""
    field = (key, annotation, default["default"]) if default else (key, annotation)
    return declared(msgspec.defstruct("Settings", [field], kw_only=True))[key]


def text(description: str = "What it is.", **words: Any) -> Any:
    said: dict[str, Any] = {"metavar": "TEXT", "must_be": "a text", **words}
    return Annotated[str, Described(description, **said)]


def test_a_declaration_names_everything_that_follows_from_it() -> None:
    setting = declare(text(), "some_text_s", default="x")
    assert (setting.flag, setting.variable) == ("--some-text-s", "GPUACTORS_SOME_TEXT_S")
    assert (setting.metavar, setting.must_be, setting.default_text()) == ("TEXT", "a text", "x")


def test_a_switch_and_a_choice_name_their_values_themselves() -> None:
    switch = declare(Annotated[Literal["on", "off"], Described("Whether.")], default="off")
    assert (switch.metavar, switch.must_be, switch.default_text()) == ("on|off", "on or off", "off")
    choice = declare(Annotated[Literal["c", "a", "b"], Described("Which.")], default="a")
    assert (choice.metavar, choice.must_be, choice.default_text()) == ("c|a|b", "c, a or b", "a")


def test_a_default_that_says_nothing_has_words() -> None:
    assert declare(text(default="none"), default="").default_text() == "none"
    instead = text(default="none", fallback_variable="OTHER")
    assert declare(instead, default="").default_text() == "OTHER, else none"


@pytest.mark.parametrize(
    ("annotation", "default", "lacks"),
    [
        (str, "x", r"one Described\(…\)"),
        (Annotated[str, "a description"], "x", r"one Described\(…\)"),
        (text(""), "x", "a description"),
        (text("."), "x", "a description"),
        (text("Without an end"), "x", "a description that ends with a full stop"),
        (text(metavar=""), "x", "a metavar"),
        (text(must_be=""), "x", "what a value must be"),
        (text(), "", "what its default means"),
        (text(fallback_variable="OTHER"), "", "what its default means"),
        (text(), None, "what its default means"),
        (text(), msgspec.NODEFAULT, "a default"),
    ],
)
def test_a_declaration_that_lacks_a_part_cannot_be_made(annotation: Any, default: Any, lacks: str) -> None:
    with pytest.raises(TypeError, match=f"the setting 'key' needs {lacks}"):
        declare(annotation, **({} if default is msgspec.NODEFAULT else {"default": default}))


@pytest.mark.parametrize("key", ["Key", "key_", "key__s", "config", "port", "metrics_port", "service_name"])
def test_a_key_that_would_be_another_ones_name_cannot_be_declared(key: str) -> None:
    """GPUACTORS_PORT is how kubelet describes a Service called gpuactors; GPUACTORS_CONFIG names the file."""
    with pytest.raises(TypeError, match=f"the setting '{key}' needs a key "):
        declare(text(), key, default="x")


def test_a_setting_needs_a_description_to_be_written_at_all() -> None:
    with pytest.raises(TypeError, match="description"):
        Described()  # type: ignore[call-arg]


@pytest.mark.parametrize("words", ["", *all_commands()])
def test_the_help_of_every_command_ends_with_examples_in_lines_of_their_own(words: str) -> None:
    *_, examples = help_of(words, 80).partition("\n  Examples:\n")
    assert [line.split("  # ")[0].strip() for line in examples.splitlines()] == [
        x for x, _ in EXAMPLES[words]
    ]


@pytest.mark.parametrize("line", [line for examples in EXAMPLES.values() for line, _ in examples])
def test_an_example_can_be_parsed(line: str) -> None:
    found = re.search(r"gpuactors ([^>|)]*)", line)
    assert found is not None
    parse(found[1])


def test_there_is_no_example_without_a_command() -> None:
    assert EXAMPLES.keys() == {"", *all_commands()}
