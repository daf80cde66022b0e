"""Start of a training run: checks against the machine, then the steps up to the moment when its ranks begin.

`moefold train` and the Python API take these steps in the same order: `set_up_run`, `choose_training_device`,
`prepare_data`, and then the ranks run `train_worker` or `train_on_rank`.
"""

import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moefold.checkpoint.checkpoint_meta import META_FILE, read_meta
from moefold.checkpoint.manifest import read_manifest, validate_hashes
from moefold.checkpoint.resume import check_compatible, data_order_change, find_resume, sample_order
from moefold.checkpoint.run_tokenizer import check_run_tokenizer
from moefold.config.checkpoint import CheckpointConfig
from moefold.config.data import DataConfig
from moefold.config.load import config_from_dict
from moefold.config.lora import LoraConfig
from moefold.config.metrics import MetricsConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import TRACE_FOLDER, MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.rl import RLConfig
from moefold.config.run import RunConfig
from moefold.config.schema import Config, config_to_dict
from moefold.config.sites import SitesConfig
from moefold.config.train import TrainConfig
from moefold.cost.kv_cache import cache_sizes
from moefold.data.dataset import NEEDS_PROGRAM, prepare
from moefold.data.fingerprint import fingerprint
from moefold.data.routing_trace import RoutingTrace, trace_shape
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError, reworded_errors
from moefold.host.listen import is_loopback
from moefold.host.rank_env import RankEnv, check_world_size, is_torchrun
from moefold.launch.fitting import check_training, choose_checked_device
from moefold.recipe import LoadedRecipe, fitting_after_loss, with_world_size
from moefold.remote_path import RemoteError, RemotePath, check_protocol, check_remote_writable, is_remote, to_path
from moefold.terminal import print_escaped
from moefold.topology.rollout_mapping import has_rollout_mapping, rollout_config
from moefold.train.resolved_keys import describe_learning_rate, keep_resolved, settings_of_checkpoint
from moefold.train.run_folder import RunFolder, choose_run_folder
from moefold.validate.config import check_config
from moefold.validate.cuda_graphs import check_cuda_graphs_device
from moefold.validate.exactness import replays_routing
from moefold.validate.memory import check_memory_device, check_offload_device, ssd_offload_keys
from moefold.validate.moe import check_dispatch_device, check_dispatch_package
from moefold.validate.parallel import check_schedule_file
from moefold.validate.rollout_experts import check_fetching_ranks
from moefold.validate.train import check_kernel_device
from moefold.validate.unused import check_unused_keys

if TYPE_CHECKING:
    from moefold.data.dataset import ProgramData


def check_writable(run: RunConfig, checkpoint: CheckpointConfig) -> None:
    """Check that the folders the run writes to exist or can be created, and that files can be created in them.

    Raises:
        ConfigError: a folder is a file, or cannot be written to.
    """
    probe_folder("run.dir", run.dir)
    if checkpoint.dir and checkpoint.saves:
        probe_folder("checkpoint.dir", checkpoint.dir)


def check_packages(model: ModelConfig, parallel: ParallelConfig, metrics: MetricsConfig) -> None:
    """Check that the packages of the chosen trackers and dispatcher are installed.

    Raises:
        ConfigError: a package is missing.
    """
    if metrics.tensorboard or metrics.wandb:
        from moefold.metrics.tracker import check_trackers

        check_trackers(metrics)
    check_dispatch_package(model, parallel)


def check_data_source(model: ModelConfig, train: TrainConfig, data: DataConfig) -> None:
    """Check that the data can be read, holds enough tokens and fits the vocabulary.

    Raises:
        ConfigError: a file is missing or empty, or the vocabulary is smaller than the tokenizer's.
    """
    check_data(data, seq_len=train.seq_len, vocab_size=model.vocab_size)


def check_resume(checkpoint: CheckpointConfig) -> None:
    """Check that the checkpoint named in the recipe exists, and is a single checkpoint.

    Raises:
        ConfigError: the path does not exist, is a file, or is a folder of several checkpoints.
    """
    if checkpoint.resume in ("auto", "never"):
        return
    path = to_path(checkpoint.resume)
    name = f"checkpoint.resume={checkpoint.resume!r}"
    if path.is_dir():
        if inner := _list_checkpoints(path):
            raise ConfigError(f"{name} is a folder of checkpoints; name one, such as {str(inner[-1])!r}")
        return
    if path.exists():
        raise ConfigError(f"{name} is a file; a checkpoint is a folder, such as RUN_DIR/checkpoints/step-000100")
    siblings = [str(sibling) for sibling in _list_checkpoints(path.parent)[-5:]]
    hint = f"the checkpoints there are {', '.join(siblings)}" if siblings else "set 'auto' for the newest one, if any"
    raise ConfigError(f"{name} does not exist; {hint}")


def check_initial_weights(model: ModelConfig, lora: LoraConfig, checkpoint: CheckpointConfig, rl: RLConfig) -> None:
    """Check that the initial weights exist and fit the recipe's model, or can be upcycled to it.

    Raises:
        ConfigError: the weights cannot be used.
    """
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

            with reworded_errors((r"^'", f"{key}: '")):
                folder = weights_path(path)
            if reason := init_from_unsupported_reason(
                model, folder, checkpoint.ignore_keys, is_dense=key == "checkpoint.upcycle.dense"
            ):
                raise ConfigError(f"{key}={path!r}: {reason}")


def check_replay(run: RunConfig, model: ModelConfig, moe: MoEConfig, train: TrainConfig) -> None:
    """Check that the trace to replay exists, fits model, batch and steps, and is not the trace to be written.

    Raises:
        ConfigError: the trace cannot be replayed.
    """
    if not moe.replay:
        return
    trace = RoutingTrace(Path(moe.replay), "moe.replay")
    if trace.folder.resolve() == (Path(run.dir) / TRACE_FOLDER).resolve():
        raise ConfigError(
            f"moe.replay={moe.replay!r} is the trace of this very run, which a new start removes; "
            "choose another run.dir"
        )
    trace.check_replay(trace_shape(model, train), run.steps)


def check_replay_content(run: RunConfig, moe: MoEConfig) -> None:
    """Check every expert choice of the trace to replay; reads the whole trace, so call it on one process per host.

    The trace must have passed `check_replay`.

    Raises:
        ConfigError: an expert id is out of range, or a token has an expert twice.
    """
    if not moe.replay:
        return

    RoutingTrace(Path(moe.replay), "moe.replay").check_content(run.steps)


def _list_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def probe_folder(key: str, path: str) -> None:
    """Try to create a temporary file in a folder, or in its closest existing parent; leaves nothing there.

    Raises:
        ConfigError: the file cannot be created.
    """
    name = f"{key}={path!r}"
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
            raise ConfigError(f"{name} {relation} a file; choose a folder")
        with tempfile.TemporaryFile(dir=existing):
            return
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error.strerror} in {str(existing)!r}; choose another") from None


def check_meeting_point(sites: SitesConfig) -> None:
    """Check the address of the meeting point of the sites, and that there is a secret unless it is this machine.

    Raises:
        ConfigError: the address has another form, or the secret is missing or too short.
    """
    if not sites.meet:
        return
    from moefold.launch.meet_client import parse_address
    from moefold.launch.signed_lines import SECRET_VARIABLE, read_secret

    host, _ = parse_address(sites.meet, "sites.meet")
    if not read_secret(sites.secret, "sites.secret") and not is_loopback(host):
        raise ConfigError(
            f"sites.meet={sites.meet!r} is another machine, and there is no shared secret; name its file with "
            f"sites.secret, or set {SECRET_VARIABLE}"
        )


def check_machine(cfg: Config) -> None:
    """Check folders, data, checkpoints and packages on the machine that will run the config; creates nothing.

    The config must have passed `check_config`.

    Raises:
        ConfigError: the first fault found.
    """
    check_writable(cfg.run, cfg.checkpoint)
    check_schedule_file(cfg.model, cfg.moe, cfg.parallel, cfg.train)
    check_resume(cfg.checkpoint)
    check_initial_weights(cfg.model, cfg.lora, cfg.checkpoint, cfg.rl)
    check_packages(cfg.model, cfg.parallel, cfg.metrics)
    check_replay(cfg.run, cfg.model, cfg.moe, cfg.train)
    check_data_source(cfg.model, cfg.train, cfg.data)
    check_meeting_point(cfg.sites)
    check_offload_folder(cfg.train)


def check_offload_folder(train: TrainConfig) -> None:
    """Check that files can be created in the offload folder, whose parent must exist.

    Run folders may be created anywhere, but a mistyped offload folder would fill another disk.

    Raises:
        ConfigError: files cannot be created.
    """
    if not ssd_offload_keys(train):
        return
    probe_folder("train.offload_dir", train.offload_dir)
    above = Path(train.offload_dir).absolute().parent
    if not above.exists():
        raise ConfigError(
            f"train.offload_dir={train.offload_dir!r} lies in {str(above)!r}, which does not exist; name a folder "
            f"of a local disk, or make {str(above)!r} if it is meant"
        )


class RunSetup(NamedTuple):
    """A checked recipe with its run folder."""

    cfg: Config
    """Recipe with run.dir as the user wrote it: the ranks make the final choice of the folder."""
    messages: tuple[str, ...]
    """Startup messages for the run log."""
    folder: RunFolder
    """Provisional choice of the run folder."""
    resume: Path | None
    """Checkpoint to resume from."""
    store: object
    """Rendezvous store of the ranks that planned together. It must outlive their next rendezvous."""

    @property
    def is_finished(self) -> bool:
        """Return whether an intact checkpoint has all steps. The ranks report a damaged one and resume earlier."""
        cfg = self.folder.cfg
        if self.resume is None or read_meta(self.resume).step < cfg.run.steps:
            return False
        manifest = read_manifest(self.resume)
        return not cfg.checkpoint.verify or not validate_hashes(self.resume, manifest, manifest)


def set_up_run(recipe: LoadedRecipe, rank_env: RankEnv | None, program_data: "ProgramData | None" = None) -> RunSetup:
    """Plan the mapping if the recipe leaves it open, check the recipe, and choose the run folder.

    Args:
        recipe: the recipe.
        rank_env: environment of this process, if a launcher started it.
        program_data: the samples that a program passes, for data.kind="program".

    Raises:
        ConfigError: the recipe cannot be trained here.
    """
    cfg = recipe.cfg
    if cfg.sites.starts_all:
        raise ConfigError(
            f"sites.count={cfg.sites.count} without a number starts all sites, which only `moefold train` does; set "
            "sites.number and sites.meet, one job for each site"
        )
    store = None
    if cfg.parallel.mapping == "auto":
        if cfg.rollout.ranks:
            raise ConfigError(
                f"parallel.mapping='auto' gives every rank to training, and rollout.ranks={cfg.rollout.ranks} only "
                "sample; set the degrees of parallel, or rollout.ranks=0"
            )
        cfg, store = _plan_mapping(cfg, recipe.explicit_keys, rank_env)
    if rank_env is not None and cfg.parallel.elastic:
        cfg = with_world_size(cfg, rank_env.world_size)
    check_config(cfg)
    _check_program_data(cfg.train, cfg.data, program_data)
    if rank_env is not None:
        check_world_size(rank_env, cfg.parallel.world_size, cfg.rollout.ranks)
    if cfg.faults.regroups:
        _check_regroup(cfg, rank_env)
    messages = list(recipe.messages)
    if cfg.run.epochs:
        from moefold.train.epochs import resolve_epochs

        is_first = rank_env is None or rank_env.local_rank == 0
        cfg, message = resolve_epochs(cfg, program_data, is_first=is_first)
        check_config(cfg)
        check_unused_keys(recipe.explicit_keys, cfg)
        messages.append(message)
    check_protocol(cfg.checkpoint.dir, "checkpoint.dir")
    check_protocol(cfg.checkpoint.resume, "checkpoint.resume")
    # Provisional: the ranks make the final choice under the lock of the folder.
    cfg = _keep_resolved_of_checkpoint(cfg, recipe.left_out)
    folder = choose_run_folder(cfg, left_out=recipe.left_out)
    check_machine(folder.cfg)
    # The ranks choose among the folders with the values that the run keeps.
    cfg = replace(folder.cfg, run=replace(folder.cfg.run, dir=cfg.run.dir))
    messages += filter(None, [describe_learning_rate(cfg, recipe.left_out)])
    return RunSetup(cfg, tuple(messages), folder, find_resume(folder.cfg), store)


def _keep_resolved_of_checkpoint(cfg: Config, left_out: frozenset[str]) -> Config:
    """Return a recipe with the values of left-out keys that the run of a named checkpoint has resolved."""
    if cfg.checkpoint.resume in ("auto", "never"):
        return cfg
    path = to_path(cfg.checkpoint.resume)
    if not (path / META_FILE).is_file():
        # `check_resume` reports it.
        return cfg
    return keep_resolved(cfg, settings_of_checkpoint(read_meta(path), cfg.train, cfg.data, cfg.align, cfg.rl), left_out)


def _check_regroup(cfg: Config, rank_env: RankEnv | None) -> None:
    """Check that fewer ranks fit the recipe, and that the launcher leaves the survivors of a lost rank alive.

    Raises:
        ConfigError: fewer ranks do not fit, or the launcher would end the survivors.
    """
    if rank_env is not None and (rank_env.is_embedded or is_torchrun()):
        launcher = "the processes of a program" if rank_env.is_embedded else "torchrun"
        end = "end with one of them" if rank_env.is_embedded else "kills all ranks of a node when one is lost"
        raise ConfigError(
            f"faults.on_loss='regroup': {launcher} {end}; start the job with `moefold train` on one machine or with "
            "srun --kill-on-bad-exit=0, or set faults.on_loss='stop' and parallel.elastic=true"
        )
    if not fitting_after_loss(cfg):
        p = cfg.parallel
        raise ConfigError(
            f"faults.on_loss='regroup': no number of ranks from faults.min_ranks={cfg.faults.min_ranks} to "
            f"{p.world_size - 1} fits the recipe with tp={p.tp}, cp={p.cp}, pp={p.pp}, ep={p.ep}, etp={p.etp} and "
            f"train.global_batch_size={cfg.train.global_batch_size}; change one of them, or set faults.on_loss='stop'"
        )


def _check_program_data(train: TrainConfig, data: DataConfig, program_data: "ProgramData | None") -> None:
    """Check that a program passes samples if and only if the recipe asks for them, and that they fit the recipe."""
    if program_data is not None and data.kind != "program":
        raise ConfigError(f'data.kind={data.kind!r} must be "program" where a program passes the data')
    if program_data is None and data.kind == "program":
        raise ConfigError(NEEDS_PROGRAM)
    if program_data is not None:
        program_data.check(train.seq_len)
        if train.eval_every and not len(program_data.validation):
            raise ConfigError(
                f"train.eval_every={train.eval_every} needs validation samples; set it to 0, or pass "
                "ProgramData(train, validation)"
            )


def choose_training_device(setup: RunSetup, rank_env: RankEnv | None) -> str:
    """Return the device type, after a check of its features and its memory.

    Raises:
        ConfigError: the device cannot run the recipe.
    """
    cfg = setup.folder.cfg
    check = partial(_check_device, cfg, rank_env)
    return choose_checked_device(cfg.run.device, cfg.num_job_ranks, rank_env, check)


def prepare_data(setup: RunSetup, rank_env: RankEnv | None) -> None:
    """Prepare the data and check the checkpoint to resume from, on one rank of each machine.

    Raises:
        ConfigError: the data cannot be read, or the checkpoint does not fit the recipe.
    """
    cfg = setup.folder.cfg
    if rank_env is not None and rank_env.local_rank != 0:
        return
    check_replay_content(cfg.run, cfg.moe)
    if cfg.is_rl:
        from moefold.rl.preflight import check_rollout_data

        longest = check_rollout_data(cfg)
        if cfg.rollout.uses_server:
            check_vllm(cfg, rank_env, max_tokens=longest)
        check_saved_rollouts(setup)
    elif cfg.data.kind != "program" and not cfg.data.drops_files:
        # The ranks agree on the corrupt token files to skip, and the checkpoint records the choice.
        prepare(
            cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed, align=cfg.align
        )
    check_compatible(setup.resume, cfg, None if setup.resume is None else fingerprint(cfg.data))
    if setup.resume is not None:
        check_run_tokenizer(cfg.data, setup.resume)


def check_saved_rollouts(setup: RunSetup) -> None:
    """Check that the untrained rollouts of the checkpoint to resume from fit the batches of the recipe.

    Raises:
        ConfigError: the rollouts have other groups or batches.
    """
    if setup.resume is None:
        return
    from moefold.rl.rollout_table import check_headers, table_headers

    cfg = setup.folder.cfg
    meta = read_meta(setup.resume)
    if not data_order_change(meta, sample_order(cfg), fingerprint(cfg.data)):
        check_headers(table_headers(meta.state_of("data").get("rl")), cfg.train, cfg.rl)


def check_vllm(cfg: Config, rank_env: RankEnv | None, *, max_tokens: int) -> None:
    """Check that rollout.folder holds the model of the recipe, and that a vLLM server runs with it.

    Args:
        cfg: the recipe.
        rank_env: the rank; None before the ranks start.
        max_tokens: tokens of the longest prompt with rollout.max_tokens.

    Raises:
        ConfigError: the folder holds another model, or the server cannot be reached or was started with other options.
    """
    from moefold.convert.preflight import init_from_unsupported_reason
    from moefold.inference.vllm_server import VllmError, vllm_server

    rollout = cfg.rollout
    # The ranks of other machines need the server, and not the folder.
    is_first = rank_env is None or rank_env.rank == 0
    ignored_keys = cfg.checkpoint.ignore_keys
    if is_first and (reason := init_from_unsupported_reason(cfg.model, Path(rollout.folder), ignored_keys)):
        raise ConfigError(f"rollout.folder={rollout.folder!r} cannot be used: {reason}")
    replays, _ = replays_routing(cfg.model, cfg.moe, cfg.rl, is_exact=False)
    try:
        vllm_server(cfg.run, cfg.train, cfg.rollout, returns_experts=replays).check(max_tokens=max_tokens)
    except VllmError as error:
        raise ConfigError(str(error)) from None


def check_rollout_cache(cfg: Config, device_type: str) -> None:
    """Check that the cache of the rollout engine holds a sample of train.seq_len, under each mapping that samples.

    With rl.staleness, held-out prompts are sampled under the mapping of training.

    Raises:
        ConfigError: a sample does not fit into the cache.
    """
    from moefold.inference.engine.capacity import cache_pages, check_requests
    from moefold.inference.engine.requests import EngineSettings, Request

    rollout = cfg.rollout
    settings = EngineSettings.of_recipe(cfg.rollout)
    longest = Request(prompt=(0,) * max(1, cfg.train.seq_len + 1 - rollout.max_tokens), max_tokens=rollout.max_tokens)
    words = ("a larger cache_gib", "a larger rollout.cache_gib"), ("fewer slots", "fewer rollout.slots")
    with reworded_errors((r"\bcache_gib=", "rollout.cache_gib="), (r"\bslots=", "rollout.slots="), *words):
        mappings = [rollout_config(cfg) if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout) else cfg]
        if cfg.rl.staleness and cfg.train.eval_every:
            mappings.append(cfg)
        for mapping in mappings:
            sizes = cache_sizes(mapping, device_type)
            num_pages = cache_pages(sizes, settings)
            assert num_pages is not None
            check_requests([longest], num_pages, sizes.page_positions)


def _plan_mapping(cfg: Config, keys: frozenset[str], rank_env: RankEnv | None) -> tuple[Config, object]:
    """Plan the parallel mapping; return the new config and the rendezvous store, which must outlive the rendezvous.

    With several ranks, rank 0 plans for the slowest machine and broadcasts its answer.
    """
    # Detecting the devices imports torch.
    from moefold.cost.hardware import DetectedMachine
    from moefold.launch.detect_hardware import detect_machine, slowest_machine
    from moefold.planner.auto_parallel import plan_mapping

    machine = detect_machine(cfg.run.device, rank_env)
    if rank_env is None or rank_env.world_size == 1:
        planned, report = plan_mapping(cfg, keys, machine)
        print_escaped(report)
        return planned, None
    from moefold.launch.rank0 import JsonDict, compute_on_rank0

    def answer(machines: list[JsonDict]) -> JsonDict:
        planned, report = plan_mapping(cfg, keys, slowest_machine([DetectedMachine(**facts) for facts in machines]))
        tree = config_to_dict(planned)
        return {"parallel": tree["parallel"], "train": tree["train"], "words": report}

    decision, store = compute_on_rank0(rank_env, cfg.faults.timeout_s, asdict(machine), answer)
    if rank_env.rank == 0:
        print_escaped(decision["words"])
    sections = {section: decision[section] for section in ("parallel", "train")}
    return config_from_dict({**config_to_dict(cfg), **sections}), store


def _check_device(cfg: Config, rank_env: RankEnv | None, device_type: str) -> None:
    """Reject settings that the device does not support, and a step that does not fit into its memory."""
    check_dispatch_device(cfg.model, cfg.parallel, device_type)
    check_kernel_device(cfg.run, device_type)
    check_cuda_graphs_device(cfg.run, device_type)
    check_offload_device(cfg.train, device_type)
    check_memory_device(cfg, device_type)
    if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout):
        num_training = cfg.parallel.world_size
        ranks_per_machine = num_training + cfg.rollout.ranks if rank_env is None else rank_env.local_world_size
        first_rank = num_training if cfg.rollout.ranks else 0
        recipe = rollout_config(cfg)
        check_fetching_ranks(recipe.parallel, recipe.rollout, device_type, ranks_per_machine, first_rank)
    if cfg.is_rl and not cfg.rollout.uses_server:
        check_rollout_cache(cfg, device_type)
    check_training(cfg, device_type, rank_env)
