"""Python interface: plan, build, train, evaluate and generate from a program. Importing it does not import torch.

`import moefold` offers these names. `docs/api.md` describes them. The commands execute the same steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.config.base.plugins import import_files
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.host.rank_env import read_rank_env
from moefold.message_text import keep_names, spelled_as
from moefold.recipe import LoadedRecipe, load_recipe
from moefold.train.start import set_up_run

if TYPE_CHECKING:
    import numpy as np

    from moefold.data.dataset import ProgramData
    from moefold.inference.jobs import EvalOptions, GenerateOptions
    from moefold.inference.sampling import SamplingParams
    from moefold.inference.scoring import Evaluation
    from moefold.inference.worker import Generation
    from moefold.model.loss_function import LossFunction
    from moefold.model.transformer import Transformer
    from moefold.planner.plan_request import PlanOptions
    from moefold.planner.planner import Planner
    from moefold.train.callbacks.callback import Callback
    from moefold.train.worker import TrainOutcome


def plan(
    model: str | Path,
    gpu: str | Path,
    *,
    num_gpus: int | None = None,
    seq_len: int | None = None,
    global_batch_size: int | None = None,
    fix: Mapping[str, Any] | None = None,
    options: "PlanOptions | None" = None,
) -> "Planner":
    """Create the planner that ranks all legal mappings of a model on some GPUs, like `moefold plan`.

    Args:
        model: a preset, a recipe (.toml), or the config.json (or folder) of a Hugging Face model.
        gpu: name of a device such as "h100", or a .toml file.
        num_gpus: total number of GPUs. None means the recipe's, like `seq_len` and `global_batch_size`.
        seq_len: tokens per sample.
        global_batch_size: samples per step.
        fix: values of axes. Only mappings with them are searched, such as {"tp": 2, "ep": 8}.
        options: other settings.

    Returns:
        The planner: `.best()` is the fastest mapping that fits, `.top_plans(count)` the best few, `.config_for(plan)`
        the recipe under a mapping. `result_as_dict(planner, count)` is the output of `moefold plan --json`.

    Raises:
        ConfigError: the model, the device or a setting is wrong or missing, or the recipe supports no mapping. The
            methods raise it if no mapping is legal or fits.
    """
    from moefold.planner.plan_request import PlanOptions, plan_request
    from moefold.planner.planner import Planner

    given_fields = {"num_gpus": num_gpus, "seq_len": seq_len, "global_batch_size": global_batch_size, "fix": fix}
    arguments: dict[str, Any] = {name: value for name, value in given_fields.items() if value is not None}
    for name, value in arguments.items():
        other = None if options is None else getattr(options, name)
        if other and other != value:
            raise ConfigError(f"{name}={value!r} and options.{name}={other!r} differ; give one of them")
    with spelled_as(_arguments_of(plan, PlanOptions)):
        return Planner(plan_request(str(model), str(gpu), replace(options or PlanOptions(), **arguments)))


def build_model(cfg: Config, device: str = "cpu") -> "Transformer":
    """Build the whole model on one device, with the initial weights of a run with this config.

    `parallelize` of `moefold.parallel` builds the shards of a mapping instead.

    Args:
        cfg: the config. Its mapping is not used.
        device: a torch device.

    Returns:
        The module. `model(tokens)` with tokens int64 [B, S] of `train.seq_len` tokens returns logits [S, B, V].
    """
    import torch

    from moefold.model.transformer import build_model as build_whole_model
    from moefold.model.weight_init import init_weights

    with torch.device("meta"):
        model = build_whole_model(cfg)
    model = model.to_empty(device=device)
    init_weights(model, cfg.model, cfg.run.seed)
    model.set_positions(torch.arange(cfg.train.seq_len, device=device))
    return model


def train_model(
    recipe: str | Path | LoadedRecipe | Config,
    overrides: Sequence[str] = (),
    *,
    loss: "LossFunction | None" = None,
    data: "ProgramData | None" = None,
    callbacks: "Sequence[Callback]" = (),
) -> "TrainOutcome":
    """Train from a recipe like `moefold train`: in a new run folder, or from the last checkpoint of the run.

    A job of one rank runs in this process. Several ranks are started on this machine. Under a launcher such as torchrun
    this process is one rank. Call it from the main thread, which receives Ctrl-C.

    Args:
        recipe: a TOML file, or the result of `load_recipe` or `load_config`.
        overrides: strings `section.key=value`, for a file.
        loss: the loss to minimise. None means the recipe's loss. With reinforcement learning it has an attribute
            `columns`, the columns of a batch that it reads.
        data: the samples of a recipe with `data.kind="program"`.
        callbacks: hooks of the training loop. Started ranks work on copies of all three, which must be picklable for
            GPU ranks. A program for GPUs guards the call with `if __name__ == "__main__"`.

    Returns:
        Exit status, run folder, metrics of the last step, and newest checkpoint. The status is not 0 if a signal has
        stopped the run.

    Raises:
        ConfigError: the recipe cannot be trained here.
        RunError: the run or a started rank failed. The rank's message is on stderr.
    """
    loaded = _loaded(recipe, overrides)
    _check_loss(loaded, loss)
    rank_env = read_rank_env()
    setup = set_up_run(loaded, rank_env, data)
    if setup.is_finished:
        from moefold.train.worker import finished_outcome

        finished = finished_outcome(setup)
        assert finished is not None, "no step is left"
        return finished
    device_type = setup.choose_device(rank_env)
    setup.prepare_data(rank_env)

    from moefold.launch.rank_results import collect_from_ranks
    from moefold.train.worker import ProgramHooks, train_on_rank

    program = ProgramHooks(loss, data, callbacks)
    main = partial(train_on_rank, setup, program)
    cfg = setup.folder.cfg
    return collect_from_ranks(main, cfg.num_job_ranks, device_type, rank_env, regroups=cfg.faults.regroups)


def train_in_process(
    recipe: str | Path | LoadedRecipe | Config,
    overrides: Sequence[str] = (),
    *,
    loss: "LossFunction | None" = None,
    data: "ProgramData | None" = None,
    callbacks: "Sequence[Callback]" = (),
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> "TrainOutcome":
    """Train with the processes of this program as ranks, and return to it: in Ray Train, accelerate or a notebook.

    No process is started. The ranks are the members of the default process group. Without one they are the ranks of the
    launcher whose variables are set (torchrun, srun), or this process alone. Collective: every rank calls it, with
    equal arguments. The run creates and destroys its own process groups. The program's groups must not be used during
    the run, and are unchanged afterwards. The function can be called again, also with another mapping, and from any
    thread.

    Args:
        recipe: see `train_model`. `parallel.world_size` must be the number of ranks.
        overrides: strings `section.key=value`, for a file.
        loss: see `train_model`, like `data` and `callbacks`. Nothing is pickled.
        data: the samples of a recipe with `data.kind="program"`.
        callbacks: hooks of the training loop.
        on_step: called on each rank after each step, including its save and evaluation, with the record of
            metrics.jsonl.

    Returns:
        Exit status, run folder, metrics of the last step, and newest checkpoint. The status is not 0 if a signal has
        stopped the run. In the main thread, Ctrl-C and SIGTERM stop it after the step, as in `moefold train`.

    Raises:
        ConfigError: the recipe cannot be trained by these ranks. Raised on all of them.
        RunError: the run failed. An exception of a callback is raised unchanged. The other ranks then raise RunError,
            or, if a rank hangs for `faults.timeout_s` or its process has ended, print the diagnosis and end.
    """
    loaded = _loaded(recipe, overrides)
    _check_loss(loaded, loss)

    from moefold.train.worker import ProgramHooks, train_in_program

    return train_in_program(loaded, ProgramHooks(loss, data, callbacks, on_step))


def evaluate(
    model: str | Path,
    *,
    tokens: "str | Path | np.ndarray | None" = None,
    text: str | Path | None = None,
    logits: str | Path | None = None,
    overrides: Sequence[str] = (),
    part: str | Sequence[str] = (),
    options: "EvalOptions | None" = None,
) -> "Evaluation":
    """Compute the mean cross-entropy of a model over token ids or a text file, like `moefold eval`.

    Args:
        model: a checkpoint, a folder of checkpoints, a run folder or a Hugging Face folder.
        tokens: row of ids, or a .npy file of ids.
        text: file of UTF-8 text for the model's tokenizer. Give either tokens or text.
        logits: .npy file for the logits, float32 [sequences, S, V].
        overrides: the mapping, such as `parallel.tp=2`.
        part: FILE.py:CLASS of each part in the model's training that is from a file. The files are imported.
        options: other settings.

    Returns:
        The loss in nats per token, the perplexity and the number of predicted tokens.

    Raises:
        ConfigError: the model, the data, a setting or the mapping cannot work.
        RunError: a started rank has failed. Its message is on stderr.
    """
    from moefold.inference.jobs import EvalOptions, EvalRequest, prepare_evaluation

    if (tokens is None) == (text is None):
        raise ConfigError("evaluate needs either tokens or text")
    request = EvalRequest(
        model=str(model),
        tokens=Path(tokens) if isinstance(tokens, str) else tokens,
        text=None if text is None else Path(text),
        logits=None if logits is None else Path(logits),
        overrides=tuple(overrides),
        options=EvalOptions() if options is None else options,
    )
    rank_env = read_rank_env()
    with spelled_as(_arguments_of(evaluate, EvalOptions)):
        import_files(part)
        job = prepare_evaluation(request, rank_env, lambda notice: None)

        from moefold.inference.worker import evaluate_on_rank
        from moefold.launch.rank_results import collect_from_ranks

        main = keep_names(partial(evaluate_on_rank, job))
        return collect_from_ranks(main, job.cfg.parallel.world_size, job.device_type, rank_env)


def generate(
    model: str | Path,
    prompts: str | Sequence[str],
    *,
    max_tokens: int = 128,
    sampling: "SamplingParams | None" = None,
    overrides: Sequence[str] = (),
    part: str | Sequence[str] = (),
    options: "GenerateOptions | None" = None,
) -> "list[Generation]":
    """Continue prompts with a model, like `moefold generate`.

    Args:
        model: a checkpoint, a folder of checkpoints, a run folder or a Hugging Face folder.
        prompts: texts, or messages with `GenerateOptions(chat=True)`. All are continued together.
        max_tokens: maximum new tokens of each prompt.
        sampling: temperature, top_k, top_p, min_p and seed.
        overrides: the mapping, such as `parallel.tp=2`.
        part: FILE.py:CLASS of each part in the model's training that is from a file. The files are imported.
        options: other settings.

    Returns:
        One generation per prompt: `.text`, `.tokens` and `.finish_reason`.

    Raises:
        ConfigError: the model, a prompt, a setting or the mapping cannot work.
        RunError: a started rank has failed. Its message is on stderr.
    """
    from moefold.inference.jobs import GenerateOptions, GenerationRequest, prepare_generation
    from moefold.inference.sampling import SamplingParams

    texts = (prompts,) if isinstance(prompts, str) else tuple(prompts)
    if not texts:
        raise ConfigError("generate needs at least one prompt")
    request = GenerationRequest(
        model=str(model),
        read_prompts=lambda: texts,
        max_tokens=max_tokens,
        sampling=SamplingParams() if sampling is None else sampling,
        overrides=tuple(overrides),
        options=GenerateOptions() if options is None else options,
    )
    rank_env = read_rank_env()
    with spelled_as(_arguments_of(generate, GenerateOptions, SamplingParams)):
        import_files(part)
        job = prepare_generation(request, rank_env)

        from moefold.inference.worker import generate_on_rank
        from moefold.launch.rank_results import collect_from_ranks

        main = keep_names(partial(generate_on_rank, job))
        return collect_from_ranks(main, job.cfg.parallel.world_size, job.device_type, rank_env)


def _check_loss(loaded: LoadedRecipe, loss: "LossFunction | None") -> None:
    """Check that a loss of the program can train on the recipe's rollouts, and that the recipe sets no loss.

    Raises:
        ConfigError: it cannot, or the recipe sets a key of the replaced loss.
    """
    if loss is None:
        return
    from moefold.objectives.recipe_loss import loss_keys, rollout_loss_problem

    if replaced := sorted(loaded.explicit_keys & loss_keys()):
        raise ConfigError(f"loss= replaces the loss of the recipe, which sets {', '.join(replaced)}; leave one out")
    if loaded.cfg.is_rl and (problem := rollout_loss_problem(loss, loaded.cfg.rl)):
        raise ConfigError(f"loss={type(loss).__name__} {problem}")


def _loaded(recipe: str | Path | LoadedRecipe | Config, overrides: Sequence[str]) -> LoadedRecipe:
    if isinstance(recipe, str | Path):
        return load_recipe(recipe, overrides)
    if overrides:
        raise ConfigError("overrides apply to a recipe file; give them to load_recipe, or change the config itself")
    if isinstance(recipe, LoadedRecipe):
        return recipe
    if recipe.parallel.mapping == "auto":
        raise ConfigError(
            'parallel="auto" keeps the keys that the recipe sets, which a config does not tell; give the result of '
            "load_recipe instead of its cfg"
        )
    return LoadedRecipe(recipe, frozenset(), ())


def _arguments_of(function: Callable[..., Any], *options: Any) -> dict[str, str]:
    """Return the arguments of a function, and the fields of its options, by the option of a command in messages."""
    names = [*signature(function).parameters, *(field.name for owner in options for field in fields(owner))]
    return {f"--{name.replace('_', '-')}": name for name in names}
