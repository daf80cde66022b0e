"""The place of a rank is read from the environment of each launcher, or refused."""

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


def test_the_environment_of_torchrun_is_read():
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


def test_a_step_that_names_no_nodes_is_on_the_nodes_of_its_job_or_here():
    job = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_NODELIST"}
    assert read_rank_env({**job, "SLURM_JOB_NODELIST": "b1,b2"}).master_address == "b1"
    assert read_rank_env(job).master_address == "127.0.0.1"


def test_a_batch_script_is_not_a_rank():
    # sbatch sets SLURM_PROCID in the script itself, which is not a step.
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
)
def test_an_environment_without_sense_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read_rank_env({**TORCHRUN, **change})


def test_the_world_must_match_the_recipe():
    place = read_rank_env(TORCHRUN)
    check_world_size(place, 8)
    with pytest.raises(ConfigError, match="parallel.world_size=4 must equal the 8 processes"):
        check_world_size(place, 4)


@pytest.mark.parametrize("told", ["", "0", "many"])
def test_local_ranks_default_to_all(told):
    assert read_rank_env({**TORCHRUN, "LOCAL_WORLD_SIZE": told}).local_world_size == 8


# The variables of launchers that name ranks, nodes and jobs, as their documentation describes them: not recorded.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "prterun-node1-4711@1",
}
FLUX = {
    "FLUX_TASK_RANK": "5",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_SIZE": "8",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2Xn9Gm1",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
}
HYDRA = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "MASTER_PORT": "29500",
}
PALS = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "PALS_APID": "0f1c-77",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    "SKYPILOT_TASK_ID": "sky-2026-01-01-00-00-00-000000_train_1",
}
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
}
PYTORCHJOB = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
}
SURROUNDING = {**SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
"""SLURM's variables of the daemon that mpiexec or Flux starts on each node, which its ranks inherit."""


@pytest.mark.parametrize("outer", [{}, SURROUNDING], ids=["alone", "in a SLURM step"])
@pytest.mark.parametrize("recorded", [OPEN_MPI, FLUX, HYDRA, PALS], ids=["open-mpi", "flux", "hydra", "pals"])
def test_ranks_of_a_process_manager(recorded, outer):
    place = read_rank_env({**outer, **recorded, "MASTER_ADDR": "node1"})
    assert (place.rank, place.local_rank, place.world_size, place.local_world_size) == (5, 1, 8, 4)
    assert place.master_address == "node1"
    other = read_rank_env({**outer, **recorded, "MASTER_ADDR": "node1", "PMI_RANK": "6"})
    assert 20000 <= place.master_port < 40000
    assert other.master_port == place.master_port


@pytest.mark.parametrize(
    ("recorded", "change"),
    [
        (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}),
        (FLUX, {"FLUX_JOB_NNODES": "1"}),
        (PALS, {"PMI_LOCAL_SIZE": "8"}),
    ],
)
def test_the_address_of_rank_0_is_known_on_only_one_machine(recorded, change):
    assert read_rank_env({**recorded, **change}).master_address == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"_RANK but not MASTER_ADDR.*mpirun -x MASTER_ADDR=HOST"):
        read_rank_env(recorded)


def test_srun_with_pmi2_stays_slurm():
    assert read_rank_env({**SLURM, "PMI_RANK": "9", "PMI_SIZE": "16"}) == read_rank_env(SLURM)


@pytest.mark.parametrize("inside", [OPEN_MPI, FLUX, PALS, SKYPILOT, PYTORCHJOB, TRAINJOB])
def test_torchrun_inside_another_launcher_counts(inside):
    assert read_rank_env({**inside, **TORCHRUN}) == read_rank_env(TORCHRUN)


def test_a_skypilot_node_of_one_gpu_is_a_rank():
    place = read_rank_env(SKYPILOT)
    assert (place.rank, place.local_rank, place.world_size, place.local_world_size) == (1, 0, 2, 1)
    assert (place.master_address, read_rank_env({**SKYPILOT, "SKYPILOT_NODE_RANK": "0"}).master_port) == (
        "10.0.0.1",
        place.master_port,
    )


def test_a_single_node_starts_its_ranks_itself():
    assert read_rank_env({**SKYPILOT, "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}) is None
    assert read_rank_env({**TRAINJOB, "PET_NNODES": "1"}) is None


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        (PYTORCHJOB, r"RANK but not LOCAL_RANK, as in a pod of a PyTorchJob.*: torchrun --no-python moefold train"),
        (TRAINJOB, r"PET_NNODES='2' .*several pods of a TrainJob.*: torchrun --no-python moefold train"),
        ({**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "8"}, r"needs 8 processes on each node.*start torchrun"),
        ({**SKYPILOT, "SKYPILOT_NODE_IPS": ""}, "but not SKYPILOT_NODE_IPS; set MASTER_ADDR"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
            "PMI_RANK but not MASTER_PORT; set it to a free port",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "not MPI_LOCALRANKID"),
    ],
)
def test_an_environment_without_a_rank_of_its_own_is_refused(recorded, message):
    with pytest.raises(ConfigError, match=message):
        read_rank_env(recorded)
