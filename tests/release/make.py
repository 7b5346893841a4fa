"""`just release`: everything of a release into dist/, if two builds of the commit in two directories come to the same
bytes."""

from __future__ import annotations

import datetime
import filecmp
import hashlib
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from gpuactors.host.pci_ids import SHIPPED, date_of
from tests.release.addresses import project, unset
from tests.release.pci_ids import too_old
from tests.release.provenance import provenance, tag_of
from tests.release.version import CHECKOUT, commit_time, revision, source, tags, version
from tests.vm.commands import ProvisionError, run

DIST: Final = CHECKOUT / "dist"
SUMS: Final = "SHA256SUMS"


def release() -> list[str]:
    """Build twice, compare, and put it into dist/, which is replaced; what the builds said. Raises ProvisionError where
    something is not committed, cannot be built, or is not the same twice."""
    if left := run(("git", "-C", str(CHECKOUT), "status", "--porcelain")).strip():
        raise ProvisionError(f"a release is made of a commit, and this is not committed:\n{left}")
    today = datetime.datetime.fromtimestamp(commit_time(), datetime.UTC).date()
    if old := too_old(date_of(SHIPPED) or "0001-01-01", today):
        raise ProvisionError(old)
    try:
        tag = tag_of(tags(), version(), (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ProvisionError(str(error)) from None
    missing = unset(project())
    if tag and missing:
        raise ProvisionError(
            f"the commit is tagged {tag}, and pyproject.toml lacks {', '.join(missing)}: set what "
            "docs/dev/release.md names before the first release, or remove the tag for a trial"
        )
    with tempfile.TemporaryDirectory(prefix="gpuactors-release-") as name:
        # Names of two lengths: a path that gets into a file shows.
        built = [_build(Path(name) / clone) for clone in ("one", "the-other")]
        if different := differences(built[0], built[1]):
            raise ProvisionError(f"two builds of {revision()} differ in {', '.join(different)}")
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(built[0], DIST)
        said = (built[0].with_suffix(".log")).read_text(encoding="utf-8").splitlines()
    statement = provenance(digests(DIST), revision=revision(), tag=tag, source=source())
    (DIST / f"gpuactors-{version()}.provenance.json").write_text(statement, encoding="utf-8")
    (DIST / SUMS).write_text(sums_of(DIST), encoding="ascii")
    if tag:
        return [*said, f"tag {tag}"]
    lacks = [f"a release needs {what}, which pyproject.toml lacks" for what in missing]
    return [*said, *lacks, f"the commit has no tag v{version()}: a trial, and no release"]


def _build(clone: Path) -> Path:
    run(("git", "clone", "--quiet", "--no-checkout", str(CHECKOUT), str(clone)))
    # Also where somebody commits meanwhile.
    run(("git", "-C", str(clone), "checkout", "--quiet", "--detach", revision()))
    directory = clone / "dist"
    environment = {"PYTHONPATH": str(clone)}
    said = run(
        (sys.executable, "-m", "tests.release.artifacts", str(directory)), cwd=clone, environment=environment
    )
    directory.with_suffix(".log").write_text(said, encoding="utf-8")
    return directory


def differences(one: Path, other: Path) -> list[str]:
    """The files that are not byte by byte the same, or are only in one of the two."""
    names = sorted({path.name for directory in (one, other) for path in directory.iterdir()})
    _, mismatch, errors = filecmp.cmpfiles(one, other, names, shallow=False)
    return sorted(mismatch + errors)


def sums_of(directory: Path) -> str:
    """For `sha256sum --check`."""
    found = digests(directory)
    return "".join(f"{found[name]}  {name}\n" for name in sorted(found) if name != SUMS)


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of each file, by its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def main() -> int:
    """Make the release, and say what it is."""
    started = time.monotonic()
    try:
        said = release()
    except ProvisionError as error:
        print(f"just release: {error}", file=sys.stderr)
        return 1
    took_s = time.monotonic() - started
    print(f"gpuactors {version()}, commit {revision()}: built twice, the same twice, in {took_s:.0f} s")
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size:>12,}  dist/{path.name}")
    print(*said, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
