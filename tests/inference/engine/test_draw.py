"""Draws depend only on their sample and follow the filtered distribution. Meaningless parameters are refused."""

import pytest
import torch

from moefold.bench.timing import StorageMeter
from moefold.comm.private_torch import TorchDispatchMode
from moefold.cost import rollout_memory
from moefold.cost.kv_cache import rollouts_at_once
from moefold.cost.rollout_memory import BYTES_OF_A_WEIGHT, drawn_bytes
from moefold.errors import ConfigError, RunError
from moefold.inference.engine.draw import (
    Draw,
    UniformStream,
    apply_top_k_top_p,
    check_drawn,
    choose_tokens,
    sample_inverse_cdf,
)
from moefold.inference.engine.requests import Request
from moefold.inference.sampling import SamplingParams
from moefold.integer_hash import draw_bits, hash_ints
from moefold.ops.cpu.build import CompilerError
from moefold.ops.cpu.draw import NO_TOKEN, CDraw
from moefold.recipe import load_config
from tests.ops.c_kernels import needs_compiler

PROBS = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0, 1, 2, 3]),
        (2, 1.0, [1, 3]),
        (9, 1.0, [0, 1, 2, 3]),
        (0, 0.4, [1]),
        (0, 0.41, [1, 3]),
        (0, 0.7, [1, 3]),
        (0, 0.001, [1]),
        (3, 0.8, [1, 2, 3]),
        (3, 0.75, [1, 3]),
    ],
)
def test_the_likeliest_tokens_stay_with_their_weights(top_k, top_p, kept):
    weights = torch.tensor([[1, 4, 2, 3]])
    found = apply_top_k_top_p(weights, top_k, top_p)
    assert found[0].nonzero().flatten().tolist() == kept
    assert found[0, kept].tolist() == weights[0, kept].tolist()


@pytest.mark.parametrize(
    ("params", "kept"),
    [({}, {0, 1, 2, 3}), ({"min_p": 0.6}, {1, 3}), ({"min_p": 1.0}, {1}), ({"min_p": 0.6, "top_p": 0.55}, {1})],
)
def test_unlikely_tokens_are_left_out_before_the_nucleus(params, kept):
    """Draws on a grid give each kept token its share of the kept mass. Top-p counts the tokens that min-p keeps."""
    draws = [Draw(SamplingParams(**params), place / 100) for place in range(100)]
    found = choose_tokens(PROBS.log().repeat(100, 1), draws).tolist()
    assert set(found) == kept
    for token in kept:
        assert found.count(token) == pytest.approx(100 * PROBS[0, token] / PROBS[0, sorted(kept)].sum(), abs=1)


def test_a_place_on_the_line_falls_on_its_token():
    weights = torch.tensor([[0, 2, 0, 1, 1, 0]]).repeat(5, 1)
    places = torch.tensor([0.0, 0.49, 0.5, 0.75, 1.0 - 2.0**-53], dtype=torch.float64)
    assert sample_inverse_cdf(weights, places).tolist() == [1, 1, 3, 4, 4]
    # The float64 product of the last place with this sum is the sum itself.
    assert sample_inverse_cdf((2**60 - 1) * weights, places).tolist() == [1, 1, 3, 4, 4]


def in_float64(logits_V: torch.Tensor, draw: Draw) -> int:
    """The token by sums in float64, one after another, of the probabilities themselves."""
    params = draw.params
    probs_V = (logits_V.double() / params.temperature).softmax(0)
    probs = probs_V.where(probs_V >= params.min_p * probs_V.max(), 0).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])[: params.top_k or None]
    total = sum(probs[i] for i in order)
    kept = []
    before = 0.0
    for i in order:
        if before < params.top_p * total:
            kept.append(i)
        before += probs[i]
    place = draw.uniform * sum(probs[i] for i in kept)
    for i in sorted(kept):
        place -= probs[i]
        if place < 0:
            return i
    raise AssertionError("a place beyond the line")


@pytest.mark.parametrize("size", [5, 4000])
def test_integer_weights_draw_the_same_as_sums_in_float64(size):
    torch.manual_seed(1)
    logits = 4 * torch.randn(48, size)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.3, top_k=3),
        SamplingParams(temperature=2.0, top_p=0.9),
        SamplingParams(min_p=0.02, top_k=50, top_p=0.95),
    ]
    draws = [Draw(kinds[i % 4], stream(1, i, 0)[0]) for i in range(48)]
    expected = [in_float64(row, draw) for row, draw in zip(logits, draws, strict=True)]
    assert choose_tokens(logits, draws).tolist() == expected
    assert len({*expected}) > 3


@needs_compiler
@pytest.mark.parametrize("size", [1, 7, 1024, 5000])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_draws_in_c_are_the_same(size, temperature):
    """Masked tokens, equal logits, places at both ends, and rows without a distribution, among rows with one."""
    kernel = CDraw()
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(64, 2 * size, generator=generator)[:, :size]
    logits[torch.rand(64, size, generator=generator) < 0.2] = -torch.inf
    logits[::2] = logits[::2].round()
    logits[3, -1], logits[5, 0], logits[6] = torch.nan, torch.inf, -torch.inf
    params = SamplingParams(temperature=temperature)
    places = [0.0, 1 - 2**-53, *(stream(1, i, 0)[0] for i in range(62))]
    draws = [Draw(params, place) for place in places]
    expected = choose_tokens(logits, draws)
    assert expected[3] == expected[5] == expected[6] == NO_TOKEN
    assert kernel.supports(logits)
    assert torch.equal(choose_tokens(logits, draws, kernel), expected)
    assert torch.equal(kernel(logits, temperature, places), expected)


@needs_compiler
def test_filters_and_other_logits_are_left_to_torch(monkeypatch):
    kernel = CDraw()
    monkeypatch.setattr(CDraw, "__call__", lambda *_: pytest.fail("the kernel has no filters"))
    logits = torch.randn(2, 9)
    for params in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        draws = [Draw(SamplingParams(**params), 0.5)] * 2
        assert torch.equal(choose_tokens(logits, draws, kernel), choose_tokens(logits, draws))
    draws = [Draw(SamplingParams(), 0.5)] * 2
    for other in (logits.double(), logits.bfloat16(), logits.t().contiguous().t(), logits.to("meta")):
        assert not kernel.supports(other)
        assert choose_tokens(other, draws, kernel).shape == (2,)


@needs_compiler
def test_a_compiler_that_errs_in_draws_is_found_out(monkeypatch):
    draw = CDraw.__call__
    monkeypatch.setattr(
        CDraw, "__call__", lambda self, logits, *args: draw(self, logits + torch.arange(logits.shape[1]), *args)
    )
    with pytest.raises(CompilerError, match="draws of tokens are wrong"):
        CDraw()


def test_a_draw_waits_for_no_device():
    """Tensors of the device "meta" have no values: reading one on the host raises."""
    kinds = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=3, top_p=0.9, min_p=0.1)]
    draws = [Draw(kinds[i % 3], 0.5) for i in range(6)]
    found = choose_tokens(torch.empty(6, 50, device="meta"), draws)
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.int64, (6,))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        found.tolist()


class LargestTensor(TorchDispatchMode):
    """Remembers the elements of the largest result of an operator."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return found


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9, "min_p": 0.01}])
def test_many_rows_need_no_more_memory_than_some(monkeypatch, params):
    shared = SamplingParams(temperature=0.7, **params)
    draws = [Draw(shared, row / 40) for row in range(40)]
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    logits[7] = float("nan")
    at_once = choose_tokens(logits, draws)
    monkeypatch.setattr("moefold.inference.engine.draw.MAX_WEIGHTS", 170)
    with LargestTensor() as largest:
        assert torch.equal(choose_tokens(logits, draws), at_once)
    assert largest.numel == 3 * 50
    monkeypatch.setattr("moefold.inference.engine.draw.MAX_WEIGHTS", 20)
    assert torch.equal(choose_tokens(logits, draws), at_once), "one row at a time"


def test_sums_do_not_depend_on_their_order():
    """The negative control is in float64, whose sums of the same numbers in another order differ."""
    torch.manual_seed(0)
    powers = torch.randn(100_000, dtype=torch.float64).exp()
    weights = (powers / powers.max() * 2.0**44).round().long()
    assert weights.sum() == weights.flip(0).cumsum(0)[-1]
    assert powers.sum() != powers.flip(0).cumsum(0)[-1]


def stream(seed: int, prompt_number: int, sample_number: int, max_tokens: int = 300) -> UniformStream:
    request = Request(
        prompt=(1,),
        prompt_number=prompt_number,
        sample_number=sample_number,
        max_tokens=max_tokens,
        eos_ids=frozenset(),
    )
    return UniformStream(seed, request)


def test_a_draw_is_a_function_of_seed_prompt_sample_and_position():
    in_order = [stream(1, 2, 3)[t] for t in range(300)]
    whole = stream(1, 2, 3, max_tokens=1000)
    assert [whole[t] for t in reversed(range(300))] == in_order[::-1]
    words = draw_bits(hash_ints(1, 2, 3), 300)
    assert in_order == [int(word >> 11) / 2**53 for word in words.tolist()]
    others = [stream(*key)[0] for key in ((0, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 3, 2))]
    assert len({in_order[0], *others}) == 6


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draws = [Draw(SamplingParams(temperature=0.5), stream(7, 0, i)[0]) for i in range(4000)]
    counts = torch.bincount(choose_tokens(logits.expand(4000, 4), draws), minlength=4)
    expected = (logits / 0.5).softmax(0)
    # Four standard deviations.
    assert ((counts / 4000 - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt()).all()


def test_rows_with_other_parameters_change_no_row():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    kinds = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=3)]
    draws = [Draw(kinds[i % 3], stream(1, i, 0)[0]) for i in range(6)]
    alone = [int(choose_tokens(logits[i : i + 1], draws[i : i + 1])) for i in range(6)]
    assert choose_tokens(logits, draws).tolist() == alone


def test_greedy_takes_the_first_of_equal_logits():
    greedy = Draw(SamplingParams(temperature=0.0), 0.0)
    assert choose_tokens(torch.tensor([[1.0, 3, 3], [5, 0, 1]]), [greedy] * 2).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "--temperature -1 must be at least 0"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"top_p": 0.0}, "--top-p 0 must lie in"),
        ({"top_p": 1.5}, "--top-p 1.5 must lie in"),
        ({"top_k": -1}, "--top-k -1 must be at least 0"),
        ({"min_p": 1.5}, "--min-p 1.5 must lie between 0"),
        ({"seed": -1}, "--seed -1 must be at least 0"),
        ({"temperature": 0.0, "top_k": 3}, "no effect"),
        ({"temperature": 0.0, "min_p": 0.1}, "no effect"),
    ],
)
def test_numbers_that_mean_nothing(wrong, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**wrong).check()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_without_a_distribution_are_refused(wrong, temperature):
    logits_NV = torch.zeros(2, 4)
    logits_NV[1, 2] = wrong
    draws = [Draw(SamplingParams(temperature=temperature), 0.5)] * 2
    found = choose_tokens(logits_NV, draws).tolist()
    assert found[0] in range(4)
    assert found[1] == NO_TOKEN
    with pytest.raises(RunError, match="NaN or infinite"):
        check_drawn(found)
    logits_NV[1, 2] = -float("inf")
    check_drawn(choose_tokens(logits_NV, draws).tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("at_once", [4, 64])
def test_the_formula_of_memory_counts_the_memory_of_draws(monkeypatch, temperature, at_once):
    """Rows in one part, and in parts of `MAX_WEIGHTS`."""
    rows, vocab = 16, 5000
    monkeypatch.setattr(rollout_memory, "MAX_WEIGHTS", at_once * vocab)
    monkeypatch.setattr("moefold.inference.engine.draw.MAX_WEIGHTS", at_once * vocab)
    logits = torch.randn(rows, vocab)
    params = SamplingParams(temperature=temperature)
    with StorageMeter() as meter:
        choose_tokens(logits, [Draw(params, i / rows) for i in range(rows)])
    formula = drawn_bytes(rows, vocab)
    assert formula == min(rows, at_once) * vocab * BYTES_OF_A_WEIGHT
    assert formula <= meter.peak_bytes <= 1.01 * formula


def test_top_p_takes_no_more_than_is_said():
    logits = torch.randn(16, 5000)
    with StorageMeter() as meter:
        choose_tokens(logits, [Draw(SamplingParams(top_p=0.9, min_p=0.001), 0.5)] * 16)
    assert 40 <= meter.peak_bytes / logits.numel() <= 41.1


def test_a_vllm_server_draws_elsewhere():
    words = ["data.kind=task", "data.task=sort", "model.preset=tiny", "rl.group_size=4", "rollout.engine=vllm"]
    assert rollouts_at_once(load_config(None, words)) == 0
