"""moefold trains Mixture-of-Experts language models with MoE Parallel Folding (arXiv:2504.14960).

The names of the Python interface are imported at their first use. `docs/api.md` describes them.
"""

import importlib

__version__ = "0.2.0"

_MODULES = {
    "Callback": "train.callbacks.callback",
    "LossFunction": "model.loss_function",
    "ModelOutput": "model.head",
    "Metric": "metrics.definitions",
    "NextTokenLoss": "parts.loss",
    "ProgramData": "data.dataset",
    "Sample": "data.sample",
    "Sampler": "data.sampler",
    "EvalOptions": "inference.jobs",
    "edit": "config.edit",
    "GenerateOptions": "inference.jobs",
    "PlanOptions": "planner.plan_request",
    "Planner": "planner.planner",
    "SamplingParams": "inference.sampling",
    "result_as_dict": "planner.plan_json",
    "weighted_sum": "model.loss_function",
    "Config": "config.schema",
    "ConfigError": "errors",
    "Layout": "topology.layout",
    "LoadedRecipe": "recipe",
    "RunError": "errors",
    "build_model": "api",
    "check_config": "validate.config",
    "evaluate": "api",
    "fold": "topology.layout",
    "generate": "api",
    "load_config": "recipe",
    "load_recipe": "recipe",
    "plan": "api",
    "train_in_process": "api",
    "train_model": "api",
}
"""Module of each name."""


def __getattr__(name: str) -> object:
    """Import a name of the Python interface at its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return the names of the module, including names that have not been imported yet."""
    return sorted({*globals(), *_MODULES})
