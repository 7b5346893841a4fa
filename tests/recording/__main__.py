"""`just recording`: writes the recordings and pictures of docs/media/ anew, from real runs."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.recording.cast import Cast
from tests.recording.sessions import diagnosis, incident, node_in_trouble, replay_page
from tests.recording.svg import rendered
from tests.support.browser import open_browser

MEDIA: Final = Path(__file__).resolve().parents[2] / "docs" / "media"


def main() -> int:
    """Command line of `just recording`."""
    MEDIA.mkdir(exist_ok=True)
    with node_in_trouble() as env, tempfile.TemporaryDirectory() as directory:
        _write("diagnosis", diagnosis(env))
        page = Path(directory) / "incident.html"
        replay_page(env, page)
        with open_browser() as tab:
            tab.open(page.as_uri(), width=1100, height=820)
            tab.screenshot(MEDIA / "replay.png")
    _write("incident", incident())
    for path in sorted(MEDIA.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


def _write(name: str, cast: Cast) -> None:
    (MEDIA / f"{name}.cast").write_text(cast.text(), encoding="utf-8")
    (MEDIA / f"{name}.svg").write_text(rendered(cast.text()), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
