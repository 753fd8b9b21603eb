"""Records of a benchmark from the flat fields that a line of records.jsonl has."""

from typing import Any

from annie_quant.documents import RequestRecord, pick
from annie_quant.documents.records import RECORD_GROUPS


def record_of(**fields: Any) -> RequestRecord:
    """Return the record with these fields, by name; fields that are missing have their defaults."""
    return pick(
        RequestRecord,
        {**fields, **{name: pick(kind, fields) for name, kind in RECORD_GROUPS.items()}},
    )
