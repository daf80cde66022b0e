"""Data pipeline: the same samples in the same order under every parallel mapping. numpy only."""

from moefold.data.dataset import Dataset, ProgramData, open_dataset, prepare
from moefold.data.sample import AnnotatedSampleSource, Sample
from moefold.data.sampler import Sampler, Split
from moefold.data.tokenizer import Tokenizer
from moefold.data.validate_source import check_data

__all__ = [
    "Dataset",
    "ProgramData",
    "Sample",
    "AnnotatedSampleSource",
    "Sampler",
    "Split",
    "Tokenizer",
    "check_data",
    "open_dataset",
    "prepare",
]
