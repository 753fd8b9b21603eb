"""lm-eval's tasks on an NVFP4 checkpoint: python examples/lm_eval_scores.py MODEL_DIR TASK...     (pip install lm_eval)"""

import sys

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM

import annie_quant.runtime  # noqa: F401  (transformers loads NVFP4 folders after this import)

folder, *tasks = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
model = HFLM(pretrained=folder, dtype="auto", device=device, batch_size=16)
result = lm_eval.simple_evaluate(model, tasks=tasks)
for task, scores in result["results"].items():
    for metric, value in scores.items():
        if isinstance(value, float):
            print(f"{task:20} {metric:24} {value:.4f}")
