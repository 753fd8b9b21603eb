"""Build the notebooks: src/NAME.py in percent format → NAME.ipynb, without outputs.

python notebooks/build.py            write the notebooks
python notebooks/build.py --check    exit with 1 if a notebook differs from its source
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CELL = re.compile(r"^# %%(?P<kind> \[markdown\])?$", re.MULTILINE)


def cells(source: str) -> list[dict]:
    """Return the cells of a percent-format script. The text of markdown cells is in comment lines."""
    marks = list(CELL.finditer(source))
    result = []
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        text = source[mark.end() : following.start() if following else None].strip("\n")
        cell = {
            "id": hashlib.sha256(f"{len(result)}:{text}".encode()).hexdigest()[:8],
            "metadata": {},
        }
        if mark["kind"]:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())
            result.append(
                {"cell_type": "markdown", **cell, "source": text.splitlines(keepends=True)}
            )
        else:
            code = {
                "execution_count": None,
                "outputs": [],
                "source": text.splitlines(keepends=True),
            }
            result.append({"cell_type": "code", **cell, **code})
    return result


def notebook(source: str) -> str:
    """Return the .ipynb file's text (nbformat 4.5)."""
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    document = {"cells": cells(source), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    stale = []
    for script in sorted((HERE / "src").glob("*.py")):
        target, text = HERE / f"{script.stem}.ipynb", notebook(script.read_text(encoding="utf-8"))
        if not target.is_file() or target.read_text(encoding="utf-8") != text:
            stale.append(target.name)
            if "--check" not in sys.argv:
                target.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        sys.exit(f"different from their sources: {', '.join(stale)}; run python notebooks/build.py")


if __name__ == "__main__":
    main()
