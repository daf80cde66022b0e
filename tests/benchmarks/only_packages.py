"""A process with only the packages of a stage installed, as in an image made for torch."""

import re
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from benchmarks.gpu_suites import TEST_LIBRARIES

BROUGHT_ALONG = ("triton", "pytest-xdist")
"""Packages of the image of a GPU that the stages use where they are."""


def hide_others() -> None:
    """Make packages impossible to find, except the packages of the stages of tests and their requirements."""
    kept = set()
    todo = [*TEST_LIBRARIES.values(), *BROUGHT_ALONG]
    while todo:
        name = re.split(r"[^\w.-]", todo.pop())[0].lower().replace("_", "-")
        if name in kept:
            continue
        kept.add(name)
        with suppress(PackageNotFoundError):
            # Without the requirements of extras.
            todo += [line for line in requires(name) or [] if "extra ==" not in line]
    known = {
        module: {name.lower().replace("_", "-") for name in names}
        for module, names in packages_distributions().items()
        if module not in sys.builtin_module_names
    }
    hidden = {module for module, names in known.items() if not names & kept and module not in ("moefold", "tests")}
    find = PathFinder.find_spec

    class Finder:
        """The finder of installed packages, without the hidden ones."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            return None if name.partition(".")[0] in hidden else find(name, path, target)

        invalidate_caches = PathFinder.invalidate_caches
        find_distributions = PathFinder.find_distributions

    sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
