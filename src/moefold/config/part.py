"""Parts: the choices of a recipe as frozen objects. Torch-free.

A part is a dataclass in a file of its own: `parts/GROUP/KIND.py`, or `parts/GROUP/KIND/part.py` with its module and its
formula in the same folder. The name of the file is the kind that a recipe writes (`config/find.py`). Its fields are its
settings, and its methods answer everything else that is asked of it. `config/groups/` has the base class of each group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from moefold.config.find import kind_of
from moefold.config.problem import Problem


class FlatKey(NamedTuple):
    """Recipe key that a field of a built-in part is read from; type, bounds and help stand on the key."""

    name: str
    """As "section.key"."""


class KindOf(NamedTuple):
    """Mark of a recipe key whose value is the kind of a part of a group, or a table with `kind`."""

    group: str


class UnusedKeys(NamedTuple):
    """Recipe keys outside a part that have no effect with it."""

    names: str
    """Each as "section.key", separated by spaces."""
    reason: str
    """As it follows "has no effect:" in the message."""
    remedy: str
    """What to write instead."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One choice of a recipe. A field is a setting: `name: Annotated[type, bound, ...]`, with its help as docstring."""

    group: ClassVar[str]
    """Folder of `parts/`, and the end of the name of the entry points of other packages, `moefold.GROUP`."""
    key: ClassVar[str]
    """Recipe key that chooses the part of this group, as "section.key"."""
    changes_maths: ClassVar[bool] = True
    """False for a part that no result depends on: `moefold verify` compares it with the oracle, which does not read it.
    """

    is_for_training: ClassVar[bool] = False
    """True for a part that inference does not read: its rules hold for training alone."""

    @property
    def kind(self) -> str:
        """Word by which a recipe names the part."""
        return kind_of(type(self))

    def check(self, recipe: Any) -> Iterator[Problem]:
        """Yield what this part does not go with in a recipe, a `Config`. Bounds of one setting stand on its field."""
        yield from ()

    def unused_keys(self) -> Iterator[UnusedKeys]:
        """Yield keys without effect with this part, without the keys that parts of other kinds read."""
        yield from ()

    def formula(self) -> Any:
        """Return the part in float64 for the oracle: a function, or a named tuple of functions and facts.

        None: `moefold verify` refuses recipes with it, by name.
        """
        return None
