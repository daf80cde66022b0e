"""Private names of torch stand in one module, which says on which versions they were checked."""

import textwrap
from pathlib import Path

from moefold.comm.private_torch import CHECKED_TORCH_VERSIONS
from tests.architecture import rules
from tests.architecture.private_torch import private_torch_names

OWNER = "src/moefold/comm/private_torch.py"


def test_private_torch_names_stand_in_their_owner() -> None:
    """Check every module of the package but the owner."""
    found = private_torch_names(rules.python_files(rules.SOURCE))
    assert [use for use in found if OWNER not in use] == []


def test_checked_versions_are_those_allowed() -> None:
    """Compare the versions with the limits of torch in pyproject.toml."""
    required = next(
        line.strip(' ",')
        for line in (rules.SOURCE.parents[1] / "pyproject.toml").read_text().splitlines()
        if '"torch>=' in line
    )
    first, last = (
        tuple(map(int, version.split("."))) for version in CHECKED_TORCH_VERSIONS[:: len(CHECKED_TORCH_VERSIONS) - 1]
    )
    assert required == f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"


def test_private_names_of_torch_are_found(tmp_path: Path) -> None:
    """Find one use of each kind, but no private names of the package itself."""
    path = tmp_path / "example.py"
    path.write_text(
        textwrap.dedent("""
            import torch.utils._pytree
            from torch.distributed.pipelining.stage import _PipelineStageBase
            class A:
                _own = 1
                def run(self, tensor, other):
                    self._mine = other._own
                    torch._foreach_norm([tensor])
                    getattr(tensor, "_unsharded_param", None)
                    return tensor._version, self._mine
        """)
    )
    found = [use.partition(" ")[2] for use in private_torch_names([path])]
    assert found == [
        "torch.utils._pytree",
        "torch.distributed.pipelining.stage._PipelineStageBase",
        "torch._foreach_norm",
        "_unsharded_param",
        "tensor._version",
    ]
