"""What the fork server holds in memory before it forks ranks."""

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor

torch.set_num_threads(1)
