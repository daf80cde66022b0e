"""What the ranks of the tests find in memory: they would each import it again.

A rank imports the file of the function that it is to call, which takes a tenth of a second for pytest and a second for
transformers; a run draws its loss at its end, with half a second for matplotlib.
"""

import gc
from contextlib import suppress

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import pytest  # noqa: F401
import torch

import moefold.verify.compare  # noqa: F401

with suppress(ImportError):
    import safetensors.torch  # noqa: F401
    import transformers.cache_utils
    import transformers.modeling_utils  # noqa: F401

torch.set_num_threads(1)
# As in moefold.testing.preload.
gc.collect()
gc.freeze()
