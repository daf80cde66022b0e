import pytest

from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv, check_world_size, read_rank_env

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_JOB_ID": "4100003",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def test_a_process_of_its_own_has_no_place():
    assert read_rank_env({"HOME": "/root"}) is None


def test_torchrun():
    assert read_rank_env(TORCHRUN) == RankEnv(5, 1, 8, "10.0.0.1", 29500, local_world_size=4)


def test_slurm_meets_on_the_first_node_at_a_port_of_the_job():
    assert read_rank_env(SLURM) == RankEnv(9, 1, 16, "gpu003", 20000 + 4100003 % 20000, local_world_size=8)


def test_slurm_yields_to_an_address_that_the_user_gave():
    place = read_rank_env({**SLURM, "MASTER_ADDR": "10.9.8.7", "MASTER_PORT": "1234"})
    assert (place.master_address, place.master_port) == ("10.9.8.7", 1234)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("gpu[003-010,12],cpu1", "gpu003"),
        ("n[9,11-12]-ib,n20-ib", "n9-ib"),
        ("rack[1-2]node[04-05]", "rack1node04"),
    ],
)
def test_first_node_of_a_list(nodes, first):
    assert read_rank_env({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_address == first


def test_a_step_that_names_no_nodes_is_on_those_of_its_job_or_here():
    job = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_NODELIST"}
    assert read_rank_env({**job, "SLURM_JOB_NODELIST": "b1,b2"}).master_address == "b1"
    assert read_rank_env(job).master_address == "127.0.0.1"


def test_a_batch_script_is_no_rank():
    # sbatch sets SLURM_PROCID in the script itself, which is no step.
    assert read_rank_env({key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}) is None


def test_torchrun_inside_slurm_counts():
    assert read_rank_env({**SLURM, **TORCHRUN}).rank == 5


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_is_refused(missing):
    environment = {key: value for key, value in TORCHRUN.items() if key != missing}
    with pytest.raises(ConfigError, match=f"the environment has RANK but not {missing}; .* or unset RANK"):
        read_rank_env(environment)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "RANK=8 in the environment must be below WORLD_SIZE=8"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x' in the environment must be a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment must be a number"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 in the environment is not a valid port"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 in the environment is not a valid port"),
    ],
    ids=str,
)
def test_an_environment_without_sense_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read_rank_env({**TORCHRUN, **change})


def test_the_world_must_be_that_of_the_recipe():
    place = read_rank_env(TORCHRUN)
    check_world_size(place, 8)
    with pytest.raises(ConfigError, match="parallel.world_size=4 must equal the 8 processes"):
        check_world_size(place, 4)


@pytest.mark.parametrize("told", ["", "0", "many"])
def test_local_ranks_default_to_all(told):
    assert read_rank_env({**TORCHRUN, "LOCAL_WORLD_SIZE": told}).local_world_size == 8
