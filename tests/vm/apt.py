"""A private apt: the machine's own package sources for another suite, with a state of its own. Needs no root.

Names no host: a source of `bookworm-backports` is the machine's source of `bookworm` with the suite exchanged, and
with everything else that the entry says (Signed-By, architectures, comments). Proxies, certificates, keys and
passwords are the machine's own too, because only the lists, the cache, the sources and the pins are replaced. Must not
run a program, and must not write outside the directory that it is given.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ETC_APT: Final = Path("/etc/apt")

OS_RELEASE: Final = Path("/etc/os-release")

COMPONENT: Final = "main"
"""Where everything is that the machine needs. A source without it is not Debian's."""

ONE_LINE: Final = re.compile(
    r"deb\s+(?P<options>\[[^\]]*\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>.+)"
)
"""sources.list(5), one-line style. Options are kept as they are."""

FIELD: Final = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9-]*):(?P<value>.*)", re.DOTALL)
"""A field of a deb822 stanza, with the lines that continue it."""


@dataclass(frozen=True, slots=True)
class Source:
    """One entry for one suite. `suffix` says its style: `.list` or `.sources`."""

    suffix: str
    text: str


def codename(os_release: Path = OS_RELEASE) -> str:
    """The suite that the machine runs, e.g. `bookworm`; empty where os-release(5) names none."""
    found = re.search(r'^VERSION_CODENAME="?([^"\n]*)', os_release.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def sources_of(suite: str, *, base: str, etc_apt: Path = ETC_APT) -> tuple[Source, ...]:
    """Every source of the machine's `base` suite, with `suite` in its place; each once.

    Empty where the machine has none. Updates and security are suites of their own (`bookworm-updates`) and are not
    meant. Some may be a third party's that has no such suite; apt then ignores it, with a message.
    """
    found: list[Source] = []
    files = [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*"))]
    for file in files:
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".list":
            found += _of_lines(text, suite, base)
        elif file.suffix == ".sources":
            found += _of_stanzas(text, suite, base)
    return tuple(dict.fromkeys(found))


def private_apt(directory: Path, sources: tuple[Source, ...]) -> tuple[str, ...]:
    """Options for apt-get and apt-cache, after which they know these sources and nothing else, and write to `directory`
    alone. The lists stay there from one time to the next; `apt-get update` fetches them."""
    parts = directory / "sources.list.d"
    shutil.rmtree(parts, ignore_errors=True)
    for needed in (parts, directory / "lists" / "partial", directory / "cache" / "archives" / "partial"):
        needed.mkdir(parents=True, exist_ok=True)
    for number, source in enumerate(sources):
        (parts / f"{number}{source.suffix}").write_text(source.text, encoding="utf-8")
    # What is installed on the machine does not count here.
    status = directory / "status"
    status.touch()
    settings = {
        "Dir::State": directory,
        "Dir::State::lists": directory / "lists",
        "Dir::State::status": status,
        "Dir::Cache": directory / "cache",
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": parts,
        # The operator's pins are about what gets installed; nothing is.
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Acquire::Languages": "none",
    }
    return tuple(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))


def _of_lines(text: str, suite: str, base: str) -> list[Source]:
    found = []
    for line in text.splitlines():
        entry = ONE_LINE.fullmatch(line.partition("#")[0].strip())
        if entry is not None and entry["suite"] == base and COMPONENT in entry["components"].split():
            options = entry["options"] or ""
            found.append(Source(".list", f"deb {options}{entry['uri']} {suite} {entry['components']}\n"))
    return found


def _of_stanzas(text: str, suite: str, base: str) -> list[Source]:
    # A comment may stand between a field and the lines that continue it, and ends no stanza.
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = []
    for stanza in re.split(r"\n\s*\n", "\n".join(lines)):
        # A line that begins with a blank continues the field above it.
        fields = {
            field["name"].lower(): field["value"]
            for part in re.split(r"\n(?![ \t])", stanza.strip("\n"))
            if (field := FIELD.fullmatch(part))
        }
        wanted = (
            "deb" in fields.get("types", "").split()
            and base in fields.get("suites", "").split()
            and COMPONENT in fields.get("components", "").split()
            and fields.get("enabled", "yes").strip().lower()
            not in {"no", "false", "without", "off", "disable", "0"}
        )
        if wanted:
            fields |= {"types": " deb", "suites": f" {suite}"}
            # A value is kept to the letter: a key may be written out in Signed-By, over many lines.
            found.append(Source(".sources", "".join(f"{name}:{value}\n" for name, value in fields.items())))
    return found
