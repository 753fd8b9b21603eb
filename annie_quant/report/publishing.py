"""Upload a checkpoint to the Hugging Face Hub with its model card.

prepare(run_dir, repo_id, …) -> UploadPlan   audit, card and the files to upload, staged in RUN/publish/OWNER--NAME; no network
upload(plan, …) -> Uploaded            huggingface_hub's resumable upload, then a check of what the Hub has

Only files on a list of names are uploaded, and nothing at all where one of them contains a secret.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec

from annie_quant.checkpoint.shards import COMPANIONS, is_model, model_sha256
from annie_quant.core.errors import CheckpointError, EnvironmentFault, ServerError, UsageError, need
from annie_quant.core.files import write_text
from annie_quant.core.progress import Progress, as_progress
from annie_quant.core.secrets import secret_in
from annie_quant.documents import SpeedGate, salvage_or_default
from annie_quant.judge import decision
from annie_quant.judge.decision import wording
from annie_quant.report import card
from annie_quant.report.recheck import check_figures, first, judge_again, verdict_differences
from annie_quant.report.run import REFERENCE, LoadedRun, load

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# What a server or transformers needs of a checkpoint folder.
NAMES = (
    *COMPANIONS,
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "hf_quant_config.json",
    "tokenizer*.json",
    "chat_template.*",
    "*processor_config.json",
    "annie_quant.json",
    "LICENSE*",
    "NOTICE*",
)
REPORT_FILES = ("report.html", "report.md", "comparison.md", "results.csv")
RECORD_FILES = ("records.jsonl", "inputs.json")


class _NamedConfig(msgspec.Struct):
    name_or_path: str = msgspec.field(default="", name="_name_or_path")


class Uploaded(msgspec.Struct):
    """A finished upload.

    files: their number.
    """

    url: str
    private: bool
    files: int
    size_bytes: int


class PlannedFile(msgspec.Struct):
    """path: in the repository."""

    path: str
    size_bytes: int


class UploadPlan(msgspec.Struct, kw_only=True):
    """What `upload` would do; `--dry-run --json` prints it.

    folder: holds exactly `files`.
    size_bytes: of all files.
    left_out: names in the checkpoint's folder that are not uploaded.
    objections: why it should not be published.
    forced: the reason for publishing in spite of them.
    """

    repo_id: str
    private: bool
    folder: Path
    files: list[PlannedFile]
    size_bytes: int = 0
    left_out: list[str] = []
    objections: list[str] = []
    forced: str = ""
    refused: bool = False

    def __post_init__(self) -> None:
        self.size_bytes = sum(file.size_bytes for file in self.files)
        self.refused = bool(self.objections) and not self.forced

    @property
    def card(self) -> str:
        return (self.folder / "README.md").read_text(encoding="utf-8")


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
) -> UploadPlan:
    """Audit the checkpoint, write its card and stage the files; use no network.

    model: its name in the run (default: the verdict's candidate).
    checkpoint: its folder, where the run does not know it.
    forced: the reason for publishing in spite of failed gates or audit findings; the card shows it.
    Raises UsageError (no such model, another checkpoint than the evaluated one, no base model, a
    bad name, a secret in a file), CheckpointError.
    """
    from annie_quant import checkpoint as checkpoints

    run = load(run_dir)
    name = model or run.verdict.candidate or _only_model(run)
    source = _folder(run, name, checkpoint)
    base = base_model or _known_base(source)
    if not base:
        raise UsageError(
            f"{source}: config.json does not name the Hub model of this one",
            "add --base-model OWNER/NAME",
        )
    unknown = check_identity(run, name, source)
    origin = source_of(run, name)
    audit = checkpoints.audit(source, source=origin)
    problems = [f"audit: {f.message}" for f in audit.findings] + unknown + objections(run, name)
    calibration = Path(calib_data) if calib_data else run.folder / "calibration.jsonl"
    if calib_data and not calibration.is_file():
        raise UsageError(
            f"{calibration}: no such file", "give --calib-data the conversations that were used"
        )
    subject = card.Subject(
        name=name,
        folder=source,
        audit=audit,
        repo_id=repo_id,
        base_model=base,
        license=license or _license(source),
        compared=origin is not None,
        calibration=calibration,
        forced=forced,
        objections=tuple(problems) if forced else (),
    )
    text = card.render(run, subject)
    names = sorted(f.name for f in source.iterdir())
    uploadable = [n for n in names if any(fnmatch.fnmatchcase(n, pattern) for pattern in NAMES)]
    files = {n: source / n for n in uploadable if (source / n).is_file()}
    extras = (REPORT_FILES if with_report else ()) + (RECORD_FILES if with_records else ())
    files |= {f"evidence/{n}": run.folder / n for n in extras if (run.folder / n).is_file()}
    for path, file in files.items():
        secret = secret_in(file)
        if secret:
            raise UsageError(
                f"{path} contains {secret}; it cannot be published, not even with --force",
                f"check {file}",
            )
    folder = _stage(run.folder / "publish" / repo_id.replace("/", "--"), files, text)
    return UploadPlan(
        repo_id=repo_id,
        private=private,
        folder=folder,
        files=[
            PlannedFile(p.relative_to(folder).as_posix(), p.stat().st_size)
            for p in sorted(_staged(folder))
        ],
        objections=problems,
        left_out=[n for n in names if n not in files and n != "README.md"],
        forced=forced,
    )


def objections(run: LoadedRun, model: str) -> list[str]:
    """Return why this model should not be published.

    Reasons are lost gates, no gates at all, a confound, a broken export, and figures or a verdict
    that differ from the records or outcomes. Speed limits are not among them, because they hold for
    one machine only.
    """
    sides = run.sides_of(model)
    judged = judge_again(run.folder)
    problems: list[str] = []
    for aggregates in (run.aggregates, judged.aggregates):
        for gate in decision.deciding_gates(aggregates, model):
            if gate.verdict == "loses" and not isinstance(gate.result, SpeedGate):
                problems.append(wording.reason(gate))
    problems = [*dict.fromkeys(problems), *verdict_differences(run, judged)]
    chosen = decision.candidate_decision(judged.aggregates, model)
    if chosen and chosen.confounded:
        problems.append(f"CONFOUNDED: {', '.join(chosen.confounded)}")
    if not any(s.gates for s in sides):
        problems.append("no gate was measured for this model")
    check = check_figures(run, sides)
    if check and check.differences:
        problems.append(
            f"{len(check.differences)} of {check.compared} served figures differ from the records"
        )
    problems += decision.blocking_of(run.aggregates, model)
    for name in sorted({s.model for s in sides if s.model in run.aggregates.offline}):
        if name not in run.evaluations:
            problems.append(
                f"eval/{name}.json, from which offline figures are counted again, is missing or unreadable"
            )
        elif name in run.evidence:
            problems.append(f"eval/{name}.json does not hold: {first(run.evidence[name])}")
    return problems


def check_identity(run: LoadedRun, model: str, folder: Path) -> list[str]:
    """Return an objection where nothing in the run states which checkpoint was measured.

    Raises UsageError where it was another one than `folder`.
    """
    evaluation = run.evaluations.get(model)
    files = evaluation.checkpoint_files if evaluation else None
    recorded = {
        f"eval/{model}.json": files.sha256 if files else "",
        "run.json": run.model(model).model_sha256,
    }
    known = {where: sha256 for where, sha256 in recorded.items() if sha256}
    if not known:
        return [
            "the run does not record the SHA-256 of the checkpoint that was measured: evaluate it again"
        ]
    for where, sha256 in known.items():
        if not is_model(folder, sha256):
            actual = model_sha256(folder)
            raise UsageError(
                f"{folder} is not the checkpoint that was measured: its SHA-256 is {actual[:16]}, in {where} {sha256[:16]}",
                f"annie-quant eval {folder} --reference BF16, or name the measured one: --checkpoint DIR",
            )
    return []


def source_of(run: LoadedRun, model: str) -> Path | None:
    """Return the bf16 checkpoint that a model was compared with, where it is still there and unchanged."""
    evaluation = run.evaluations.get(model)
    folder = Path(evaluation.reference) if evaluation else None
    if evaluation is None or folder is None or not (folder / "config.json").is_file():
        return None
    return folder if is_model(folder, evaluation.reference_sha256) else None


def _only_model(run: LoadedRun) -> str:
    """Return the only model besides the reference, where neither a verdict nor a search names a candidate."""
    known = [m.name for m in run.models if m.name != REFERENCE]
    if len(known) != 1:
        raise UsageError(
            f"{run.folder}: no candidate is named among {', '.join(known) or 'no models'}",
            "choose one: --model NAME",
        )
    return known[0]


def _folder(run: LoadedRun, name: str, checkpoint: str | os.PathLike | None) -> Path:
    names = [m.name for m in run.models]
    if name not in names:
        raise UsageError(
            f"{run.folder}: there is no model {name!r}", f"choose one of: {', '.join(names)}"
        )
    folder = Path(checkpoint) if checkpoint else run.folder_of(name)
    if folder is None or not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{name}: its checkpoint folder is not known or not there", "add --checkpoint DIR"
        )
    return folder


def _known_base(folder: Path) -> str:
    name = salvage_or_default(_NamedConfig, folder / "config.json").name_or_path
    return name if re.fullmatch(r"[\w.\-]+/[\w.\-]+", name) and not Path(name).exists() else ""


def _license(folder: Path) -> str:
    """Return the licence in the metadata of the README in the checkpoint's folder."""
    readme = folder / "README.md"
    if not readme.is_file():
        return ""
    hub = need("huggingface_hub", "quantize")
    try:
        return str((hub.metadata_load(readme) or {}).get("license") or "")
    except ValueError:
        return ""


def _stage(folder: Path, files: dict[str, Path], text: str) -> Path:
    """Make `folder` hold exactly these files, as hard links where the file system allows, and the card.

    Links to the same file stay, and with them huggingface_hub's notes (.cache/huggingface), by
    which an upload resumes.
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
    return [
        p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).parts[0] != ".cache"
    ]


def upload(
    plan: UploadPlan,
    endpoint: str | None = None,
    token: str | None = None,
    progress: Progress | Callable[[str], object] | None = None,
) -> Uploaded:
    """Upload what was prepared; an interrupted upload resumes.

    Raises UsageError (refused; the repository is public and should be private), EnvironmentFault
    (no token, offline), ServerError (the Hub refuses, or keeps failing; files that were uploaded
    stay).
    """
    if plan.refused:
        raise UsageError(
            f"not published: {'; '.join(plan.objections[:4])}",
            'fix the objections, or publish anyway: --force "REASON"',
        )
    hub = need("huggingface_hub", "quantize")
    errors = need("huggingface_hub.errors", "quantize")
    if not (token or hub.get_token()):
        raise EnvironmentFault("no Hugging Face token is set", "hf auth login, or set HF_TOKEN")
    api = hub.HfApi(endpoint=endpoint, token=token)
    try:
        _check_visibility(errors, api, plan)
        as_progress(progress).message(f"{plan.repo_id}: {len(plan.files)} files")
        _send(api, plan)
        missing = _missing_files(api, plan)
    except errors.OfflineModeIsEnabled as error:
        raise EnvironmentFault(
            "HF_HUB_OFFLINE is set, so nothing can be uploaded", "unset HF_HUB_OFFLINE"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ServerError(
            f"the Hub refused: {_first_line(error)}", "check the token: hf auth whoami"
        ) from error
    except (RuntimeError, OSError) as error:
        raise ServerError(
            f"the upload failed: {_first_line(error.__cause__ or error)}",
            "run the same command again: it resumes",
        ) from error
    if missing:
        # huggingface_hub's notes list them as uploaded; without the notes the next upload sends
        # them.
        shutil.rmtree(plan.folder / ".cache", ignore_errors=True)
        raise ServerError(
            f"the Hub lacks {', '.join(missing[:4])}, or has them in another size",
            "run the same command again",
        )
    return Uploaded(
        f"{api.endpoint}/{plan.repo_id}", plan.private, len(plan.files), plan.size_bytes
    )


def _send(api: HfApi, plan: UploadPlan) -> None:
    """Use the large-folder upload, which resumes with and without Xet; upload_folder, its successor, only with Xet."""
    if not hasattr(api, "upload_large_folder"):
        api.create_repo(plan.repo_id, private=plan.private, exist_ok=True)
        api.upload_folder(
            repo_id=plan.repo_id,
            folder_path=plan.folder,
            ignore_patterns=[".cache/*"],
        )
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        api.upload_large_folder(
            repo_id=plan.repo_id,
            folder_path=plan.folder,
            repo_type="model",
            private=plan.private,
            print_report=False,
        )


def _check_visibility(errors: ModuleType, api: HfApi, plan: UploadPlan) -> None:
    try:
        repository = api.repo_info(plan.repo_id, repo_type="model")
    except errors.RepositoryNotFoundError:
        return
    if plan.private and not repository.private:
        raise UsageError(
            f"{plan.repo_id} exists and is public", "add --public, or choose another name"
        )


def _missing_files(api: HfApi, plan: UploadPlan) -> list[str]:
    """Return the files that the repository lacks or has in another size."""
    repository = api.model_info(plan.repo_id, files_metadata=True)
    sizes = {f.rfilename: f.size for f in repository.siblings or ()}
    return [f.path for f in plan.files if sizes.get(f.path) != f.size_bytes]


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
