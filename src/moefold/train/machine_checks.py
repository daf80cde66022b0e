"""Checks of a recipe against the machine that will run it: folders, files, packages, servers, and type of device.

Each raises ConfigError for the first fault that it finds.
"""

import tempfile
from pathlib import Path

from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.metrics import MetricsConfig
from moefold.config.sections.moe import TRACE_FOLDER, MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.kv_cache import cache_sizes
from moefold.data.dataset import DataRequest
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.message_text import Problem, Setting
from moefold.ops.kernel_support import check_kernel_device
from moefold.remote_path import RemoteError, RemotePath, check_remote_writable, is_remote, to_path
from moefold.topology.rollout_mapping import has_rollout_mapping, rollout_config
from moefold.validate.cuda_graphs import check_cuda_graphs_device
from moefold.validate.exactness import replays_routing
from moefold.validate.memory_savings import check_memory_device, check_offload_device, ssd_offload_keys
from moefold.validate.moe import check_dispatch_device, check_dispatch_package
from moefold.validate.pipeline import check_schedule_file


def check_machine(cfg: Config) -> None:
    """Check folders, data, checkpoints and packages on the machine that will run the config. It creates nothing.

    The config must have passed `check_config`.
    """
    check_writable(cfg.run, cfg.checkpoint)
    check_schedule_file(cfg.model, cfg.moe, cfg.parallel, cfg.train)
    check_resume(cfg.checkpoint)
    check_initial_weights(cfg.model, cfg.lora, cfg.checkpoint, cfg.rl)
    check_packages(cfg.model, cfg.parallel, cfg.metrics)
    check_replay(cfg.run, cfg.model, cfg.moe, cfg.train)
    check_data(DataRequest.of(cfg))
    check_meeting_point(cfg.sites)
    check_offload_folder(cfg.train)


def check_device(cfg: Config, device_type: str) -> None:
    """Check that a type of device supports the settings of a training step.

    Inference has neither CUDA graphs of a step nor states to offload: it calls `check_kernel_device` alone.

    Raises:
        ConfigError: the device does not support a setting.
    """
    check_dispatch_device(cfg.model, cfg.parallel, device_type)
    check_kernel_device(cfg.run, device_type)
    check_cuda_graphs_device(cfg.run, device_type)
    check_offload_device(cfg.train, device_type)
    check_memory_device(cfg, device_type)


def check_writable(run: RunConfig, checkpoint: CheckpointConfig) -> None:
    """Check that the folders the run writes to exist or can be created, and that files can be created in them."""
    probe_folder("run.dir", run.dir)
    if checkpoint.dir and checkpoint.saves:
        probe_folder("checkpoint.dir", checkpoint.dir)


def check_packages(model: ModelConfig, parallel: ParallelConfig, metrics: MetricsConfig) -> None:
    """Check that the packages of the chosen trackers and dispatcher are installed."""
    if metrics.tensorboard or metrics.wandb:
        from moefold.metrics.tracker import check_trackers

        check_trackers(metrics)
    check_dispatch_package(model, parallel)


def check_resume(checkpoint: CheckpointConfig) -> None:
    """Check that the checkpoint named in the recipe exists, and is a single checkpoint."""
    if checkpoint.resume in ("auto", "never"):
        return
    path = to_path(checkpoint.resume)
    name = Setting("checkpoint.resume", checkpoint.resume)
    if path.is_dir():
        if inner := _list_checkpoints(path):
            raise ConfigError(name.problem("is a folder of checkpoints", f"name one, such as {str(inner[-1])!r}"))
        return
    if path.exists():
        raise ConfigError(f"{name} is a file; a checkpoint is a folder, such as RUN_DIR/checkpoints/step-000100")
    siblings = [str(sibling) for sibling in _list_checkpoints(path.parent)[-5:]]
    hint = f"the checkpoints there are {', '.join(siblings)}" if siblings else "set 'auto' for the newest one, if any"
    raise ConfigError(name.problem("does not exist", hint))


def check_initial_weights(model: ModelConfig, lora: LoraConfig, checkpoint: CheckpointConfig, rl: RLConfig) -> None:
    """Check that the initial weights exist and fit the recipe's model, or can be upcycled to it."""
    if lora.trains_adapters_only:
        from moefold.convert.preflight import check_initial_adapters

        check_initial_adapters(lora, checkpoint)
    dense = checkpoint.upcycle.dense if checkpoint.upcycle else ""
    initial_weights = {"checkpoint.init_from": checkpoint.init_from, "checkpoint.upcycle.dense": dense}
    if rl.reference != "start":
        initial_weights["rl.reference"] = rl.reference
    for key, path in initial_weights.items():
        if path:
            from moefold.convert.preflight import init_from_unsupported_reason, weights_path

            try:
                folder = weights_path(path)
            except ConfigError as error:
                raise error.with_start(f"{key}: ") from error
            if reason := init_from_unsupported_reason(
                model, folder, checkpoint.ignore_keys, is_dense=key == "checkpoint.upcycle.dense"
            ):
                raise ConfigError(Problem(key, path, f": {reason}"))


def check_replay(run: RunConfig, model: ModelConfig, moe: MoEConfig, train: TrainConfig) -> None:
    """Check that the trace to replay exists, fits model, batch and steps, and is not the trace to be written."""
    if not moe.replay:
        return
    from moefold.data.routing_trace import RoutingTrace, trace_shape

    trace = RoutingTrace(Path(moe.replay), "moe.replay")
    if trace.folder.resolve() == (Path(run.dir) / TRACE_FOLDER).resolve():
        rule = "is the trace of this very run, which a new start removes"
        raise ConfigError(Problem("moe.replay", moe.replay, rule, "choose another run.dir"))
    trace.check_replay(trace_shape(model, train), run.steps)


def check_replay_content(run: RunConfig, moe: MoEConfig) -> None:
    """Check every expert choice of the trace to replay. It reads the whole trace, so call it on one process per host.

    The trace must have passed `check_replay`.
    """
    if not moe.replay:
        return
    from moefold.data.routing_trace import RoutingTrace

    RoutingTrace(Path(moe.replay), "moe.replay").check_content(run.steps)


def _list_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def probe_folder(key: str, path: str) -> None:
    """Try to create a temporary file in a folder, or in its closest existing parent. It leaves nothing there."""
    name = Setting(key, path)
    if is_remote(path):
        if path.startswith("memory://"):
            raise ConfigError(f"{name} would end with the process; name a folder, or a URL of a store such as s3://")
        try:
            check_remote_writable(RemotePath(path))
        except RemoteError as error:
            raise ConfigError(f"{key}: {error}") from None
        return
    folder = Path(path)
    existing = folder.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            relation = "is" if existing == folder.absolute() else f"lies below {str(existing)!r}, which is"
            raise ConfigError(name.problem(f"{relation} a file", "choose a folder"))
        with tempfile.TemporaryFile(dir=existing):
            return
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error.strerror} in {str(existing)!r}; choose another") from None


def check_meeting_point(sites: SitesConfig) -> None:
    """Check the address of the meeting point of the sites, and that there is a secret unless it is this machine."""
    if not sites.meet:
        return
    from moefold.host.listen import is_loopback
    from moefold.launch.meet_client import parse_address
    from moefold.launch.signed_lines import SECRET_VARIABLE, read_secret

    host, _ = parse_address(sites.meet)
    if not read_secret(sites.secret, "sites.secret") and not is_loopback(host):
        rule = "is another machine, and there is no shared secret"
        way_out = f"name its file with sites.secret, or set {SECRET_VARIABLE}"
        raise ConfigError(Problem("sites.meet", sites.meet, rule, way_out))


def check_offload_folder(train: TrainConfig) -> None:
    """Check that files can be created in the offload folder, whose parent must exist.

    Run folders may be created anywhere, but a mistyped offload folder would fill another disk.
    """
    if not ssd_offload_keys(train):
        return
    probe_folder("train.offload_dir", train.offload_dir)
    above = Path(train.offload_dir).absolute().parent
    if not above.exists():
        rule = f"lies in {str(above)!r}, which does not exist"
        way_out = f"name a folder of a local disk, or make {str(above)!r} if it is meant"
        raise ConfigError(Problem("train.offload_dir", train.offload_dir, rule, way_out))


def check_vllm(cfg: Config, rank_env: RankEnv | None, *, max_tokens: int) -> None:
    """Check that rollout.folder holds the model of the recipe, and that a vLLM server runs with it.

    Args:
        rank_env: the rank, or None before the ranks start.
        max_tokens: tokens of the longest prompt with rollout.max_tokens.
    """
    from moefold.convert.preflight import init_from_unsupported_reason
    from moefold.inference.vllm_server import VllmError, vllm_server

    rollout = cfg.rollout
    # The ranks of other machines need the server, and not the folder.
    is_first = rank_env is None or rank_env.rank == 0
    ignored_keys = cfg.checkpoint.ignore_keys
    if is_first and (reason := init_from_unsupported_reason(cfg.model, Path(rollout.folder), ignored_keys)):
        raise ConfigError(Problem("rollout.folder", rollout.folder, f"cannot be used: {reason}"))
    replays, _ = replays_routing(cfg.model, cfg.moe, cfg.rl, is_exact=False)
    try:
        vllm_server(cfg.run, cfg.train, cfg.rollout, returns_experts=replays).check(max_tokens=max_tokens)
    except VllmError as error:
        raise ConfigError(str(error)) from None


def check_rollout_cache(cfg: Config, device_type: str) -> None:
    """Check that the cache of the generation engine holds a sample of train.seq_len, under each mapping that samples.

    With rl.staleness, held-out prompts are sampled under the mapping of training.
    """
    from moefold.inference.engine.pages import cache_pages, check_requests
    from moefold.inference.engine.requests import EngineSettings, Request

    rollout = cfg.rollout
    settings = EngineSettings.of_recipe(cfg.rollout)
    longest = Request(prompt=(0,) * max(1, cfg.train.seq_len + 1 - rollout.max_tokens), max_tokens=rollout.max_tokens)
    mappings = [rollout_config(cfg) if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout) else cfg]
    if cfg.rl.staleness and cfg.train.eval_every:
        mappings.append(cfg)
    for mapping in mappings:
        sizes = cache_sizes(mapping, device_type)
        num_pages = cache_pages(sizes, settings)
        assert num_pages is not None
        check_requests([longest], num_pages, sizes.page_positions)
