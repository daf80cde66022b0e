"""Objectives against TRL's own loss functions, which run unbound on a stub of their trainer: value and gradient."""

import inspect
import math
import re
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.config.base.part import make_part
from tests.objectives.example import IDS, PAIR_IDS, Example, example, pair_example
from tests.objectives.losses import policy, preference

pytest.importorskip("trl", reason="pip install -e '.[align-check]' installs TRL")

TOLERANCE = 1e-10
SEQUENCES = [(row, number) for row, ids in enumerate(IDS) for number in range(max(ids) + 1)]


def _stub(**settings: Any) -> SimpleNamespace:
    """Return the attributes of a trainer that TRL's loss functions read."""
    accelerator = SimpleNamespace(
        num_processes=1,
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        unwrap_model=lambda x: x,
    )
    common = {
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**common | settings)


def _padded(values: Tensor, ids: list[list[int]], sequences: list[tuple[int, int]], length: int = 10) -> Tensor:
    """Return the values of each sequence as a row, right-padded with 0."""
    rows = []
    for row, number in sequences:
        found = values[row][torch.tensor(ids[row]) == number]
        rows.append(torch.cat((found, found.new_zeros(length - len(found)))))
    return torch.stack(rows)


def _assert_equal(case: Example, loss: Any, theirs: Tensor) -> None:
    (expected,) = torch.autograd.grad(theirs, case.hidden)
    terms, gradient, _ = case.run(loss)
    torch.testing.assert_close(terms.sum(), theirs.detach().double().reshape(()), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(gradient, expected, rtol=TOLERANCE, atol=TOLERANCE)


def _grpo(case: Example, max_tokens: int = 12, **settings: Any) -> Tensor:
    """Return TRL's GRPO loss of the three rollouts of an example."""
    from trl import GRPOTrainer

    log_probs, columns = case.log_probs(), case.columns
    mask = _padded(torch.ones_like(log_probs), IDS, SEQUENCES)
    rows = {name: _padded(values, IDS, SEQUENCES) for name, values in columns.items() if values.is_floating_point()}
    inputs = {
        "prompt_ids": torch.zeros(3, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(3, 1),
        "completion_ids": torch.zeros(3, 10, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": rows["advantages"],
        "old_per_token_logps": rows["old_log_probs"],
        "ref_per_token_logps": rows["reference_log_probs"],
        "num_items_in_batch": mask.sum(),
    }
    correction = settings.pop("vllm_importance_sampling_mode", "")
    if correction:
        inputs["importance_sampling_ratio"] = _sampling_ratio(
            correction, rows["trainer_log_probs"], rows["old_log_probs"], mask
        )
        # The ratio of the policy is taken against the trainer's log-probabilities.
        inputs["old_per_token_logps"] = rows["trainer_log_probs"]
    per_token = _padded(log_probs, IDS, SEQUENCES)
    stub = _stub(
        **{
            "loss_type": "grpo",
            "importance_sampling_level": "token",
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
        }
        | settings,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (per_token, torch.zeros(3, 10), None),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=bool(correction),
        vllm_importance_sampling_correction=bool(correction),
        current_gradient_accumulation_steps=1,
        max_completion_length=max_tokens,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
    )
    return GRPOTrainer._compute_loss(stub, None, inputs)


BOUNDS = (0.7, 1.5)


def _sampling_ratio(mode: str, trained: Tensor, sampled: Tensor, mask: Tensor) -> Tensor:
    """Return the importance weights by the statements of TRL's method, which computes much else."""
    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    found = re.search(
        r"( +)mask = completion_mask if tool_mask.*?(?=\n +# Compute the per-token log prob)", source, re.S
    )
    assert found is not None, "TRL computes the ratio in other statements"
    stub = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=BOUNDS[0],
        vllm_importance_sampling_clip_max=BOUNDS[1],
    )
    names = {
        "self": stub,
        "torch": torch,
        "math": math,
        "completion_mask": mask,
        "tool_mask": None,
        "old_per_token_logps": trained,
        "sampling_per_token_logps": sampled,
    }
    exec(textwrap.dedent(found[0]), names)
    ratio: Tensor = names["vllm_importance_sampling_ratio"]
    return ratio


def _rollouts(mean: str) -> Example:
    """Return the example with the weights of a kind of mean."""
    case = example()
    is_sampled = (torch.tensor(IDS) >= 0).double()
    if mean == "rollout":
        for row, number in SEQUENCES:
            is_in = torch.tensor(IDS[row]) == number
            is_sampled[row][is_in] = 1 / is_in.double().sum() / 3
        case.columns["weights"] = is_sampled
    else:
        case.columns["weights"] = is_sampled / (is_sampled.sum() if mean == "token" else 3 * 12)
    return case


@pytest.mark.parametrize(
    ("mean", "settings", "loss"),
    [
        ("rollout", {}, policy(objective="clip")),
        ("rollout", {"beta": 0.3}, policy(objective="clip", kl=0.3)),
        ("token", {"loss_type": "dapo"}, policy(objective="clip")),
        ("constant", {"loss_type": "dr_grpo"}, policy(objective="clip")),
        (
            "token",
            {"loss_type": "cispo", "epsilon_high": 2.0, "beta": 0.1},
            policy(objective=make_part("objective", "cispo", clip_low=1.0, clip_high=1.0), kl=0.1),
        ),
        ("rollout", {"importance_sampling_level": "sequence"}, policy(objective="sequence")),
        (
            "token",
            {"loss_type": "dapo", "importance_sampling_level": "sequence", "beta": 0.3},
            policy(objective="sequence", kl=0.3),
        ),
        (
            "token",
            {"loss_type": "dapo", "vllm_importance_sampling_mode": "token_truncate"},
            policy(objective="clip", correction=make_part("correction", "clamp", low=0.7, high=1.5)),
        ),
        (
            "rollout",
            {"beta": 0.3, "vllm_importance_sampling_mode": "token_mask"},
            policy(objective="clip", kl=0.3, correction=make_part("correction", "mask", low=0.7, high=1.5)),
        ),
    ],
    ids=["grpo", "grpo-kl", "dapo", "dr_grpo", "cispo-kl", "gspo", "gspo-token-mean-kl", "tis", "icepop-kl"],
)
def test_grpo(mean, settings, loss):
    case = _rollouts(mean)
    if loss.objective == "sequence":
        # TRL has one advantage for each rollout.
        for row, number in SEQUENCES:
            is_in = torch.tensor(IDS[row]) == number
            case.columns["advantages"][row][is_in] = case.columns["advantages"][row][is_in][0].clone()
    _assert_equal(case, loss, _grpo(case, **settings))


PAIRS = [(0, 0), (0, 2), (1, 0)]
"""Row and first sequence of each pair."""


def _sequence_rows(values: Tensor, sequences: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return values and mask of the tokens of each sequence, [sequences, 10]."""
    return _padded(values, PAIR_IDS, sequences), _padded(torch.ones_like(values), PAIR_IDS, sequences)


def _reference(case: Example, sequences: list[tuple[int, int]]) -> Tensor:
    return torch.stack([case.columns["reference_log_probs"][row, number] for row, number in sequences])


def _batch(mask: Tensor) -> dict[str, Tensor]:
    """Return token ids and mask as TRL has them, with a prompt of one token."""
    completion_mask = torch.cat((torch.zeros(len(mask), 1), mask), 1)
    ids = torch.zeros(len(mask), 11, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completion_mask}


def _model(log_probs: Tensor) -> Any:
    """Return a model as TRL calls it: log-probabilities of the labels, 0 where a label is masked."""
    nothing = torch.zeros_like(log_probs)
    # TRL logs the values that follow the log-probabilities.
    outputs = SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    return lambda **inputs: outputs


@pytest.mark.parametrize("method", ["dpo", "ipo"])
def test_dpo_and_ipo_equal_trl(method):
    from trl import DPOTrainer

    case = pair_example()
    chosen, rejected = PAIRS, [(row, number + 1) for row, number in PAIRS]
    log_probs, mask = _sequence_rows(case.log_probs(), chosen + rejected)
    inputs = _batch(mask) | {
        "ref_chosen_logps": _reference(case, chosen),
        "ref_rejected_logps": _reference(case, rejected),
    }
    stub = _stub(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid" if method == "dpo" else "ipo"],
        loss_weights=[1.0],
        beta=0.4,
        label_smoothing=0.0,
        use_weighting=False,
    )
    theirs = DPOTrainer._compute_loss(stub, _model(log_probs), inputs, False)
    _assert_equal(case, preference(method=method, beta=0.4), theirs)


def test_simpo():
    from trl.experimental.cpo import CPOTrainer

    case = pair_example()
    log_probs, mask = _sequence_rows(case.log_probs(), PAIRS + [(row, number + 1) for row, number in PAIRS])
    mean = log_probs.sum(1) / mask.sum(1)
    stub = _stub(alpha=0.0, loss_type="simpo", simpo_gamma=0.7, beta=2.5, label_smoothing=0.0)
    losses, _, _ = CPOTrainer.cpo_loss(stub, mean[:3], mean[3:])
    _assert_equal(case, preference(method="simpo", beta=2.5, gamma=0.7), losses.mean())


def test_kto():
    from trl import KTOTrainer

    case = pair_example()
    total = 0.0
    for row, pairs in enumerate(([0, 2], [0])):
        sequences = [(row, number) for number in pairs]
        mismatched = [(row, number + 1) for number in pairs]
        log_probs, mask = _sequence_rows(case.log_probs(), sequences)
        kl_log_probs, _ = _sequence_rows(case.log_probs(), mismatched)
        batch = _batch(mask) | {
            "label": case.columns["is_desirable"][row, : len(pairs)],
            "ref_logps": _reference(case, sequences),
            "ref_KL_logps": _reference(case, mismatched),
        }
        stub = _stub(
            precompute_ref_logps=True,
            calculate_KL=True,
            loss_type="kto",
            beta=0.4,
            desirable_weight=1.0,
            undesirable_weight=1.3,
            _compute_kl_logps=lambda model, batch, kl=kl_log_probs: kl.sum(1),
        )
        # The divergence is estimated over the completions of a row, as TRL estimates it over a batch.
        total = total + KTOTrainer._compute_loss(stub, _model(log_probs), batch, False) * len(pairs) / 3
    _assert_equal(case, preference(method="kto", beta=0.4, undesirable_weight=1.3), total)
