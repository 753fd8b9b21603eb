"""Check names and prose against the project's language rules (CONTRIBUTING.md, "Language").

    python tools/check_language.py [FILE ...]        without files: everything that git tracks

Prints one line per violation (file:line: word: what to write instead) and exits with 1 if there is any. Checked are the names
that Python code defines, the names in C code, comments, docstrings, strings with a space in them, and documents. A line with
the comment "language: data" is skipped: its text is input or output of something, not prose.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".pyi", ".c", ".h", ".cu", ".cuh", ".md", ".html", ".js", ".css", ".sh", ".toml", ".jinja"}
SKIPPED = ("annie_quant/assets/tiny", "annie_quant/assets/workloads", "annie_quant/assets/personas", "csrc/licences",
           "tests/data/", "tests/fuzz/corpus", "tools/check_language.py")  # fmt: skip
PRAGMA = "language: data"

# Names that may not be defined: they say nothing about the value.
NAMES = {
    **dict.fromkeys(
        ("found", "made", "given", "kept", "seen", "asked"), "name the thing: findings, result, rows, requests"
    ),
    **dict.fromkeys(
        ("said", "told", "tell", "tells", "heard", "hears", "say", "says"), "message, report, log, callback"
    ),
    **dict.fromkeys(("mend", "mends", "mended"), "fix"),
    **dict.fromkeys(("beside", "anew", "wanted", "founding"), "next to / again / expected / original"),
    **dict.fromkeys(("house", "room", "walk"), "package, module, traversal"),
    **dict.fromkeys(("stairs", "let_go", "dealt_anew", "lies"), "lookup_table, release, shuffled, invalid"),
}
# Abbreviations without a vowel (three to five letters) that a name may have in it: the field's, and those of libraries.
ABBREVIATIONS = (
    "bfcl|cls|cpp|cpps|css|csv|ctrl|csrc|ctx|cwd|dns|fds|ffn|gcc|ggml|gptq|html|http|httpx|int|https|ldx|llm|mhz|mlp|mtp|mtq|nccl|nvcc|nvfp|nvml|"
    "pdl|plt|png|ptr|ptx|qkv|rhs|rms|rng|rss|sfb|sms|sql|src|ssl|std|str|svg|sys|tls|tmp|tmpfs|tqdm|ttft|txt|url|vllm|vllms|xml"
)
COUNTED = (
    "row|line|file|dict|folder|process|thread|connection|column|entry|hash|record|server|GPU|task|byte|block|event|token|"
    "weight|second|minute|hour|day|core|layer|batch|read|call|answer|request|prompt|gate|workload|turn|linear|tensor|"
    "value|number|figure|page|panel|module|session|visit|side|model|step|launch|warp|lane|tile|stage|chunk|piece|name|key"
)
# Prose (comments, docstrings, strings, documents): pattern → what to write.
PROSE: tuple[tuple[str, str], ...] = (
    (r"mend(s|ed|ing)?", "fix"),
    (r"beside", "next to, compared with, in the same folder"),
    (r"(said|says|tells?|told|hears?|heard)", "reports, states, logs, message"),
    (r"founding", "the requirement's number (R7) or 'original plan'"),
    (r"wanted|wants?", "expected, needs"),
    (r"dealt anew|anew|afresh", "shuffled, again"),
    (r"words for|a word on", "description, message"),
    (r"turn(s|ed|ing)? (them |it )?over|stairs", "permute in place, lookup table"),
    (r"kernel after adds?|shared tiles?", "fix-up kernel, stream-K"),
    (r"of no \w+'s making|beautiful", "plain words"),
    (r"(?<!there )is no (?!longer\b|more\b|less\b|better\b|worse\b|later\b|larger\b|smaller\b)\w+", "is not a ..."),
    (rf"(?:an?|one|each) (?:\w+ )?({COUNTED})s? an? ({COUNTED})", "one ... per ..."),
    (r"left alone|leaves? alone", "skipped, unchanged"),
    (
        r"(thus|hence|hereby|whence|thereof|therein|wherein|whereby|lest|nigh|ere|aught|naught|upon|whilst|amongst|albeit"
        r"|henceforth|forthwith|whither|hither|thither|perchance|mayhap)",
        "plain words",
    ),
    (r"(can(not)? be|not to be|is to be|are to be) had", "available"),
    (r"but for (the|a|an|its|their|one|two|what)", "except for"),
    (r"an? \w+ of (its|their|our|his|her) own", "its own ..."),
    (r"(goes|go|went|gone|going) on (with|from|where|after|later)", "continue, resume"),
    (r"in place of", "instead of"),
    (r"for good", "permanently"),
    (r"held still|stands? still|stood still", "stopped"),
    (r"nothing to say", "no warnings"),
    (r"the likes? of", "similar to"),
    (r"house rules?|of the house", "package, project"),
)
CODES = (
    (r"\"[a-z_]*_lies\"|\"[a-z_]*_wrong\"", "an error code that names the mismatch: invalid_..., ..._mismatch"),
    (r"\"mends?\"", '"fix"'),
)
_PROSE = [(re.compile(rf"(?<![\w`/-])(?:{pattern})(?![\w`])", re.IGNORECASE), advice) for pattern, advice in PROSE]
_CODES = [(re.compile(pattern), advice) for pattern, advice in CODES]


def violations(path: Path) -> Iterator[tuple[int, str, str]]:
    """Return (line, word, advice) for each violation in one file."""
    text = path.read_text(encoding="utf-8")
    skipped = {number for number, line in enumerate(text.split("\n"), 1) if PRAGMA in line}
    for violation in _violations(path, text):
        if violation[0] not in skipped:
            yield violation


def _violations(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    if path.suffix in (".py", ".pyi"):
        yield from python_names(ast.parse(text))
        parts = python_prose(text)
        yield from in_text(text, _CODES)
    elif path.suffix in (".c", ".h", ".cu", ".cuh"):
        yield from c_names(text)
        parts = c_prose(text)
    else:
        parts = iter([(1, text)])
    for line, part in parts:
        for number, word, advice in in_text(part, _PROSE):
            yield line + number - 1, word, advice


def in_text(text: str, rules: list[tuple[re.Pattern[str], str]]) -> Iterator[tuple[int, str, str]]:
    for pattern, advice in rules:
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), advice


def python_names(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Check the names that the code defines: functions, classes, arguments, variables, attributes, import aliases."""
    for node in ast.walk(tree):
        name = None
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = node.name
            for _, word, advice in in_text(name.replace("_", " ") if name.startswith("test_") else "", _PROSE):
                yield node.lineno, f"{name}: {word}", advice
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.alias) and node.asname:
            name = node.asname
        if name is None:
            continue
        if name.strip("_") in NAMES:
            yield getattr(node, "lineno", 1), name, NAMES[name.strip("_")]
        for part in re.findall(r"[A-Z]?[a-z]+", name):
            if 3 <= len(part) <= 5 and not re.search(f"[aeiouy]|^({ABBREVIATIONS})$", part.lower()):
                yield (
                    getattr(node, "lineno", 1),
                    name,
                    f"the word instead of {part!r} (ABBREVIATIONS lists those allowed)",
                )


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Return comments and strings with their lines. A string without a space is data, not prose."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        text_kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
        if token.type in text_kinds and " " in token.string.strip():
            yield token.start[0], token.string


def c_prose(text: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r'/\*.*?\*/|//[^\n]*|"(?:[^"\\\n]|\\.)*"', text, re.DOTALL):
        yield text.count("\n", 0, match.start()) + 1, match[0]


def c_names(text: str) -> Iterator[tuple[int, str, str]]:
    code = re.sub(r'/\*.*?\*/|//[^\n]*|"(?:[^"\\\n]|\\.)*"', lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    for match in re.finditer(rf"\b(?:{'|'.join(NAMES)})\b", code):
        yield code.count("\n", 0, match.start()) + 1, match[0], NAMES[match[0]]


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def main() -> int:
    paths = [Path(argument).resolve() for argument in sys.argv[1:]] or tracked()
    paths = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    count = 0
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in SUFFIXES or name.startswith(SKIPPED):
            continue
        for line, word, advice in sorted(violations(path)):
            print(f"{name}:{line}: {word!r}: write {advice}")
            count += 1
    print(f"{count} violations" if count else "the language rules are kept", file=sys.stderr)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
