"""The noise belongs to the token: shards, order and repeats do not change it. It is uniform and uncorrelated."""

import torch

from moefold.integer_hash import draw_bits, splitmix64
from moefold.model.moe.token_noise import CPU_CHUNK_ELEMENTS, uniform_noise

SAMPLES, POSITIONS = torch.arange(4), torch.arange(32)


def test_a_shard_has_the_noise_of_its_tokens():
    whole = uniform_noise(5, 3, SAMPLES, POSITIONS, 16).view(32, 4, 16)
    mine = torch.tensor([30, 2, 7])
    assert torch.equal(uniform_noise(5, 3, SAMPLES[2:], mine, 16).view(3, 2, 16), whole[mine, 2:])


def test_another_seed_step_sample_or_position_has_other_noise():
    def noise(seed: int = 1, step: int = 1, sample: int = 0, position: int = 0) -> float:
        return uniform_noise(seed, step, torch.tensor([sample]), torch.tensor([position]), 1).item()

    drawn = [
        noise(),
        noise(seed=2),
        noise(step=2),
        noise(sample=1),
        noise(position=1),
        noise(2**63 - 1),
        noise(step=10**9),
    ]
    assert len(set(drawn)) == len(drawn)
    assert noise() == noise()


def test_it_is_the_stream_of_split_mix():
    golden = 0x9E3779B97F4A7C15
    of_token = splitmix64(splitmix64(splitmix64(9 + 4 * golden) + 2 * golden) + 6 * golden)
    expected = (draw_bits(of_token, 8) >> 11).astype(float) / 2**53
    assert uniform_noise(9, 4, torch.tensor([2]), torch.tensor([5]), 8)[0].tolist() == expected.tolist()


def test_it_is_uniform_and_its_features_are_uncorrelated():
    noise = uniform_noise(7, 1, torch.arange(64), torch.arange(64), 8)
    assert 0 <= noise.min() < 1e-3
    assert 1 - 1e-3 < noise.max() < 1
    histogram = noise.flatten().histc(16, 0, 1) / noise.numel()
    assert (histogram - 1 / 16).abs().max() < 0.005
    assert (noise.T.corrcoef() - torch.eye(8)).abs().max() < 0.06


def test_jitter_does_not_depend_on_its_chunks():
    samples, positions, width = torch.arange(3), torch.arange(50), CPU_CHUNK_ELEMENTS // 20
    whole = uniform_noise(5, 3, samples, positions, width).view(50, 3, width)
    for position in (0, 6, 7, 49):
        alone = uniform_noise(5, 3, samples, positions[position : position + 1], width)
        assert torch.equal(alone, whole[position])
    wide = uniform_noise(5, 3, samples[:2], positions[:2], CPU_CHUNK_ELEMENTS + 1)
    assert torch.equal(wide[:, :width], whole[:2, :2].flatten(0, 1))


def test_scale_shift_and_type_round_once():
    noise = uniform_noise(5, 3, SAMPLES, POSITIONS, 16)
    scaled = uniform_noise(5, 3, SAMPLES, POSITIONS, 16, scale=0.6, shift=0.7, dtype=torch.float32)
    assert scaled.dtype == torch.float32
    assert torch.equal(scaled, (0.7 + 0.6 * noise).float())
    assert uniform_noise(5, 3, SAMPLES[:0], POSITIONS, 16).shape == (0, 16)
