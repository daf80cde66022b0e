"""A Hugging Face folder of a small model with a tokenizer of whole words."""

import json
from pathlib import Path

from tests.convert.hf_models import make_model, save_model

WORDS = ["<eos>", "[UNK]", "the", "cat", "sat", "on", "a", "mat", ".", "dog", "ran"]
"""By id. The model has further ids."""


def save_with_words(path: Path) -> Path:
    """Save a small Mixtral and the tokenizer, which knows an end of text and no beginning."""
    import tokenizers

    save_model(make_model("mixtral"), path)
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
