"""A micro-batch of packed sequences on a head of its own, with columns of random numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.model.head import Head, ModelOutput
from moefold.model.loss_function import LossFunction, metrics_of
from moefold.model.loss_metrics import LossMetricRecorder

B, S, H, V = 2, 10, 6, 11
IDS = [[-1, 0, 0, 0, -1, -1, 1, 1, -1, -1], [-1, -1, 0, 0, 0, 0, 0, 0, 0, -1]]


@dataclass
class Example:
    """Hidden states and columns; the log-probabilities of the tokens follow from the head."""

    head: Head
    hidden: Tensor
    columns: dict[str, Tensor]

    def log_probs(self, temperature: float = 1.0) -> Tensor:
        """Return the log-probabilities of the labels, [B, S], by definition."""
        logits = self.hidden.transpose(0, 1) @ self.head.weight.t() / temperature
        return logits.log_softmax(-1).gather(-1, self.columns["labels"].unsqueeze(-1)).squeeze(-1)

    def output(self, metrics: LossMetricRecorder | None = None) -> ModelOutput:
        """Return the input of a loss function."""
        return ModelOutput(self.hidden, self.head, None, 0, metrics or LossMetricRecorder())

    def run(self, loss: LossFunction) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return the terms, the gradient of the hidden states and the metrics."""
        recorder = LossMetricRecorder(metrics_of(loss))
        terms = loss(self.output(recorder), self.columns)
        (gradient,) = torch.autograd.grad(terms.sum(), self.hidden)
        device = self.hidden.device
        return terms.detach(), gradient, recorder.by_name(recorder.sums(device), recorder.maxima(device))

    def expect(self, loss: Callable[[Tensor, Mapping[str, Tensor]], Tensor], temperature: float = 1.0) -> list[Tensor]:
        """Return value and gradient of a formula of the log-probabilities and the columns."""
        value = loss(self.log_probs(temperature), self.columns)
        return [value.detach(), *torch.autograd.grad(value, self.hidden)]


PAIR_IDS = [[-1, 0, 0, 0, -1, 1, 1, -1, 2, 3], [-1, 0, -1, 1, 1, 1, -1, -1, -1, -1]]
"""Two pairs in the first row, one in the second."""


def pair_example() -> Example:
    """Draw an example of pairs, whose reference is near the policy."""
    found = example()
    ids = torch.tensor(PAIR_IDS)
    counts = torch.stack([(ids == number).sum(1) for number in range(4)], 1)
    is_weighted = (ids >= 0) & (ids % 2 == 0)
    share = is_weighted.double() / counts.gather(1, ids.clamp(min=0)) / 3
    sums = torch.stack([found.log_probs().detach().where(ids == number, 0.0).sum(1) for number in range(4)], 1)
    noise = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found.columns |= {
        "sequence_ids": ids,
        "weights": share,
        "reference_log_probs": sums + noise,
        "is_desirable": torch.tensor([[True, False], [False, True]]),
    }
    return found


def example(temperature: float = 1.0, seed: int = 0) -> Example:
    """Draw an example; every log-probability is far from the sampler's, so that some ratios are beyond every bound."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    head = Head(ModelConfig(hidden_size=H, vocab_size=V)).double()
    head.weight.data.copy_(normal(V, H))
    hidden = normal(S, B, H).requires_grad_()
    ids = torch.tensor(IDS)
    columns = {
        "labels": torch.randint(V, (B, S), generator=generator),
        "sequence_ids": ids,
        "weights": torch.rand(B, S, generator=generator, dtype=torch.float64) * (ids >= 0),
        "advantages": normal(B, S),
    }
    found = Example(head, hidden, columns)
    for name, spread in (("old_log_probs", 0.6), ("trainer_log_probs", 0.5), ("reference_log_probs", 0.7)):
        columns[name] = found.log_probs(temperature).detach() + spread * normal(B, S)
        # A column may hold anything where no token was sampled.
        columns[name] = columns[name].where(ids >= 0, -1e30)
    return found
