"""Training inside the processes of a program, which go on after the run."""

from functools import partial

from moefold.comm.torch_compat import set_aside_process_groups
from moefold.errors import ConfigError
from moefold.launch.embedding import program_ranks, restored_process_state
from moefold.recipe import LoadedRecipe
from moefold.train.start import choose_training_device, prepare_data, set_up_run
from moefold.train.worker import ProgramParts, TrainOutcome, finished_outcome, train_on_rank


def train_in_program(recipe: LoadedRecipe, program: ProgramParts) -> TrainOutcome:
    """Train with the processes of the program as ranks; collective over its default process group.

    Args:
        recipe: the recipe.
        program: the parts that the program passes.

    Raises:
        ConfigError: the recipe cannot be trained here; on all ranks.
        RunError: the run failed; a rank whose peer failed names the loss of the connection.
    """
    if recipe.cfg.rollout.ranks:
        raise ConfigError(
            f"rollout.ranks={recipe.cfg.rollout.ranks} only sample, and each process of this program trains; set "
            "rollout.ranks=0, or start the job with `moefold train`"
        )
    with restored_process_state(), program_ranks(recipe.cfg.faults.timeout_s) as ranks:
        rank_env = ranks.rank_env
        setup = ranks.agree(partial(set_up_run, recipe, rank_env, program.data))
        if finished := ranks.first(finished_outcome(setup)):
            return finished
        device_type = ranks.agree(partial(choose_training_device, setup, rank_env))
        ranks.check_devices(device_type)
        ranks.agree(partial(prepare_data, setup, rank_env))
        with set_aside_process_groups():
            return train_on_rank(setup.cfg, setup.messages, program, rank_env, device_type)
