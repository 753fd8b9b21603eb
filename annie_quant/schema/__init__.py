"""Documents that one stage writes and another reads, as types, and the functions that decode and write them.

    decode(Run, path)       a document from a file or from bytes; every fault is one line that names the field
    write(path, run)        a document as indented JSON
    salvage(Run, path)      the parts of a document that fit; the others count as missing
    read_bench(folder)      bench.json with its aggregates, wherever they are stored

One module per document: messages (of a chat), records (records.jsonl), settings (inputs.json), machine (servers, memory),
statistics (gates, metrics, comparisons), results (aggregates, verdict), run (bench.json, run.json), workloads (workload
files), audit (of a checkpoint), recipe (annie_quant.json), evaluation (eval/*.json, sensitivity/*.json), search
(search.json). A new document gets its own module, and its names are added here.

Fields that a reader does not know are ignored. `schema_version` is SCHEMA_VERSION in everything written; documents of older
versions are upgraded when they are decoded. Names of fields end in their unit. JSON Schemas of the public documents are in
docs/reference/schemas (tools/make_schemas.py).
"""

# ruff: noqa: F401
from __future__ import annotations

from annie_quant.schema.audit import Audit, AuditSummary, Finding, ServerSupport, TensorRow
from annie_quant.schema.evaluation import (
    DifferingAnswer,
    DraftAcceptance,
    EnsembleFigures,
    EvaluatedWorkload,
    Evaluation,
    GateTable,
    KLFigures,
    KLSummary,
    LayerDivergence,
    LayerKL,
    MarginBin,
    Member,
    ModelFiles,
    NumericsResult,
    SameAnswers,
    Sensitivity,
    SensitivityKey,
)
from annie_quant.schema.limits import Digest, JsonScalar, ShortText
from annie_quant.schema.machine import (
    Energy,
    Environment,
    Identity,
    MemoryBytes,
    MemoryFigures,
    MemoryGrowth,
    MemoryLevels,
    ModelMeta,
    limited_identity,
)
from annie_quant.schema.messages import CalledFunction, ChatCall, ChatMessage, ChatRow, LoggedChat, RowProvenance
from annie_quant.schema.reading import SCHEMA_VERSION, check_version, convert, decode, encode, write
from annie_quant.schema.recipe import RECIPE_FILE, HeldOut, Ingredient, Recipe
from annie_quant.schema.records import Load, RequestRecord, ToolCall
from annie_quant.schema.results import (
    Aggregates,
    Confound,
    Crossover,
    ModelRow,
    OfflineSide,
    Roles,
    ServedSide,
    ToolSurfacePoint,
    TurnPoint,
    Verbosity,
    Verdict,
)
from annie_quant.schema.run import Bench, EarlyStop, Ended, Run, Stage, read_bench, write_run
from annie_quant.schema.salvage import salvage, salvage_line, salvage_or_default, salvage_value
from annie_quant.schema.search import (
    CalibrationDraw,
    Hardened,
    HardenedGate,
    Labels,
    LabelScores,
    SearchNumerics,
    SearchResult,
    Size9B,
    StrategyRow,
)
from annie_quant.schema.settings import (
    BackendSettings,
    BenchConfig,
    Inputs,
    SentCase,
    SentWorkload,
    WorkloadSettings,
)
from annie_quant.schema.statistics import (
    AdjustedResult,
    Comparison,
    Drift,
    GateResult,
    GateVerdict,
    MemberVerdict,
    Metric,
    MetricSummary,
    NoiseFloor,
    Outcome,
    PairedGate,
    PairedResult,
    PairedVerdict,
    PooledGates,
    SpeedGate,
    Standing,
    WorkloadSummary,
)
from annie_quant.schema.workloads import CaseFile, ContextFile, Expect, WorkloadFile
