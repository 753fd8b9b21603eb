"""Write the JSON Schemas of the public documents into docs/reference/schemas.

python tools/make_schemas.py
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from annie_quant import documents  # noqa: E402
from annie_quant.documents.records import RECORD_GROUPS  # noqa: E402


def default(field: msgspec.structs.FieldInfo) -> object:
    """Return the default of a field, as msgspec.defstruct takes it."""
    return (
        msgspec.field(default_factory=field.default_factory)
        if field.default is msgspec.NODEFAULT
        else field.default
    )


def record_line() -> type[msgspec.Struct]:
    """Return the type of a line of records.jsonl: the fields of a record and of its groups next to each other."""
    kinds = [documents.RequestRecord, *RECORD_GROUPS.values()]
    found = [field for kind in kinds for field in msgspec.structs.fields(kind)]
    fields: list[tuple] = []
    for field in found:
        if field.name not in RECORD_GROUPS:
            end = () if field.required else (default(field),)
            fields.append((field.name, field.type, *end))
    namespace = {
        "__doc__": "One line of records.jsonl: one request of a benchmark, its answer and what the gates found."
    }
    return msgspec.defstruct("RecordLine", fields, kw_only=True, namespace=namespace)


FOLDER = ROOT / "docs" / "reference" / "schemas"
DOCUMENTS = {
    "run": documents.Run,
    "bench": documents.Bench,
    "inputs": documents.Inputs,
    "record": record_line(),
    "workload": documents.WorkloadFile,
    "audit": documents.Audit,
    "recipe": documents.Recipe,
    "evaluation": documents.Evaluation,
    "sensitivity": documents.Sensitivity,
    "search": documents.SearchResult,
}


def text(kind: type) -> str:
    """Return the JSON Schema of a document, with one line per definition."""
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | msgspec.json.schema(
        kind
    )
    definitions = document.pop("$defs")
    for part in definitions.values():
        part["description"] = inspect.cleandoc(
            part["description"]
        )  # msgspec takes the indentation away from 0.23 on
    lines = (f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in definitions.items())
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    return "{\n" + head + ',\n "$defs": {\n' + ",\n".join(lines) + "\n }\n}\n"


def texts() -> dict[str, str]:
    """Return the text of each file by name."""
    return {f"{name}.json": text(kind) for name, kind in DOCUMENTS.items()}


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in texts().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
