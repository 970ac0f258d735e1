"""The demo's report as README shows it, docs/pictures/demo-light.png and -dark.png: its verdict and first figure,
as wide as on a phone, so that it can be read on one.

    python docs/make/screenshot.py runs/demo/report.html

Needs Chromium or Chrome on the PATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
WIDTH, HEIGHT, SCALE = 400, 1200, 2
#: pixels that are left below the last line
BELOW = 12
#: what the picture leaves out: what stands between verdict and figure, and all that follows
STYLE = """<style>
p.soft, .entries, figcaption, figure ~ * { display: none !important }
body { padding: 12px 14px 0 !important } figure { margin: 0 }
</style></head>"""


def crop(picture: Path) -> None:
    """Take away what is empty at the foot of the picture; the window is higher than any report's first figure."""
    with Image.open(picture) as image:
        shown = image.convert("RGB")
    empty = Image.new("RGB", shown.size, shown.getpixel((0, shown.height - 1)))
    _, _, _, bottom = ImageChops.difference(shown, empty).getbbox()
    shown.crop((0, 0, shown.width, bottom + BELOW * SCALE)).save(picture, optimize=True)


def main(report: Path) -> int:
    """Both pictures."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    if browser is None:
        print("screenshot.py needs Chromium or Chrome on the PATH: `apt-get install chromium`", file=sys.stderr)
        return 2
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(report.read_text(encoding="utf-8").replace("</head>", STYLE, 1), encoding="utf-8")
        for number, theme in enumerate(("dark", "light")):
            command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            command += [f"--blink-settings=preferredColorScheme={number}", "--virtual-time-budget=8000"]
            command += [f"--force-device-scale-factor={SCALE}", f"--window-size={WIDTH},{HEIGHT}"]
            picture = PICTURES / f"demo-{theme}.png"
            subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], check=True, stderr=subprocess.DEVNULL)
            crop(picture)
            print(f"{picture}: {picture.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
