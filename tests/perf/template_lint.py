"""Lint every chat template of a folder, and print one row per template that can call tools.

pip download --no-deps trl==1.16.0 && unzip -d trl trl-1.16.0-*.whl
python tests/perf/template_lint.py trl/trl/chat_templates
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from annie_quant.checkpoint.template_lint import lint_folder


def codes(rows: list) -> str:
    names = {row.code.removeprefix("template_"): row.line for row in rows}
    return ", ".join(f"{name} ({line})" for name, line in names.items()) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with *.jinja files")
    arguments = parser.parse_args()
    count = 0
    print("| template | family | faults (line) | limits (line) |\n|---|---|---|---|")
    for path in sorted(arguments.folder.glob("*.jinja")):
        if path.stem.endswith("_training"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "chat_template.jinja").write_text(path.read_text())
            lint = lint_folder(Path(folder))
        count += 1
        assert lint is not None
        if lint.form:
            print(f"| {path.stem} | {lint.family} | {codes(lint.faults)} | {codes(lint.limits)} |")
    print(f"\n{count} templates linted")


if __name__ == "__main__":
    main()
