"""Write tests/data/transformers_names.json: the parameters of every family's class in a version of transformers.

pip install --target DIR transformers     the newest version, next to the pinned one
PYTHONPATH=DIR:. python tools/make_names.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from annie_quant import models
from annie_quant.models import Family, Form

FILE = Path(__file__).resolve().parent.parent / "tests/data/transformers_names.json"


def parameters(family: Family, form: Form) -> dict[str, list[int]]:
    """Return short name → shape of a form's parameters outside of the vision tower, with layers of one kind counted once.

    The model has transformers' default settings, on the meta device. Layers lose their number: "layers.mlp.up_proj.weight".
    """
    config = transformers.AutoConfig.for_model(form.model_type)
    with torch.device("meta"):
        model = getattr(transformers, form.class_name)(config)
    result = {}
    for name, tensor in model.state_dict().items():
        if family.in_vision(name):
            continue
        inside = models.in_layer(name)
        short = f"layers.{inside}" if inside else models.short_name(name)
        result[short] = list(tensor.shape)
    return dict(sorted(result.items()))


def main() -> None:
    classes = {}
    for family in models.families():
        for form in family.forms:
            classes[form.class_name] = parameters(family, form)
    document = {
        "transformers": transformers.__version__,
        "command": "PYTHONPATH=DIR:. python tools/make_names.py",
        "classes": dict(sorted(classes.items())),
    }
    text = json.dumps(document, indent=1)
    FILE.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
