"""Rules that hold for the whole repository: what no file may name, what each bound must say, what the core
may import, and that the README says what the program does."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from gpuactors.config import KEYS
from tests.support.about_claims import ABOUT_CLAIMS
from tests.support.markdown import chapter
from tests.tables import TABLES, Written

ROOT = Path(__file__).resolve().parents[1]

HOSTS = frozenset(
    {
        "127.0.0.1",
        "docs.kernel.org",
        "git.kernel.org",
        "in-toto.io",
        "github.com",
        "json-schema.org",
        "keepachangelog.com",
        "kubernetes.io",
        "localhost",
        "lwn.net",
        "pci-ids.ucw.cz",
        "semver.org",
        "slsa.dev",
        "www.apache.org",
        "www.kernel.org",
        "www.w3.org",
    }
)
"""Hosts that a file may point to. A package registry or a mirror is nobody's to name here: they are
configured on the machine. (`.example`, `.invalid`, `.test` and 192.0.2.x are always allowed: RFC 2606, RFC 5737.)"""

VENDORED = frozenset({"src/gpuactors/host/data/pci.ids", "src/gpuactors/host/data/LICENSE.pci.ids"})
"""Other people's texts, kept as they are."""

MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:root|home|work|Users|mnt)/[\w.-]")
URL_HOST = re.compile(r"\b[a-z][a-z0-9+]*://(?:[^\s/@]*@)?([\w.-]+\.\w+|localhost)", re.IGNORECASE)

PURE = frozenset(
    {
        "__future__",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "heapq",
        "itertools",
        "math",
        "operator",
    }
    | {"re", "string", "types", "typing"}
)
"""What the core may take from the standard library: no clock, no chance, no files, no logging, no tasks."""

UUIDS_OF_NAMES = frozenset({"NAMESPACE_DNS", "uuid5"})
"""What is pure of `uuid`: the same name has the same UUID."""

OF_VALUES = frozenset({"Struct", "field", "replace", "force_setattr"})
"""Of msgspec: what frozen values are made of. The standard library's dataclasses take 50 times as long to define."""

OF_CODECS = frozenset(
    {"UNSET", "UnsetType", "ValidationError", "asdict", "convert", "to_builtins", "Meta", "fields"}
)
"""Of msgspec: by which `claims/checkpoint.py` and `claims/stored.py` make JSON values of structs, and structs of these.
They touch no bytes."""


@functools.cache
def files() -> tuple[str, ...]:
    """The files of the repository: tracked, or new and not ignored."""
    done = subprocess.run(
        # Whoever runs the tests need not be who owns the checkout (a container, a pipeline).
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = tuple(name for name in done.stdout.split("\0") if name and (ROOT / name).is_file())
    assert "pyproject.toml" in found
    return found


@functools.cache
def texts() -> tuple[tuple[str, str], ...]:
    ours = (name for name in files() if name not in VENDORED and not name.endswith(".png"))
    return tuple((name, (ROOT / name).read_text("utf-8")) for name in ours)


def test_every_file_is_text_without_a_secret_of_the_machine_it_was_written_on() -> None:
    for name, text in texts():
        for number, line in enumerate(text.splitlines(), start=1):
            assert not MACHINE_PATH.search(line), (
                f"{name}:{number} names a path of somebody's machine: {line}"
            )


def test_no_file_names_a_host_that_is_not_on_the_list() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    own = {host for url in urls.values() for host in URL_HOST.findall(url)}
    for name, text in texts():
        for number, line in enumerate(text.splitlines(), start=1):
            for host in URL_HOST.findall(line):
                known = host.lower() in HOSTS or host.startswith("192.0.2.")
                known = known or host.rpartition(".")[2] in {"example", "invalid", "test"} or host in own
                assert known, (
                    f"{name}:{number} names the host {host}; name the thing instead, or add it to HOSTS"
                )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("index = https://packages.test/simple", ["packages.test"]),
        ("git+ssh://git@mirror.test/x", ["mirror.test"]),
        ("deb http://deb.mirror.test/debian bookworm", ["deb.mirror.test"]),
        ("unix:///run/kubelet.sock", []),
    ],
)
def test_hosts_are_found(line: str, found: list[str]) -> None:
    assert URL_HOST.findall(line) == found


def test_the_scripts_can_be_run_and_parsed() -> None:
    for name, shell in (("do", "sh"), (".ci/run", "bash")):
        assert (ROOT / name).stat().st_mode & 0o111, f"{name} cannot be run"
        subprocess.run([shell, "-n", str(ROOT / name)], check=True, timeout=60)


def test_requirements_are_exact_and_hashed_and_say_nothing_about_where_from() -> None:
    assert "uv.lock" not in files()
    requirements = [(name, text) for name, text in texts() if name.startswith("requirements/")]
    assert {name for name, _ in requirements} == {
        f"requirements/{n}.txt" for n in ("build", "dev", "helm", "nvml", "pci-ids", "runtime")
    }
    for name, text in requirements:
        assert "://" not in text, name
        lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
        for index, line in enumerate(lines):
            if line.startswith(" "):
                assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?", line), f"{name}: {line}"
            else:
                assert re.match(r"[a-z0-9.-]+==[^ ]+ (;.* )?\\$", line), f"{name}: {line}"
                assert lines[index + 1].startswith("    --hash"), f"{name}: {line} has no hash"


def test_the_requirements_have_all_that_the_project_depends_on() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for name, wanted in {
        "runtime": project["project"]["dependencies"],
        "build": project["build-system"]["requires"],
        "helm": project["dependency-groups"]["helm"],
        "pci-ids": project["dependency-groups"]["pci-ids"],
        "nvml": project["project"]["dependencies"] + project["project"]["optional-dependencies"]["nvml"],
        "dev": project["project"]["dependencies"]
        + [entry for entry in project["dependency-groups"]["dev"] if isinstance(entry, str)],
    }.items():
        pinned = set(
            re.findall(r"^([a-z0-9.-]+)==", (ROOT / f"requirements/{name}.txt").read_text(), re.MULTILINE)
        )
        for requirement in wanted:
            package = re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")
            assert package in pinned, f"{package} is not in requirements/{name}.txt: run 'just lock'"


def test_the_requirements_with_nvml_are_those_of_the_image_and_one_more() -> None:
    """So an image with it is the same otherwise."""
    with_nvml, plain = ((ROOT / f"requirements/{name}.txt").read_text() for name in ("nvml", "runtime"))
    added = set(with_nvml.splitlines()) - set(plain.splitlines())
    assert set(plain.splitlines()) <= set(with_nvml.splitlines())
    assert [line.partition("==")[0] for line in added if "==" in line] == ["nvidia-ml-py"]


@pytest.mark.parametrize("path", ["src/gpuactors/limits.py", "src/gpuactors/grpc_trio/limits.py"])
def test_every_bound_gives_its_reason(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    bounds: list[str] = []
    undescribed: list[str] = []
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        bounds.append(node.target.id)
        match following:
            case ast.Expr(value=ast.Constant(value=str(reason))) if len(reason.split()) >= 5:
                undescribed.clear()
            case ast.AnnAssign():
                undescribed.append(
                    node.target.id
                )  # one text may stand for a group of bounds, after its last one
            case _:
                pytest.fail(f"{path}: {node.target.id} has no text that gives its reason")
    assert not undescribed
    assert len(bounds) > 10


def test_the_core_takes_nothing_impure_from_the_standard_library() -> None:
    for path in sorted((ROOT / "src/gpuactors/core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    modules = [alias.name for alias in names]
                case ast.ImportFrom(module="uuid", names=names):
                    modules = [] if {alias.name for alias in names} <= UUIDS_OF_NAMES else ["uuid"]
                case ast.ImportFrom(module="msgspec" | "msgspec.structs" as module, names=names):
                    modules = [] if {alias.name for alias in names} <= OF_VALUES | OF_CODECS else [module]
                case ast.ImportFrom(module=str(module)):
                    modules = [module]
                case ast.AsyncFunctionDef() | ast.Await():
                    pytest.fail(f"{path.name}:{node.lineno} is asynchronous; the core is not")
                case _:
                    continue
            for name in modules:
                top = name.partition(".")[0]
                assert top in PURE or top == "gpuactors", f"{path.name} imports {name}"
                assert top in sys.stdlib_module_names or top == "gpuactors"


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for type checking count: whoever reads a file has to read what it names."""
    graph = grimp.build_graph("gpuactors", "gpuactors_simulation", include_external_packages=False)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imported.values())) > len(imported)
    assert len(tuple(TopologicalSorter(imported).static_order())) == len(imported)


def test_the_core_imports_late_only_what_is_about_claims() -> None:
    """In a function, or for type checking. All else is imported at the head of a file."""
    late = []
    for path in sorted((ROOT / "src/gpuactors/core").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in set(ast.walk(tree)) - set(tree.body):
            if isinstance(node, ast.ImportFrom):
                late += [f"{node.module}.{alias.name}" for alias in node.names]
            assert not isinstance(node, ast.Import), f"{path}:{node.lineno}"
    assert late
    assert [name for name in late if not ABOUT_CLAIMS.match(name)] == []


def test_each_file_that_a_text_of_the_core_names_is_there() -> None:
    """Beside it, or by its path below the core, the package or the checkout."""
    core = ROOT / "src/gpuactors/core"
    for path in sorted(core.rglob("*.py")):
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text()):
            places = (path.parent, core, ROOT / "src/gpuactors", ROOT)
            assert any((place / name).is_file() for place in places), f"{path} names {name}"


SMALL_FILE_MAX_LINES = 40
"""A file of so few lines says why it is one: without a reason it belongs to the file that uses it."""


def test_a_small_file_says_why_it_is_one() -> None:
    """Packages' own files, and actors, of which each has a file, need no reason."""
    unexplained: list[str] = []
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name == "__init__.py" or "pb" in path.parts or text.count("\n") > SMALL_FILE_MAX_LINES:
            continue
        tree = ast.parse(text)
        is_actor = path.parent.name == "actors" and any(
            isinstance(node, ast.AsyncFunctionDef) and node.name == "run" for node in tree.body
        )
        if not is_actor and "A file of its own: " not in " ".join((ast.get_docstring(tree) or "").split()):
            unexplained.append(str(path.relative_to(ROOT / "src")))
    assert not unexplained, "say in the docstring: A file of its own: …"


def test_the_core_hides_no_import_from_the_program() -> None:
    core = ROOT / "src/gpuactors/core"
    assert [path.name for path in core.rglob("*.py") if "TYPE_CHECKING" in path.read_text()] == []


def test_no_file_of_ours_imports_asyncio() -> None:
    for path in sorted((ROOT / "src").rglob("*.py")):
        if "pb" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "asyncio" for name in imported):
                assert id(node) in for_types, f"{path} imports asyncio; there is no loop in this process"


# --- the README -------------------------------------------------------------------------------------------


def table_of(document: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    section = chapter((ROOT / document).read_text(), heading)
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    return rows[2:]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_table_that_follows_from_the_code_is_as_the_recipe_writes_it(table: Written) -> None:
    path, text, written = table.put()
    assert text == written, f"{path.name}: run 'just tables' and commit the result"


def test_every_setting_has_a_row() -> None:
    rows = table_of("docs/reference.md", "All settings")
    assert tuple(row[0].strip("`") for row in rows) == KEYS


def test_every_command_has_a_row() -> None:
    listed = {row[0].strip("`").split()[1] for row in table_of("docs/reference.md", "All commands")}
    done = subprocess.run(
        [sys.executable, "-m", "gpuactors", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    commands = set(re.findall(r"^  ([a-z]+)  ", done.stdout.partition("Commands:")[2], re.MULTILINE))
    assert commands
    assert listed == commands


def test_the_two_commands_of_the_readme_are_those_that_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme.split("\n## Try it\n", 1)[1].split("\n## ", 1)[0]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    commands = [line.partition("#")[0].strip() for line in block.splitlines() if line.strip()]
    assert len(commands) == 2
    test_command = commands[1]
    ci = (ROOT / ".ci/run").read_text()
    assert f"\n{test_command}\n" in ci
    for command in commands:
        wrapper, recipe = command.split()
        assert (ROOT / wrapper).stat().st_mode & 0o111, f"{wrapper} cannot be run"
        assert re.search(rf"^{recipe}\b.*:", (ROOT / "justfile").read_text(), re.MULTILINE)
