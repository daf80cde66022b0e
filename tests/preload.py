"""Modules that the ranks and commands that tests fork have in memory: they would each import them again.

A rank imports the file of the function that it is to call, which takes a tenth of a second for pytest and a second for
transformers. Its runs draw no loss.png, see tests/no_plots.py.
"""

import gc
from contextlib import suppress
from importlib import import_module

import torch

from moefold.ops.cpu.build import CompilerError, load_library
from tests.any_speed import ignore_speed
from tests.no_plots import leave_out_plots
from tests.same_sharding import shorten_sharding

MODULES = (
    *("pytest", "hypothesis.strategies", "numpy.ma", "pydantic.dataclasses", "multiprocessing.popen_fork"),
    *("moefold.verify.compare", "moefold.train.run_log", "moefold.cli.train", "moefold.train.worker"),
    *("moefold.parts.optimizer.adamw.module", "moefold.parts.dispatcher.alltoall.module"),
    *("moefold.parts.attention.gqa.module", "moefold.parallel.pipeline", "moefold.parallel.pipeline_stage"),
    *(
        "moefold.parts.optimizer.muon.module",
        "moefold.parts.dispatcher.leastloaded.module",
        "moefold.optim.state_offload",
    ),
    *("moefold.parallel.kernels.low_precision", "moefold.parallel.offload", "moefold.parallel.memory_tracking"),
    *("moefold.train.rl.rollout_loader", "moefold.train.rl.callbacks", "moefold.train.rl.kl_reference"),
    *("moefold.parallel.gathered_weights", "moefold.inference.vllm_engine", "moefold.train.memory_profile"),
    *("torch.utils.serialization.config", "encodings.utf_8_sig"),
    *("moefold.convert.init_from", "moefold.convert.families.families", "moefold.cost.peak_memory"),
    *("moefold.cli.inference_options", "moefold.inference.worker", "moefold.inference.rollouts"),
    *("moefold.ops.cpu.attention", "moefold.ops.cpu.decode", "moefold.ops.cpu.gemm", "moefold.ops.cpu.swiglu"),
    *("moefold.ops.cpu.linear_attention", "moefold.ops.cpu.convolution", "moefold.ops.cpu.rope"),
)
"""Modules of most ranks or commands."""

for _name in MODULES:
    import_module(_name)
with suppress(ImportError):
    import safetensors.torch  # noqa: F401
    import transformers.cache_utils
    import transformers.modeling_utils  # noqa: F401
# Each rank of a run in float32 would ask the compiler for its version and load them.
with suppress(CompilerError):
    for _name in ("gemm", "swiglu", "norm", "rope", "attention", "paged_attention", "permute", "router", "decode"):
        load_library(_name)

ignore_speed()
leave_out_plots()
shorten_sharding()
torch.set_num_threads(1)
# As in moefold.verify.preload.
gc.collect()
gc.freeze()
