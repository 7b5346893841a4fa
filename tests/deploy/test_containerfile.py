"""The Containerfile, as far as it can be checked without a container engine: its sources, its pins, its entry
point."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from pathlib import Path

from tests.release.base import NAME

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = ROOT / "deploy" / "Containerfile"


def instructions() -> list[tuple[str, str]]:
    """Each instruction and its arguments, with continuation lines joined and comments dropped."""
    lines = [line for line in CONTAINERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def arguments(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def copied_from_the_checkout() -> list[str]:
    return [
        source for rest in arguments("COPY") if not rest.startswith("--from=") for source in rest.split()[:-1]
    ]


def placed(rest: str) -> list[str]:
    """The paths in the stage's directory at which one COPY puts its files."""
    *sources, to = rest.split()
    return [str(Path(to) / Path(source).name) if to.endswith("/") else to for source in sources]


def test_every_source_is_in_the_checkout_and_let_through() -> None:
    ignored, *patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert ignored == "*"
    let_through = [pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]
    sources = copied_from_the_checkout()
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), f"{source} is copied but does not exist"
    assert sorted(set(sources)) == sorted(let_through)


def test_the_package_has_all_that_its_metadata_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in [project["readme"], *project["license-files"]]:
        assert (ROOT / name).is_file()
        there = [path for rest in arguments("COPY") for path in placed(rest)]
        assert any(name == path or fnmatch.fnmatch(name, f"{path}/*") for path in there), there


def test_everything_that_is_installed_has_a_hash() -> None:
    installs = [
        command.strip()
        for rest in arguments("RUN")
        for command in rest.split("&&")
        if re.search(r"\bpip\b.* (install|wheel)\b", command)
    ]
    assert len(installs) == 2
    for command in installs:
        assert "--require-hashes -r requirements/" in command or "--no-deps" in command, command
    for name in re.findall(r"-r (\S+)", " ".join(installs)):
        pins = (ROOT / name).read_text()
        assert re.search(r"^[a-z0-9.-]+==\S+ .*\\$", pins, re.MULTILINE)
        assert "--hash=sha256:" in pins


def test_the_image_begins_with_nothing_and_its_base_names_no_registry() -> None:
    (platform, base, *_), (image,) = [rest.split() for rest in arguments("FROM")]
    assert platform == "--platform=$BUILDPLATFORM", "nothing is emulated but the start"
    assert base == NAME, "what tests/release/base.py makes stands in for it"
    assert "/" not in base
    assert image == "scratch", "without a package manager, a shell and Perl"
    from_the_stage = [rest for rest in arguments("COPY") if rest.startswith("--from=")]
    (made,) = [rest.split()[-1] for rest in arguments("RUN") if "image_root.py" in rest]
    assert from_the_stage == [f"--from=build {made} /"]


def test_it_starts_the_daemon() -> None:
    (entry_point,) = (json.loads(rest) for rest in arguments("ENTRYPOINT"))
    (command,) = (json.loads(rest) for rest in arguments("CMD"))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert [Path(entry_point[0]).name] == list(scripts)
    assert command == ["run"]
    assert "USER" not in dict(instructions()), "the manifest decides the user: uid 0, without a capability"
