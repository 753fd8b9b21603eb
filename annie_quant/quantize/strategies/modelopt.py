"""modelopt: any configuration of NVIDIA ModelOpt, by its name or recipe file, run by ModelOpt itself.

ModelOpt gets the model, batches of the job's conversations and the exclusions. It calibrates, rounds and exports. Before the
export, AWQ's scales go where servers can load them; after it the checkpoint is audited against its source and repaired.

Calibration by the largest value alone reads whole conversations, as `naive` does; everything else reads the model's own answers.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annie_quant.checkpoint.linears import HEAD, all_linears
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import EnvironmentFault, UsageError, need
from annie_quant.core.progress import Progress
from annie_quant.models import aliases, family_or_default
from annie_quant.models.formats import E2M1_BITS
from annie_quant.quantize.external import (
    Library,
    TextBatch,
    load_source,
    move_checkpoint,
    quantize_by,
    reason_of,
    rows_of,
    silence,
    text_batches,
)
from annie_quant.quantize.formats import excluded
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import ALL_NVFP4, Cost, Job, Strategy, StrategyOptions, described

LIBRARY = Library("ModelOpt", "modelopt", "nvidia-modelopt", 'pip install "annie-quant[quantize]"')
# Algorithms that compute nothing with rounded numbers. ModelOpt rounds to NVFP4 on a GPU only.
MAX_ONLY = {"max"}
RECIPE_FOLDERS = ("ptq", "auto_quantize", "qad")
CLOSE_NAMES = 3


class ModeloptOptions(StrategyOptions, frozen=True):
    config: Annotated[
        str,
        described(
            "a configuration (NVFP4_AWQ_LITE_CFG), a recipe of ModelOpt's library "
            "(general/ptq/nvfp4_default-kv_fp8), or a recipe file"
        ),
    ] = ""
    bits: Annotated[
        float, described("effective bits per weight of auto_quantize; 0: the recipe's")
    ] = 0.0
    scoring: Annotated[
        Literal["recipe", "gradient", "kl_div"],
        described("how auto_quantize scores a layer: gradient, kl_div, or as the recipe says"),
    ] = "recipe"


@dataclass(frozen=True)
class Configuration:
    """A configuration as ModelOpt reads it.

    quantize: argument of ModelOpt's quantize; in a search what is not searched, or None.
    search: the recipe's auto_quantize section; None where nothing is searched.
    """

    name: str
    quantize: dict[str, Any] | None = None
    search: Any = None

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The configurations of quantizers that it has, those of a search one by one."""
        every = [self.quantize] if self.quantize else []
        if self.search is not None:
            candidates = list(self.search.candidate_formats)
            for space in self.search.module_search_spaces:
                candidates += space.candidate_formats
            every += [dumped(candidate) for candidate in candidates]
        return every

    @property
    def is_max_only(self) -> bool:
        """Whether calibration looks for the largest values and does nothing else."""
        methods = {method for part in self.parts for method in methods_of(part)}
        return self.search is None and methods <= MAX_ONLY

    @property
    def rounds_to_nvfp4(self) -> bool:
        """Whether calibration computes with numbers that are rounded to NVFP4."""
        return not self.is_max_only and any(uses_nvfp4(part) for part in self.parts)


def dumped(settings: Any) -> dict[str, Any]:
    """Return settings of ModelOpt, a pydantic model, as the dictionary that its functions take."""
    result: dict[str, Any] = settings.model_dump(exclude_none=True)
    return result


def methods_of(config: Mapping[str, Any]) -> set[str]:
    """Return the names of a configuration's calibration algorithms."""
    algorithm = config.get("algorithm")
    steps = algorithm if isinstance(algorithm, list) else [algorithm]
    methods = {step.get("method") if isinstance(step, dict) else step for step in steps}
    return {str(method) for method in methods if method}


def uses_nvfp4(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration has a quantizer with numbers in E2M1."""
    for entry in config["quant_cfg"]:
        attributes = entry.get("cfg") or {}
        for each in attributes if isinstance(attributes, list) else [attributes]:
            if each.get("num_bits") in (E2M1_BITS, list(E2M1_BITS)):
                return True
    return False


# ---- finding a configuration


def find_configuration(name: str, model_type: str) -> Configuration:
    """Return the configuration of ModelOpt that `name` names: one of its constants, a recipe of its library, or a file.

    model_type: of config.json, which decides where several model types have a recipe of that name.
    Raises UsageError for an unknown name, with close ones, and for a recipe that does not quantize.
    """
    mtq = need("modelopt.torch.quantization", "quantize")
    if not name:
        raise UsageError(
            "--strategy modelopt runs one configuration of ModelOpt",
            "--set config=NVFP4_DEFAULT_CFG, general/auto_quantize/nvfp4_fp8_at_5p4bits, or a recipe file",
        )
    if name in mtq.config.choices:
        return Configuration(name, copy.deepcopy(getattr(mtq, name)))
    file = find_recipe(name, model_type, sorted(mtq.config.choices))
    recipe = load_recipe(name, file)
    fixed = getattr(recipe, "quantize", None)
    search = getattr(recipe, "auto_quantize", None)
    if fixed is None and search is None:
        raise UsageError(
            f"{name} is a recipe of ModelOpt that does not quantize", "choose one of general/ptq"
        )
    if search is not None and search.constraints.cost_model == "kv_cache":
        raise UsageError(f"{name} searches formats of the KV cache, which no checkpoint stores")
    return Configuration(name, None if fixed is None else dumped(fixed), search)


def recipe_library() -> Path:
    """Return the folder of ModelOpt's recipes."""
    found = importlib.util.find_spec("modelopt_recipes")
    places = list(found.submodule_search_locations or []) if found else []
    if not places:
        raise EnvironmentFault(
            "ModelOpt's recipes are not installed", "pip install nvidia-modelopt"
        )
    return Path(places[0])


def find_recipe(name: str, model_type: str, constants: Sequence[str]) -> Path:
    """Return the file of a recipe: a file's own path, a path in ModelOpt's library, or a recipe's name there."""
    library = recipe_library()
    own = Path(name)
    if own.suffix in (".yaml", ".yml") and own.is_file():
        return own.resolve()
    renamed = name.replace("huggingface/", "model_type/", 1)  # the folder's name from 0.48 on
    for path in (name, renamed):
        file = library / f"{path.removesuffix('.yaml')}.yaml"
        if file.is_file():
            return file
    every = [f for f in sorted(library.rglob("*.yaml")) if f.parent.name in RECIPE_FOLDERS]
    named = [file for file in every if file.stem == name]
    for_model = [file for file in named if model_type.removesuffix("_text") in file.parts]
    general = [file for file in named if "general" in file.parts]
    chosen = for_model or general or named
    if len(chosen) == 1:
        return chosen[0]
    paths = [str(file.relative_to(library).with_suffix("")) for file in chosen or every]
    if chosen:
        raise UsageError(
            f"ModelOpt has {len(chosen)} recipes called {name!r}", f"name one: {', '.join(paths)}"
        )
    names = [*constants, *(file.stem for file in every), *paths]
    close = difflib.get_close_matches(name, names, n=CLOSE_NAMES, cutoff=0.3)
    version = need("modelopt", "quantize").__version__
    raise UsageError(
        f"ModelOpt {version} has no configuration called {name!r}",
        f"close ones: {', '.join(close)}" if close else f"its recipes are in {library}",
    )


def load_recipe(name: str, file: Path) -> Any:
    """Return ModelOpt's recipe in a file. Raises UsageError with its own reason for one that it refuses."""
    reader = need("modelopt.recipe", "quantize")
    try:
        with silence():
            return reader.load_recipe(file)
    except Exception as error:
        raise UsageError(f"{name}: ModelOpt refuses the recipe: {reason_of(error)}") from error


# ---- running ModelOpt


class ModelOptRun:
    """One model that ModelOpt quantizes."""

    def __init__(
        self, job: Job[ModeloptOptions], batches: Sequence[TextBatch], progress: Progress
    ) -> None:
        import torch

        self.options = job.options
        self.patterns = exclusion_patterns(job)
        self.progress = progress
        self.family = family_or_default(ModelFolder(job.model).config)
        self.mtq: Any = need("modelopt.torch.quantization", "quantize")
        self.model = load_source(job.model)
        parameters = inspect.signature(type(self.model).forward).parameters
        self.few_logits = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.batches = [
            {"input_ids": torch.from_numpy(b.ids), "labels": torch.from_numpy(b.labels)}
            for b in batches
        ]

    def forward_loop(self, model: Any) -> None:
        """Compute all batches, without logits that nothing reads."""
        import torch

        head = getattr(model.get_output_embeddings(), "input_quantizer", None)
        options = {} if head is not None and head.is_enabled else self.few_logits
        with torch.no_grad():
            for number, batch in enumerate(self.batches, 1):
                model(batch["input_ids"].to(model.device), use_cache=False, **options)
                count = len(self.batches)
                self.progress.update(number, count, f"ModelOpt: batch {number} of {count}")

    def quantize(self, config: dict[str, Any]) -> None:
        disabled = [
            {"quantizer_name": f"{pattern}.*", "enable": False} for pattern in self.patterns
        ]
        config = config | {"quant_cfg": [*config["quant_cfg"], *disabled]}
        self.model = self.mtq.quantize(self.model, config, self.forward_loop)

    def search(self, configuration: Configuration) -> None:
        """Let auto_quantize choose formats, then calibrate the recipe's KV cache if it has one."""
        section = configuration.search
        constraints = dumped(section.constraints)
        if self.options.bits:
            constraints["effective_bits"] = self.options.bits
        if section.cost_excluded_layers:
            cost = constraints.setdefault("cost", {})
            cost["excluded_module_name_patterns"] = list(section.cost_excluded_layers)
        method = section.auto_quantize_method
        if self.options.scoring != "recipe":
            method = self.options.scoring
        spaces = []
        for space in section.module_search_spaces:
            described_space = {
                "module_name_patterns": list(space.module_name_patterns),
                "quantization_formats": [dumped(c) for c in space.candidate_formats],
                "allow_no_quant": space.allow_no_quant,
            }
            spaces.append(described_space)
        inside_excluded = [f"{pattern}.*" for pattern in self.patterns]
        self.model, _ = self.mtq.auto_quantize(
            self.model,
            constraints=constraints,
            quantization_formats=[dumped(c) for c in section.candidate_formats] or None,
            data_loader=self.batches,
            forward_step=self.loss_step if method == "gradient" else self.logits_step,
            loss_func=lambda output, batch: output.loss,
            disabled_layers=[*section.disabled_layers, *self.patterns, *inside_excluded],
            num_calib_steps=len(self.batches),
            num_score_steps=self.score_steps(section.score_size),
            method=method,
            module_search_spaces=spaces or None,
            fixed_quantization_config=configuration.quantize,
        )
        if section.kv_cache is not None:
            self.calibrate_kv_cache(dumped(section.kv_cache)["quant_cfg"])

    def loss_step(self, model: Any, batch: dict[str, Any]) -> Any:
        labelled = {name: tokens.to(model.device) for name, tokens in batch.items()}
        return model(**labelled, use_cache=False)

    def logits_step(self, model: Any, batch: dict[str, Any]) -> Any:
        return model(batch["input_ids"].to(model.device), use_cache=False).logits

    def score_steps(self, rows: int) -> int:
        """Return the number of batches with `rows` rows, or of all batches."""
        counted = 0
        for number, batch in enumerate(self.batches, 1):
            counted += len(batch["input_ids"])
            if counted >= rows:
                return number
        return len(self.batches)

    def calibrate_kv_cache(self, entries: Sequence[dict[str, Any]]) -> None:
        """Quantize the KV cache after a search, as ModelOpt's own program does."""
        chosen = [entry for entry in entries if entry["quantizer_name"] != "*"]
        self.mtq.set_quantizer_by_cfg(self.model, quant_cfg=chosen)
        if all((entry.get("cfg") or {}).get("use_constant_amax") for entry in chosen):
            return
        alone = [{"quantizer_name": "*", "enable": False}, *chosen]
        with self.mtq.set_quantizer_by_cfg_context(self.model, alone):
            self.mtq.calibrate(self.model, algorithm="max", forward_loop=self.forward_loop)

    def export(self, output: Path) -> None:
        import torch

        from annie_quant.quantize.awq_scales import fold_scales

        exporter = need("modelopt.torch.export", "quantize")
        with torch.no_grad():
            fold_scales(self.model, self.family)
            exporter.export_hf_checkpoint(self.model, export_dir=str(output))


def exclusion_patterns(job: Job[ModeloptOptions]) -> list[str]:
    """Return patterns of modules for ModelOpt that match what --exclude-layers names. Raises UsageError for one without match."""
    excluded(job.exclude, dict.fromkeys([*all_linears(ModelFolder(job.model)), HEAD]))
    patterns = []
    for pattern in job.exclude:
        # transformers loads the text model of a multimodal checkpoint under shorter names.
        for name in aliases(pattern):
            is_wildcard = any(c in name for c in "*?[")
            patterns += [name] if is_wildcard else [name, f"*.{name}"]
    return patterns


def check_machine(configuration: Configuration) -> None:
    """Raise EnvironmentFault where ModelOpt cannot run a configuration on this machine."""
    from annie_quant.quantize.backend import device_kind

    if configuration.rounds_to_nvfp4 and device_kind() == "cpu":
        what = "auto_quantize" if configuration.search is not None else "its calibration"
        raise EnvironmentFault(
            f"{configuration.name}: {what} computes with numbers in NVFP4, which ModelOpt does on a CUDA device only",
            "without one ModelOpt calibrates by the largest values: NVFP4_DEFAULT_CFG, NVFP4_MLP_ONLY_CFG, "
            "W4A16_NVFP4_CFG; or --engine own",
        )


def check_options(configuration: Configuration, options: ModeloptOptions) -> None:
    """Raise UsageError for options of a search where nothing is searched."""
    if configuration.search is None and (options.bits or options.scoring != "recipe"):
        raise UsageError(
            f"{configuration.name} chooses no formats, so it has no bits and no scoring",
            "--set config=general/auto_quantize/nvfp4_fp8_at_5p4bits",
        )
    if not 0 <= options.bits <= 16:
        raise UsageError(f"bits={options.bits:g}: expected more than 0 and at most 16")


# ---- the strategy


def plan_modelopt(job: Job[ModeloptOptions], progress: Progress) -> QuantizationPlan:
    """Let ModelOpt quantize and export, and return what is in the sound checkpoint."""
    from annie_quant.quantize.backend import device_kind
    from annie_quant.quantize.calibration_text import read_answers, read_whole_conversations

    model_type = str(ModelFolder(job.model).config.get("model_type"))
    configuration = find_configuration(job.options.config, model_type)
    check_options(configuration, job.options)
    check_machine(configuration)
    exclusion_patterns(job)
    read = read_whole_conversations if configuration.is_max_only else read_answers
    text = read(job, progress)

    def write(export: Path) -> None:
        batches = text_batches(rows_of(text), device_kind(), job.seed)
        run = ModelOptRun(job, batches, progress)
        if configuration.search is not None:
            run.search(configuration)
        else:
            run.quantize(configuration.quantize or {})
        run.export(export)

    hint = "another configuration, or --engine own with --strategy naive, mlp_only or awq_lite"
    return quantize_by(LIBRARY, configuration.name, job, text, progress, write, hint)


STRATEGY = Strategy(
    name="modelopt",
    summary="any configuration of NVIDIA ModelOpt by ModelOpt itself (--set config=NAME), audited and repaired",
    formats=ALL_NVFP4,
    # AWQ, the default search and local Hessians take about so many passes.
    cost=Cost(rank=95, passes=22, encode=20, reads_answers=True),
    plan=plan_modelopt,
    options=ModeloptOptions,
    write=move_checkpoint,
    requires=("torch", "transformers", "modelopt"),
    recipe_option="config",
)
