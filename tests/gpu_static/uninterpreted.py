"""Programs of this folder run in a process whose Triton kernels are not interpreted."""

import json
import os
import subprocess
import sys
from typing import Any

from tests.e2e.command import ROOT
from tests.e2e.forked import run_program

FRESH_KERNELS = """
import sys
loaded = [name for name in sys.modules if name.startswith("moefold.ops.triton.")]
assert not loaded, f"the fork server has imported kernels, which are interpreted: {loaded}"
"""
RUN_MODULE = """
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def trace_uninterpreted(kind: str, program: str, *words: str) -> Any:
    """Run a program that traces launches in the checkout's folder, and return the JSON that it prints.

    It is forked: the package's kernels are imported after that, which is when Triton asks for its interpreter. Triton's
    own functions are interpreted, so that nothing can be compiled.

    Args:
        kind: "-c": the program is code; "-m": it is the name of a module.
        program: the code, or the name of the module.
        words: its arguments.
    """
    code, arguments = (program, words) if kind == "-c" else (RUN_MODULE, (program, *words))
    done = run_program(FRESH_KERNELS + code, *arguments, timeout_s=240, cwd=ROOT, environment=_environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compile_uninterpreted(*words: str) -> Any:
    """Run Python with these arguments, in an interpreter of its own, and return the JSON that it prints."""
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, env=_environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
