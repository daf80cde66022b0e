"""What the fork server holds in memory before it forks ranks."""

import atexit
import gc
import signal

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor

# The training itself: half a second that each rank of each task would spend again.
import moefold.train.trainer
import moefold.verify.distributed_run  # noqa: F401

# Ranks inherit it: Ctrl-C reaches each process of a terminal, and one just forked would answer with a traceback.
signal.signal(signal.SIGINT, signal.SIG_IGN)
torch.set_num_threads(1)
# A collection that walked through all this in a rank would copy its pages: a quarter of a second.
gc.collect()
gc.freeze()
# What is frozen is not taken down at the end, and triton's library would say so on stderr.
atexit.register(gc.unfreeze)
