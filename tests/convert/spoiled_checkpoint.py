"""Checkpoints with NaN or infinity in a tensor, as a run saves them whose weights have diverged."""

from pathlib import Path

import torch
from torch import Tensor

from moefold.checkpoint.manifest import MANIFEST_FILE, digest_file, write_manifest


def spoil_stored(checkpoint: Path, values: Tensor, fault: float = torch.nan) -> None:
    """Replace the first value of a stored tensor, and seal the checkpoint again.

    Args:
        checkpoint: its folder.
        values: the tensor, as it is stored.
        fault: the new value.
    """
    spoiled = values.contiguous().clone()
    spoiled.flatten()[0] = fault
    before, after = (x.contiguous().view(torch.uint8).numpy().tobytes() for x in (values, spoiled))
    (file,) = (file for file in checkpoint.glob("*.distcp") if before in file.read_bytes())
    file.write_bytes(file.read_bytes().replace(before, after))
    files = [file for file in checkpoint.iterdir() if file.name != MANIFEST_FILE and file.is_file()]
    write_manifest(checkpoint, {file.name: digest_file(file) for file in files})
