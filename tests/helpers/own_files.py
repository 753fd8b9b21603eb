"""The files of a user with a model and persona that are not Annie's: for the test of that line, and its measurement."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from paths import TINY_ANNIE

from annie_quant.data import generate
from annie_quant.documents.persona import PERSONAS_FOLDER


def write_model(folder: Path) -> None:
    """Write a checkpoint that the package has not seen: tiny-annie with another chat template."""
    shutil.copytree(TINY_ANNIE, folder, ignore=shutil.ignore_patterns(".annie_quant"))
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("These functions can be called:", "You can call:")
    )


def write_logs(folder: Path) -> None:
    """Write prompt.txt (Annie's, with one more sentence), tools.json and chats.jsonl: 200 logged chats."""
    annie = json.loads((PERSONAS_FOLDER / "annie.json").read_text())
    generate("annie", n=200, output=folder / "rows.jsonl", split="train")
    prompt = annie["system_prompt"] + " Today is Sunday."
    lines = []
    for line in (folder / "rows.jsonl").read_text().splitlines():
        turns = json.loads(line)["messages"][1:]
        chat = {"messages": [{"role": "system", "content": prompt}, *turns]}
        lines.append(json.dumps(chat | {"tools": annie["tools"]}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    (folder / "prompt.txt").write_text(prompt)
    (folder / "tools.json").write_text(json.dumps(annie["tools"]))
