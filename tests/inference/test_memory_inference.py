"""Test that inference takes the memory that is announced, and refuses what does not fit before it reserves it."""

import numpy as np
import pytest
import torch

from moefold.cli.main import main
from moefold.cost.kv_cache import cache_sizes
from moefold.errors import ConfigError
from moefold.inference.engine.requests import EngineSettings, Request
from moefold.inference.jobs import cache_of_requests
from moefold.inference.settings import batch_bytes, explain_oom
from tests.inference.checkpoint_folder import described_run
from tests.inference.example import KINDS, recipe_of_kind, write_checkpoint
from tests.inference.kept_bytes import kept_bytes
from tests.verify.covering import few_else_slow
from tests.verify.recipes import tiny


@pytest.mark.parity
@pytest.mark.parametrize("kind", few_else_slow(KINDS, ["deepseek-v3", "windows"]))
def test_the_cache_and_the_weights_are_as_large_as_computed(pool, tmp_path, kind):
    pool.run(1, write_checkpoint, recipe_of_kind(kind, tmp_path))
    for num_ranks, mapping in ((1, {"dtype": "float32"}), (2, {"tp": 2, "ep": 2}), (2, {"pp": 2})):
        for cache in ("latents", "heads")[: 1 + (kind == "deepseek-v3")]:
            for rank, (there, computed) in enumerate(pool.run(num_ranks, kept_bytes, tmp_path, mapping, cache)):
                # For a pipeline the computed cache is the cache of the rank that has most layers.
                assert there[0] == computed[0] or (there[0] < computed[0] and "pp" in mapping)
                # The last tp rank has a row less of a vocabulary that tp does not divide.
                is_short = kind == "windows" and "tp" in mapping and rank == 1
                assert there[1] < computed[1] if is_short else there[1] == computed[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"generate {{run}} x y --max-tokens {10**13}",
            f"the rank needs at least 9,536,743 GiB (the cache of 2 prompts and --max-tokens {10**13} 9,536,743 GiB, ",
        ),
        (
            f"eval {{run}} --text {{run}}/text --seq-len 8 --batch-size {10**13} moe.eval_capacity_factor=1",
            f"(a batch of {10**13} sequences of 8 tokens ",
        ),
    ],
)
def test_a_cache_that_no_memory_holds_is_refused_before_it_is_reserved(tmp_path, capsys, words, message):
    described_run(tmp_path)
    (tmp_path / "text").write_text("the text of a file")
    assert main(words.format(run=tmp_path).split() + ["--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_the_states_of_linear_attention_grow_with_the_prompts(tmp_path, capsys):
    """`generate` has no option for the number of slots: its message must not name one."""
    described_run(tmp_path, model={"preset": "tiny", "layers.attention": "linear, full"})
    sizes = []
    for prompts in (["x"], ["x", "y", "z"]):
        assert main(["generate", str(tmp_path), *prompts, "--cache-gib", "1e-9", "--device", "cpu"]) == 2
        err = capsys.readouterr().err
        assert "states of linear attention, " in err
        assert "slots" not in err
        assert err.endswith("set at least that, or fewer prompts\n")
        sizes.append(float(err.split("linear attention, ")[1].split()[0]))
    assert sizes[0] < sizes[1]


def test_a_batch_larger_than_the_file_is_as_large_as_the_file(mixtral, capsys, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(64) % 60)
    said = []
    for batch_size in (8, 10**12):
        words = ["eval", str(mixtral), "--tokens", str(tmp_path / "ids.npy"), "--seq-len", "8", "--device", "cpu"]
        assert main([*words, "--json", "--batch-size", str(batch_size)]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_memory_that_ends_on_the_way_is_one_message():
    words = r"not enough memory \(.*can't allocate memory.*\); take less"
    with pytest.raises(ConfigError, match=words), explain_oom("take less"):
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="^another$"), explain_oom("take less"):
        raise RuntimeError("another")


def test_the_logits_of_a_batch_are_counted(tmp_path):
    from moefold.inference.settings import InferenceRequest, inference_config
    from moefold.inference.source import find_source

    described_run(tmp_path)
    wish = InferenceRequest(overrides=("parallel.tp=2", "parallel.cp=2"), seq_len=16, batch_size=3)
    cfg = inference_config(find_source(str(tmp_path)), wish, "evaluate")
    # 48 ids, labels and marks; 24 rows of 128 float32 logits.
    assert batch_bytes(cfg.run, cfg.model, cfg.parallel, cfg.train) == 48 * 17 + 24 * 128 * 4


@pytest.mark.parametrize(("device_type", "pages", "positions"), [("cpu", 3, 64), ("cuda", 2, 256)])
def test_a_cache_is_counted_in_the_pages_of_its_device(device_type, pages, positions):
    """Samples of 65 and of 3 positions; and requests that a limit in bytes holds, and does not."""
    cfg = tiny(train={"global_batch_size": 1})
    requests = [Request(prompt=(1,) * 64, max_tokens=2), Request(prompt=(1, 2), max_tokens=2)]
    sizes = cache_sizes(cfg, device_type)
    assert sizes.page_positions == positions
    needed = cache_of_requests(cfg, device_type, [requests], EngineSettings(slots=2))
    assert needed == sizes.kv_bytes(pages * positions)
    page_gib = sizes.kv_bytes(positions) / 2**30
    limited = EngineSettings(slots=2, cache_gib=1.5 * page_gib)
    if device_type == "cuda":
        assert cache_of_requests(cfg, device_type, [requests], limited) == sizes.kv_bytes(positions)
    else:
        with pytest.raises(ConfigError, match="the cache of 64 tokens holds no sample of 65"):
            cache_of_requests(cfg, device_type, [requests], limited)
    with pytest.raises(ConfigError, match=f"smaller than one page of {positions} tokens"):
        cache_of_requests(cfg, device_type, [requests], EngineSettings(slots=2, cache_gib=0.5 * page_gib))
