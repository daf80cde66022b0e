"""Samples completions from the model that is being trained, on its own mapping and weights."""

from collections.abc import Sequence

import torch

from moefold.data.index_shuffle import draw_bits, hash_ints
from moefold.inference.engine.requests import Completion, Request
from moefold.inference.generate import sample_inverse_cdf
from moefold.inference.sampling import SamplingParams
from moefold.parallel.inference_model import InferenceModel, KVCacheDecoder
from moefold.parallel.parallel_model import ParallelModel

_TO_UNIT = 2.0**-53


class _TrainingView(InferenceModel):
    """A training model as an inference model; it shares the weights."""

    def __init__(self, model: ParallelModel) -> None:
        (self.stage,) = model.stages
        self.cfg = self.stage.cfg
        self.groups = model.groups
        self.positions = model.positions
        self._pending_send = None


class RolloutSampler:
    """Samples completions of a batch of prompts from a training model."""

    def __init__(self, model: ParallelModel, sampling: SamplingParams) -> None:
        self._model = model
        self._sampling = sampling

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completion of each request."""
        self._model.train(False)
        try:
            with self._model.cast_copies.fresh():
                return self._decode(requests)
        finally:
            self._model.train(True)

    def _decode(self, requests: Sequence[Request]) -> list[Completion]:
        view = _TrainingView(self._model)
        lengths_B = torch.tensor([len(request.prompt) for request in requests])
        longest = int(lengths_B.max())
        tokens = torch.zeros(len(requests), longest, dtype=torch.int64)
        for i, request in enumerate(requests):
            tokens[i, : len(request.prompt)] = torch.as_tensor(request.prompt)
        max_tokens = max(request.max_tokens for request in requests)
        keys = [hash_ints(self._sampling.seed, r.prompt_number, r.sample_number) for r in requests]
        found: list[list[int]] = [[] for _ in requests]
        log_probs: list[list[float]] = [[] for _ in requests]
        reasons = ["" for _ in requests]
        first_B = torch.zeros_like(lengths_B)
        picked_B = lengths_B - 1
        num_keys = longest
        temperature = self._sampling.temperature
        with KVCacheDecoder(view, longest + max_tokens) as decoder:
            for step in range(max_tokens):
                logits = decoder.forward(tokens, first_B, picked_B, num_keys).float()
                log_probs_BV = (logits / (temperature or 1.0)).log_softmax(-1)
                if temperature == 0:
                    chosen = log_probs_BV.argmax(-1)
                else:
                    draws = [int(draw_bits(hash_ints(key, step), 1)[0] >> 11) * _TO_UNIT for key in keys]
                    probs = (logits.double() / temperature).softmax(-1)
                    chosen = sample_inverse_cdf(probs, torch.tensor(draws, dtype=torch.float64))
                values = log_probs_BV.gather(1, chosen[:, None])[:, 0].tolist()
                for i, (token, value) in enumerate(zip(chosen.tolist(), values, strict=True)):
                    if reasons[i]:
                        continue
                    found[i].append(token)
                    log_probs[i].append(value)
                    if token in requests[i].eos_ids:
                        reasons[i] = "eos"
                    elif len(found[i]) == requests[i].max_tokens:
                        reasons[i] = "length"
                if all(reasons):
                    break
                tokens = chosen.unsqueeze(1)
                picked_B = torch.zeros_like(lengths_B)
                first_B = lengths_B + step
                num_keys = longest + step + 1
        return [
            Completion(tokens=tuple(t), log_probs=tuple(p), finish_reason=reason)  # type: ignore[arg-type]
            for t, p, reason in zip(found, log_probs, reasons, strict=True)
        ]
