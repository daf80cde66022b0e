"""Kinds of layers by their letters in the patterns of the model, as the oracle knows them."""

from types import MappingProxyType

from moefold.config.model import ModelConfig
from moefold.config.patterns import attention_letters
from moefold.verify.no_formula import no_formula, unknown_kind

LETTERS = MappingProxyType(
    {"layer_pattern": "DM", "attention_pattern": "FWCL", "rope_pattern": "RN", "index_pattern": "FS"}
)
"""Letters that the oracle has a formula for, by key."""


def check_letters(model: ModelConfig) -> None:
    """Refuse a letter of a pattern that the oracle does not know.

    Raises:
        NoFormulaError: there is one.
    """
    for key, known in LETTERS.items():
        for letter in getattr(model, key):
            if letter.isalpha() and letter not in known:
                no_formula(f"{letter!r} in model.{key}={getattr(model, key)!r}", "verify/oracle_patterns.py")


def attention_letter(model: ModelConfig, layer: int) -> str:
    """Return the letter of model.attention_pattern of a layer; multi-token prediction layers are as the last one."""
    return attention_letters(model.attention_pattern, model.num_layers)[min(layer, model.num_layers - 1)]


def has_a_gate_per_head(model: ModelConfig) -> bool:
    """Return whether a gate of softmax attention belongs to a whole head, not to one dim of it."""
    match model.attention_gate_width:
        case "head":
            return True
        case "dim":
            return False
        case unknown:
            unknown_kind("model.attention_gate_width", unknown)
