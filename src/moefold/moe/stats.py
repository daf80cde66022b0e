"""What routing did during one optimizer step."""

import torch
from torch import Tensor


class RouterStats:
    """Sums over the micro-batches of a step, for the tokens of this rank; on the device, never waited for.

    A micro-batch is counted when its gradient passes the layer: once, also where its forward pass is recomputed, and
    never at evaluation.
    """

    def __init__(self, num_experts: int) -> None:
        self.tokens_per_expert_E = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        """Copies routed to each expert of the model, before any is dropped."""
        self.routed_tokens = torch.zeros((), dtype=torch.int64, device="cpu")
        """Copies routed in all."""
        self.dropped = torch.zeros((), dtype=torch.int64, device="cpu")
        """Copies dropped."""
        self.aux = torch.zeros((), dtype=torch.float64, device="cpu")
        """My part of the load-balancing loss as it is optimised: with its coefficient, mean over micro-batches."""
        self.z = torch.zeros((), dtype=torch.float64, device="cpu")
        """My part of the z-loss as it is optimised."""
        self.entropy = torch.zeros((), dtype=torch.float64, device="cpu")
        """Sum over tokens of the entropy of their scores, in nats."""
        self.thresholds_E = torch.zeros(num_experts, dtype=torch.float64, device="cpu")
        """My part of the sum over micro-batches of the thresholds of quantile balancing."""

    def add(
        self,
        tokens_per_expert_E: Tensor,
        *,
        entropy: Tensor,
        dropped: Tensor | None,
        aux: Tensor | None,
        z: Tensor | None,
        thresholds_E: Tensor | None,
    ) -> None:
        """Count one micro-batch; None counts as zero."""
        self._move_to(tokens_per_expert_E.device)
        self.tokens_per_expert_E += tokens_per_expert_E
        self.routed_tokens += tokens_per_expert_E.sum()
        self.entropy += entropy
        if dropped is not None:
            self.dropped += dropped
        if aux is not None:
            self.aux += aux
        if z is not None:
            self.z += z
        if thresholds_E is not None:
            self.thresholds_E += thresholds_E

    def reset(self) -> None:
        """Begin a new step."""
        for total in vars(self).values():
            total.zero_()

    def _move_to(self, device: torch.device) -> None:
        if self.routed_tokens.device != device:
            for name, total in vars(self).items():
                setattr(self, name, total.to(device))
