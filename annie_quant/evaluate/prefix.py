"""Grouping rows of tokens that share a prefix, so that the prefix is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GROUP_COST = 512  # one more forward pass, in tokens
MIN_SHARED = 16  # a shorter shared prefix does not pay for a separate forward


@dataclass(frozen=True)
class PrefixGroup:
    """Rows (indices) with the same first `shared` tokens; each row has at least one more token."""

    shared: int
    rows: tuple[int, ...]


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def group_by_prefix(
    rows: Sequence[Sequence[int]], limits: Sequence[int], group_cost: int = GROUP_COST, multiple: int = 1
) -> list[PrefixGroup]:
    """Return groups that cover all rows with few computed tokens. limits[i]: most tokens of row i that may be shared.

    group_cost: of one more group, in tokens. multiple: the number of shared tokens is one of it.

    Greedy over the rows in lexicographic order: a row joins the group while the shorter prefix costs less than a new group.
    """
    order = sorted(range(len(rows)), key=lambda i: list(rows[i]))
    groups: list[PrefixGroup] = []
    members: list[int] = []
    shared = 0

    def close() -> None:
        if members:
            whole = shared - shared % multiple
            groups.append(PrefixGroup(whole if whole >= MIN_SHARED else 0, tuple(members)))

    for i in order:
        if members:
            shorter = min(shared, limits[i], common_prefix(rows[members[-1]], rows[i]))
            if (len(members) - 1) * (shared - shorter) <= shorter + group_cost:
                members.append(i)
                shared = shorter
                continue
            close()
        members, shared = [i], limits[i]
    close()
    return groups
