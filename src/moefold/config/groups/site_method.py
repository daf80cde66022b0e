"""Methods of sites: presets of the rounds in which jobs exchange their weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moefold.config.part import Part


@dataclass(frozen=True, kw_only=True)
class SiteMethodPart(Part):
    """Values of the keys of [sites] that a recipe leaves out; what a round does, these keys say."""

    group: ClassVar[str] = "site_method"
    key: ClassVar[str] = "sites.method"
    changes_maths: ClassVar[bool] = False

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key, without the section.

        Args:
            every: `sites.every` of the recipe, unchecked, or its default.
        """
        raise NotImplementedError
