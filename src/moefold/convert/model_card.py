"""The model card of an exported folder: what the Hub shows of it, from facts that the checkpoint records."""

from pathlib import Path

from moefold.checkpoint.folder import CheckpointMeta
from moefold.config.schema import ModelConfig
from moefold.metrics.flops import count_parameters

CARD_FILE = "README.md"

_HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- moefold
"""
_USE = """
```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH_OR_NAME_OF_THIS_FOLDER")
```

Before you publish this model, add the data it was trained on, its evaluation, its limits and its licence.
"""


def write_model_card(folder: Path, family: str, model: ModelConfig, meta: CheckpointMeta) -> None:
    """Write README.md with the sizes of the model and how long it was trained.

    Args:
        folder: of the export.
        family: the `model_type` of its config.json.
        model: what the folder computes.
        meta: of the checkpoint, which a run has written.

    Raises:
        OSError: the file cannot be written.
    """
    count = count_parameters(model)
    sizes = f"{count.total:,} parameters"
    if model.num_experts:
        sizes += f", {count.active:,} of them active for each token ({model.top_k} of {model.num_experts} experts)"
    lines = [
        f"# {family} model trained with moefold",
        "",
        f"- architecture: `{family}`, {model.num_layers} layers, hidden size {model.hidden_size:,}",
        f"- size: {sizes}",
        f"- training: {meta.step:,} optimizer steps, {meta.tokens:,} tokens",
    ]
    tag = "- mixture-of-experts\n" if model.num_experts else ""
    (folder / CARD_FILE).write_text(f"{_HEAD}{tag}---\n" + "\n".join(lines) + "\n" + _USE, encoding="utf-8")
