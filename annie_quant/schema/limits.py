"""Limits for what another party writes into a document: a server, a model, a file from elsewhere."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

ShortText = Annotated[str, Meta(max_length=200)]
Digest = Annotated[str, Meta(max_length=64)]
Share = Annotated[float, Meta(ge=0, le=1)]
Milliseconds = Annotated[float, Meta(ge=-1e12, le=1e12)]  # our clock's; sums and charts stay finite
Count = Annotated[int, Meta(ge=0, le=10**15)]
JsonScalar = Annotated[str, Meta(max_length=1000)] | int | float | bool | None
