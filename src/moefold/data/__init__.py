"""Tokens for the trainer: the same samples in the same order under every mapping. numpy only."""

from moefold.data.check import check_data
from moefold.data.dataset import Dataset, open_dataset, prepare
from moefold.data.marked import MarkedSample, MarkedSource
from moefold.data.sampling import Split
from moefold.data.tokenizer import Tokenizer

__all__ = ["Dataset", "MarkedSample", "MarkedSource", "Split", "Tokenizer", "check_data", "open_dataset", "prepare"]
