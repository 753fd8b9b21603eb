"""Take a picture of the top of a report with headless Chromium, as in the README.

python tools/screenshot.py RUN_DIR PNG [--dark] [--width 1280] [--height 1500]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MIN_WIDTH = 500  # headless windows cannot be narrower


def screenshot(run_dir: Path, picture: Path, dark: bool, width: int, height: int) -> str | None:
    """Write `picture` (PNG, width x height pixels) of the run's report.html. Returns an error message, or None."""
    report = run_dir.resolve() / "report.html"
    browser = next((path for name in NAMES if (path := shutil.which(name))), None)
    if browser is None:
        return "Chromium is not on the PATH: apt-get install chromium"
    if not report.is_file():
        return f"{run_dir} has no report.html: annie-quant report {run_dir}"
    if width < MIN_WIDTH:
        return f"--width {width}, expected {MIN_WIDTH} or more"
    flags = [
        "--headless=new",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--no-first-run",
    ]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory() as profile:
        temporary = Path(profile) / "picture.png"
        flags += [
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            f"--screenshot={temporary}",
        ]
        try:
            process = subprocess.run(
                [browser, *flags, report.as_uri()], capture_output=True, text=True, timeout=60
            )
        except subprocess.TimeoutExpired:
            return "Chromium did not finish within 60 seconds"
        if not temporary.is_file():
            return f"Chromium wrote no picture: {(process.stderr.strip().splitlines() or ['no output'])[-1]}"
        picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(temporary, picture)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1500)
    sys.exit(screenshot(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
