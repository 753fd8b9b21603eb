"""A picture of the top of a report, made with headless Chromium: how the README's picture comes about.

python -m annie_quant.report.screenshot RUN_DIR PNG [--dark] [--width 1280] [--height 1500]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import click

from annie_quant.errors import AnnieError, EnvironmentFault, UsageError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LEAST_WIDTH = 500  # a headless window is no narrower


def browser() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise EnvironmentFault("no Chromium is on the PATH", "apt-get install chromium")
    return found


def take(run_dir: Path, picture: Path, dark: bool = False, width: int = 1280, height: int = 1500) -> None:
    """Write `picture` (PNG, width x height pixels) of the run's report.html. Raises UsageError, EnvironmentFault."""
    report = run_dir.resolve() / "report.html"
    if not report.is_file():
        raise UsageError(f"{run_dir}: there is no report.html", f"annie-quant report {run_dir}")
    if width < LEAST_WIDTH:
        raise UsageError(f"width must be {LEAST_WIDTH} or more, got {width}")
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
        part = Path(profile) / "picture.png"
        flags += [f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--screenshot={part}"]
        try:
            ended = subprocess.run([browser(), *flags, report.as_uri()], capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            raise EnvironmentFault("Chromium did not finish within 60 seconds") from None
        if not part.is_file():
            said = next(iter(ended.stderr.strip().splitlines()[-1:]), "nothing")
            raise EnvironmentFault(f"Chromium made no picture; it said: {said}")
        picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(part, picture)


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("picture", type=click.Path(path_type=Path))
@click.option("--dark", is_flag=True)
@click.option("--width", default=1280, show_default=True)
@click.option("--height", default=1500, show_default=True)
def main(run_dir: Path, picture: Path, dark: bool, width: int, height: int) -> None:
    """Write PICTURE, a PNG of the top of RUN_DIR's report."""
    try:
        take(run_dir, picture, dark, width, height)
    except AnnieError as error:
        raise SystemExit(f"{error.message}" + (f"\n{error.hint}" if error.hint else "")) from None


if __name__ == "__main__":
    main()
