"""Shared selection: the layer attends to the keys that the nearest indexer before it selected (arXiv:2603.12201)."""

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.groups.indexer import IndexerPart


@dataclass(frozen=True, kw_only=True)
class SharedSelectionPart(IndexerPart):
    """Attend to the selection of an earlier layer."""

    is_shared: ClassVar[bool] = True
