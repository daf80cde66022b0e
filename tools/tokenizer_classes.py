"""Make the table of tokenizer classes that rebuild their tokenizer, from the installed transformers.

python -m tools.tokenizer_classes > src/moefold/data/hf_tokenizer/tokenizer_classes.json
"""

import inspect
import itertools
import json
import sys
from typing import Any

from moefold.data.hf_tokenizer.class_table import PLAIN_CLASSES, form_key

REBUILDING_CLASSES = (
    "CohereTokenizer",
    "GPT2Tokenizer",
    "GPTNeoXTokenizer",
    "GemmaTokenizer",
    "LlamaTokenizer",
    "Qwen2Tokenizer",
    "Qwen3_5Tokenizer",
)
"""Classes of decoder-only models that take the parts of a tokenizer from their own code; all are byte-pair encoders."""
_SWITCHES = ("add_prefix_space", "legacy", "trim_offsets")
"""Settings of tokenizer_config.json that change the parts of a class."""
_VALUES = (None, True, False)
_OWN_MARK = "<mark>"


def make_table() -> dict[str, Any]:
    """Make the table from the installed transformers."""
    import transformers
    from transformers.models.auto import tokenization_auto

    registered = {
        model_type: name.removesuffix("Fast") if name not in PLAIN_CLASSES else name
        for model_type, name in tokenization_auto.TOKENIZER_MAPPING_NAMES.items()
        if name
    }
    classes = {name: _describe_class(tokenization_auto.tokenizer_class_from_name(name)) for name in REBUILDING_CLASSES}
    known = {
        *registered.values(),
        *(name for name in dir(transformers) if name.endswith(("Tokenizer", "TokenizerFast"))),
    }
    return {
        "classes": classes,
        "model_types": dict(sorted(registered.items())),
        "distrusted_model_types": sorted(tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS),
        "known": sorted({name.removesuffix("Fast") for name in known} - {"PreTrainedTokenizer"}),
    }


def _describe_class(found: type[Any]) -> dict[str, Any]:
    """Return the entry of a class, by making tokenizers of it under all values of its switches."""
    from tokenizers import processors

    parameters = inspect.signature(found.__init__).parameters
    switches = [name for name in _SWITCHES if name in parameters]
    vocab = {_OWN_MARK: 0}
    forms: dict[str, int] = {}
    parts: list[dict[str, Any]] = []
    for count in range(len(switches) + 1):
        for names in itertools.combinations(switches, count):
            for values in itertools.product(_VALUES, repeat=count):
                given = dict(zip(names, values, strict=True))
                try:
                    made = _parts_of(found(vocab=dict(vocab), merges=[], **given))
                except TypeError:
                    # Some classes refuse null.
                    continue
                if made not in parts:
                    parts.append(made)
                forms[form_key(given)] = parts.index(made)
    marked = found(
        vocab=dict(vocab),
        merges=[],
        unk_token=_OWN_MARK,
        post_processor=processors.TemplateProcessing(f"{_OWN_MARK} $A", special_tokens=[(_OWN_MARK, 0)]),
    )
    plain = found(vocab=dict(vocab), merges=[])
    return {
        "switches": sorted(switches),
        "forms": forms,
        "parts": parts,
        "special_tokens": dict(plain.special_tokens_map),
        "reads_merges": found.vocab_files_names.get("merges_file") == "merges.txt",
        "takes_unk_token": _parts_of(marked)["model"].get("unk_token") == _OWN_MARK,
        "replaces_post_processor": _OWN_MARK
        not in json.dumps(json.loads(marked._tokenizer.to_str())["post_processor"]),
    }


def _parts_of(tokenizer: Any) -> dict[str, Any]:
    tree = json.loads(tokenizer._tokenizer.to_str())
    model = {key: value for key, value in tree["model"].items() if key not in ("type", "vocab", "merges")}
    return {"model": model, **{key: tree[key] for key in ("normalizer", "pre_tokenizer", "decoder")}}


if __name__ == "__main__":
    json.dump(make_table(), sys.stdout, indent=1, sort_keys=True, ensure_ascii=False)
    print()
