"""Test that the loss by chunks has the same value and gradients as the loss, and keeps no logits."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from benchmarks.process_group import make_group
from moefold.comm.collectives import all_gather_uneven, all_reduce_max, all_reduce_sum
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.loss import PLAIN_SOFTMAX, ChunkOptions, SoftmaxOptions, chunked_token_losses, token_losses
from moefold.model.transformer import build_model
from moefold.parallel.tensor_parallel import TPVocabParallel
from tests.models import model_of

H, V = 6, 23


def _case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = 3 * torch.randn(5, 3, H, dtype=dtype), torch.randn(V, H, dtype=dtype)
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(V, (5, 3)), torch.randn(5, 3, dtype=dtype)


@pytest.mark.parametrize("keeps", [False, True], ids=["again", "kept"])
@pytest.mark.parametrize("chunk", [1, 4, 5, 14, 15])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_equals_the_loss_of_whole_logits(chunk, dtype, keeps):
    x, weight, labels, share = _case(dtype)
    losses = chunked_token_losses(x, weight, labels, ChunkOptions(chunk, saves_exponentials=keeps)).loss
    found = torch.autograd.grad((losses * share).sum(), (x, weight))
    expected_losses = token_losses(x @ weight.t(), labels).loss
    expected = torch.autograd.grad((expected_losses * share).sum(), (x, weight))
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    assert losses.dtype == expected_losses.dtype
    torch.testing.assert_close(losses, expected_losses, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


def test_kept_exponentials_serve_two_backward_passes():
    x, weight, labels, share = _case()
    losses = chunked_token_losses(x, weight, labels, ChunkOptions(4, saves_exponentials=True)).loss
    loss = (losses * share).sum()
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    for once, twice in zip(first, torch.autograd.grad(loss, (x, weight)), strict=True):
        assert torch.equal(once, twice)


@pytest.mark.parametrize("keeps", [False, True], ids=["again", "kept"])
def test_it_equals_torch_with_logits_that_overflow_exp(keeps):
    x, weight, labels, _ = _case()
    losses = chunked_token_losses(1e3 * x, weight, labels, ChunkOptions(4, saves_exponentials=keeps)).loss
    expected = F.cross_entropy((1e3 * x @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected, rtol=1e-12, atol=1e-9)


def _on_shards(chunk: int, keeps: bool, softmax: SoftmaxOptions) -> list[Tensor]:
    """Losses and gradients, with the vocabulary cut over two ranks."""
    rank = torch.distributed.get_rank()
    tp = make_group((0, 1), rank, torch.distributed.group.WORLD)
    x, weight, labels, share = _case()
    mine = weight.detach().chunk(2)[rank].clone().requires_grad_()
    options = ChunkOptions(chunk, TPVocabParallel(tp, V).vocab_range, keeps, softmax=softmax)
    losses, normalizers, entropy = chunked_token_losses(x, mine, labels, options)
    loss = (losses * share).sum() if entropy is None else (losses * share + normalizers.square()).sum()
    by_x, by_weight = torch.autograd.grad(loss, (x, mine))
    assert torch.equal(all_reduce_max(losses, tp), losses)
    found = [losses.detach(), all_reduce_sum(by_x, tp), all_gather_uneven(by_weight, tp, (12, 11))]
    return found if entropy is None else [*found, entropy]


@pytest.mark.parity
@pytest.mark.parametrize("keeps", [False, True], ids=["again", "kept"])
@pytest.mark.parametrize("chunk", [4, 15])
def test_a_vocabulary_in_two_parts(pool, chunk, keeps):
    x, weight, labels, share = _case()
    losses = token_losses(x @ weight.t(), labels).loss
    expected = [losses.detach(), *torch.autograd.grad((losses * share).sum(), (x, weight))]
    for found in pool.run(2, _on_shards, chunk, keeps, PLAIN_SOFTMAX):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parity
@pytest.mark.parametrize("keeps", [False, True], ids=["again", "kept"])
def test_temperature_and_entropy_of_a_vocabulary_in_two_parts(pool, keeps):
    for found in pool.run(2, _on_shards, 4, keeps, SoftmaxOptions(0.7, has_entropy=True)):
        for mine, theirs in zip(found, _by_definition(0.7), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def _by_definition(temperature: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Losses, gradients of them and of squared normalizers, and entropies, by definition in float64."""
    x, weight, labels, share = _case(dtype)
    logits = x.double() @ weight.double().t() / temperature
    log_law = logits.log_softmax(-1)
    losses = -log_law.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    loss = (losses * share.double() + logits.logsumexp(-1).square()).sum()
    gradients = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    return [losses.detach(), *gradients, -(log_law.exp() * log_law).sum(-1).detach()]


@pytest.mark.parametrize("path", ["whole", "again", "kept"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_temperature_and_entropy(path, dtype, temperature):
    x, weight, labels, share = _case(dtype)
    softmax = SoftmaxOptions(temperature, has_entropy=True)
    if path == "whole":
        losses, normalizers, entropy = token_losses(x @ weight.t(), labels, softmax=softmax)
    else:
        losses, normalizers, entropy = chunked_token_losses(
            x, weight, labels, ChunkOptions(4, saves_exponentials=path == "kept", softmax=softmax)
        )
    assert not entropy.requires_grad
    loss = (losses * share + normalizers.square()).sum()
    found = [losses.detach(), *torch.autograd.grad(loss, (x, weight)), entropy]
    tolerance = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 4e-2}[dtype]
    for mine, theirs in zip(found, _by_definition(temperature, dtype), strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance * scale)


def test_entropy_of_a_certain_token_is_zero():
    logits = torch.tensor([[0.0, -1e4, -1e4], [0.0, 0.0, 0.0]])
    losses, _, entropy = token_losses(logits, torch.tensor([0, 1]), softmax=SoftmaxOptions(has_entropy=True))
    torch.testing.assert_close(entropy, torch.tensor([3.0]).log() * torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(losses, entropy)


def _kept(module: nn.Module, tokens: Tensor) -> list[tuple[int, ...]]:
    """Shapes of all that a forward pass keeps for the backward pass."""
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    targets = {"labels": tokens, "weights": torch.ones(tokens.shape) / tokens.numel()}
    if module.config.mtp_layers:
        targets |= {"mtp_labels": tokens.unsqueeze(1), "mtp_weights": targets["weights"].unsqueeze(1)}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        module(tokens, **targets)
    return shapes


@pytest.mark.parametrize("mtp_layers", [0, 1])
@pytest.mark.parametrize("is_tied", [False, True])
def test_no_logits_are_kept(is_tied, mtp_layers):
    model = model_of(
        {
            "layers": 1,
            "hidden_size": 16,
            "attention.num_heads": 2,
            "attention.num_kv_heads": 1,
            "vocab_size": 97,
            "ffn.moe.num_experts": 2,
            "ffn.moe.intermediate_size": 8,
            "tie_embeddings": is_tied,
            "mtp_layers": mtp_layers,
        }
    )
    tokens = torch.randint(97, (2, 12))
    kept = {}
    for chunk in (0, 8):
        cfg = Config(model=model, train=TrainConfig(seq_len=12, micro_batch_size=2, loss_chunk=chunk))
        module = build_model(cfg)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.1)
        module.set_positions(torch.arange(12))
        shapes = _kept(module, tokens)
        # Not the head itself, [97, 16] or transposed.
        kept[chunk] = sum(97 in shape and 16 not in shape for shape in shapes)
    assert kept == {0: 1 + mtp_layers, 8: 0}


def test_the_default_chunk_holds_64_mib_of_logits_on_a_cpu_and_1_gib_on_a_gpu():
    def of(vocab_size: int, tp: int, device_type: str = "cpu", seq_len: int = 2**16) -> int:
        model, parallel = ModelConfig(vocab_size=vocab_size), ParallelConfig(tp=tp, cp=2, world_size=2 * tp)
        cfg = Config(model=model, parallel=parallel, train=TrainConfig(seq_len=seq_len, micro_batch_size=2))
        return cfg.loss_chunk_tokens(device_type)

    assert of(32768, 1) == 512
    assert of(32768, 4) == 2048
    assert of(131072, 1) == 256
    assert of(131072, 1, "cuda") == 2048
    assert of(131072, 4, "cuda") == 8192
    # Up to 1 GiB of logits in float32 there is one chunk.
    assert [of(131072, 1, device, 2048) for device in ("cpu", "cuda")] == [0, 0]
    assert [of(131072, 1, device, 2049) for device in ("cpu", "cuda")] == [256, 2048]
