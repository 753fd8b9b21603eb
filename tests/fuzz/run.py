"""Run all fuzzers one after the other for a limited time and print a table. `make fuzz SECONDS=60`

    python tests/fuzz/run.py SECONDS [NAME ...]

C (sse, request): libFuzzer with ASan and UBSan (clang). codec: codec_driver.c with its own generator, ASan and UBSan.
Python (targets.py): atheris (libFuzzer with coverage of Python bytecode) if it can be installed, else mutations of the seeds.
New inputs are written to build/fuzz/corpus/NAME, failing ones to build/fuzz/crash-*. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build/fuzz"
SITE = BUILD / "site"
C_TARGETS = ("sse", "request")
INPUT_BYTES = 4096
INPUT_S = 60  # an input that takes longer is a finding
SIMD = re.compile(r"/\* flags for (\w+):(.*)\*/")  # the first line of a SIMD variant

Row = tuple[
    str, str, int, str, int, bool
]  # name, fuzzer, executions, coverage, corpus size, failed


def libfuzzer(name: str, by: str, command: list[str], seconds: int, seeds: list[Path]) -> Row:
    corpus = BUILD / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", "-print_final_stats=1", f"-timeout={INPUT_S}", f"-max_len={INPUT_BYTES * 8}",
               "-rss_limit_mb=4096", f"-artifact_prefix={BUILD}/crash-{name}-"]  # fmt: skip
    folders = [str(corpus), *(str(s) for s in seeds if s.is_dir())]
    done = subprocess.run(
        [*command, *options, *folders], capture_output=True, text=True, cwd=BUILD, errors="replace"
    )
    runs = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    cover = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
    coverage = f"{cover[-1][0]} edges" if cover else ""
    return (
        name,
        by,
        int(runs[1]) if runs else 0,
        coverage,
        len(list(corpus.iterdir())),
        done.returncode != 0,
    )


def c_target(name: str, seconds: int) -> Row:
    binary = BUILD / name
    sources = [HERE / f"fuzz_{name}.c", ROOT / f"csrc/stream/{name}.c"]
    flags = [
        "-std=c11",
        "-g",
        "-O1",
        "-fsanitize=fuzzer,address,undefined",
        "-DLIBFUZZER",
        f"-I{ROOT}/csrc",
    ]
    subprocess.run(["clang", *flags, *sources, "-o", binary], check=True)
    return libfuzzer(name, "libFuzzer", [str(binary)], seconds, [HERE / "corpus" / name])


def codec(seconds: int) -> Row:
    """Run the codec's driver, which generates its inputs; each round starts from another number."""
    flags = ["-std=c11", "-g", "-O1", "-ffp-contract=off", "-fno-math-errno", "-pthread", f"-I{ROOT}/csrc",
             "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]  # fmt: skip
    objects = []
    for source in [*sorted((ROOT / "csrc/nvfp4").glob("*.c")), HERE / "codec_driver.c"]:
        line = SIMD.match(source.read_text())
        if source.name == "module.c" or (line and line[1] != os.uname().machine):
            continue
        objects.append(str(BUILD / f"{source.stem}.o"))
        simd = line[2].split() if line else []
        subprocess.run(["gcc", *flags, *simd, "-c", str(source), "-o", objects[-1]], check=True)
    subprocess.run(["gcc", *flags, *objects, "-lm", "-o", str(BUILD / "codec")], check=True)
    each, rounds, until = 20_000, 0, time.monotonic() + seconds
    start = random.randrange(10_000)
    while time.monotonic() < until:
        done = subprocess.run(
            [str(BUILD / "codec"), str(each), str(start + rounds)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        rounds += 1
        if done.returncode:
            print(
                f"codec: broken with {each} executions from {start + rounds - 1}", file=sys.stderr
            )
            return "codec", "own driver", rounds * each, "", 0, True
    return "codec", "own driver", rounds * each, "", 0, False


def python_target(name: str, seconds: int) -> Row:
    if not have_atheris():
        return mutated(name, seconds)
    seeds = BUILD / "seeds" / name
    write_seeds(name, seeds)
    return libfuzzer(
        name,
        "atheris",
        [sys.executable, str(HERE / "run.py"), "--atheris", name],
        seconds,
        [seeds, HERE / "corpus" / name],
    )


def have_atheris() -> bool:
    sys.path.insert(0, str(SITE))
    try:
        import atheris  # noqa: F401
    except ImportError:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(SITE),
            "atheris==3.0.0",
        ]
        return subprocess.run(pip, capture_output=True).returncode == 0
    return True


def write_seeds(name: str, folder: Path) -> None:
    from targets import TARGETS

    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[name].seeds()):
        (folder / f"seed{number}").write_bytes(seed)


def mutated(name: str, seconds: int) -> Row:
    """Run mutated seeds without coverage, if atheris is not available."""
    from mutate import mutate
    from targets import TARGETS

    target, rng = TARGETS[name], random.Random()
    corpus = [p.read_bytes() for p in (HERE / "corpus" / name).glob("*")]
    seeds, runs, until = [*target.seeds(), *corpus], 0, time.monotonic() + seconds
    while time.monotonic() < until:
        raw = mutate(rng, rng.choice(seeds))
        runs += 1
        try:
            target.run(raw)
        except Exception as error:
            (BUILD / f"crash-{name}").write_bytes(raw)
            print(f"{name}: {error!r}: stored in {BUILD}/crash-{name}", file=sys.stderr)
            return name, "mutations", runs, "", len(seeds), True
    return name, "mutations", runs, "", len(seeds), False


def run_atheris(name: str, arguments: list[str]) -> None:
    """Run libFuzzer's loop over one target, alternating its mutations and ours. Runs in a separate process."""
    sys.path.insert(0, str(SITE))
    import atheris
    from mutate import mutate

    with atheris.instrument_imports(include=["annie_quant"]):
        import annie_quant.bench.run_folder
        import annie_quant.checkpoint
        import annie_quant.checkpoint.gguf.reader
        import annie_quant.data.rows
        import annie_quant.judge
        import annie_quant.ops.doctor
        import annie_quant.ops.server
        import annie_quant.report.pages
        import annie_quant.report.run
        import annie_quant.stream  # noqa: F401
    from targets import TARGETS

    list(TARGETS[name].seeds())

    def change(data: bytes, most: int, seed: int) -> bytes:
        if seed % 2:
            return atheris.Mutate(data, most)
        return mutate(random.Random(seed), data)[:most]

    atheris.Setup([sys.argv[0], *arguments], TARGETS[name].run, custom_mutator=change)
    atheris.Fuzz()


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--atheris"]:
        run_atheris(arguments[1], arguments[2:])
        return 0
    from targets import TARGETS

    known = [*C_TARGETS, "codec", *TARGETS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seconds", nargs="?", type=int, default=60, help="per fuzzer")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="default: all of " + " ".join(known),
    )
    options = parser.parse_args(arguments)
    seconds, names = options.seconds, options.names or known
    BUILD.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        if name in (*C_TARGETS, "codec") and not shutil.which(
            "clang" if name in C_TARGETS else "gcc"
        ):
            print(f"{name}: skipped, its compiler is not installed", file=sys.stderr)
            continue
        rows.append(
            codec(seconds)
            if name == "codec"
            else c_target(name, seconds)
            if name in C_TARGETS
            else python_target(name, seconds)
        )
        print(
            "{:14} {:10} {:>10} executions  {:>12}  corpus {:>5}  {}".format(
                *rows[-1][:5], "BROKEN" if rows[-1][5] else ""
            ),
            flush=True,
        )
    return int(any(row[5] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
