"""Greedy answers of one bf16 model to any conversations, batched, and stored so that a killed run resumes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from annie_quant.checkpoint.chat_template import ConversationRefused
from annie_quant.core.progress import SILENT, Progress
from annie_quant.data.conversations import assistant_message
from annie_quant.data.model_rows import ModelAnswer
from annie_quant.documents import ChatMessage
from annie_quant.documents.persona import Tool
from annie_quant.judge import Case, Workload
from annie_quant.offline.answers import Reference
from annie_quant.offline.pair import EvaluationJob, working_dtype
from annie_quant.offline.prompts import OfflineRequest, Template

ANSWERS_PER_STEP = 64  # after which they are stored


class ModelAnswers:
    """Answers of the model in a folder. Those to a conversation that was answered before come from the cache.

    progress: for what is reported before the first answer.
    """

    def __init__(self, folder: Path, progress: Progress = SILENT) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        job = EvaluationJob(checkpoint=folder, reference=folder)
        progress.message(f"loading {folder}")
        self.folder = str(folder)
        self.template = Template(folder)
        self.reference = Reference(job, self.template, working_dtype([folder], device), device, 0)
        self.reference.engine()  # a folder that cannot be loaded is an error now

    def answer(
        self,
        conversations: Sequence[Sequence[ChatMessage]],
        tools: Sequence[Tool],
        max_tokens: int,
        progress: Progress,
        text: str,
    ) -> list[ModelAnswer]:
        """Return the answers in order."""
        workload = _workload(max_tokens)
        requests = []
        answers: dict[int, ModelAnswer] = {}
        for index, messages in enumerate(conversations):
            case = Case(str(index), messages=tuple(messages), tools=tuple(tools))
            try:
                requests.append(self.template.request(workload, case))
            except ConversationRefused as error:
                answers[index] = ModelAnswer(assistant_message(""), False, 0, error.reason)
        for at in range(0, len(requests), ANSWERS_PER_STEP):
            progress.update(at, len(requests), text)
            step = requests[at : at + ANSWERS_PER_STEP]
            for request, answer in zip(step, self._complete(step), strict=True):
                answers[int(request.case.id)] = answer
        progress.update(len(requests), len(requests), text)
        return [answers[index] for index in range(len(conversations))]

    def _complete(self, requests: Sequence[OfflineRequest]) -> list[ModelAnswer]:
        completions = self.reference.complete(requests, SILENT)
        answers = []
        for request, completion in zip(requests, completions, strict=True):
            message = self.template.message(request, completion)
            answers.append(ModelAnswer(message, completion.finished, len(completion.tokens)))
        return answers

    def count(self, text: str) -> int:
        return len(self.template.tokenize(text))

    def close(self) -> None:
        self.reference.cache.close()


def _workload(max_tokens: int) -> Workload:
    """Return a workload without cases: what the requests of one call share."""
    return Workload(
        name="rows",
        description="",
        persona=None,
        system=None,
        tools=None,
        thinking=False,
        max_tokens=max_tokens,
        temperature=0.0,
        gates=(),
        cases=(),
    )
