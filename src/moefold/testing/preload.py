"""What the fork server holds in memory before it forks ranks."""

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor

# The training itself: half a second that each rank of each task would spend again.
import moefold.train.trainer
import moefold.verify.mapping  # noqa: F401

torch.set_num_threads(1)
