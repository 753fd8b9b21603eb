"""What strategies share in which another library quantizes: its text, its errors, and the audit of what it wrote.

Before the checkpoint gets its place it is audited against its source, and repaired.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from annie_quant import checkpoint
from annie_quant.checkpoint import dialects
from annie_quant.checkpoint.linears import HEAD, all_linears
from annie_quant.checkpoint.shards import COMPANIONS, ModelFolder, inside
from annie_quant.core.errors import AnnieError, EnvironmentFault
from annie_quant.core.progress import Progress
from annie_quant.models import aliases
from annie_quant.models.formats import NVFP4_AWQ
from annie_quant.quantize.formats import choose
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import Job

if TYPE_CHECKING:
    from annie_quant.quantize.calibration_text import CalibrationText

IGNORED_LABEL = -100  # of transformers' loss
_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
MAX_NOTED = 3
RECIPE_HINT = "another recipe (--set recipe=rtn), or --strategy gptq"


@dataclass(frozen=True)
class Library:
    """A library that quantizes.

    name: its own name, as in messages.
    module: its Python module.
    distribution: its name on the package index.
    install: the command that installs it, and what that conflicts with.
    """

    name: str
    module: str
    distribution: str
    install: str

    def load(self, submodule: str = "") -> Any:
        """Import the library or a module of it. Raises EnvironmentFault in one line where it cannot be."""
        try:
            with silence():
                return importlib.import_module(self.module + submodule)
        except ImportError as error:
            is_missing = isinstance(error, ModuleNotFoundError) and error.name == self.module
            reason = "is not installed" if is_missing else f"cannot be loaded ({reason_of(error)})"
            raise EnvironmentFault(f"{self.name} {reason}", self.install) from error

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.distribution)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep a library's reports and warnings from the terminal, whose standard output belongs to the command."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def reason_of(error: BaseException) -> str:
    """Return the first line of an exception's text, or its name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# ---- what the library gets


@dataclass(frozen=True)
class TextBatch:
    """Rows of tokens that a library computes together, int64 [B, T] each.

    ids: shorter rows repeat their own tokens, so that nothing but natural text is observed.
    labels: the same tokens, and IGNORED_LABEL for repeated ones.
    """

    ids: np.ndarray
    labels: np.ndarray


def text_batches(rows: Sequence[Sequence[int]], device: str, seed: int) -> list[TextBatch]:
    """Return the rows in batches of similar lengths, in random order."""
    from annie_quant.quantize.shared_text import PASS_COSTS, divide

    ordered = sorted(rows, key=lambda row: (len(row), tuple(row)))
    lengths = [len(row) for row in ordered]
    batches = []
    for part in divide(lengths, _BATCH_TOKENS[device], PASS_COSTS[device].extra_pass):
        width = lengths[part][-1]
        ids = np.stack([np.resize(np.asarray(row, np.int64), width) for row in ordered[part]])
        real = np.arange(width) < np.array(lengths[part])[:, None]
        batches.append(TextBatch(ids, np.where(real, ids, IGNORED_LABEL)))
    random.Random(seed).shuffle(batches)
    return batches


def rows_of(text: CalibrationText) -> list[tuple[int, ...]]:
    """Return the tokens of each conversation once."""
    from annie_quant.quantize.calibration_text import longest_per_row

    return list(longest_per_row(text.samples).values())


def load_source(model: Path) -> Any:
    """Return transformers' model of a folder, on this process's device."""
    import transformers

    from annie_quant.offline.loading import one_line_errors
    from annie_quant.quantize.backend import device_kind

    auto_class: Any = transformers.AutoModelForCausalLM
    with one_line_errors(model):
        loaded = auto_class.from_pretrained(model, dtype="auto", trust_remote_code=False)
    return loaded.eval().to(device_kind())


def load_tokenizer(model: Path) -> Any:
    """Return transformers' tokenizer of a folder."""
    import transformers

    auto_class: Any = transformers.AutoTokenizer
    return auto_class.from_pretrained(model, trust_remote_code=False)


def unquantized_modules(job: Job[Any]) -> list[str]:
    """Return the linears that the own strategies leave in 16 bits too, by all names that transformers may give them."""
    folder = ModelFolder(job.model)
    chosen = set(choose(folder, job.exclude))
    names = [name for name in (*all_linears(folder), HEAD) if name not in chosen]
    return list(dict.fromkeys(alias for name in names for alias in aliases(name)))


# ---- what the library writes


def quantize_by(
    library: Library,
    recipe: str,
    job: Job[Any],
    text: CalibrationText,
    progress: Progress,
    write: Callable[[Path], None],
    hint: str,
) -> QuantizationPlan:
    """Let a library write a checkpoint, and return what is in the sound one, which move_checkpoint moves to its place.

    write: quantizes with the library and writes into a folder that does not exist yet.
    hint: what else the user can do where the library stops.
    """
    folder = exported_folder(job)
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.parent.mkdir(parents=True)
    title = f"{recipe} by {library.name} {library.version}"
    progress.message(title)
    export = folder.with_name("export")
    try:
        with silence():
            write(export)
    except AnnieError:
        raise
    except Exception as error:
        message = f"{recipe}: {library.name} {library.version} stopped: {reason_of(error)}"
        raise EnvironmentFault(message, hint) from error
    notes = [title, *share_tensor_scales(export), *repaired(export, job.model, folder, job.output)]
    model = dialects.read(ModelFolder(folder))
    formats = {name: linear.stored_format(model.folder) for name, linear in model.linears.items()}
    plan = QuantizationPlan.of(formats)
    plan.calibration = text.use
    plan.notes = notes
    return plan


def exported_folder(job: Job[Any]) -> Path:
    """Return the folder in which a job's checkpoint is made."""
    return job.work_folder() / "external" / "checkpoint"


def share_tensor_scales(export: Path) -> list[str]:
    """Give linears in compressed-tensors' layout that servers fuse one tensor scale, and return a note where that was needed.

    Their codes stay: the block scales take the factor, rounded to E4M3. The libraries do so for q, k, v and gate, up only.
    """
    from safetensors.torch import load_file, save_file

    folder = ModelFolder(export)
    divisor = ".weight_global_scale"  # the inverse of a tensor scale
    modules = [name.removesuffix(divisor) for name in folder if name.endswith(divisor)]
    factors: dict[str, float] = {}
    shared: dict[str, float] = {}
    for group in folder.family.fused_groups(modules):
        divisors = {module: float(folder.scalar(module + divisor)) for module in group}
        smallest = min(divisors.values())
        factors |= {module: smallest / own for module, own in divisors.items() if own != smallest}
        shared |= dict.fromkeys(group, smallest)
    if not factors:
        return []
    for file in sorted(export.glob("*.safetensors")):
        tensors = load_file(file)
        for module in factors.keys() & {name.removesuffix(divisor) for name in tensors}:
            scale = tensors[f"{module}.weight_scale"]
            rescaled = (scale.float() * factors[module]).to(scale.dtype)
            tensors[f"{module}.weight_scale"] = rescaled
            tensors[module + divisor].fill_(shared[module])
        save_file(tensors, file, metadata={"format": "pt"})
    return [f"{len(factors)} linears got the tensor scale of those that servers fuse with them"]


def repaired(export: Path, source: Path, folder: Path, output: Path) -> list[str]:
    """Audit a library's checkpoint, and put it, or a repaired copy of it, into `folder`. Return what was repaired or cannot be.

    output: where the checkpoint will be, for the notes.
    """
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(inside(source, source / name), export / name)
    findings = checkpoint.audit(export, source=source).findings
    notes: list[str] = []
    # Rounding with error feedback may end far from the source; packed again it would be lost.
    faults = [finding for finding in findings if finding.code != "large_error"]
    if faults or is_named_awq(export):
        with contextlib.suppress(AnnieError):  # a layout that is not repaired keeps its findings
            if dialects.of(ModelFolder(export)) is not dialects.modelopt:
                converted = export.with_name("modelopt")
                checkpoint.convert(export, to="modelopt", output=converted)
                export = converted
            result = checkpoint.repair(export, source, folder)
            findings = result.remaining
            actions = result.actions
            more = f"; and {len(actions) - MAX_NOTED} more" if actions[MAX_NOTED:] else ""
            notes.append(f"repaired: {'; '.join(actions[:MAX_NOTED])}{more}")
    if not folder.exists():
        export.rename(folder)
    if findings:
        notes.append(
            f"not sound, {len(findings)} findings such as: {findings[0].message} "
            f"(annie-quant audit {output} --source {source})"
        )
    return notes


def is_named_awq(export: Path) -> bool:
    """Return whether ModelOpt calls linears NVFP4_AWQ, which servers do not load.

    Their scales are folded, so a repair writes the formats that are there.
    """
    settings = export / "hf_quant_config.json"
    return settings.is_file() and f'"{NVFP4_AWQ}"' in settings.read_text()


def move_checkpoint(job: Job[Any], plan: QuantizationPlan, progress: Progress) -> None:
    """Move the checkpoint into the output folder."""
    for file in sorted(exported_folder(job).iterdir()):
        shutil.move(file, job.output / file.name)
