"""Print rows that the offline teacher writes for personas, one per line, to be read against their prompts.

    python tests/perf/generated_rows.py [PERSONA.json ...] [--n 50] [--seed 1]

Without files: the five invented personas of tests/data/personas. generated_rows.md has the reading.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from annie_quant.data import generate, load_persona, read_rows
from annie_quant.data.model_rows import row_lines

FOLDER = Path(__file__).resolve().parents[1] / "data" / "personas"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("personas", nargs="*", default=sorted(map(str, FOLDER.glob("*.json"))))
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for persona in options.personas:
        print(f"\n== {persona}\n{load_persona(persona).system_prompt}\n")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.jsonl"
            generate(persona, n=options.n, output=file, seed=options.seed)
            for row in read_rows(file):
                print(f"{row['id']}: {' | '.join(row_lines(row))}")


if __name__ == "__main__":
    main()
