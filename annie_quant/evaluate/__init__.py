"""Evaluating a checkpoint before any server exists: gates, KL divergence and perplexity compared with the reference.

evaluate(folder, reference, workloads)      the whole evaluation
sensitivity(folder, reference, workloads)   which layers the divergence comes from
"""

from __future__ import annotations

import annie_quant.hf  # noqa: F401 - registers NVFP4 with transformers
from annie_quant.evaluate.evaluation import evaluate
from annie_quant.evaluate.layers import sensitivity

__all__ = ["evaluate", "sensitivity"]
