"""Every policy-gradient objective is its formula: value, gradient and metrics."""

import pytest
import torch
from torch import Tensor

from moefold.config.base.part import make_part
from moefold.model.transformer import build_model
from moefold.model.weight_init import init_weights
from tests.objectives.example import IDS, example
from tests.objectives.losses import policy
from tests.verify.recipes import tiny

SEQUENCES = [(row, i) for row, ids in enumerate(IDS) for i in range(max(ids) + 1)]


def _sampled(x: Tensor) -> Tensor:
    """Zero where no token was sampled."""
    return x.where(torch.tensor(IDS) >= 0, 0.0)


def _mean_of_sequence(x: Tensor) -> Tensor:
    """Replace each token's value by the mean of its sequence, one sequence at a time."""
    mean = torch.zeros_like(x)
    for row, number in SEQUENCES:
        is_in = torch.tensor(IDS[row]) == number
        mean[row] = torch.where(is_in, x[row][is_in].mean(), mean[row])
    return mean


def _clip(ratio: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.28) -> Tensor:
    """Return the clipped objective with a case for each sign, instead of a minimum."""
    gain = torch.where(advantages >= 0, ratio.clamp(max=1 + high), ratio.clamp(min=1 - low)) * advantages
    return -gain


def _ratio(log_probs: Tensor, columns: dict[str, Tensor], old: str = "old_log_probs") -> Tensor:
    return _sampled(log_probs - columns[old]).exp()


FORMULAS = {
    "policy": lambda log_probs, c: -c["advantages"] * log_probs,
    "clip": lambda log_probs, c: _clip(_ratio(log_probs, c), c["advantages"]),
    "cispo": lambda log_probs, c: -_ratio(log_probs, c).clamp(0.8, 1.28).detach() * c["advantages"] * log_probs,
    "sequence": lambda log_probs, c: _clip(
        _mean_of_sequence(_sampled(log_probs - c["old_log_probs"])).exp(), c["advantages"]
    ),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("objective", FORMULAS)
def test_an_objective_is_its_formula(objective, temperature):
    case = example(temperature)
    loss = policy(objective=objective, temperature=temperature)
    terms, gradient, metrics = case.run(loss)
    value, expected = case.expect(
        lambda log_probs, c: (FORMULAS[objective](log_probs, c) * c["weights"]).sum(), temperature
    )
    assert loss.terms == ("policy",)
    torch.testing.assert_close(terms, value.view(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12)
    assert metrics["ratio_max"] > 1.28
    if objective != "policy":
        assert 0 < metrics["clipped"] < 1


def test_the_clipped_fraction_counts_tokens_whose_gradient_is_cut():
    case = example()
    _, _, metrics = case.run(policy(objective="clip"))
    log_probs, c = case.log_probs(), case.columns
    ratio, is_trained = _ratio(log_probs, c), c["weights"] != 0
    is_cut = torch.where(c["advantages"] >= 0, ratio > 1.28, ratio < 0.8)
    assert metrics["clipped"] == pytest.approx(float(is_cut[is_trained].double().mean()))
    assert metrics["ratio_max"] == pytest.approx(float(ratio[is_trained].detach().max()))
    entropy = torch.distributions.Categorical(logits=case.hidden.transpose(0, 1) @ case.head.weight.t()).entropy()
    assert metrics["entropy"] == pytest.approx(float(entropy[is_trained].detach().mean()))
    difference = (log_probs - c["old_log_probs"])[is_trained].abs()
    assert metrics["mismatch_mean"] == pytest.approx(float(difference.detach().mean()))
    assert metrics["mismatch_max"] == pytest.approx(float(difference.detach().max()))
    assert metrics["mismatch_equal"] == 0


@pytest.mark.parametrize(
    ("kind", "formula"), [("k3", lambda d: d.exp() - d - 1), ("k2", lambda d: 0.5 * d**2)], ids=["k3", "k2"]
)
def test_the_kl_penalty_equals_its_definition(kind, formula):
    case = example()
    terms, gradient, metrics = case.run(policy(objective="clip", kl=0.3, kl_kind=kind))

    def penalty(log_probs: Tensor, c: dict[str, Tensor]) -> Tensor:
        return formula(_sampled(c["reference_log_probs"] - log_probs))

    own, own_gradient = case.expect(lambda log_probs, c: (FORMULAS["clip"](log_probs, c) * c["weights"]).sum())
    kl, kl_gradient = case.expect(lambda log_probs, c: 0.3 * (penalty(log_probs, c) * c["weights"]).sum())
    torch.testing.assert_close(terms, torch.stack((own, kl)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, own_gradient + kl_gradient, rtol=1e-11, atol=1e-12)
    is_trained = case.columns["weights"] != 0
    assert metrics["kl"] == pytest.approx(float(penalty(case.log_probs(), case.columns)[is_trained].detach().mean()))


def _masked(factor: Tensor, judged: Tensor) -> Tensor:
    return factor.where((judged >= 0.7) & (judged <= 1.5), 0.0)


CORRECTIONS = {
    "clamp": lambda d: d.exp().clamp(0.7, 1.5),
    "mask": lambda d: _masked(d.exp(), d.exp()),
    "sequence_mask": lambda d: _masked(d.exp(), _mean_of_sequence(d).exp()),
}


@pytest.mark.parametrize("objective", ["policy", "clip"])
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_correction_for_another_sampler(kind, objective):
    case = example()
    loss = policy(objective=objective, correction=make_part("correction", kind, low=0.7, high=1.5))
    terms, gradient, metrics = case.run(loss)

    def formula(log_probs: Tensor, c: dict[str, Tensor]) -> Tensor:
        trainer = log_probs.detach() if objective == "policy" else c["trainer_log_probs"]
        if objective == "clip":
            token_loss = _clip(_ratio(log_probs, c, "trainer_log_probs"), c["advantages"])
        else:
            token_loss = -c["advantages"] * log_probs
        return (token_loss * CORRECTIONS[kind](_sampled(trainer - c["old_log_probs"])) * c["weights"]).sum()

    value, expected = case.expect(formula)
    torch.testing.assert_close(terms, value.view(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12)
    assert 0 < metrics["corrected"] < 1


def test_on_policy_the_ratio_is_one_and_every_objective_has_one_gradient():
    case = example()
    case.columns["old_log_probs"] = -case.output().cross_entropy(case.columns["labels"]).detach()
    case.columns["advantages"] = _mean_of_sequence(case.columns["advantages"])
    case.columns["weights"] = (torch.tensor(IDS) >= 0) * 0.25
    gradients = []
    for objective in FORMULAS:
        _, gradient, metrics = case.run(policy(objective=objective))
        assert metrics["ratio_max"] == 1
        assert metrics["mismatch_equal"] == 1
        assert metrics.get("clipped", 0) == 0
        gradients.append(gradient)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=1e-13)


def test_a_column_that_is_missing_is_named():
    case = example()
    del case.columns["trainer_log_probs"]
    with pytest.raises(ValueError, match="lacks the columns \\['trainer_log_probs'\\] of objective='clip'"):
        case.run(policy(objective="clip", correction="clamp"))


@pytest.mark.parametrize(
    "settings",
    [{"kl": -0.1}, {"temperature": 0.0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name}={settings[name]} must"):
        policy(**settings)


@pytest.mark.parametrize("objective", FORMULAS)
@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_the_gradient_over_all_texts_equals_the_gradient_of_the_expected_reward(objective, baseline):
    """Enumerate the 8 texts of 3 tokens over a vocabulary of 2, each weighted by its probability."""
    cfg = tiny(model={"vocab_size": 2}, moe={"aux_loss": 0.0, "z_loss": 0.0}, train={"seq_len": 4})
    model = build_model(cfg).double()
    init_weights(model, cfg.model, cfg.run.seed)
    loss = policy(objective=objective)
    model.set_loss(loss)
    model.set_positions(torch.arange(4))
    texts = torch.cartesian_prod(*[torch.arange(2)] * 3)
    tokens = torch.cat((torch.tensor([[1, 0]]).expand(8, 2), texts), 1)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    rewards = torch.randn(8, dtype=torch.float64)
    is_sampled = (torch.arange(4) >= 1).expand(8, 4)

    log_probs = model(inputs).transpose(0, 1).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    probability = (log_probs * is_sampled).sum(1).exp()
    assert float(probability.detach().sum()) == pytest.approx(1, abs=1e-14)
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad((probability * rewards).sum(), list(parameters.values()), allow_unused=True)

    columns = {
        "labels": labels,
        # For each token of a text, the gradient of a geometric mean is the gradient of the whole text over its length.
        "weights": probability.detach()[:, None] * is_sampled,
        "advantages": (rewards - baseline)[:, None].expand(8, 4),
        "old_log_probs": log_probs.detach(),
        "sequence_ids": torch.zeros(8, 4, dtype=torch.int64).where(is_sampled, -1),
    }
    model(inputs, **columns).sum().backward()
    for (name, parameter), gradient in zip(parameters.items(), expected, strict=True):
        wanted = torch.zeros_like(parameter) if gradient is None else gradient
        found = torch.zeros_like(parameter) if parameter.grad is None else -parameter.grad
        error = float((found - wanted).abs().max())
        assert error <= 1e-12 * max(1.0, float(wanted.abs().max())), name
