"""The least memory that a step needs, and the message where a machine has less."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.config.schema import Config
from moefold.cost.kv_cache import (
    cache_sizes,
    min_rollout_cache_bytes,
    num_state_slots,
    rollouts_at_once,
)
from moefold.cost.peak_memory import compute_rank_memory
from moefold.cost.rollout_memory import drawn_bytes, min_sampling_memory, sampling_rank_memory
from moefold.cost.saved_tensors import KERNEL_PROFILES
from moefold.errors import ConfigError
from moefold.host.memory import AvailableMemory
from moefold.host.rank_env import RankEnv
from moefold.launch import memory_check
from moefold.launch.accelerator import device_without_torch, has_no_gpu
from moefold.recipe import load_config
from moefold.validate.config import check_config
from moefold.validate.memory_need import (
    MIN_PROCESS_BYTES,
    HostCapacity,
    MemoryShortage,
    check_training_fits,
    find_shortage,
    min_training_memory,
)
from tests.clock import processor_s

RECIPES = Path(__file__).parents[2] / "recipes"
GIB = 2**30
BATCH = ("train.micro_batch_size=1", "train.global_batch_size=4096")
BIG = ("model.preset=mixtral-8x7b", "train.eval_every=0")


def recipe(*words: str, name: str = "single") -> Config:
    cfg = load_config(RECIPES / f"{name}.toml", words)
    check_config(cfg)
    return cfg


def lack(cfg: Config, size_gib: float, device_type: str = "cpu", each: AvailableMemory | None = None) -> str:
    p = cfg.parallel
    ranks = tuple(rank * p.pp // p.world_size for rank in range(p.world_size))
    try:
        check_training_fits(
            cfg, HostCapacity(device_type, ranks, AvailableMemory(round(size_gib * GIB), "free here"), each)
        )
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "words",
    [
        ("parallel.schedule=1f1b",),
        ("parallel.schedule=gpipe",),
        ("parallel.schedule=zbv", "parallel.virtual_stages=2"),
        ("train.global_batch_size=4096",),
        ("parallel.schedule=interleaved", "parallel.virtual_stages=2", "train.global_batch_size=4096"),
        ("train.recompute=['layer']", "train.offload_optimizer=ssd", "train.offload_dir=/tmp"),
    ],
)
def test_the_least_is_at_most_the_value_of_the_formulas(words, device_type):
    cfg = recipe(*words, name="quickstart")
    whole = compute_rank_memory(cfg, kernels=KERNEL_PROFILES[device_type])
    for need, memory in zip(min_training_memory(cfg, device_type), whole, strict=True):
        states = memory.total - memory.activations.total - memory.optimizer_in_transit
        assert states <= need.total() <= memory.total
        assert sum(need[part] for part in ("weights", "gradients", "optimizer", "buffers")) == states


def test_a_step_of_very_many_passes_counts_only_states():
    cfg = recipe("model.layers=1024", "parallel.pp=256", "parallel.world_size=256", "train.global_batch_size=65536")
    cfg = replace(cfg, train=replace(cfg.train, micro_batch_size=1))
    before_s = processor_s()
    needs = min_training_memory(cfg, "cpu")
    assert processor_s() - before_s < 1.0
    assert len(needs) == 256
    assert all("activations" not in need for need in needs)


def test_snapshots_of_peers_are_in_the_memory_of_a_cpu():
    """ZeRO 1 sends two times the state of the rank and of its peer; ZeRO 0 only experts with one owner."""
    words = (
        "parallel.world_size=4",
        "parallel.pp=1",
        "parallel.ep=4",
        "train.global_batch_size=32",
        "parallel.tp=1",
        "parallel.cp=1",
    )
    kept = ("faults.on_loss=regroup", "checkpoint.peer_every=1")
    for zero, copies in ((1, 2.0), (0, 1.69)):
        cfg = recipe(*words, f"parallel.zero={zero}", *kept, name="quickstart")
        (states,) = (rank.states for rank in compute_rank_memory(cfg))
        (parts,) = min_training_memory(cfg, "cpu")
        of_state = parts["peer snapshots"] / (states.weights + states.optimizer)
        assert of_state == pytest.approx(2 * copies, rel=0.01)
        assert "peer snapshots" not in min_training_memory(cfg, "cuda")[0]


def test_the_ranks_of_a_machine_share_its_memory():
    needs = min_training_memory(recipe(name="quickstart"), "cpu")
    together = 4 * needs[0].total() + 4 * needs[1].total() + 8 * MIN_PROCESS_BYTES
    for size, fits in ((together, True), (together - 1, False)):
        found = find_shortage(needs, HostCapacity("cpu", (0, 0, 0, 0, 1, 1, 1, 1), AvailableMemory(size, "free")))
        assert (found is None) == fits
    assert isinstance(found, MemoryShortage)
    assert found.parts.total() == found.needed == together


def test_each_gpu_has_its_own_memory_and_each_process_its_limit():
    needs = min_training_memory(recipe(name="quickstart"), "cuda")
    fullest = max(need.total() for need in needs)
    assert find_shortage(needs, HostCapacity("cuda", (0, 0, 1, 1), AvailableMemory(fullest, ""))) is None
    assert find_shortage(needs, HostCapacity("cuda", (0, 0, 1, 1), AvailableMemory(fullest - 1, ""))) is not None
    plenty = AvailableMemory(2**60, "")
    assert find_shortage(needs, HostCapacity("cpu", (0, 1), plenty, AvailableMemory(fullest, ""))) is None
    short = find_shortage(needs, HostCapacity("cpu", (0, 1), plenty, AvailableMemory(fullest - 1, "left by ulimit")))
    assert short is not None
    assert short.available.description == "left by ulimit"


def test_the_message_has_the_parts_the_ways_out_and_the_least():
    text = lack(recipe(*BIG), 20)
    assert text.startswith("a step of 1 rank on the CPU does not fit into memory: the rank needs at least 733 GiB (")
    assert "optimizer 348 GiB, weights 174 GiB, gradients 174 GiB, activations 37.2 GiB)" in text
    assert "and 20 GiB are free here" in text
    assert 'with train.micro_batch_size=1 train.recompute=["layer"] it still needs 696 GiB' in text
    assert "46,702,792,704 parameters are 696 GiB, however ranks share them" in text
    assert text.endswith("run.check_memory=false starts it anyway")
    assert "at least 9 GPUs of this size" in lack(recipe(*BIG), 80, "cuda")


def test_a_setting_that_would_fit_is_tried_before_it_is_named():
    cfg = recipe("train.micro_batch_size=16", "train.seq_len=4096")
    one = replace(cfg, train=replace(cfg.train, micro_batch_size=1))
    again = replace(one, train=replace(one.train, recompute=("layer",)))
    most, less, least = (min_training_memory(c, "cuda")[0].total() / GIB for c in (cfg, one, again))
    assert not lack(cfg, most, "cuda")
    assert "; it may fit with train.micro_batch_size=1; " in lack(cfg, (most + less) / 2, "cuda")
    assert '; it may fit with train.micro_batch_size=1 train.recompute=["layer"]; ' in lack(cfg, least, "cuda")
    text = lack(cfg, least * 0.99, "cuda")
    assert "lower train.micro_batch_size (now 1) or train.seq_len (now 4096)" in text


DEVICES = ("cpu", "cuda")
RL = ("data.kind=task", "rl.group_size=4", "train.global_batch_size=16", "train.eval_every=0", "rollout.slots=16")


def test_the_cache_of_rollouts_is_counted_up_to_the_need_of_a_round():
    cfg = recipe(*RL, "rollout.max_tokens=64")
    full = cache_sizes(cfg, "cpu").kv_bytes(16 * 64)
    assert min_rollout_cache_bytes(cfg) == full
    assert min_rollout_cache_bytes(replace(cfg, rollout=replace(cfg.rollout, slots=8))) == full // 2
    half = replace(cfg, rollout=replace(cfg.rollout, cache_gib=full / 2 / GIB))
    assert min_rollout_cache_bytes(half) == full // 2


def test_pages_and_states_of_rollouts_share_the_limit_of_the_cache():
    """The states of all slots come first, also of those that shared prompts may take. Pages have the rest."""
    cfg = recipe(*RL, "rollout.max_tokens=64", "model.layers=2 x (linear, full)")
    states = 16 * cache_sizes(cfg, "cpu").state_bytes
    full = cache_sizes(cfg, "cpu").kv_bytes(16 * 64)
    assert min_rollout_cache_bytes(cfg) == full + states
    limit = num_state_slots(16) * cache_sizes(cfg, "cpu").state_bytes + full // 2
    half = replace(cfg, rollout=replace(cfg.rollout, cache_gib=limit / GIB))
    assert min_rollout_cache_bytes(half) == full // 2 + states


def test_draws_of_large_vocabularies_are_counted_where_tokens_are_drawn():
    """256 rows of 151,936 tokens are drawn in parts of 110: 0.4 GB, as they would be with more rows."""
    words = (*RL, "rollout.slots=256", "train.global_batch_size=1024", "model.vocab_size=151936")
    cfg = recipe(*words)
    drawn = 110 * 151936 * 24
    assert [min_sampling_memory(cfg, device)[0]["draws of tokens"] for device in ("cpu", "cuda")] == [drawn] * 2
    mapped = recipe(*words, "parallel.world_size=4", "parallel.pp=2", "parallel.tp=2", "parallel.schedule=gpipe")
    found = {device: [part["draws of tokens"] for part in min_sampling_memory(mapped, device)] for device in DEVICES}
    assert found == {"cpu": [0, drawn // 2], "cuda": [0, drawn]}
    other = recipe(*words, "parallel.world_size=2", "rollout.tp=2")
    assert [part["draws of tokens"] for part in min_sampling_memory(other, "cuda")] == [drawn // 2]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_cache_that_does_not_fit_is_refused_with_a_size_that_does(device_type):
    cfg = recipe(*RL, "rollout.max_tokens=100000", "rollout.cache_gib=50")
    cache = min_rollout_cache_bytes(cfg)
    step = min_training_memory(replace(cfg, rollout=replace(cfg.rollout, cache_gib=0.01)), device_type)[0].total()
    (need,) = min_training_memory(cfg, device_type)
    assert need["rollout cache"] == cache > step
    assert "activations" not in need
    assert not lack(cfg, (need.total() + GIB) / GIB, device_type)
    text = lack(cfg, (step + cache / 2 + GIB) / GIB, device_type)
    found = re.search(r"; it may fit with rollout\.cache_gib=([0-9.]+); ", text)
    assert found is not None
    assert "rollout cache " in text
    frugal = replace(cfg, rollout=replace(cfg.rollout, cache_gib=float(found[1])))
    assert not lack(frugal, (step + cache / 2 + GIB) / GIB, device_type)


@pytest.mark.parametrize(("device_type", "positions"), [("cpu", 5 * 64), ("cuda", 2 * 256)])
def test_a_cache_is_only_named_if_it_holds_a_sample_in_pages_of_the_device(device_type, positions):
    """A sample of 256 tokens, and one page more."""
    cfg = recipe(*RL, "model.layers=64", "train.seq_len=256", "rollout.max_tokens=100000", "rollout.cache_gib=50")
    need = find_shortage(min_training_memory(cfg, device_type), HostCapacity(device_type, (0,), AvailableMemory(0, "")))
    assert need is not None
    other = need.needed - need.parts["rollout cache"]
    # Sizes are named in thousandths of a GiB.
    least = cache_sizes(cfg, device_type).kv_bytes(positions)
    texts = [lack(cfg, (other + size) / GIB, device_type) for size in (least + GIB / 500, least - GIB / 500)]
    assert ["rollout.cache_gib=" in text for text in texts] == [True, False]


def test_the_check_can_be_turned_off():
    assert not lack(recipe(*BIG, "run.check_memory=false"), 20)


def test_the_machine_is_asked_in_little_time():
    cfg = recipe("model.preset=deepseek-v3", "train.eval_every=0", "parallel.pp=16", "parallel.world_size=16", *BATCH)
    before_s = processor_s()
    assert lack(cfg, 20)
    assert processor_s() - before_s < 1.0


@pytest.mark.parametrize(
    "words",
    [
        ["train", str(RECIPES / "single.toml"), *BIG, "run.device=cpu"],
        [
            "train",
            str(RECIPES / "mixtral-8x7b.toml"),
            "run.device=cpu",
            "data.kind=synthetic",
            "data.path=",
            "data.document_end=-1",
        ],
        ["memory", str(RECIPES / "single.toml"), *BIG],
    ],
    ids=["one rank", "64 ranks", "memory"],
)
def test_a_model_that_no_machine_holds_is_refused_before_torch_is_asked(tmp_path, monkeypatch, capsys, words):
    monkeypatch.setattr(memory_check, "available_host_memory", lambda: AvailableMemory(20 * GIB, "free here"))
    before_s = processor_s()
    assert main([*words, f"run.dir={tmp_path / 'run'}"]) == 2
    assert processor_s() - before_s < 2.0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "does not fit into memory" in err
    assert "20 GiB are free here" in err
    assert not (tmp_path / "run").exists()


def test_under_a_launcher_the_first_rank_of_a_machine_counts_its_own_ranks(monkeypatch):
    cfg = recipe(name="quickstart")
    places = [RankEnv(rank, rank % 4, 8, "", 1, local_world_size=4) for rank in (0, 4, 5)]
    hosts = [memory_check.local_host_capacity(cfg.parallel, "cpu", place) for place in places]
    assert [host.pp_ranks for host in hosts] == [(0,) * 4, (1,) * 4, (1,) * 4]
    monkeypatch.setattr(memory_check, "available_host_memory", lambda: AvailableMemory(0, "free"))
    memory_check.check_training(cfg, "cpu", places[2])
    with pytest.raises(ConfigError, match="the 4 ranks of this machine need"):
        memory_check.check_training(cfg, "cpu", places[1])


def test_a_machine_checks_its_ranks_that_only_sample(monkeypatch):
    words = ["data.kind=task", "data.task=sort", "rl.group_size=4", "rl.objective=clip", "rl.staleness=1"]
    words += ["parallel.world_size=4", "rollout.ranks=4", "rollout.pp=2", "train.seq_len=128", "model.preset=tiny"]
    cfg = load_config(None, words)
    check_config(cfg)
    parts = sampling_rank_memory(cfg, "cpu")
    assert [set(part) for part in parts] == [{"rollout weights", "rollout cache", "draws of tokens"}] * 2
    # The last stage draws.
    assert [part["draws of tokens"] for part in parts] == [0, drawn_bytes(rollouts_at_once(cfg), cfg.model.vocab_size)]
    sampling, training = RankEnv(4, 0, 8, "", 1, local_world_size=4), RankEnv(0, 0, 8, "", 1, local_world_size=4)
    need = 2 * sum(part.total() for part in parts) + 4 * MIN_PROCESS_BYTES
    monkeypatch.setattr(memory_check, "available_host_memory", lambda: AvailableMemory(need, "free"))
    # No rank that trains is on the machine of the others, whose model would not fit.
    memory_check.check_training(cfg, "cpu", sampling)
    monkeypatch.setattr(memory_check, "available_host_memory", lambda: AvailableMemory(need - 1, "free"))
    with pytest.raises(ConfigError, match=r"ranks of rollout\.ranks=4 do not fit into memory: the 4 ranks .*cache_gib"):
        memory_check.check_training(cfg, "cpu", sampling)
    with pytest.raises(ConfigError, match="a step of 4 ranks on the CPU does not fit"):
        memory_check.check_training(cfg, "cpu", training)
    both = need + 4 * (min_training_memory(cfg, "cpu")[0].total() + MIN_PROCESS_BYTES)
    monkeypatch.setattr(memory_check, "available_host_memory", lambda: AvailableMemory(both, "free"))
    memory_check.check_training(cfg, "cpu", None)
    monkeypatch.setattr(memory_check, "available_host_memory", lambda: AvailableMemory(both - 1, "free"))
    with pytest.raises(ConfigError, match=r"ranks of rollout\.ranks=4 do not fit into memory: the 8 ranks .*cache_gib"):
        memory_check.check_training(cfg, "cpu", None)


def test_a_machine_without_a_driver_is_known_without_torch(tmp_path):
    (tmp_path / "dev").mkdir()
    assert has_no_gpu(tmp_path)
    assert [device_without_torch(wish, 1, None, tmp_path) for wish in ("cpu", "auto")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match="world_size=2 needs a GPU for each rank, and this machine shows 0"):
        device_without_torch("cuda", 2, None, tmp_path)
    (tmp_path / "dev" / "nvidia0").touch()
    assert [device_without_torch(wish, 1, None, tmp_path) for wish in ("cpu", "auto", "cuda")] == ["cpu", "", ""]
