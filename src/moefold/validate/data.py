"""Rules on the data: packing, ends of documents, and weights of sources."""

import math
from collections.abc import Iterator

from moefold.config.model import ModelConfig
from moefold.config.sections.data import DataConfig
from moefold.message_text import Problem

PACKED_KINDS = ("python-docs", "text", "tokens", "huggingface")
"""Kinds of data whose documents form one stream, which `data.packing` splits into samples."""


def validate_packing(data: DataConfig) -> Iterator[Problem]:
    """Check that best-fit packing knows the documents, and that no document can vanish."""
    if data.packing != "best_fit" or data.kind not in PACKED_KINDS:
        return
    if data.document_end < 0 and not data.document_index:
        rule = "packs documents, and the recipe does not say where they end"
        way_out = (
            "set data.document_end to the token that ends documents, or data.document_index=true for files of "
            "`moefold tokenize`"
        )
        yield Problem("data.packing", "best_fit", rule, way_out)
    if data.streaming:
        rule = "reads all documents before it packs them, and data.streaming=true reads each once"
        yield Problem("data.packing", "best_fit", rule, "set streaming=false, or packing='concatenate'")
    if data.corrupt == "skip":
        rule = "packs the documents of all files together, and data.corrupt='skip' leaves files out"
        yield Problem("data.packing", "best_fit", rule, "set corrupt='fatal', or packing='concatenate'")


def validate_document_end(model: ModelConfig, data: DataConfig) -> Iterator[Problem]:
    """Check that the document-end token is in the vocabulary."""
    end = data.document_end
    vocab_size = model.vocab_size
    if end >= vocab_size:
        rule = f"must be below model.vocab_size={vocab_size}"
        way_out = "choose an id of the vocabulary, or -1 for samples of one document"
        yield Problem("data.document_end", end, rule, way_out)


def validate_data_weights(data: DataConfig) -> Iterator[Problem]:
    """Check that data.weights has one positive number for each path."""
    if not data.weights:
        return
    if len(data.weights) != len(data.paths):
        rule = f"must have one number for each of the {len(data.paths)} paths of data.path"
        way_out = "list as many, or leave weights out to join the paths by their sizes"
        yield Problem("data.weights", list(data.weights), rule, way_out)
    if not all(0 < weight < math.inf for weight in data.weights):
        rule = "must be greater than 0"
        yield Problem("data.weights", list(data.weights), rule, "leave out the paths without a share")


def validate_data_source(data: DataConfig) -> Iterator[Problem]:
    """Check the column and the splits of a Hugging Face data set."""
    if not data.column:
        yield Problem("data.column", "", "must name the column of the text", "the default is 'text'")
    if not data.split:
        yield Problem("data.split", "", "must name a split", "the default is 'train'")
    if data.validation_split and data.validation_split == data.split:
        rule = "must not be the split that is trained on"
        way_out = "leave it out to hold out data.validation_fraction of it"
        yield Problem("data.validation_split", data.validation_split, rule, way_out)


def has_validation_split(data: DataConfig) -> bool:
    """Return whether evaluation uses a separate split."""
    return data.kind == "huggingface" and bool(data.validation_split)


DATA_RULES = (validate_data_weights, validate_data_source)
