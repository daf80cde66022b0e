"""Modules that the fork server imports before it forks ranks."""

# ruff: noqa: E402
import atexit
import gc
import signal

# Searching the objects of the imports for garbage would take a fifth of their time.
gc.disable()

import torch

# Training modules: importing them here saves half a second in each rank of each task.
import moefold.train.trainer
import moefold.verify.distributed_run  # noqa: F401
from moefold.comm.private_torch import import_compiler
from moefold.config.schema import Config
from moefold.validate.config import check_config

# Inherited by ranks: a terminal sends SIGINT to all processes, and a new rank would print a traceback.
signal.signal(signal.SIGINT, signal.SIG_IGN)
torch.set_num_threads(1)
import_compiler()
# Classes and types of all built-in parts, and caches of the rules: each rank checks its recipe.
check_config(Config())
# Garbage collection of these objects in a rank would copy their pages (copy-on-write): a quarter of a second.
gc.collect()
gc.freeze()
# Frozen objects are not destroyed at exit, and triton's library would complain on stderr.
atexit.register(gc.unfreeze)
gc.enable()
