"""Values that fit a JSON schema and mean something, drawn with a seed: a call's arguments, and a tool's result.

Enums, constants, examples, numbers with limits, text by pattern, format and the property's name, arrays, nested objects,
optional properties, unions and local references ($defs) are drawn. A range does not end before it begins, dates are near the
prompt's today, and a unit is that of its quantity. The names are in assets/offline_teacher/values.json.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import rstr

from annie_quant.core.files import ASSETS
from annie_quant.core.json_schema import mismatch
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.exchanges import MY_TOPICS, WORDS
from annie_quant.data.prompt_rules import NO_RULES, PromptRules, words_of

OPTIONAL_SHARE = 0.5  # of the optional properties, which get a value
MAX_ITEMS = 3
MAX_SCHEMA_DEPTH = 6
MAX_ATTEMPTS = 30
MAX_EQUAL_DRAWS = 5  # of the two ends of a range
LOWEST = 1  # of numbers without limits
HIGHEST = 90
DAYS_AHEAD = 40  # of dates after or before today
DATE_FORMATS = ("%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%Y%m%d")
TIME_FORMATS = ("%H:%M", "%H:%M:%S", "%I:%M %p", "%H%M")
MOMENT_FORMATS = ("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S")
STATED_FORMATS = {"date-time": MOMENT_FORMATS, "date": DATE_FORMATS, "time": TIME_FORMATS}
WRITTEN_FORMATS = {  # as descriptions write them
    "yyyy-mm-ddthh:mm": "%Y-%m-%dT%H:%M",
    "yyyy-mm-dd hh:mm": "%Y-%m-%d %H:%M",
    "yyyy-mm-dd": "%Y-%m-%d",
    "jjjj-mm-tt": "%Y-%m-%d",
    "dd.mm.yyyy": "%d.%m.%Y",
    "tt.mm.jjjj": "%d.%m.%Y",
    "mm/dd/yyyy": "%m/%d/%Y",
    "dd/mm/yyyy": "%d/%m/%Y",
    "hh:mm": "%H:%M",
}
STAYS = (["check", "in"], ["check", "out"])
_EXAMPLE = re.compile(
    r"(?:e\.g\.|for example|such as|z\. ?B\.|zum Beispiel|beispielsweise|example:)[:,]?\s*"
    r"(?:\"([^\"]+)\"|'([^']+)'|`([^`]+)`|([\w./+-]*\w))",
    re.IGNORECASE,
)

Schema = Mapping[str, Any]  # a JSON schema, or an OpenAI tool with one
_NULL = {"type": "null"}


class NamedValues(msgspec.Struct):
    """What a property is called, and its usual values.

    low, high, step: of a number. units: in which it is measured; the first one is the usual.
    texts: # is a digit; texts_de: in German.
    flag: the value is true or false.
    measured: a value of whatever is measured.
    """

    words: tuple[str, ...]
    low: float | None = None
    high: float = 0
    step: float = 1
    units: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    texts_de: tuple[str, ...] = ()
    flag: bool = False
    measured: bool = False


class ValueWords(msgspec.Struct):
    """values.json.

    open_bounds: words that mean a date where nothing else is said.
    ordered: pairs of words of which the first one's value is not above the second one's.
    """

    units_words: tuple[str, ...]
    entries: tuple[NamedValues, ...]
    dates: tuple[str, ...]
    times: tuple[str, ...]
    moments: tuple[str, ...]
    people: tuple[str, ...]
    codes: tuple[str, ...]
    births: tuple[str, ...]
    open_bounds: tuple[str, ...]
    past: tuple[str, ...]
    ordered: tuple[tuple[str, str], ...]


VALUES = msgspec.json.decode(
    (ASSETS / "offline_teacher" / "values.json").read_bytes(), type=ValueWords
)
_ENTRIES = {word: entry for entry in reversed(VALUES.entries) for word in entry.words}


class NoValue(Exception):
    """No drawn value fits the schema."""


def draw_arguments(
    schema: Schema,
    rng: random.Random,
    split: str,
    rules: PromptRules = NO_RULES,
    about: str = "",
) -> JsonObject:
    """Return arguments that fit a tool's parameters.

    about: the tool's name and description.
    Raises NoValue where none of MAX_ATTEMPTS fits, for example because the schema refers to another
    document, which is never fetched.
    """
    drawer = ValueDrawer(schema, rng, split, rules, about)
    reason = None
    for _ in range(MAX_ATTEMPTS):
        try:
            value = drawer.value(schema)
        except (RecursionError, AttributeError, TypeError, ValueError, ArithmeticError, re.error):
            raise NoValue("the schema is not valid, or refers to itself without end") from None
        if isinstance(value, dict):
            reason = mismatch(value, schema)
            if reason is None:
                return value
    because = f": {reason}" if reason else ""
    raise NoValue(f"no arguments that fit {json.dumps(schema)[:120]}{because}")


class ValueDrawer:
    """Draws values for the parts of one schema.

    root: the schema, to which local references refer.
    split: whose words are used.
    about: what the values are for, in words.
    """

    def __init__(
        self,
        root: Schema,
        rng: random.Random,
        split: str,
        rules: PromptRules,
        about: str,
    ) -> None:
        self.root = root
        self.rng = rng
        self.split = split
        self.rules = rules
        self.about = words_of(about)
        # of the last object: what is measured, and whether it has the two ends of a way
        self.quantity: NamedValues | None = None
        self.travels = False

    def value(self, node: object, name: str = "", depth: int = 0) -> object:
        """Return a value for a part of the schema, which is that of the property `name` at this depth."""
        if not isinstance(node, Mapping):
            return self._text({}, name)
        if "$ref" in node:
            node = self._resolved(node)
        if "const" in node:
            return node["const"]
        if node.get("enum"):
            return self._member(node["enum"], name)
        for key in ("anyOf", "oneOf"):
            if node.get(key):
                return self.value(self._option(node, key, depth), name, depth)
        if node.get("allOf"):
            parts = [_without(node, "allOf"), *node["allOf"]]
            return self.value(self._merged(parts), name, depth)
        kind = self._kind(node)
        if kind == "object":
            return self._object(node, depth)
        if kind == "array":
            return self._array(node, name, depth)
        if kind in ("integer", "number"):
            return self._number(node, kind, name)
        if kind == "boolean":
            return self.rng.random() < 0.5
        return None if kind == "null" else self._text(node, name)

    def result_value(self, name: str) -> object:
        """Return a value for a field of a result of which only the name is known."""
        entry = self._entry(name)
        if entry is not None and entry.flag:
            return self.rng.random() < 0.7
        if entry is not None and entry.low is not None:
            kind = "integer" if entry.step % 1 == 0 else "number"
            return self._number({}, kind, name)
        if entry is None and not self.knows(name):
            return f"{name[:1].upper()}-{self.rng.randint(10, 99)}"
        return self._text({}, name)

    def knows(self, name: str) -> bool:
        """Return whether the name says what its values are."""
        last = words_of(name)[-1:]
        listed = (*VALUES.dates, *VALUES.times, *VALUES.moments)
        listed += (*VALUES.people, *VALUES.codes, *VALUES.units_words)
        return not set(last).isdisjoint(listed) or self._entry(name) is not None

    def note_fields(self, names: Sequence[str]) -> None:
        """Take the quantity that is measured from names and values of a result."""
        self.quantity = self._quantity(names)

    def _member(self, members: Sequence[object], name: str) -> object:
        """Return one of an enum, the usual unit of the quantity where it has that."""
        if self.quantity is not None and _has(name, VALUES.units_words):
            units = [unit.lower() for unit in self.quantity.units]
            usual = [m for m in members if isinstance(m, str) and m.lower() in units]
            members = usual or members
        return self.rng.choice(members)

    def _option(self, node: Schema, key: str, depth: int) -> Schema:
        """Return the schema with one of its alternatives: null only where it refers to itself deeply, or has no other."""
        if depth >= MAX_SCHEMA_DEPTH and _NULL in node[key]:
            options = [_NULL]
        else:
            options = [option for option in node[key] if option != _NULL] or node[key]
        return {**_without(node, key), **self._resolved(self.rng.choice(options))}

    def _kind(self, node: Schema) -> object:
        kind = node.get("type")
        if isinstance(kind, list):
            kind = self.rng.choice([k for k in kind if k != "null"] or kind)
        if kind is not None:
            return kind
        if "properties" in node:
            return "object"
        return "array" if "items" in node else "string"

    def _object(self, node: Schema, depth: int) -> JsonObject:
        required = set(node.get("required") or ())
        properties = node.get("properties") or {}
        chosen = []
        for key in properties:
            if key in required or (depth < MAX_SCHEMA_DEPTH and self.rng.random() < OPTIONAL_SHARE):
                chosen.append(key)
        chosen += [key for key in node.get("required") or () if key not in properties]
        self.quantity = self._quantity(chosen)
        self.travels = {"from", "to"} <= {*chosen}
        result = {}
        for key in chosen:
            result[key] = self.value(properties.get(key, {}), key, depth + 1)
        for low, high in _ordered_pairs(chosen, self.about):
            for _ in range(MAX_EQUAL_DRAWS):
                if result[low] != result[high]:
                    break
                result[high] = self.value(properties.get(high, {}), high, depth + 1)
        self.put_in_order(result)
        return result

    def not_before(self, value: object, others: Iterable[object]) -> object:
        """Return a result's date, or the last of the other dates where it is earlier: what is returned was borrowed before."""
        form, _ = _parsed(value)
        if form not in DATE_FORMATS:
            return value
        dates = [other for other in others if _parsed(other)[0] == form]
        return max([value, *dates], key=_sort_key)

    def put_in_order(self, values: JsonObject) -> None:
        """Swap the ends of ranges that end before they begin."""
        pairs = _ordered_pairs(list(values), self.about)
        for low, high in pairs + pairs:  # an average is between two others
            first = _sort_key(values[low])
            second = _sort_key(values[high])
            if first is not None and type(first) is type(second) and first > second:
                values[low], values[high] = values[high], values[low]

    def _quantity(self, names: Sequence[str]) -> NamedValues | None:
        """Return what is measured: the first word with a unit among the names, else in the tool's words."""
        words = [word for name in names for word in words_of(name)] + self.about
        entries = [_ENTRIES[word] for word in words if word in _ENTRIES]
        return next((entry for entry in entries if entry.units), None)

    def _array(self, node: Schema, name: str, depth: int) -> list[object]:
        n = int(node.get("minItems", depth < MAX_SCHEMA_DEPTH))
        if depth < MAX_SCHEMA_DEPTH:
            most = min(int(node.get("maxItems", MAX_ITEMS)), n + MAX_ITEMS - 1)
            n = self.rng.randint(n, max(n, most))
        first = node.get("prefixItems", ())
        rest = node.get("items", {})
        if isinstance(rest, list):  # a tuple until draft 2019-09
            first = rest
            rest = node.get("additionalItems", {})
        schemas = [*first[:n], *[rest] * (n - len(first))]
        items = [self.value(schema, name.removesuffix("s"), depth + 1) for schema in schemas]
        if _has(name, ("range", "interval", "between", "bereich", "zeitraum")):
            keys = [_sort_key(item) for item in items]
            if None not in keys and len(set(map(type, keys))) == 1:
                items.sort(key=_sort_key)
        if node.get("uniqueItems"):
            return list({json.dumps(item, sort_keys=True): item for item in items}.values())
        return items

    def _number(self, node: Schema, kind: object, name: str) -> int | float:
        entry = self._entry(name)
        low, high = self._limits(node, entry)
        usual = 1 if kind == "integer" else 0.5
        if entry is not None and entry.low is not None:
            usual = max(1, round(entry.step)) if kind == "integer" else entry.step
        step = Decimal(str(node.get("multipleOf") or usual))
        first = -(-Decimal(str(low)) // step)
        last = Decimal(str(high)) // step
        if last < first:
            return low if kind == "number" else int(low)
        drawn = self.rng.randint(int(first), int(last)) * step
        return int(drawn) if drawn % 1 == 0 else float(drawn)

    def _limits(self, node: Schema, entry: NamedValues | None) -> tuple[float, float]:
        """Return the least and the highest value: the schema's, narrowed to what the name usually has."""
        low = node.get("minimum", node.get("exclusiveMinimum"))
        high = node.get("maximum", node.get("exclusiveMaximum"))
        if entry is not None and entry.low is not None:
            narrow_low = entry.low if low is None else max(low, entry.low)
            narrow_high = entry.high if high is None else min(high, entry.high)
            if narrow_low < narrow_high:
                return narrow_low, narrow_high
        if low is None:
            low = LOWEST if high is None else min(LOWEST, high - (HIGHEST - LOWEST))
        if high is None:
            high = max(HIGHEST, low + (HIGHEST - LOWEST))
        return low, high

    def _entry(self, name: str) -> NamedValues | None:
        """Return what the table has for a name: its last word counts most."""
        words = words_of(name)
        found = next((_ENTRIES[word] for word in reversed(words) if word in _ENTRIES), None)
        if found is not None and found.flag and words[-1] not in found.words:
            found = None
        if found is not None and found.measured and self.quantity is not None:
            return self.quantity
        return found

    def _text(self, node: Schema, name: str) -> str:
        """Return an example of the schema, or a text by its format and name; one by its pattern where that does not match."""
        pattern = node.get("pattern")
        texts = self._candidates(node, name)
        for text in texts:
            if pattern is None or re.search(pattern, text):
                return self._fitted(text, node)
        assert pattern is not None  # there is at least one text
        generator = rstr.Rstr(self.rng)
        # * and + repeat up to 100 times
        return min((generator.xeger(pattern) for _ in range(3)), key=len)

    def _candidates(self, node: Schema, name: str) -> list[str]:
        """Return texts of which the first one that matches the pattern is used."""
        examples = [text for text in node.get("examples") or () if isinstance(text, str)]
        if examples:
            return [self.rng.choice(examples)]
        description = str(node.get("description") or "")
        formats = self._moment_formats(node, name, description)
        if formats:
            moment = self._moment(name)
            return [moment.strftime(form) for form in formats]
        if _has(name, VALUES.units_words):
            return [self.quantity.units[0] if self.quantity is not None else "pieces"]
        example = _EXAMPLE.search(description)
        texts = [self._word(node, name)]
        if example is not None:
            written = next(filter(None, example.groups()))
            texts.insert(0, self._with_digits(re.sub(r"\d", "#", written)))
        return texts

    def _moment_formats(self, node: Schema, name: str, description: str) -> tuple[str, ...]:
        """Return the formats that a date or a time may have; none for another text."""
        if node.get("format") is not None:
            return STATED_FORMATS.get(str(node["format"]), ())
        lower = description.lower()
        for text, written in WRITTEN_FORMATS.items():
            if text in lower:
                return (written, *DATE_FORMATS, *TIME_FORMATS)
        last = set(words_of(name)[-1:])
        if not last.isdisjoint(VALUES.moments):
            return MOMENT_FORMATS
        is_bound = any(not last.isdisjoint(pair) for pair in VALUES.ordered)
        said = last.union(words_of(description)) if is_bound else last
        if not said.isdisjoint(VALUES.dates):
            return DATE_FORMATS
        if not said.isdisjoint(VALUES.times):
            return TIME_FORMATS
        is_day = not last.isdisjoint(VALUES.open_bounds) or words_of(name) in STAYS
        return DATE_FORMATS if is_day else ()

    def _moment(self, name: str) -> datetime.datetime:
        """Return a date near today and a time in the opening hours; long ago for a birthday, before today for a report."""
        days = self.rng.randint(1, DAYS_AHEAD)
        if _has(name, VALUES.births):
            days = -self.rng.randint(20 * 365, 75 * 365)
        elif {*self.about, *words_of(name)} & {*VALUES.past}:
            days = -days
        day = self.rules.today + datetime.timedelta(days=days)
        while day.weekday() in self.rules.closed:
            day += datetime.timedelta(days=1 if days > 0 else -1)
        start, end = self.rules.hours
        minute = self.rng.choice((0, 15, 30, 45))
        time = datetime.time(self.rng.randint(start, max(start, end - 2)) % 24, minute)
        return datetime.datetime.combine(day, time)

    def _word(self, node: Schema, name: str) -> str:
        """Return a text by the schema's format, else by the property's name, else a topic."""
        rng = self.rng
        kind = node.get("format")
        words = words_of(name)
        last = words[-1] if words else ""
        who = rng.choice(WORDS.names[self.split])
        if kind == "email" or "email" in words or last == "mail":
            return f"{who.lower()}{rng.randint(1, 99)}@example.org"
        if kind in ("uri", "url") or {*words} & {"url", "uri", "link", "website"}:
            return f"https://example.org/{who.lower()}/{rng.randint(1, 999)}"
        entry = self._entry(name if words else str(kind or ""))
        if kind in ("uuid", "ipv4", "hostname"):
            entry = _ENTRIES[kind]
        is_code = last in VALUES.codes
        if entry is not None and entry.texts and not is_code:
            german = entry.texts_de if self.rules.language == "de" else ()
            return self._with_digits(rng.choice(german or entry.texts))
        if is_code:
            number = WORDS.first_order[self.split] + rng.randint(0, 9999)
            return f"{name[:1].upper() or 'N'}-{number}"
        if words == ["from"] or (words == ["to"] and self.travels):
            return rng.choice(_ENTRIES["city"].texts)
        if last in VALUES.people:
            return who
        if entry is not None and entry.low is not None:
            return str(self._number({}, "integer", name))
        if self.rules.language == "de":
            return rng.choice(_ENTRIES["title"].texts_de)
        return rng.choice(MY_TOPICS[self.split])

    def _with_digits(self, text: str) -> str:
        """Return a text with a digit for each #, none of which leads with zero."""
        first = True
        result = ""
        for sign in text:
            is_digit = sign == "#"
            result += str(self.rng.randint(int(first), 9)) if is_digit else sign
            first = not is_digit
        return result

    def _fitted(self, text: str, node: Schema) -> str:
        """Return the text, repeated or cut to the schema's lengths."""
        shortest = int(node.get("minLength", 0))
        longest = int(node.get("maxLength", 1000))
        if len(text) < shortest:
            text = (text + " ") * (shortest // (len(text) + 1) + 1)
        text = text[:longest]
        return text.strip() if len(text.strip()) >= shortest else text

    def _resolved(self, node: object) -> Schema:
        """Return a schema with its local reference (#/$defs/NAME) replaced by what it refers to."""
        for _ in range(MAX_SCHEMA_DEPTH):
            if not isinstance(node, Mapping) or "$ref" not in node:
                break
            target: Any = self.root
            for part in str(node["$ref"]).lstrip("#/").split("/"):
                target = target.get(part, {}) if isinstance(target, Mapping) else {}
            node = {**target, **_without(node, "$ref")}
        return node if isinstance(node, Mapping) else {}

    def _merged(self, nodes: Sequence[object]) -> JsonObject:
        """Return one schema for all of several."""
        result: JsonObject = {}
        properties: JsonObject = {}
        required: list[str] = []
        for schema in map(self._resolved, nodes):
            result |= schema
            properties |= schema.get("properties", {})
            required += schema.get("required", ())
        if properties:
            result["properties"] = properties
        if required:
            result["required"] = required
        return result


def _without(node: Schema, key: str) -> JsonObject:
    return {k: v for k, v in node.items() if k != key}


def _has(name: str, words: Sequence[str]) -> bool:
    return not set(words).isdisjoint(words_of(name))


def _ordered_pairs(names: Sequence[str], about: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of names, such as start_date and end_date, whose values are in order.

    A journey departs before it arrives; a guest arrives before departure.
    """
    split = {name: words_of(name) for name in names}
    pairs = []
    for first, second in VALUES.ordered:
        if first == "arrival" and {*about} & {"flight", "train", "bus", "flug", "zug", "trip"}:
            first, second = second, first
        for low, words in split.items():
            if first in words:
                at = words.index(first)
                partner = [*words[:at], second, *words[at + 1 :]]
                pairs += [(low, high) for high, other in split.items() if other == partner]
    return pairs


def _parsed(value: object) -> tuple[str, datetime.datetime | None]:
    """Return the format of a date or a time, and its moment; ("", None) for any other value."""
    if isinstance(value, str):
        for form in (*DATE_FORMATS, *TIME_FORMATS, *MOMENT_FORMATS):
            with contextlib.suppress(ValueError):
                return form, datetime.datetime.strptime(value, form)
    return "", None


def _sort_key(value: object) -> Any:
    """Return what a number, a date or a time is sorted by; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return _parsed(value)[1]
