"""Comparison of the sites' routing: the experts that each site chooses for the same held-out samples."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.comm.site_links import Probe
from moefold.config.model import ModelConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.moe.router import Router
from moefold.ops.tensor_hash import TensorHasher
from moefold.parallel.batch import Batch
from moefold.train.callbacks.callback import TrainingContext

NUM_SAMPLES = 8
"""Number of held-out samples for the comparison of the routing."""


class _ChoiceRecorder:
    """Records the choices of a router for the first samples of a batch, without changing them."""

    in_evaluation = True
    only_records = True

    def __init__(self) -> None:
        self.num_samples = 0
        self.chosen: list[tuple[Tensor, Tensor]] = []

    def apply(self, ids_TK: Tensor, sample_ids_B: Tensor) -> Tensor:
        """Record the choices. The result is the same tensor, see `RouterOverride`."""
        ids_BSK = ids_TK.view(-1, len(sample_ids_B), ids_TK.shape[1]).transpose(0, 1)
        is_counted = sample_ids_B < self.num_samples
        self.chosen.append((sample_ids_B[is_counted].cpu(), ids_BSK[is_counted].to("cpu", torch.int16)))
        return ids_TK

    def take(self) -> Tensor:
        """Return the choices since the last call, int16 [tokens, K], sample by sample.

        Micro-batches may have any size and order.
        """
        sample_ids, chosen_NSK = map(torch.cat, zip(*self.chosen, strict=True))
        self.chosen.clear()
        return chosen_NSK[sample_ids.argsort()].flatten(0, 1)


class RoutingProbe:
    """Reads the choices of all routers of this rank for the same `NUM_SAMPLES` held-out samples.

    A rank has the same layers on every site and, with the same held-out samples and global batch size, the same
    tokens. A hash of the tokens shows whether the choices of the sites can be compared.
    """

    def __init__(self, model: ModelConfig, train: TrainConfig, site: int) -> None:
        self._top_k = model.routed.top_k if model.routed else 0
        self._train = train
        self._site = site
        self._batches: list[Batch] | None = None

    def read(self, context: TrainingContext) -> Probe:
        """Evaluate the held-out samples and return the choices of this rank's routers. It is collective.

        The probe is empty in a run without evaluation, or if all held-out samples are lost.
        """
        if self._batches is None:
            self._batches = context.data.eval_batches(NUM_SAMPLES) if self._train.eval_every else []
        layers = context.training.model.moe_layers()
        routers: Sequence[Router] = [layers[number].router for number in sorted(layers)]
        overrides = [router.override for router in routers]
        recorders = [_ChoiceRecorder() for _ in routers]
        for router, recorder in zip(routers, recorders, strict=True):
            router.override = recorder
        chosen: list[Tensor] = []
        try:
            for number, batch in enumerate(self._batches):
                for recorder in recorders:
                    recorder.num_samples = NUM_SAMPLES - number * self._train.global_batch_size
                context.training.evaluate([batch])
                # Layers of multi-token prediction do not run in evaluation.
                chosen += [recorder.take() for recorder in recorders if recorder.chosen]
        finally:
            for router, override in zip(routers, overrides, strict=True):
                router.override = override
        hasher = TensorHasher(context.groups.device)
        # Sites without samples have nothing to compare.
        keys = [int(hasher.digest(batch.tokens)[1]) for batch in self._batches] or [self._site]
        return Probe(sum(keys) % 2**62, torch.cat([torch.empty(0, self._top_k, dtype=torch.int16), *chosen]))


def count_equal_choices(gathered: Tensor, weights: Sequence[float], index: int) -> tuple[int, int]:
    """Count the equal choices of one member and the others for the same tokens. It does not communicate.

    Args:
        gathered: choices of each member, int16 [members, tokens, K]. The K experts of a token differ.
        weights: weight of each member. Choices of members of weight 0 are not read.

    Returns:
        Number of equal choices, and number of all compared choices, over the other members.
    """
    others = [number for number, weight in enumerate(weights) if weight and number != index]
    if not weights[index]:
        return 0, 0
    ids_TK = gathered[index]
    equal = sum(int((ids_TK[:, :, None] == gathered[other][:, None, :]).sum()) for other in others)
    return equal, ids_TK.numel() * len(others)
