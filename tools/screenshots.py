"""Takes pictures of a report page: `python tools/screenshots.py out/report.html FOLDER [--readme]`.

Chromium renders the page in two widths, light and dark. docs/report.png is the top of the page of `make demo`.
"""

import argparse
import subprocess
from pathlib import Path

WIDTHS = (1280, 400)
README_PICTURE = Path(__file__).parents[1] / "docs" / "report.png"


def take_picture(page: Path, picture: Path, width: int, height: int, *, is_dark: bool = False) -> None:
    """Render the top of a page into a PNG file."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--timeout=20000"]
    dark = ["--blink-settings=preferredColorScheme=0", "--force-dark-mode"] if is_dark else []
    size = f"--window-size={width},{height}"
    command += [*dark, size, f"--screenshot={picture}", page.resolve().as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if result.returncode or not picture.exists():
        raise SystemExit(f"{picture}: chromium failed with exit code {result.returncode}:\n{result.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path, help="a report.html")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="where the pictures are written")
    parser.add_argument("--height", type=int, default=1000, help="how much of the page is shown")
    parser.add_argument("--readme", action="store_true", help="write docs/report.png instead")
    options = parser.parse_args()
    if options.readme:
        take_picture(options.page, README_PICTURE, WIDTHS[0], options.height)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        for is_dark in (False, True):
            picture = options.folder / f"report-{width}-{'dark' if is_dark else 'light'}.png"
            take_picture(options.page, picture, width, options.height, is_dark=is_dark)


if __name__ == "__main__":
    main()
