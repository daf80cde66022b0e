"""What the ranks of the tests find in memory: they would each import it again.

A rank imports the file of the function that it is to call, which takes a tenth of a second for pytest and a second for
transformers. Its runs draw no loss.png, see tests/no_plots.py.
"""

import gc
from contextlib import suppress

import pytest  # noqa: F401
import torch

import moefold.train.callbacks.run_log
import moefold.verify.compare  # noqa: F401
from tests.no_plots import leave_out_plots

with suppress(ImportError):
    import safetensors.torch  # noqa: F401
    import transformers.cache_utils
    import transformers.modeling_utils  # noqa: F401

leave_out_plots()
torch.set_num_threads(1)
# As in moefold.verify.ranks.preload.
gc.collect()
gc.freeze()
