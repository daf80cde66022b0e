"""Placement of the tokens of each round, for attention whose work is shared by ranks with different samples."""

from dataclasses import replace

from moefold.comm.collectives import all_gather_objects
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.ops.documents import DocumentBounds
from moefold.parallel.batch import Batch
from moefold.topology.token_placement import RoundShape, document_bounds, place


class RoundPlacer:
    """Adds the placement of its round to each micro-batch of a batch, where ranks share attention work.

    Args:
        cfg: the recipe.
        groups: the process groups of this rank.
    """

    def __init__(self, cfg: Config, groups: ParallelGroups) -> None:
        p = cfg.parallel
        self._is_needed = p.context == "planned" and p.attention_hosts == "balanced" and p.dp * p.cp > 1
        self._dp_group = groups.attn.dp
        self._shape = RoundShape(
            dp=p.dp, cp=p.cp, micro_batch_size=cfg.train.micro_batch_size, seq_len=cfg.train.seq_len
        )

    def add_placement(self, batch: Batch) -> Batch:
        """Return the batch with placements, or unchanged if none is needed or it has no documents; collective over dp.

        The ranks tell each other the bounds of their documents: a few integers for each sample.
        """
        if not self._is_needed or not batch.document_bounds:
            return batch
        of_rank = [bounds.of_samples for bounds in batch.document_bounds]
        rounds = zip(*all_gather_objects(of_rank, self._dp_group), strict=True)
        placed = tuple(
            self._with_placement(bounds, [sample for samples in round_ for sample in samples])
            for bounds, round_ in zip(batch.document_bounds, rounds, strict=True)
        )
        return replace(batch, document_bounds=placed)

    def _with_placement(self, bounds: DocumentBounds, of_samples: list[tuple[int, ...]]) -> DocumentBounds:
        """Return the bounds with the placement of a round, given the bounds of all its samples."""
        return replace(bounds, placement=place("samples", self._shape, document_bounds(self._shape, of_samples)))
