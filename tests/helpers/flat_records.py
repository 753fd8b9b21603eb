"""Records of a benchmark from the flat fields that a line of records.jsonl has."""

from typing import Any

import msgspec

from annie_quant.documents import RequestRecord
from annie_quant.documents.records import RECORD_GROUPS


def record_of(**fields: Any) -> RequestRecord:
    """Return the record with these fields, by name; fields that are missing have their defaults."""
    groups = {name: _struct(kind, fields) for name, kind in RECORD_GROUPS.items()}
    return _struct(RequestRecord, fields | groups)


def _struct(kind: type[msgspec.Struct], fields: dict[str, Any]) -> Any:
    return kind(**{name: fields[name] for name in kind.__struct_fields__ if name in fields})
