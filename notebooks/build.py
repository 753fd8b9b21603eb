"""Build the notebooks: src/NAME.py in percent format → NAME.ipynb, executed, with its outputs.

python notebooks/build.py [NAME ...]     execute and write the notebooks; NAME: 1_format, ...
python notebooks/build.py --check        exit with 1 if a notebook's cells differ from its source, or it has no outputs
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

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


def notebook(source: str) -> dict[str, Any]:
    """Return the notebook of a source, without outputs (nbformat 4.5)."""
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": cells(source), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def execute(document: dict[str, Any]) -> dict[str, Any]:
    """Run a notebook and return it with its outputs, without warnings and without this machine's paths."""
    import nbclient
    import nbformat

    os.environ["PYTHONPATH"] = str(HERE.parent)
    result = nbformat.reads(json.dumps(document), as_version=4)
    nbclient.NotebookClient(
        result, timeout=1200, resources={"metadata": {"path": str(HERE)}}
    ).execute()
    for cell in result.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    text = nbformat.writes(result)
    for place, name in ((str(HERE.parent), "."), (sys.prefix, ".venv"), (str(Path.home()), "~")):
        text = text.replace(json.dumps(place)[1:-1], name)
    return json.loads(re.sub(r"/tmp/tmp\w+", "/tmp/…", text))


def code_of(document: dict[str, Any]) -> list[str]:
    """Return the text of each cell."""
    return ["".join(cell["source"]) for cell in document["cells"]]


def faults(target: Path, source: str) -> str:
    """Return what is wrong with a stored notebook; "" where it is up to date."""
    if not target.is_file():
        return "missing"
    stored = json.loads(target.read_text(encoding="utf-8"))
    if code_of(stored) != code_of(notebook(source)):
        return "its cells differ from the source"
    return "" if any(cell.get("outputs") for cell in stored["cells"]) else "it has no outputs"


def main() -> None:
    names = [argument for argument in sys.argv[1:] if argument != "--check"]
    stale = []
    for script in sorted((HERE / "src").glob("*.py")):
        target = HERE / f"{script.stem}.ipynb"
        source = script.read_text(encoding="utf-8")
        if "--check" in sys.argv:
            fault = faults(target, source)
            stale += [f"{target.name} ({fault})"] if fault else []
        elif not names or script.stem in names:
            text = json.dumps(execute(notebook(source)), indent=1, ensure_ascii=False)
            target.write_text(f"{text}\n", encoding="utf-8")
            print(f"{target.name}: {target.stat().st_size / 1e3:.0f} kB")
    if stale:
        sys.exit(f"run python notebooks/build.py: {', '.join(stale)}")


if __name__ == "__main__":
    main()
