"""Roles: which side is judged (candidate), which is bf16 (reference), and which would be replaced (incumbent).

The user states them. What is not stated follows from the order of the sides and from the format of their weights, never from a
name: a side whose weights are bf16 is the reference, the first other side is the candidate, and the next one the incumbent. Two
sides of one quantized format are an A/B of the second against the first. Where neither the user nor the formats determine which
of two sides is new, each is compared with the other (Roles.assumed), so that a loss is not missed in either direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from annie_quant.core.errors import UsageError
from annie_quant.documents import Aggregates, Comparison, ModelRow, Roles

REFERENCE_FORMAT = "BF16"


def assign(names: Sequence[str], formats: Mapping[str, str], stated: Roles | None = None) -> Roles:
    """Return all roles.

    names: the sides, in the user's order.
    formats: of their weights, where known.
    stated: by the user.

    Raises UsageError for a role that names no side, and for a side in two roles.
    """
    stated = stated or Roles()
    check(names, stated)
    reference = stated.reference
    free = [name for name in names if name not in stated.names]
    if reference is None:
        reference = next(
            (name for name in free if formats.get(name, "").upper() == REFERENCE_FORMAT), None
        )
        if reference is not None and not stated.candidate and len(names) == 1:
            reference = None  # a side alone is the candidate, whatever its format
    free = [name for name in free if name != reference]
    known = [formats[name] for name in free[:2] if formats.get(name)]
    candidate = stated.candidate
    incumbent = stated.incumbent
    assumed = False
    if candidate is None and incumbent is None and len(free) == 2:
        if len(known) == 2 and known[0] == known[1]:
            free.reverse()
        assumed = reference is None and len(known) < 2
    if candidate is None and free:
        candidate = free.pop(0)
    if incumbent is None and free:
        incumbent = free.pop(0)
    return Roles(candidate=candidate, reference=reference, incumbent=incumbent, assumed=assumed)


def check(names: Sequence[str], stated: Roles) -> None:
    """Raise UsageError for a role that names no side, and for a side in two roles."""
    taken: dict[str, str] = {}
    for role in ("candidate", "reference", "incumbent"):
        name = getattr(stated, role)
        if name is None:
            continue
        if name not in names:
            raise UsageError(
                f"--{role} {name}: no side has this name", f"choose one of: {', '.join(names)}"
            )
        if name in taken:
            raise UsageError(
                f"--{role} {name}: it is the {taken[name]} already", "give each role its own side"
            )
        taken[name] = role


def sides(aggregates: Aggregates) -> list[str]:
    """Return served backends, then models that were only evaluated offline."""
    return list(dict.fromkeys([*aggregates.served, *aggregates.offline]))


def model_row(aggregates: Aggregates, name: str) -> ModelRow:
    """Return the model of a side; a backend may have another name than the model that it serves."""
    models = {m.name: m for m in aggregates.models}
    served = aggregates.served.get(name)
    return (
        models.get(name)
        or models.get((served.model if served else None) or "")
        or ModelRow(name=name)
    )


def formats_of(aggregates: Aggregates) -> dict[str, str]:
    """Return the format of each side's weights, where it is stored."""
    formats = {name: model_row(aggregates, name).format for name in sides(aggregates)}
    formats |= {name: side.format for name, side in aggregates.served.items() if side.format}
    unquantized = [
        name for name, numerics in aggregates.offline.items() if set(numerics) == {"bf16"}
    ]
    return {name: text for name, text in formats.items() if text} | dict.fromkeys(
        unquantized, REFERENCE_FORMAT
    )


def roles_of(aggregates: Aggregates, candidate: str | None = None) -> Roles:
    """Return a run's roles: those stored with it, else (an older run) those that follow from its stored formats.

    candidate: another side or model to be judged; it leaves the other role that it had.
    """
    names = list(aggregates.served or aggregates.offline)
    roles = aggregates.roles or assign(names, formats_of(aggregates))
    if not aggregates.served:
        roles = replace(roles, incumbent=None, assumed=False)  # nothing else is in operation
    if candidate is None or candidate == roles.candidate:
        return roles
    others = [
        n
        for n in (roles.incumbent, roles.candidate)
        if n not in (None, candidate) and n in aggregates.served
    ]
    reference = None if roles.reference == candidate else roles.reference
    return replace(
        roles,
        candidate=candidate,
        reference=reference,
        incumbent=next(iter(others), None),
        assumed=False,
    )


def other_side(roles: Roles, name: str) -> str | None:
    """Return the side that the gates of side `name` are compared with: the reference, else the incumbent; None for that one.

    Where roles are assumed, the incumbent is compared with the candidate, too.
    """
    other = roles.reference or roles.incumbent
    if name != other:
        return other
    return roles.candidate if roles.assumed else None


def label_of(aggregates: Aggregates, name: str) -> str:
    return model_row(aggregates, name).label or name


def with_candidate_second(row: Comparison, candidate: str) -> Comparison:
    """Return a comparison whose side b is the candidate, so that its difference is candidate - incumbent."""
    if row.b == candidate or row.median_difference is None:
        return row
    return replace(
        row,
        a=row.b,
        b=row.a,
        median_a=row.median_b,
        median_b=row.median_a,
        median_difference=-row.median_difference,
        low=None if row.high is None else -row.high,
        high=None if row.low is None else -row.low,
    )
