"""Tokens for the trainer: the same samples in the same order under every mapping. numpy only."""

from moefold.data.check import check_data
from moefold.data.dataset import Dataset, open_dataset, prepare
from moefold.data.marked import AnnotatedSampleSource, Sample
from moefold.data.sampling import Sampler, Split
from moefold.data.tokenizer import Tokenizer

__all__ = [
    "Dataset",
    "Sample",
    "AnnotatedSampleSource",
    "Sampler",
    "Split",
    "Tokenizer",
    "check_data",
    "open_dataset",
    "prepare",
]
