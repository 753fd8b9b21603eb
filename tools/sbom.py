"""Write the bill of materials of a wheel (CycloneDX 1.6, JSON): the wheel, its dependencies, and the libraries inside it.

    python tools/sbom.py WHEEL OUTPUT.json

CycloneDX's tool reads a fresh environment in which the wheel is installed. It does not find the C libraries inside the wheel;
they are added from the versions that _stream reports. The same wheel and the same registry give the same file.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TOOL = "cyclonedx-bom==7.5.0"
# Library in annie_quant.libs -> its parts: (name in the version text of _stream's libcurl, component, licence, URL).
PARTS = {
    "libcurl": (
        ("libcurl", "curl", "curl", "https://curl.se"),
        ("OpenSSL", "openssl", "Apache-2.0", "https://openssl.org"),
        ("nghttp2", "nghttp2", "MIT", "https://nghttp2.org"),
    ),
}


def main(wheel: Path, output: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subject = environment(folder, "subject", str(wheel))
        tool = environment(folder, "tool", TOOL)
        listed = [
            tool,
            "-m",
            "cyclonedx_py",
            "environment",
            subject,
            "--output-reproducible",
            "--mc-type",
            "library",
        ]
        bill = json.loads(subprocess.run(listed, capture_output=True, text=True, check=True).stdout)
        code = "import annie_quant._stream as s, pathlib; print(s.CURL_VERSION); "
        code += "print(*(f for f in pathlib.Path(s.__file__).parents[1].glob('annie_quant.libs/*')), sep='\\n')"
        output_lines = subprocess.run(
            [subject, "-I", "-c", code], capture_output=True, text=True, check=True
        ).stdout.split("\n")
        versions = dict(word.split("/", 1) for word in output_lines[0].split() if "/" in word)
        bundled = [
            part
            for line in filter(None, output_lines[1:])
            for part in components(Path(line), versions)
        ]

    subject_entry = next(c for c in bill["components"] if c["name"] == "annie-quant")
    subject_entry.pop("externalReferences", None)  # the path of the wheel on this machine
    subject_entry["hashes"] = [
        {"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    ]
    bill["components"] = [
        c
        for c in bill["components"]
        if c is not subject_entry and c["name"] not in ("pip", "setuptools")
    ] + bundled
    bill["dependencies"] = [
        d for d in bill["dependencies"] if not d["ref"].startswith(("pip==", "setuptools=="))
    ]
    bill["metadata"]["component"] = subject_entry
    depends = next(d for d in bill["dependencies"] if d["ref"] == subject_entry["bom-ref"])
    depends["dependsOn"] = [*depends.get("dependsOn", ()), *(part["bom-ref"] for part in bundled)]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(bill, indent=1) + "\n")
    print(
        f"{output}: {len(bill['components'])} components, {len(bundled)} of them inside the wheel"
    )


def environment(folder: str, name: str, requirement: str) -> str:
    """Create a virtual environment with this requirement and return its Python."""
    path = Path(folder, name)
    venv.create(path, with_pip=True)
    python = str(path / "bin/python")
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", requirement],
        check=True,
    )
    return python


def components(library: Path, versions: dict[str, str]) -> list[dict]:
    """Return the components of one library in the wheel. Raises KeyError for a library that is not in PARTS."""
    content = hashlib.sha256(library.read_bytes()).hexdigest()
    return [
        {
            "type": "library",
            "bom-ref": f"carried:{component}",
            "name": component,
            **({"version": versions[reported]} if reported else {}),
            "licenses": [{"expression": licence}],
            "externalReferences": [{"type": "website", "url": url}],
            "properties": [
                {"name": "annie-quant:file", "value": f"annie_quant.libs/{library.name}"},
                {"name": "annie-quant:file:sha256", "value": content},
            ],
        }
        for reported, component, licence, url in PARTS[library.name.split("-")[0].split(".")[0]]
    ]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
