"""Test the CUDA branches with values on a pretended device: training, generation, and tests that can fail."""

import logging
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from benchmarks.gpu_suites import GPU_TESTS
from moefold.comm.groups import ParallelGroups
from moefold.comm.host_copy import HostCopy, copy_to_device, copy_together_to_device
from moefold.comm.private_torch import cuda_flash_attention_reads_pages
from moefold.cost.kv_cache import CUDA_PAGE_POSITIONS
from moefold.inference.engine.draw import Draw, choose_tokens
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import EngineSettings, Request
from moefold.inference.sampling import SamplingParams
from moefold.launch.ranks import init_distributed, single_rank_env
from moefold.model.attention import AttentionMaskSpec
from moefold.model.layer_cache import CacheSize, CurrentPass, PassRows
from moefold.model.paged_cache import KeyLimits, PagedAttention
from moefold.ops import paged_flash
from moefold.ops.paged_flash import FlashPages, device_refusal
from moefold.ops.triton import experts as triton_experts
from moefold.parallel.inference_model import InferenceModel
from moefold.parallel.paged_decoder import PagedDecoder, decoding_notice, forward_chain
from moefold.parallel.parallelize import parallelize
from moefold.validate.config import check_config
from tests.architecture.rules import ROOT
from tests.gpu import test_moments
from tests.gpu.runs import losses_on
from tests.gpu_static.pretended_cases import BFLOAT16, FAMILIES, FEATURES, LINEAR, TILED
from tests.gpu_static.pretended_cuda import CUDA, is_pretended, pretended_cuda
from tests.gpu_static.pretended_transfers import recorded_transfers
from tests.model.moe import test_experts
from tests.ops import test_block_attention
from tests.verify.recipes import LATENT, tiny

STEPS = 2
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")


def first_is_fast(names):
    """Return the names as parameters, all but the first one slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if i else []) for i, name in enumerate(names)]


def _recipe(case, folder, **sizes):
    case = {section: dict(keys) for section, keys in case.items()}
    train = {"global_batch_size": 2, "micro_batch_size": 1} | sizes.pop("train", {}) | case.pop("train", {})
    if "offload_dir" in train:
        train["offload_dir"] = str(folder)
    cfg = tiny(model=sizes.pop("model", {}) | case.pop("model", {}), train=train, **case)
    return replace(cfg, run=replace(cfg.run, dtype="float32", kernels="plain"))


@pytest.mark.parametrize("name", first_is_fast(FEATURES))
def test_a_feature_trains_as_on_a_cpu(tmp_path, name):
    cfg = _recipe(FEATURES[name], tmp_path)
    expected = losses_on(cfg, "cpu", STEPS)
    with pretended_cuda():
        found = losses_on(replace(cfg, run=replace(cfg.run, kernels="auto")), "cuda", STEPS)
    assert found == pytest.approx(expected, rel=1e-4)


@needs_triton
@pytest.mark.parametrize("name", first_is_fast(BFLOAT16))
def test_kernels_in_bfloat16_train_as_float32_does(tmp_path, monkeypatch, name):
    monkeypatch.setattr(triton_experts, "supports_grouped_mm", lambda *args: False)
    # The interpreter takes half a second for a launch: the fast row has one layer.
    sizes = TILED | ({"layers": 1} if name == next(iter(BFLOAT16)) else {})
    cfg = _recipe(BFLOAT16[name], tmp_path, model=sizes, train={"micro_batch_size": 2, "seq_len": 16})
    expected = losses_on(cfg, "cpu", STEPS)
    run = replace(cfg.run, dtype="bfloat16", kernels="auto", device="cuda", deterministic=True)
    with pretended_cuda():
        found = losses_on(replace(cfg, run=run), "cuda", STEPS)
    assert found == pytest.approx(expected, rel=2e-2)


def _generated(cfg, device_type, cache, *, records_routing):
    with init_distributed(single_rank_env(), device_type) as device:
        model = parallelize(cfg, ParallelGroups.create(check_config(cfg), device))
        prompts = [tuple((i * j + 3) % 8 for j in range(length)) for i, length in enumerate((70, 1, 3))]
        requests = [
            Request(prompt=prompt, prompt_number=i, max_tokens=5, eos_ids=frozenset({77}), num_alternatives=2)
            for i, prompt in enumerate(prompts)
        ]
        settings = EngineSettings(slots=2, pass_tokens=16, cache=cache)
        params = SamplingParams(temperature=0.7, top_k=5, seed=1)
        engine = GenerationEngine(model, settings, params, records_routing=records_routing)
        return [
            (done.tokens, None if done.expert_ids is None else done.expert_ids.tolist())
            for done in engine.generate(requests)
        ]


@pytest.mark.parametrize(
    ("name", "cache", "records_routing"),
    [
        *(pytest.param(name, "latents", False, marks=[pytest.mark.slow] if i else [])
          for i, name in enumerate(FAMILIES)),
        pytest.param("MLA", "heads", False, marks=pytest.mark.slow),
        pytest.param("plain", "latents", True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_family_generates_the_tokens_of_a_cpu(name, cache, records_routing):
    cfg = tiny(model=FAMILIES[name], train={"seq_len": 96, "global_batch_size": 1})
    cfg = replace(cfg, run=replace(cfg.run, dtype="float32", kernels="plain"))
    expected = _generated(cfg, "cpu", cache, records_routing=records_routing)
    with pretended_cuda():
        assert _generated(cfg, "cuda", cache, records_routing=records_routing) == expected


def _transfers(cfg, generations=1):
    """Return the transfers of the last of some generations that share pages and mix samplers, its passes and draws."""
    kinds = [SamplingParams(top_k=5), SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_p=0.9)]
    requests = [
        Request(prompt=(3, 1) * length, prompt_number=length, sample_number=i, max_tokens=5, num_alternatives=2,
                sampling=kinds[i % 3])
        for i, length in enumerate((35, 35, 1, 2))
    ]  # fmt: skip
    with pretended_cuda(), init_distributed(single_rank_env(), "cuda") as device:
        model = parallelize(cfg, ParallelGroups.create(check_config(cfg), device))
        engine = GenerationEngine(model, EngineSettings(slots=3, pass_tokens=16), kinds[0])
        for _ in range(generations):
            with engine.open(8) as generation, recorded_transfers() as found:
                for number, request in enumerate(requests):
                    generation.add(number, request)
                passes = draws = 0
                while generation.any_rank_has_work():
                    draws += bool(generation.step())
                    passes += 1
    assert passes > draws > 5
    return found, passes, draws


def test_the_host_reads_once_a_pass_of_generation_and_copies_from_pinned_memory():
    """Plain operations read the tokens of each expert too, once in each of two layers."""
    cfg = tiny(train={"seq_len": 96, "global_batch_size": 1})
    found, passes, draws = _transfers(replace(cfg, run=replace(cfg.run, dtype="float32", kernels="plain")))
    assert Counter(found.waits) == {"engine.py:_draw": draws, "expert_ops.py:_values": 2 * passes}
    assert found.pageable == []


@needs_triton
@pytest.mark.slow
def test_the_host_reads_nothing_else_where_kernels_run():
    cfg = tiny(model=TILED | {"layers": 1}, train={"seq_len": 96, "global_batch_size": 1})
    device_refusal.cache_clear()
    # The first generation chooses and checks kernels.
    found, _, draws = _transfers(replace(cfg, run=replace(cfg.run, dtype="bfloat16", kernels="auto")), generations=2)
    device_refusal.cache_clear()
    assert found.waits == ["engine.py:_draw"] * draws
    assert found.pageable == []


def _decoded(with_kernel, window):
    """The outputs of passes of a prompt in chunks and of single tokens, and how the pages were read."""
    torch.manual_seed(0)
    current = CurrentPass()
    reader = FlashPages() if with_kernel else None
    core = PagedAttention(current, 4, CUDA_PAGE_POSITIONS, KeyLimits(window), segment_kernel=reader)
    tables = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    sinks = torch.randn(4).to("cuda") if window else None
    found = []
    for spans in ([range(280), range(5)], [range(280, 281), range(5, 260)], [range(281, 282), range(260, 261)]):
        places = torch.tensor([p for span in spans for p in span])
        counts = [len(span) for span in spans]
        pages = tables[torch.arange(2).repeat_interleave(torch.tensor(counts)), places // CUDA_PAGE_POSITIONS].long()
        slots = pages * CUDA_PAGE_POSITIONS + places % CUDA_PAGE_POSITIONS
        on_device = (x.to("cuda") for x in (slots, places, tables))
        current.rows = PassRows(*on_device, counts, [span[-1] for span in spans])
        q, k, v = (torch.randn(len(places), 1, heads, 16).to("cuda", torch.bfloat16) for heads in (4, 2, 2))
        found.append(core(q, k, v, None, sinks))
    return torch.cat(found).cpu(), core.page_path


@pytest.mark.skipif(not cuda_flash_attention_reads_pages(), reason="torch takes no block table")
@pytest.mark.parametrize("window", [0, 50])
def test_reading_pages_equals_gathering_pages(window):
    device_refusal.cache_clear()
    with pretended_cuda():
        gathered, reason = _decoded(False, window)
        found, path = _decoded(True, window)
    device_refusal.cache_clear()
    assert (reason, path) == ("gathered, as run.kernels='plain'", "read by flash attention")
    torch.testing.assert_close(found, gathered, atol=2e-2, rtol=2e-2)


def _notice(kernels, dtype="float32", model=None, kind="latents"):
    cfg = tiny(model=model or {}, train={"global_batch_size": 1})
    cfg = replace(cfg, run=replace(cfg.run, dtype=dtype, kernels=kernels))
    with init_distributed(single_rank_env(), "cuda") as device:
        built = InferenceModel.build(cfg, ParallelGroups.create(check_config(cfg), device))
        notice = decoding_notice(built, kind)
        return notice[notice.rindex("pages of ") :], built.message


def test_generation_names_its_kernels(monkeypatch):
    device_refusal.cache_clear()
    with pretended_cuda():
        assert _notice("plain") == ("pages of 2 layers: gathered, as run.kernels='plain'", "")
        pages, kernels = _notice("auto")
        assert kernels == "run.kernels='auto': plain, as run.dtype='float32'"
        assert pages == "pages of 2 layers: gathered, as flash attention does not take heads of 4 in torch.float32"
        # As of torch 2.11.
        monkeypatch.setattr(paged_flash, "cuda_flash_attention_reads_pages", lambda: False)
        reason = f"flash attention of torch {torch.__version__} takes no block table"
        assert _notice("auto", "bfloat16", WIDE)[0] == f"pages of 2 layers: gathered, as {reason}"
    device_refusal.cache_clear()


WIDE = {"attention.head_dim": 8}
NO_LATENTS = "gathered, as flash attention does not take latents"
READ_OR_GATHERED = [
    (WIDE, "latents", "2 layers: read by flash attention"),
    (WIDE | {"attention.head_dim": 12}, "latents",
     "2 layers: gathered, as flash attention does not take heads of 12 in torch.bfloat16"),
    (WIDE | FAMILIES["chunked attention"], "latents",
     "1 layer: gathered, as flash attention knows no attention chunks; 1 layer: read by flash attention"),
    (WIDE | LINEAR, "latents", "1 layer: read by flash attention"),
    (LATENT, "latents", f"2 layers: {NO_LATENTS}"),
    (LATENT | {"attention.qk_nope_head_dim": 6}, "heads",
     "2 layers: gathered, as flash attention takes no values of 3 with keys of 8"),
    # Wide values are padded keys.
    (LATENT | {"attention.v_head_dim": 8}, "heads", "2 layers: read by flash attention"),
]  # fmt: skip


@pytest.mark.skipif(not cuda_flash_attention_reads_pages(), reason="torch takes no block table")
@needs_triton
@pytest.mark.parametrize(("model", "kind", "expected"), READ_OR_GATHERED)
def test_the_notice_counts_the_layers_whose_pages_are_read(model, kind, expected):
    device_refusal.cache_clear()
    with pretended_cuda():
        assert _notice("auto", "bfloat16", model, kind)[0] == f"pages of {expected}"
    device_refusal.cache_clear()


@pytest.mark.parametrize(
    ("name", "cache"),
    [("plain", "latents"), ("MLA", "latents"), ("MLA", "heads"), ("chunked attention", "latents")],
)
def test_the_first_pass_reports_the_text_of_the_notice(caplog, name, cache):
    cfg = tiny(model=FAMILIES[name], train={"seq_len": 96, "global_batch_size": 1})
    cfg = replace(cfg, run=replace(cfg.run, dtype="float32", kernels="auto"))
    with pretended_cuda(), caplog.at_level(logging.INFO):
        pages, _ = _notice("auto", "float32", FAMILIES[name], cache)
        _generated(cfg, "cuda", cache, records_routing=False)
    assert [record.getMessage() for record in caplog.records if "pages of" in record.getMessage()] == [pages]


def test_a_pass_without_rows_reports_nothing(caplog):
    cfg = tiny(train={"global_batch_size": 1})
    cfg = replace(cfg, run=replace(cfg.run, dtype="float32", kernels="plain"))
    size = CacheSize(num_pages=1, page_positions=CUDA_PAGE_POSITIONS)
    found = []
    with pretended_cuda(), init_distributed(single_rank_env(), "cuda") as device, caplog.at_level(logging.INFO):
        model = InferenceModel.build(cfg, ParallelGroups.create(check_config(cfg), device))
        with forward_chain(model) as chain, PagedDecoder(chain, size) as decoder:
            for num_rows in (0, 1, 1):
                places, last = torch.arange(num_rows).to("cuda"), [0] * num_rows
                tables = torch.zeros(num_rows, 1, dtype=torch.int32).to("cuda")
                decoder.forward(places, PassRows(places, places, tables, [1] * num_rows, last), places)
                found.append(sum("pages of 2 layers" in record.getMessage() for record in caplog.records))
    assert found == [0, 1, 1]


def test_tokens_are_drawn_on_the_device():
    torch.manual_seed(0)
    logits = 4 * torch.randn(12, 3000)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_k=7),
        SamplingParams(top_k=900, top_p=0.9, min_p=1e-3),
    ]
    draws = [Draw(kinds[i % 4], i / 12) for i in range(12)]
    expected = choose_tokens(logits, draws).tolist()
    arrays = (np.arange(5), np.arange(6, dtype=np.int32).reshape(2, 3))
    with pretended_cuda():
        found = choose_tokens(logits.to("cuda"), draws)
        assert found.device == CUDA
        assert found.tolist() == expected
        copied = copy_together_to_device(arrays, CUDA)
        assert all(one.device == CUDA for one in copied)
        assert [one.tolist() for one in copied] == [one.tolist() for one in arrays]


def test_gpu_tests_of_moments_can_pass(tmp_path):
    """A row of the GPU tests; `test_gpu_tests_pass_on_the_pretended_device` runs the others."""
    with pretended_cuda():
        test_moments.test_moments_outside_the_gpu_give_the_same_bits(tmp_path, "adamw", "float32", "host")


def test_gpu_tests_of_past_windows_can_pass():
    with pretended_cuda():
        test_block_attention.test_past_windows_of_the_cuda_kernel_equal_the_masked_twin()


def test_gpu_tests_of_experts_can_pass():
    with pretended_cuda():
        test_experts.test_grouped_kernel_equals_the_loop_on_cuda((3, 0, 5, 2))


def test_a_query_that_attends_to_no_key_is_not_a_window():
    """The flash kernel would read the window of -1 as no limit."""
    with pretended_cuda(), pytest.raises(AssertionError, match="the last query attends to no key"):
        AttentionMaskSpec(200).past_mask(range(400, 550), range(100, 350), _bfloat16(250, 1, 2, 16))


def _bfloat16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16, device="cuda")


SLOW_ON_A_CPU = ("test_cuda_graphs", "test_deterministic", "test_kernels", "test_offload")
"""Files of GPU tests that capture, start processes of their own, or wait for the device."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_gpu_tests_pass_on_the_pretended_device():
    files = [
        name for name in GPU_TESTS if name not in ("tests/gpu", "tests/ops/triton", "tests/train/test_peak_memory.py")
    ]
    files += [f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")
              if path.stem not in SLOW_ON_A_CPU]  # fmt: skip
    plugin = ["-p", "tests.gpu_static.pretended_plugin", "-p", "no:cacheprovider"]
    # Whole runs in bfloat16 take the interpreter hours.
    chosen = ["-m", "gpu and not slow", "-k", "not gpt_oss and not bfloat16_trains"]
    # Staging of an asynchronous save needs memory that an accelerator pinned.
    goes_on = "tests/gpu/test_checkpoint.py::test_a_run_goes_on_where_the_other_device_stopped"
    chosen += [f"--deselect={goes_on}[{places}-True]" for places in ("cuda-cpu", "cpu-cuda")]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, *chosen, *files]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


# Negative controls: the errors that the device is made to find are noticed.


def test_a_tensor_left_on_the_cpu_is_noticed():
    with pretended_cuda():
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match=r"same device, but aten::add.Tensor|same device, but aten::add"):
            x + torch.ones(3)
        assert (x + torch.ones(3).to("cuda")).device == CUDA
        # A number on the CPU is an argument of a kernel, and an index is copied.
        assert (x + torch.tensor(1.0)).tolist() == [2.0] * 3
        assert x[torch.tensor([0, 2])].is_cuda
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(3)[torch.tensor([0, 2], device="cuda")] + x.index_select(0, torch.tensor([0]))


def test_a_tensor_left_on_the_cpu_in_a_backward_pass_is_noticed():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.ones(grad.shape)

    with pretended_cuda(), pytest.raises(RuntimeError, match="same device, but aten::mul"):
        Wrong.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()


@needs_triton
def test_a_cpu_pointer_given_to_a_kernel_is_noticed():
    from moefold.ops.triton.rope import apply_rope

    with pretended_cuda():
        x, cos, sin = (torch.ones(4, 1, 1, 16, device="cuda") for _ in range(3))
        assert apply_rope(x, cos, sin, is_interleaved=False).is_cuda
        with pytest.raises(ValueError, match=r"cannot be accessed from Triton \(cpu tensor\?\)"):
            apply_rope(x, cos.cpu(), sin, is_interleaved=False)


@pytest.mark.parametrize("read", [lambda x: x.numpy(), np.asarray])
def test_an_array_of_a_cuda_tensor_is_noticed(read):
    with pretended_cuda():
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            read(torch.ones(3, device="cuda"))
        assert read(torch.ones(3, device="cuda").cpu()).sum() == 3


@pytest.mark.parametrize(
    ("transfer", "waits", "pageable"),
    [
        (lambda x: x.sum().item(), 1, 0),
        (lambda x: bool(x.any()), 1, 0),
        (lambda x: x.tolist(), 1, 0),
        (lambda x: x.cpu(), 1, 0),
        (lambda x: torch.empty(3).copy_(x), 1, 0),
        (lambda x: x.nonzero(), 1, 0),
        (lambda x: x[x > 0], 1, 0),
        (lambda x: torch.cuda.synchronize(), 1, 0),
        (lambda x: HostCopy(x), 0, 0),
        (lambda x: HostCopy(x).wait(), 1, 0),
        (lambda x: x.to("cpu", non_blocking=True), 0, 1),
        (lambda x: torch.ones(3).to(x.device, non_blocking=True), 0, 1),
        (lambda x: x.copy_(torch.ones(3)), 0, 1),
        (lambda x: torch.tensor([1.0], device=x.device), 0, 1),
        (lambda x: x[torch.tensor([0, 2])], 0, 1),
        (lambda x: copy_to_device(torch.ones(3), x.device), 0, 0),
        (lambda x: x.copy_(torch.ones(3, pin_memory=True), non_blocking=True), 0, 0),
        (lambda x: (x + torch.tensor(1.0)).clone().to(x.device), 0, 0),
    ],
)
def test_a_wait_of_the_host_and_a_copy_that_is_not_pinned_are_noticed(transfer, waits, pageable):
    with pretended_cuda():
        x = torch.ones(3, device="cuda")
        with recorded_transfers() as found:
            transfer(x)
        transfer(x)
    assert (len(found.waits), len(found.pageable)) == (waits, pageable)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.zeros(2, device="cuda"),
        lambda x: torch.zeros(2, device=torch.device("cuda", 0)),
        lambda x: torch.zeros_like(x),
        lambda x: x.new_zeros(2),
        lambda x: torch.ones(2).to(x),
        lambda x: torch.ones(2).cuda(),
        lambda x: x.to(torch.float64),
        lambda x: x.view(2, 1),
        lambda x: torch.arange(2, device=x.device),
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
    ],
)
def test_tensors_made_for_the_device_are_on_it(make):
    with pretended_cuda():
        x = torch.ones(2, device="cuda")
        y = make(x)
        assert (y.device, y.is_cuda, y.is_cpu, y.get_device()) == (CUDA, True, False, 0)
        assert not torch.ones(2).is_cuda
        assert not y.cpu().is_cuda
    # Nothing is left of it.
    assert not torch.cuda.is_available()
    assert y.device.type == "cpu"
    assert is_pretended(y)
