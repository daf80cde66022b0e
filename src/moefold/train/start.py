"""Start of a training run: the steps up to the moment when its ranks begin.

`moefold train` and the Python API take these steps in the same order: `set_up_run`, `RunSetup.choose_device`,
`RunSetup.prepare_data`, and then the ranks run `train_worker` or `train_on_rank`.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moefold.checkpoint.checkpoint_meta import META_FILE, read_meta
from moefold.checkpoint.manifest import read_manifest, validate_hashes
from moefold.checkpoint.resume import check_compatible, find_resume
from moefold.checkpoint.run_tokenizer import check_run_tokenizer
from moefold.checkpoint.sample_order import data_order_change, sample_order
from moefold.config.load import config_from_dict
from moefold.config.schema import Config, config_to_dict
from moefold.config.sections.data import DataConfig
from moefold.config.sections.train import TrainConfig
from moefold.data.dataset import NEEDS_PROGRAM, DataRequest
from moefold.data.fingerprint import fingerprint
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv, check_world_size, is_torchrun
from moefold.launch.memory_check import check_training, choose_device_type
from moefold.message_text import Problem
from moefold.metrics.reader import has_evaluation
from moefold.recipe import LoadedRecipe
from moefold.remote_path import check_protocol, to_path
from moefold.terminal import print_escaped
from moefold.topology.rollout_mapping import has_rollout_mapping, rollout_config
from moefold.train.machine_checks import (
    check_device,
    check_machine,
    check_replay_content,
    check_rollout_cache,
    check_vllm,
)
from moefold.train.resolved_keys import describe_learning_rate, keep_resolved, settings_of_checkpoint
from moefold.train.run_folder import RunFolder, choose_run_folder
from moefold.validate.config import check_config, with_world_size, world_sizes_after_rank_loss
from moefold.validate.rl import check_fetching_ranks
from moefold.validate.unused import check_unused_keys

if TYPE_CHECKING:
    from moefold.data.dataset import ProgramData


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
        """Return whether an intact checkpoint has all steps, and the run their last evaluation.

        The ranks report a damaged one and resume earlier. An evaluation that was made up later is in metrics.jsonl.
        """
        cfg = self.folder.cfg
        if self.resume is None:
            return False
        meta = read_meta(self.resume)
        if meta.step < cfg.run.steps:
            return False
        if not meta.is_evaluated and not has_evaluation(Path(cfg.run.dir), meta.step):
            return False
        manifest = read_manifest(self.resume)
        return not cfg.checkpoint.verify or not validate_hashes(self.resume, manifest, manifest)

    def choose_device(self, rank_env: RankEnv | None) -> str:
        """Return the device type, after a check of its features and its memory.

        Raises:
            ConfigError: the device cannot run the recipe.
        """
        cfg = self.folder.cfg
        device_type = choose_device_type(cfg.run.device, cfg.num_job_ranks, rank_env)
        _check_device(cfg, rank_env, device_type)
        return device_type

    def prepare_data(self, rank_env: RankEnv | None) -> None:
        """Prepare the data and check the checkpoint to resume from, on one rank of each machine.

        Raises:
            ConfigError: the data cannot be read, or the checkpoint does not fit the recipe.
        """
        cfg = self.folder.cfg
        if rank_env is not None and rank_env.local_rank != 0:
            return
        check_replay_content(cfg.run, cfg.moe)
        if cfg.is_rl:
            from moefold.rl.preflight import check_rollout_data

            longest = check_rollout_data(cfg)
            if cfg.rollout.uses_server:
                check_vllm(cfg, rank_env, max_tokens=longest)
            self._check_saved_rollouts()
        elif cfg.data.kind != "program" and not cfg.data.drops_files:
            # The ranks agree on the corrupt token files to skip, and the checkpoint records the choice.
            DataRequest.of(cfg).prepare()
        check_compatible(self.resume, cfg, None if self.resume is None else fingerprint(cfg.data))
        if self.resume is not None:
            check_run_tokenizer(cfg.data, self.resume)

    def _check_saved_rollouts(self) -> None:
        """Check that the untrained rollouts of the checkpoint to resume from fit the batches of the recipe.

        Raises:
            ConfigError: the rollouts have other groups or batches.
        """
        if self.resume is None:
            return
        from moefold.rl.rollout_table import check_headers, table_headers

        cfg = self.folder.cfg
        meta = read_meta(self.resume)
        if not data_order_change(meta, sample_order(cfg), fingerprint(cfg.data)):
            check_headers(table_headers(meta.state_of("data").get("rl")), cfg.train, cfg.rl)


def set_up_run(recipe: LoadedRecipe, rank_env: RankEnv | None, program_data: "ProgramData | None" = None) -> RunSetup:
    """Plan the mapping if the recipe leaves it open, check the recipe, and choose the run folder.

    Args:
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
            rule = f"gives every rank to training, and rollout.ranks={cfg.rollout.ranks} only sample"
            way_out = "set the degrees of parallel, or rollout.ranks=0"
            raise ConfigError(Problem("parallel.mapping", "auto", rule, way_out))
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
    """Check that fewer ranks fit the recipe, and that the launcher leaves the survivors of a lost rank alive."""
    if rank_env is not None and (rank_env.is_embedded or is_torchrun()):
        launcher = "the processes of a program" if rank_env.is_embedded else "torchrun"
        end = "end with one of them" if rank_env.is_embedded else "kills all ranks of a node when one is lost"
        raise ConfigError(
            f"faults.on_loss='regroup': {launcher} {end}; start the job with `moefold train` on one machine or with "
            "srun --kill-on-bad-exit=0, or set faults.on_loss='stop' and parallel.elastic=true"
        )
    if not world_sizes_after_rank_loss(cfg):
        p = cfg.parallel
        raise ConfigError(
            f"faults.on_loss='regroup': no number of ranks from faults.min_ranks={cfg.faults.min_ranks} to "
            f"{p.world_size - 1} fits the recipe with tp={p.tp}, cp={p.cp}, pp={p.pp}, ep={p.ep}, etp={p.etp} and "
            f"train.global_batch_size={cfg.train.global_batch_size}; change one of them, or set faults.on_loss='stop'"
        )


def _check_program_data(train: TrainConfig, data: DataConfig, program_data: "ProgramData | None") -> None:
    """Check that a program passes samples if and only if the recipe asks for them, and that they fit the recipe."""
    if program_data is not None and data.kind != "program":
        raise ConfigError(Problem("data.kind", data.kind, 'must be "program" where a program passes the data'))
    if program_data is None and data.kind == "program":
        raise ConfigError(NEEDS_PROGRAM)
    if program_data is not None:
        program_data.check(train.seq_len)
        if train.eval_every and not len(program_data.validation):
            raise ConfigError(
                f"train.eval_every={train.eval_every} needs validation samples; set it to 0, or pass "
                "ProgramData(train, validation)"
            )


def _plan_mapping(cfg: Config, keys: frozenset[str], rank_env: RankEnv | None) -> tuple[Config, object]:
    """Plan the parallel mapping, and return the new config and the rendezvous store, which must outlive the rendezvous.

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
    from moefold.launch.rank0_computation import JsonDict, compute_on_rank0

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
    """Refuse settings that the device does not support, and a step that does not fit into its memory."""
    check_device(cfg, device_type)
    if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout):
        num_training = cfg.parallel.world_size
        ranks_per_machine = num_training + cfg.rollout.ranks if rank_env is None else rank_env.local_world_size
        first_rank = num_training if cfg.rollout.ranks else 0
        recipe = rollout_config(cfg)
        check_fetching_ranks(recipe.parallel, recipe.rollout, device_type, ranks_per_machine, first_rank)
    if cfg.is_rl and not cfg.rollout.uses_server:
        check_rollout_cache(cfg, device_type)
    check_training(cfg, device_type, rank_env)
