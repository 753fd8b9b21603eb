"""Putting a checkpoint on the Hub with its card: what would go up, what speaks against it, and the upload itself.

prepare(run_dir, repo_id, …) -> Plan   reads everything, stages the very files in RUN/publish/OWNER--NAME, uploads nothing
upload(plan, …) -> dict                huggingface_hub's large-folder upload, which resumes; then the Hub is asked what it has

Only files on a list of names go up, never what else lies in the folder, and never a file in which a secret is seen.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from annie_quant.errors import CheckpointError, EnvironmentFault, ServerError, UsageError, need
from annie_quant.files import write_text
from annie_quant.publish import card
from annie_quant.report import recount
from annie_quant.report.run import REFERENCE, Run, load

# What a server or transformers needs of a checkpoint folder.
NAMES = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "hf_quant_config.json",
    "tokenizer*.json", "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.*", "*processor_config.json", "annie_quant.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
REPORT_FILES = ("report.html", "report.md", "comparison.md", "results.csv")
RECORD_FILES = ("records.jsonl", "inputs.json")
SECRETS = {
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{30,}",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an API key": rb"\bsk-[A-Za-z0-9_\-]{24,}",
    "a GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})",
    "an AWS key": rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "an authorization header": rb"(?i)authorization['\"]?\s*[:=]\s*['\"]?bearer\s+[A-Za-z0-9._\-]{16,}",
}
HEADER_LIMIT = 100_000_000  # bytes; the format's own limit of a safetensors header


@dataclass
class Plan:
    """What `upload` would do: `files` are (path in the repository, size in bytes), `folder` holds exactly these."""

    repo_id: str
    private: bool
    folder: Path
    files: list[tuple[str, int]]
    card: str
    objections: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    forced: str = ""

    @property
    def refused(self) -> bool:
        return bool(self.objections) and not self.forced

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.files)

    def to_dict(self) -> dict[str, Any]:
        return {
            "repo_id": self.repo_id,
            "private": self.private,
            "folder": str(self.folder),
            "files": [{"path": name, "size_bytes": size} for name, size in self.files],
            "size_bytes": self.size_bytes,
            "left_out": self.left_out,
            "objections": self.objections,
            "forced": self.forced,
            "refused": self.refused,
        }


def prepare(
    run_dir: str | os.PathLike,
    repo_id: str,
    model: str | None = None,
    checkpoint: str | os.PathLike | None = None,
    base_model: str | None = None,
    license: str = "",
    calib_data: str | os.PathLike | None = None,
    private: bool = True,
    with_report: bool = False,
    with_records: bool = False,
    forced: str = "",
) -> Plan:
    """Audit the checkpoint, write its card, stage the files; nothing leaves the machine.

    model: its name in the run (default: the verdict's candidate).  checkpoint: its folder, where the run does not know it.
    forced: the reason for publishing in spite of failed gates or audit faults; it is printed in the card.
    Raises UsageError (no such model, no base model, a bad name, a secret in a file), CheckpointError.
    """
    from annie_quant import checkpoint as checkpoints

    run = load(Path(run_dir))
    name = model or run.doc["verdict"].get("candidate") or _only_model(run)
    source = _folder(run, name, checkpoint)
    base = base_model or _known_base(source)
    if not base:
        raise UsageError(
            f"{source}: config.json does not say which Hub model this was made from", "add --base-model OWNER/NAME"
        )
    audit = checkpoints.audit(source)
    objections = [f"audit: {f.message}" for f in audit.findings] + against(run, name)
    calibration = Path(calib_data) if calib_data else run.folder / "calibration.jsonl"
    if calib_data and not calibration.is_file():
        raise UsageError(f"{calibration}: no such file", "give --calib-data the conversations that were used")
    subject = card.Subject(
        name=name, folder=source, audit=audit, repo_id=repo_id, base_model=base, license=license or _license(source),
        calibration=calibration, forced=forced, objections=tuple(objections) if forced else (),
    )  # fmt: skip
    text = card.render(run, subject)
    chosen = {f.name: f for f in sorted(source.iterdir()) if f.is_file() and wanted(f.name)}
    extras = (REPORT_FILES if with_report else ()) + (RECORD_FILES if with_records else ())
    chosen |= {f"evidence/{n}": run.folder / n for n in extras if (run.folder / n).is_file()}
    for path, file in chosen.items():
        if secret := secret_in(file):
            raise UsageError(f"{path} holds {secret}; it is not published, whatever is said", f"look into {file}")
    staged = stage(run.folder / "publish" / repo_id.replace("/", "--"), chosen, text)
    return Plan(
        repo_id=repo_id,
        private=private,
        folder=staged,
        files=sorted((p.relative_to(staged).as_posix(), p.stat().st_size) for p in _staged(staged)),
        card=text,
        objections=objections,
        left_out=sorted(f.name for f in source.iterdir() if f.name not in chosen and f.name != "README.md"),
        forced=forced,
    )


def wanted(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in NAMES)


def against(run: Run, model: str) -> list[str]:
    """What the run says against publishing this model: failed gates, no gates at all, figures without records."""
    sides = card.sides_of(run, model)
    found = [
        f"{run.gate_title(gate)} fails {side.title}: {row['passes']:g} of {row['n']:g}"
        for side in sides
        for gate, row in side.gates.items()
        if row["verdict"] == "fail" and not row["advisory"]
    ]
    if not any(s.gates for s in sides):
        found.append("no gate was measured for this model")
    served = {s.key.split("/", 1)[1]: s.data for s in sides if s.kind == "served"}
    if served and run.records:
        checked = recount.check(served, run.measured, recount.greedy_workloads(run.inputs))
        if checked["differ"]:
            found.append(f"{len(checked['differ'])} of {checked['compared']} served figures differ from the records")
    return found


def _only_model(run: Run) -> str:
    """The one model there is besides the reference, where no verdict or search names a candidate."""
    known = [m["name"] for m in run.models if m["name"] != REFERENCE]
    if len(known) != 1:
        raise UsageError(
            f"{run.folder}: no candidate is named among {', '.join(known) or 'no models'}", "choose one: --model NAME"
        )
    return str(known[0])


def _folder(run: Run, name: str, given: str | os.PathLike | None) -> Path:
    row: dict[str, Any] = next((m for m in run.models if m["name"] == name), {})
    if not row:
        raise UsageError(
            f"{run.folder}: there is no model {name!r}", f"choose one of: {', '.join(m['name'] for m in run.models)}"
        )
    said = [Path(given)] if given else [Path(row.get("checkpoint") or "."), run.folder / "models" / name]
    folder = next((p for p in said if (p / "config.json").is_file()), None)
    if folder is None:
        raise CheckpointError(f"{name}: no checkpoint folder is known or there", "add --checkpoint DIR")
    return folder


def _known_base(folder: Path) -> str:
    said = str(card.read_object(folder / "config.json").get("_name_or_path") or "")
    return said if re.fullmatch(r"[\w.\-]+/[\w.\-]+", said) and not Path(said).exists() else ""


def _license(folder: Path) -> str:
    """The licence in the metadata of a README that came with the checkpoint."""
    readme = folder / "README.md"
    if not readme.is_file():
        return ""
    hub = need("huggingface_hub", "quantize")
    try:
        return str((hub.metadata_load(readme) or {}).get("license") or "")
    except ValueError:
        return ""


def secret_in(path: Path) -> str:
    """What kind of secret a file holds ("" for none). Of weights only the header is text."""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            content = file.read(min(length, HEADER_LIMIT))
        else:
            content = file.read()
    return next((kind for kind, pattern in SECRETS.items() if re.search(pattern, content)), "")


def stage(folder: Path, files: dict[str, Path], text: str) -> Path:
    """A folder with exactly these files, as hard links where the file system allows, and the card.

    A file that is there already with the same content's stamp stays, and with it what huggingface_hub remembers of it
    (.cache/huggingface): that is how an interrupted upload goes on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in _staged(folder):
        if old.relative_to(folder).as_posix() not in {*files, "README.md"}:
            old.unlink()
    for name, source in files.items():
        target = folder / name
        if target.exists() and target.stat().st_ino == source.stat().st_ino:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            target.hardlink_to(source)
        except OSError:
            shutil.copy2(source, target)
    readme = folder / "README.md"
    if not readme.exists() or readme.read_text(encoding="utf-8") != text:
        write_text(readme, text)
    return folder


def _staged(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).parts[0] != ".cache"]


def upload(
    plan: Plan, endpoint: str | None = None, token: str | None = None, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Upload what was prepared; an interrupted upload goes on where it stopped. Returns {"url", "files", "size_bytes"}.

    Raises UsageError (refused; a public repository where a private one was meant), EnvironmentFault (no token, offline),
    ServerError (the Hub refuses, or keeps failing; what has arrived stays).
    """
    if plan.refused:
        raise UsageError(
            f"not published: {'; '.join(plan.objections[:4])}", 'mend it, or say why not: --force "REASON"'
        )
    hub, errors = need("huggingface_hub", "quantize"), need("huggingface_hub.errors", "quantize")
    if not (token or hub.get_token()):
        raise EnvironmentFault("no Hugging Face token is set", "hf auth login, or set HF_TOKEN")
    api = hub.HfApi(endpoint=endpoint, token=token)
    try:
        _check_visibility(errors, api, plan)
        say(f"{plan.repo_id}: {len(plan.files)} files")
        _send(api, plan)
        missing = _not_arrived(api, plan)
    except errors.OfflineModeIsEnabled as error:
        raise EnvironmentFault("HF_HUB_OFFLINE is set, so nothing can be uploaded", "unset HF_HUB_OFFLINE") from error
    except errors.HfHubHTTPError as error:
        raise ServerError(f"the Hub refused: {_first_line(error)}", "hf auth whoami shows whose token it is") from error
    except (RuntimeError, OSError) as error:
        raise ServerError(
            f"the upload broke off: {_first_line(error.__cause__ or error)}",
            "what has arrived stays; the same command goes on from there",
        ) from error
    if missing:
        # The Hub was told of them before and does not have them now: forget, so that the next time sends them.
        shutil.rmtree(plan.folder / ".cache", ignore_errors=True)
        raise ServerError(
            f"the Hub does not hold {', '.join(missing[:4])} as they are here", "run the same command again"
        )
    url = f"{api.endpoint}/{plan.repo_id}"
    return {"url": url, "private": plan.private, "files": len(plan.files), "size_bytes": plan.size_bytes}


def _send(api: Any, plan: Plan) -> None:
    """The large-folder upload keeps its progress beside the files, with Xet or without.

    Newer releases announce that upload_folder will take its place; there it resumes with Xet alone.
    """
    if not hasattr(api, "upload_large_folder"):
        api.create_repo(plan.repo_id, private=plan.private, exist_ok=True)
        api.upload_folder(repo_id=plan.repo_id, folder_path=plan.folder, ignore_patterns=[".cache/*"])
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        api.upload_large_folder(
            repo_id=plan.repo_id, folder_path=plan.folder, repo_type="model", private=plan.private, print_report=False
        )


def _check_visibility(errors: Any, api: Any, plan: Plan) -> None:
    try:
        there = api.repo_info(plan.repo_id, repo_type="model")
    except errors.RepositoryNotFoundError:
        return
    if plan.private and not there.private:
        raise UsageError(
            f"{plan.repo_id} exists and is public, and this was to be private", "add --public, or choose another name"
        )


def _not_arrived(api: Any, plan: Plan) -> list[str]:
    """Files that the repository lacks or has in another size."""
    there = api.repo_info(plan.repo_id, repo_type="model", files_metadata=True)
    sizes = {f.rfilename: f.size for f in there.siblings or ()}
    return [name for name, size in plan.files if sizes.get(name) != size]


def _first_line(error: BaseException) -> str:
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__
