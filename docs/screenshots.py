"""The pictures in ``docs/images``: ``python -m docs.screenshots PAGE.html``, with a page that ``lowtide report`` made.

Needs a Chromium and pillow.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.support.browser import Page

_IMAGES = Path(__file__).parent / "images"
_SHOTS = {
    "light": (1000, 1220, False, "memory"),
    "dark": (1000, 1220, True, "memory"),
    "phone": (390, 1300, False, "memory"),
    "curve": (1000, 520, False, "curve"),
    "map": (1000, 925, False, "addresses"),
}
_COLOURS = 256


def main(source: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, (width, height, dark, section) in _SHOTS.items():
            taken = Path(folder) / f"{name}.png"
            with Page(width, height, dark=dark) as page:
                page.open(source)
                if section != "memory":
                    page.run(f"document.getElementById('{section}').scrollIntoView()")
                page.screenshot(taken)
            with Image.open(taken) as image:
                image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(
                    _IMAGES / f"report-{name}.png", optimize=True
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
