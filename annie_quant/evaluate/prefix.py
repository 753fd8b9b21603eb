"""Which rows of tokens are run together after one shared prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GROUP_COST = 512  # what opening another group costs, in tokens: one more forward with its fixed cost
SHORTEST = 16  # a shared prefix below this is not worth an own forward


@dataclass(frozen=True)
class Group:
    """Rows (indices) whose first `shared` tokens are the same; each row has at least one token more."""

    shared: int
    rows: tuple[int, ...]


def common(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def group_by_prefix(rows: Sequence[Sequence[int]], caps: Sequence[int]) -> list[Group]:
    """Groups that cover all rows, for the fewest tokens run. caps[i]: the most tokens of row i that may be shared.

    Greedy over the rows in lexicographic order: a row joins while shortening the group's prefix to its own costs less
    than a group of its own.
    """
    order = sorted(range(len(rows)), key=lambda i: list(rows[i]))
    groups: list[Group] = []
    members: list[int] = []
    shared = 0
    for i in order:
        if members:
            meets = min(shared, caps[i], common(rows[members[-1]], rows[i]))
            if (len(members) - 1) * (shared - meets) <= meets + GROUP_COST:
                members.append(i)
                shared = meets
                continue
            groups.append(Group(shared if shared >= SHORTEST else 0, tuple(members)))
        members, shared = [i], caps[i]
    if members:
        groups.append(Group(shared if shared >= SHORTEST else 0, tuple(members)))
    return groups
