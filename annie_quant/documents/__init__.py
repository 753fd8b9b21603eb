"""Documents that one stage writes and another reads: their types, and the functions that decode and write them.

    decode(Run, path)       a document from a file or from bytes; every fault is one line that names the field
    write(path, run)        a document as indented JSON
    salvage(Run, path)      the valid parts of a document; the others count as missing
    read_bench(folder)      bench.json with its aggregates, wherever they are stored

    reading       these functions
    prompts       messages and workload files
    records       records.jsonl
    statistics    gates, metrics and comparisons
    results       aggregates and verdict of a run
    run           bench.json, run.json and inputs.json
    evaluation    eval/*.json, sensitivity/*.json and search.json
    drafts        what drafts of an MTP head give, and how one was tuned
    checkpoint    the result of an audit, annie_quant.json, a device's rates, a predicted speed, and how vLLM loaded a model

The names of a new document are added here.

Fields that a reader does not know are ignored. `schema_version` is SCHEMA_VERSION in everything
written; documents of older versions are upgraded when they are decoded. Names of fields end in
their unit. JSON Schemas of the public documents are in docs/reference/schemas
(tools/make_schemas.py).
"""

# ruff: noqa: F401
from __future__ import annotations

from annie_quant.core.host import Environment
from annie_quant.documents.checkpoint import (
    RECIPE_FILE,
    AdapterRecord,
    Audit,
    AuditSummary,
    Behaviour,
    CalibrationUse,
    Device,
    Finding,
    FormatPlan,
    FrontierPoint,
    GroupCost,
    HeldOut,
    Ingredient,
    LoadedModel,
    MergedAdapter,
    PredictedFirstToken,
    PredictedSpeed,
    Recipe,
    RemoteRead,
    ServerSupport,
    TemplateFault,
    TemplateLint,
    TensorRow,
)
from annie_quant.documents.drafts import DraftPrediction, DraftSteps, PromptEstimate, TunedHead
from annie_quant.documents.evaluation import (
    CalibrationDraw,
    DifferingAnswer,
    EnsembleFigures,
    EvaluatedWorkload,
    Evaluation,
    GateTable,
    Hardened,
    HardenedGate,
    KLFigures,
    KLSummary,
    LayerDivergence,
    LayerKL,
    MarginBin,
    Member,
    ModelFiles,
    NumericsResult,
    PromptOutcome,
    SameAnswers,
    SearchNumerics,
    SearchResult,
    Sensitivity,
    SensitivityKey,
    StrategyRow,
    decode_outcomes,
    encode_outcomes,
)
from annie_quant.documents.prompts import (
    CaseFile,
    ChatCall,
    ChatMessage,
    ChatRow,
    ContextFile,
    Expect,
    LoggedChat,
    RowProvenance,
    WorkloadFile,
)
from annie_quant.documents.reading import (
    SCHEMA_VERSION,
    ShortText,
    check_version,
    convert,
    decode,
    encode,
    salvage,
    salvage_line,
    salvage_or_default,
    salvage_value,
    write,
)
from annie_quant.documents.records import (
    Answer,
    Judgement,
    Load,
    RequestLoad,
    RequestRecord,
    RequestTimings,
    RequestTokens,
    ToolCall,
    by_backend,
    decode_record,
    encode_record,
    incomplete,
    salvage_record,
    set_answer,
)
from annie_quant.documents.results import (
    Aggregates,
    Cliff,
    Confound,
    Crossover,
    Identity,
    Ladder,
    LadderPoint,
    MachineSpan,
    MachineState,
    MemoryBytes,
    MemoryFigures,
    MemoryLevels,
    ModelRow,
    OfflineSide,
    PrefillLine,
    PrefillPoint,
    Roles,
    ServedSide,
    TurnPoint,
    Verdict,
    limited_identity,
)
from annie_quant.documents.run import (
    BackendSettings,
    Bench,
    BenchConfig,
    Ended,
    Inputs,
    Run,
    SentCase,
    SentWorkload,
    Stage,
    WorkloadSettings,
    read_bench,
    write_run,
)
from annie_quant.documents.statistics import (
    AdjustedResult,
    Comparison,
    GateResult,
    GateVerdict,
    MemberVerdict,
    MetricSummary,
    NoiseFloor,
    Outcome,
    PairedCounts,
    PairedGate,
    PairedResult,
    PairedVerdict,
    PooledGates,
    SpeedGate,
    Standing,
    WorkloadSummary,
)
