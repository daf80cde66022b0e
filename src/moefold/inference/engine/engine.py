"""Generation engine: continuous batching over a paged KV cache, for an inference model or a model in training."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.comm.collectives import all_reduce_max, broadcast
from moefold.comm.host_copy import copy_to_device, copy_together_to_device
from moefold.cost.kv_cache import CacheSizes, page_positions
from moefold.inference.engine.draw import Draw, UniformStream, check_drawn, choose_tokens
from moefold.inference.engine.pages import PageTableReader, cache_pages, check_longest, most_positions, pages_needed
from moefold.inference.engine.requests import (
    Completion,
    EngineSettings,
    FinishReason,
    LogitRules,
    NewToken,
    PromptScore,
    Request,
)
from moefold.inference.engine.scheduler import Pass, PassLimits, PassScheduler, PassSegment
from moefold.inference.sampling import SamplingParams
from moefold.model.layer_cache import CacheSize, PassRows
from moefold.model.loss import token_log_probs
from moefold.ops.cpu.draw import NO_TOKEN
from moefold.parallel.inference_model import ForwardChain, InferenceModel
from moefold.parallel.paged_decoder import PagedDecoder, forward_chain, shares_experts_over_samples
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.routing_cache import merge_over_tp

logger = logging.getLogger(__name__)


class Constraint(Protocol):
    """State of a grammar after the tokens of one sample."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return the mask of allowed next tokens, [V]. At least one is allowed."""
        ...

    def push(self, token: int) -> None:
        """Add an allowed token."""
        ...


Constrain = Callable[[Request], Constraint]
"""Starts the grammar of a request."""

TokenCallback = Callable[[int, int], None]
"""Callback for each new token: (request index, token)."""
StopCondition = Callable[[int, Sequence[int]], bool]
"""Predicate for a complete sample: (request index, its new tokens). Equal on all ranks of a dp rank."""


@dataclass
class _OpenSample:
    request: Request
    sampling: SamplingParams
    uniforms: UniformStream
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    expert_ids: NDArray[np.integer] | None = None
    prompt_scores: dict[int, PromptScore] = field(default_factory=dict)
    """Scores of the tokens of the prompt, by position."""
    constraint: Constraint | None = None
    """State of the grammar, on the rank that draws."""

    def next_draw(self) -> Draw:
        is_greedy = self.sampling.temperature == 0
        return Draw(self.sampling, 0.0 if is_greedy else self.uniforms[len(self.tokens)])


def model_cache_sizes(model: InferenceModel | ParallelModel) -> CacheSizes:
    """Return the sizes of the caches of a model's ranks."""
    stage = model.stages[0]
    positions = page_positions(model.groups.device.type)
    return CacheSizes(stage.config, model.stage_plan, model.groups.layout.tp, stage.dtype.itemsize, positions)


class GenerationEngine:
    """Generates completions of any number of requests at once.

    The tokens and log-probabilities of a request do not depend on the other requests or the settings. Ranks of tp and
    pp pass the same requests. Ranks of dp (and of cp, which acts like dp) pass their own.

    Args:
        model: an inference model, or a model in training, whose weights are used in place.
        records_routing: whether completions contain the chosen experts of their tokens.

    Raises:
        ConfigError: the cache is smaller than one page.
    """

    def __init__(
        self,
        model: InferenceModel | ParallelModel,
        settings: EngineSettings,
        sampling: SamplingParams,
        *,
        records_routing: bool = False,
    ) -> None:
        self._model = model
        self._settings = settings
        self._sampling = sampling
        self._records_routing = records_routing
        sizes = model_cache_sizes(model)
        self._page_positions = sizes.page_positions
        self._max_pages = cache_pages(sizes, settings)

    @contextmanager
    def open(self, num_pages: int, constrain: Constrain | None = None) -> Iterator["GenerationSession"]:
        """Open a generation, which accepts new requests while others run. It is collective over all ranks.

        The weights must not change inside this context. Requests with a grammar need `constrain`.
        """
        with ExitStack() as stack:
            chain = stack.enter_context(forward_chain(self._model))
            size = CacheSize(num_pages=num_pages, page_positions=self._page_positions, kind=self._settings.cache)
            decoder = stack.enter_context(PagedDecoder(chain, size, records_routing=self._records_routing))
            limits = PassLimits(
                slots=self._settings.slots,
                pass_tokens=self._settings.pass_tokens,
                num_pages=num_pages,
                page_positions=self._page_positions,
                share_prompts=self._settings.share_prompts,
            )
            yield GenerationSession(
                chain, decoder, PassScheduler(limits), self._sampling, constrain, records_routing=self._records_routing
            )
        if isinstance(self._model, InferenceModel) and (message := self._model.record_kernel_times()):
            logger.info("%s", message)

    def generate(
        self,
        requests: Sequence[Request],
        on_token: TokenCallback | None = None,
        is_complete: StopCondition | None = None,
    ) -> list[Completion]:
        """Generate a completion of every request, in their order. It is collective over all ranks.

        Args:
            requests: requests of this data-parallel rank, possibly none.
            on_token: called for each new token, including the end-of-text token, on every rank of the requests.
            is_complete: stop condition, called after each new token that does not end its sample.

        Raises:
            ConfigError: the cache of a rank is too small for a request. Raised on all ranks.
        """
        num_pages = pages_needed(requests, self._settings, self._page_positions)
        if self._max_pages is not None:
            groups = self._model.groups
            longest = torch.tensor([most_positions(requests)], device=groups.device)
            check_longest(int(all_reduce_max(longest, groups.attn.stage)), self._max_pages, self._page_positions)
            num_pages = min(num_pages, self._max_pages)
        completions: list[Completion | None] = [None] * len(requests)
        with self.open(num_pages) as generation:
            for request_id, request in enumerate(requests):
                generation.add(request_id, request)
            recorder = self._model.groups.recorder
            while generation.any_rank_has_work():
                recorder.note_progress()
                for new in generation.step(is_complete):
                    if on_token is not None:
                        on_token(new.request_id, new.token)
                    if new.finish_reason is not None:
                        completions[new.request_id] = generation.pop(new.request_id, new.finish_reason)
        return self._with_merged_routing([completion for completion in completions if completion is not None])

    def _with_merged_routing(self, completions: list[Completion]) -> list[Completion]:
        """Merge the recorded experts of all tensor-parallel ranks. It is collective over tp."""
        routed = [completion.expert_ids for completion in completions if completion.expert_ids is not None]
        if not routed:
            return completions
        groups = self._model.groups
        merged = merge_over_tp(routed, groups.attn.tp, groups.device)
        return [replace(completion, expert_ids=ids) for completion, ids in zip(completions, merged, strict=True)]


class GenerationSession:
    """Samples that are generated together. See `GenerationEngine.open`."""

    def __init__(
        self,
        chain: ForwardChain,
        decoder: PagedDecoder,
        scheduler: PassScheduler,
        sampling: SamplingParams,
        constrain: Constrain | None = None,
        *,
        records_routing: bool = False,
    ) -> None:
        self._chain = chain
        self._constrain = constrain
        self._decoder = decoder
        self._scheduler = scheduler
        self._sampling = sampling
        self._records_routing = records_routing
        self._open: dict[int, _OpenSample] = {}
        self._table_reader = PageTableReader(scheduler.pool)
        self._steps_together = shares_experts_over_samples(chain)

    def add(self, request_id: int, request: Request) -> None:
        """Add a request that fits into the cache. See `check_requests`.

        `request_id` is unique among the samples that are not popped. Smaller ids have priority.
        """
        assert request.prompt, "a prompt has at least one token"
        sampling = request.sampling or self._sampling
        self._open[request_id] = _OpenSample(request, sampling, UniformStream(sampling.seed, request))
        self._scheduler.add(request_id, request)

    def cancel(self, request_id: int) -> None:
        """Remove an incomplete sample."""
        del self._open[request_id]
        self._scheduler.finish(request_id)

    def pop(self, request_id: int, finish_reason: FinishReason) -> Completion:
        """Return a complete sample and remove it from the engine."""
        sample = self._open.pop(request_id)
        return Completion(
            tokens=tuple(sample.tokens),
            log_probs=tuple(sample.log_probs),
            finish_reason=finish_reason,
            expert_ids=sample.expert_ids,
        )

    @property
    def has_work(self) -> bool:
        """Return whether this rank has an unfinished sample."""
        return self._scheduler.has_work

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions on this rank: a sample lost its pages and was recomputed."""
        return self._scheduler.num_preemptions

    def any_rank_has_work(self) -> bool:
        """Return whether this rank must take part in another `step`. It is collective over ranks that step together."""
        if not self._steps_together:
            return self._scheduler.has_work
        groups = self._chain.groups
        flag = torch.tensor([self._scheduler.has_work], dtype=torch.int32, device=groups.device)
        return bool(all_reduce_max(flag, groups.attn.stage))

    def step(self, is_complete: StopCondition | None = None) -> list[NewToken]:
        """Run one forward pass, without rows if this rank has no work, and return the new tokens. It is collective."""
        work = self._scheduler.next_pass() if self._scheduler.has_work else Pass([], [], [])
        self._decoder.copy_pages(work.copies)
        self._decoder.copy_states(work.state_copies)
        device = self._chain.groups.device
        tokens_R, rows, picked_N = _pass_tensors(
            work.segments, device, self._scheduler.page_positions, self._table_reader
        )
        request_ids = [segment.request_id for segment in work.segments if segment.request_id >= 0]
        scored = (
            [] if all(segment.scored_id < 0 for segment in work.segments) else self._scored_prompt_rows(work.segments)
        )
        if scored:
            scored_rows = copy_to_device(torch.tensor([token.row for token in scored]), picked_N.device)
            picked_N = torch.cat([picked_N, scored_rows])
        logits_NV = self._decoder.forward(tokens_R, rows, picked_N)
        if scored:
            self._record_prompt_scores(None if logits_NV is None else logits_NV[len(request_ids) :], scored)
            logits_NV = None if logits_NV is None else logits_NV[: len(request_ids)]
        if not request_ids:
            return []
        samples = [self._open[request_id] for request_id in request_ids]
        return self._advance(request_ids, samples, self._draw(logits_NV, samples), is_complete)

    def _scored_prompt_rows(self, segments: Sequence[PassSegment]) -> list["_ScoredToken"]:
        """Return the rows of a pass whose next token belongs to a scored prompt."""
        scored = []
        end = 0
        for segment in segments:
            start, end = end, end + len(segment.tokens)
            if segment.scored_id < 0:
                continue
            prompt = self._open[segment.scored_id].request.prompt
            positions = range(segment.first, min(segment.first + len(segment.tokens), len(prompt) - 1))
            scored += [
                _ScoredToken(start + position - segment.first, segment.scored_id, position + 1, prompt[position + 1])
                for position in positions
            ]
        return scored

    def _record_prompt_scores(self, logits_MV: Tensor | None, scored: Sequence["_ScoredToken"]) -> None:
        """Record the log-probabilities of tokens of prompts. It is collective over the ranks of these requests."""
        groups = self._chain.groups
        alternatives = [self._open[token.request_id].request.prompt_alternatives or 0 for token in scored]
        count = max(alternatives)
        results_XM = torch.zeros(1 + 2 * count, len(scored), dtype=torch.float64, device=groups.device)
        if logits_MV is not None:
            tokens_M = copy_to_device(torch.tensor([token.token for token in scored]), groups.device)
            results_XM[0] = self._log_probs(logits_MV, tokens_M)
            if count:
                stage = self._chain.last_stage
                assert stage is not None
                results_XM[1:] = _most_likely(stage.head.vocab_parallel.gather(logits_MV), count)
        rows = self._chain.broadcast_from_last_stage(results_XM).t().tolist()
        for token, num_best, (log_prob, *best) in zip(scored, alternatives, rows, strict=True):
            score = PromptScore(log_prob, _alternatives(token.token, log_prob, best, num_best))
            self._open[token.request_id].prompt_scores[token.position] = score

    def _log_probs(self, logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
        """Return the log-probabilities of tokens, [N], from logits of this rank's vocabulary shard."""
        stage = self._chain.last_stage
        assert stage is not None
        return token_log_probs(logits_NV, tokens_N, stage.head.vocab_parallel.vocab_range, stage.head.cross_entropy_ops)

    def _changed_logits(self, whole_NV: Tensor, samples: Sequence[_OpenSample]) -> Tensor:
        """Return the logits for the draws: the logits of samples with rules are changed."""
        if all(sample.request.rules is None for sample in samples):
            return whole_NV
        changed_NV = whole_NV.clone()
        for row_V, sample in zip(changed_NV, samples, strict=True):
            rules = sample.request.rules
            if rules is None:
                continue
            if rules.grammar and sample.constraint is None:
                assert self._constrain is not None, "a request with a grammar"
                sample.constraint = self._constrain(sample.request)
            change_logits(row_V, sample.request, rules, sample.tokens, sample.constraint)
        return changed_NV

    def _draw(self, logits_NV: Tensor | None, samples: Sequence[_OpenSample]) -> list[list[float]]:
        """Draw the next token of each sample on the last stage. Return the results on every rank, a list for each kind.

        These are the tokens and their log-probabilities, and with alternatives the ids of the most likely tokens and
        their log-probabilities, in descending order.
        """
        groups = self._chain.groups
        count = max([sample.request.num_alternatives for sample in samples])
        results_XN = torch.zeros(2 + 2 * count, len(samples), dtype=torch.float64, device=groups.device)
        stage = self._chain.last_stage
        if logits_NV is not None:
            assert stage is not None
            draws = [sample.next_draw() for sample in samples]
            whole_NV = stage.head.vocab_parallel.gather(logits_NV)
            tokens_N = torch.zeros(len(samples), dtype=torch.int64, device=groups.device)
            if groups.attn.tp.rank == 0:
                tokens_N = choose_tokens(self._changed_logits(whole_NV, samples), draws, stage.kernels.draw)
                _advance_grammars(samples, tokens_N)
            # Only one rank draws: ranks with different rounding could disagree.
            tokens_N = broadcast(tokens_N, groups.attn.tp, 0)
            scaled_NV = _divide_by_temperature(logits_NV, draws)
            results_XN[0] = tokens_N
            results_XN[1] = self._log_probs(scaled_NV, tokens_N.clamp(min=0))
            if count:
                results_XN[2:] = _most_likely(_divide_by_temperature(whole_NV, draws), count)
        # The only time that a pass waits for the device.
        results: list[list[float]] = self._chain.broadcast_from_last_stage(results_XN).tolist()
        check_drawn(results[0])
        return results

    def _advance(
        self,
        request_ids: Sequence[int],
        samples: Sequence[_OpenSample],
        results: Sequence[Sequence[float]],
        is_complete: StopCondition | None,
    ) -> list[NewToken]:
        """Append the tokens of `_draw` to their samples, and finish complete ones."""
        new_tokens = []
        for request_id, sample, number, log_prob, *best in zip(request_ids, samples, *results, strict=True):
            request = sample.request
            token = int(number)
            scores: tuple[PromptScore, ...] = ()
            if sample.prompt_scores and not sample.tokens:
                scores = tuple(sample.prompt_scores[position] for position in range(1, len(request.prompt)))
            sample.tokens.append(token)
            sample.log_probs.append(log_prob)
            reason: FinishReason | None = None
            if token in request.eos_ids:
                reason = "eos"
            elif is_complete is not None and is_complete(request_id, sample.tokens):
                reason = "stop"
            elif len(sample.tokens) == request.max_tokens:
                reason = "length"
            if reason is None:
                self._scheduler.append(request_id, token)
            else:
                if self._records_routing:
                    sample.expert_ids = self._decoder.recorded_choices(self._scheduler.cached_slots(request_id))
                self._scheduler.finish(request_id)
            alternatives = _alternatives(token, log_prob, best, request.num_alternatives) if best else ()
            new_tokens.append(NewToken(request_id, token, log_prob, reason, alternatives, scores))
        return new_tokens


def _advance_grammars(samples: Sequence[_OpenSample], tokens_N: Tensor) -> None:
    if all(sample.constraint is None for sample in samples):
        return
    for sample, token in zip(samples, tokens_N.tolist(), strict=True):
        if sample.constraint is not None and token != NO_TOKEN:
            sample.constraint.push(token)


class _ScoredToken(NamedTuple):
    """Token of a prompt whose log-probability is reported."""

    row: int
    """Row of the pass whose logits predict it."""
    request_id: int
    """Id of the sample."""
    position: int
    token: int


def _most_likely(logits_NV: Tensor, count: int) -> Tensor:
    """Return the ids of the most likely tokens, then their log-probabilities, [2 * count, N]."""
    best = logits_NV.float().log_softmax(1).topk(count)
    return torch.cat([best.indices.t().double(), best.values.t().double()])


def _alternatives(token: float, log_prob: float, best: Sequence[float], count: int) -> tuple[tuple[int, float], ...]:
    """Return the first most likely tokens with their log-probabilities. `best` has the ids, then the log-probabilities.

    The loss computes `log_prob`, of `token`, in another order of sums.
    """
    half = len(best) // 2
    pairs = zip(best[: min(count, half)], best[half:], strict=False)
    return tuple((int(token_id), log_prob if token_id == token else value) for token_id, value in pairs)


def _pass_tensors(
    segments: Sequence[PassSegment], device: torch.device, page_positions: int, table_reader: PageTableReader
) -> tuple[Tensor, PassRows, Tensor]:
    """Return the tokens [R], the rows, and the rows whose next token is drawn [N]."""
    counts = [len(segment.tokens) for segment in segments]
    tokens = np.array([token for segment in segments for token in segment.tokens], np.int64)
    lasts = [segment.first + count - 1 for segment, count in zip(segments, counts, strict=True)]
    firsts = np.array([segment.first for segment in segments], np.int64)
    segment_of_row = np.arange(len(segments))
    positions = firsts
    ends = list(accumulate(counts))
    if len(tokens) > len(segments):
        segment_of_row = segment_of_row.repeat(counts)
        # Consecutive positions of each segment: the row number minus the number of the segment's first row.
        positions = np.arange(len(tokens)) + (firsts - ends + counts)[segment_of_row]
    tables = table_reader.read([segment.table for segment in segments])
    drawn_rows = [end - 1 for end, segment in zip(ends, segments, strict=True) if segment.request_id >= 0]
    pages = tables[segment_of_row, positions // page_positions]
    slots = pages.astype(np.int64) * page_positions + positions % page_positions
    state_slots = [segment.state_slot for segment in segments]
    tokens_R, slots_R, positions_R, tables_NP, state_slots_N, picked_N = copy_together_to_device(
        (tokens, slots, positions, tables, np.array(state_slots, np.int64), np.array(drawn_rows, np.int64)), device
    )
    num_state_slots = 1 + max(state_slots, default=-1)
    rows = PassRows(slots_R, positions_R, tables_NP, counts, lasts, state_slots_N, num_state_slots)
    return tokens_R, rows, picked_N


def _divide_by_temperature(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Divide each row by its temperature. Rows of temperature 0 are unchanged."""
    values = [draw.params.temperature or 1.0 for draw in draws]
    temperature = values[0]
    if values.count(temperature) == len(values):
        return logits_NV if temperature == 1 else logits_NV / temperature
    return logits_NV / copy_to_device(torch.tensor(values, dtype=logits_NV.dtype), logits_NV.device).unsqueeze(1)


def change_logits(
    logits_V: Tensor, request: Request, rules: LogitRules, tokens: Sequence[int], constraint: Constraint | None
) -> None:
    """Change the logits of a sample's next token over the whole vocabulary in place, after its new tokens so far."""
    device = logits_V.device
    if rules.bias:
        ids, values = zip(*rules.bias, strict=True)
        logits_V[list(ids)] += torch.tensor(values, dtype=logits_V.dtype, device=device)
    if rules.repetition_penalty != 1:
        used_tokens = sorted({*request.prompt, *tokens})
        logits = logits_V[used_tokens]
        logits_V[used_tokens] = torch.where(
            logits > 0, logits / rules.repetition_penalty, logits * rules.repetition_penalty
        )
    counts = Counter(tokens)
    if counts and (rules.frequency_penalty or rules.presence_penalty):
        penalties = [count * rules.frequency_penalty + rules.presence_penalty for count in counts.values()]
        logits_V[list(counts)] -= torch.tensor(penalties, dtype=logits_V.dtype, device=device)
    if len(tokens) < rules.min_tokens and len(request.eos_ids) < len(logits_V):
        logits_V[sorted(request.eos_ids)] = -torch.inf
    if constraint is not None:
        logits_V.masked_fill_(~torch.from_numpy(constraint.allowed()).to(device), -torch.inf)
