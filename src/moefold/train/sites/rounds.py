"""Rounds of a run with sites: each exchanges weights with the other sites and takes an outer step."""

import hashlib
import json
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_sum
from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import current_world
from moefold.comm.site_links import ExchangeResult, Probe, SiteRound
from moefold.config.model import ModelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.config.sections.train import TrainConfig
from moefold.errors import SIGNAL_STATUS
from moefold.launch.meet_client import MeetError
from moefold.launch.meeting import describe_sites
from moefold.launch.signed_lines import Message
from moefold.message_text import first_line
from moefold.ops.tensor_hash import TensorHasher
from moefold.optim.outer import OuterOptimizer
from moefold.optim.outer_round import PendingRound, SentVector
from moefold.parallel.fsdp import reshard_parameters
from moefold.topology.fragments import RoundCalendar
from moefold.train.callbacks.callback import CallbackStage, FinishedStep, StageCallback, TrainingContext
from moefold.train.signals import SIGNALS
from moefold.train.sites.meeting import Arrival, SiteMeeting
from moefold.train.sites.routing_probe import RoutingProbe, count_equal_choices
from moefold.train.sites.transfer import SiteStateTransfer, outer_of

WAIT_S = 1.0
"""Interval between two progress reports of a rank that waits for an exchange."""


@dataclass(frozen=True, kw_only=True)
class _Differences:
    """Differences of fragments that a site has taken for a round."""

    step: int
    due: int
    fragments: tuple[int, ...]
    delta: Tensor
    is_finite: bool
    """True if the weights of all ranks of the site were finite."""
    tokens: int
    """Tokens of this site when the differences were taken."""
    began_s: float

    @property
    def is_overlapped(self) -> bool:
        """Return whether the site trains during the exchange."""
        return self.due > self.step


@dataclass(frozen=True)
class _RunningExchange:
    """An exchange under way. The sites have not voted on it yet."""

    differences: _Differences
    sent: SentVector
    round: SiteRound
    exchange: "Future[ExchangeResult] | None"
    """Result of the exchange, or None in a round of one site."""

    def wait(self, recorder: FlightRecorder) -> tuple[ExchangeResult | None, str]:
        """Wait for the exchange of this rank and return its result, or the reason of its failure."""
        if self.exchange is None:
            vector, num_coded, num_gathered = self.sent
            gathered = vector[num_coded - num_gathered : num_coded].unsqueeze(0)
            return ExchangeResult(vector, vector, 0, 0.0, gathered), ""
        try:
            while True:
                try:
                    return self.exchange.result(WAIT_S), ""
                except TimeoutError:
                    if self.exchange.done():
                        raise
                    # Every part of the exchange has its own time limit.
                    recorder.note_progress()
        except (RuntimeError, MeetError, TimeoutError) as error:
            return None, f"the exchange with {describe_sites(self.round.members)} failed: {first_line(error)}"


class SiteRounds(StageCallback):
    """Callback that takes the outer step of a round. A round that is skipped changes nothing."""

    stage = CallbackStage.ROUNDS

    def __init__(
        self, run: RunConfig, model: ModelConfig, train: TrainConfig, sites: SitesConfig, settings: dict[str, Any]
    ) -> None:
        self._context: TrainingContext
        """Set when the run starts."""
        self._run = run
        self._model = model
        self._sites = sites
        self._calendar = RoundCalendar(run, model, sites)
        self._settings = settings
        self._meeting: SiteMeeting | None = None
        self._running_exchange: _RunningExchange | None = None
        self._record: dict[str, Any] = {}
        self._num_skipped = 0
        self._probe = RoutingProbe(model, train, sites.number)
        self._logged_wait = ""
        self._transfer: SiteStateTransfer | None = None
        self._transfer_order: Message | None = None
        """Order of the meeting point to give the state to another site after this round."""

    def on_start(self, context: TrainingContext) -> None:
        """Meet the other sites. It is collective.

        Raises:
            ConfigError: the settings or weights differ from the other sites'.
            RunError: the meeting point cannot be reached, or the state of another site did not arrive.
        """
        self._context = context
        context.before_save.append(self._decide)
        if self._sites.count == 1:
            return
        outer = outer_of(context)
        frozen = {name: p.data for name, p in context.training.parameters.items() if not p.requires_grad}
        device = context.groups.device
        frozen_hash = {"the hash of the frozen weights": hash_of_ranks(frozen, device)} if frozen else {}
        self._meeting = SiteMeeting(self._sites, self._settings | frozen_hash, context.groups.rank)
        registration = self._position(context.position.step, outer)
        digest = hash_of_ranks(outer.weights, device)
        # A pending round is counted, but not yet in the outer weights.
        weights = {"weights": digest} if outer.pending is None else {}
        found = self._meeting.ask_until_ready(registration | weights, self._poll)
        if found is Arrival.STOPPED:
            return
        # The round after the present step will still follow.
        links = self._meeting.connect(lambda: self._position(context.position.step - 1, outer))
        self._transfer = SiteStateTransfer(self._calendar, links)
        if found is Arrival.MISSED:
            self._receive_state()

    def complete(self, context: TrainingContext, step: FinishedStep) -> FinishedStep:
        """Apply the round that is due, and begin one. It is collective."""
        is_last = step.number == self._run.steps
        outer = outer_of(context)
        fragments = self._calendar.fragments_due(step.number)
        differences = outer.pending if self._running_exchange is None else self._running_exchange.differences
        due = 0 if differences is None else differences.due
        if due and (step.number >= due or is_last):
            context.groups.recorder.set_phase("waiting for the exchange with the other sites")
            self._decide()
            step = replace(step, sites=self._apply(is_overlapped=True))
            self._send_state()
        elif fragments:
            outer.skip()
        if not fragments:
            return step
        context.groups.recorder.set_phase("exchanging weights with the other sites")
        overlap = 0 if is_last else self._sites.overlap
        if not self._begin(step.number, fragments, overlap):
            self._receive_state()
            return replace(step, is_last=context.position.step == self._run.steps)
        if not overlap or self._running_exchange is None:
            self._decide()
            step = replace(step, sites=self._apply(is_overlapped=False))
            self._send_state()
        return step

    def on_rollback(self, context: TrainingContext) -> None:
        """Discard the round under way, as the weights of its differences are gone, in runs of one site."""
        self._running_exchange = None
        self._record = {}

    def on_end(self, context: TrainingContext, status: int) -> None:
        """Leave the meeting point."""
        if self._meeting is not None:
            self._meeting.leave()

    def on_error(self, context: TrainingContext, error: Exception) -> None:
        """Close the connections, which tells the meeting point that the site is gone."""
        if self._meeting is not None:
            self._meeting.close()

    @property
    def _outer(self) -> OuterOptimizer:
        return outer_of(self._context)

    def _position(self, step: int, outer: OuterOptimizer) -> Message:
        """Return the position of this site after a step, for the meeting point."""
        return {
            "step": step,
            "round": self._calendar.rounds_until(step),
            "version": outer.num_rounds,
        }

    def _poll(self, answer: Message) -> bool:
        """Return whether a signal ends the wait for the other sites. It is collective."""
        self._context.groups.recorder.set_phase("waiting for the other sites")
        awaited = describe_wait(answer, self._sites.meet)
        if self._logged_wait != awaited and self._context.log is not None:
            self._context.log.message(awaited)
        self._logged_wait = awaited
        raised = [
            any(flags) for flags in zip(*current_world().all_gather_object(self._context.stop.flags), strict=True)
        ]
        if any(raised):
            self._context.status = SIGNAL_STATUS + SIGNALS[raised.index(True)]
        return any(raised)

    def _receive_state(self) -> None:
        """Take over the state of another site, because this site lacks rounds, and begin its next round. Collective."""
        assert self._meeting is not None
        assert self._transfer is not None
        self._logged_wait = ""
        offer = self._meeting.ask_for_sender(self._poll)
        if offer is not None:
            self._transfer.receive(self._context, offer)
        # Where a round is exchanged during the whole next round, the state is given between two rounds of the same
        # step, and the sender begins the second.
        step = self._context.position.step
        fragments = self._calendar.fragments_due(step)
        if self._sites.part.overlaps_whole_round and fragments and step < self._run.steps and self._context.status == 0:
            self._begin(step, fragments, self._sites.overlap)

    def _send_state(self) -> None:
        """Send the state of this site to a joining site, if the meeting point orders it. Local to each rank."""
        order, self._transfer_order = self._transfer_order, None
        if order is not None and self._transfer is not None:
            self._transfer.send(self._context, order)

    def _begin(self, step: int, fragments: tuple[int, ...], overlap: int) -> bool:
        """Take the differences of fragments, and start to exchange them. Collective.

        Returns:
            False if the other sites have applied rounds without this one.
        """
        differences = self._take(step, fragments, overlap)
        self._record = {"fragment": fragments[0] if len(fragments) == 1 else -1, "members": 0, "skipped": None}
        if self._meeting is None:
            if differences.is_finite:
                self._send(differences, SiteRound("", (0,), (1.0,)), None)
            else:
                self._skip(step, "the weights are not finite")
            return True
        # Read the choices before the other sites wait for this site.
        probe = self._probe.read(self._context) if self._calendar.is_probed(step) else None
        answer = self._meeting.ask_for_round(self._round_request(differences))
        if answer is None:
            return False
        self._transfer_order = answer.transfer_order
        if answer.is_unpaired:
            # Its difference keeps growing.
            self._record["members"] = 1
        elif answer.round is None:
            self._skip(step, answer.skip)
        else:
            if answer.nonfinite and self._context.log is not None:
                nonfinite = describe_sites(answer.nonfinite)
                self._context.log.message(
                    f"step {step}: {nonfinite} sent weights that are not finite; weight 0 in this round"
                )
            self._send(differences, answer.round, probe)
        return True

    def _take(self, step: int, fragments: tuple[int, ...], overlap: int) -> _Differences:
        """Take the differences of fragments after a step. Collective."""
        began_s = time.perf_counter()
        reshard_parameters(self._context.training.model.stages)
        delta = self._outer.difference(fragments)
        return _Differences(
            step=step,
            due=step + overlap,
            fragments=fragments,
            delta=delta,
            is_finite=all(current_world().all_gather_object(bool(torch.isfinite(delta).all()))),
            tokens=self._context.position.tokens,
            began_s=began_s,
        )

    def _round_request(self, differences: _Differences) -> Message:
        """Return the request for a round, for the meeting point. Collective."""
        outer = self._outer
        in_pairs = self._sites.part.in_pairs
        return self._position(differences.step, outer) | {
            "do": "round",
            "tokens": self._weight(differences.fragments),
            "finite": differences.is_finite,
            # The outer weights of pairs differ.
            "digest": 0 if in_pairs else hash_of_ranks(outer.weights, self._context.groups.device),
            "timeout_s": self._sites.timeout_s,
            # A site that joins after the last step would have nothing to train.
            "last": differences.due >= self._run.steps,
            "merges": in_pairs and differences.step == self._run.steps,
        }

    def _send(self, differences: _Differences, round_: SiteRound, probe: Probe | None) -> None:
        """Start to exchange differences with the members of a round, and begin the next round if it overlaps."""
        outer = self._outer
        sent = outer.vector_to_send(
            differences.fragments, differences.delta, is_last=differences.step == self._run.steps
        )
        exchange: Future[ExchangeResult] | None = None
        if len(round_.members) > 1:
            assert self._meeting is not None
            assert self._meeting.links is not None
            exchange = self._meeting.links.begin(
                round_, sent.vector, sent.num_coded, outer.code, sent.num_gathered, probe
            )
        self._running_exchange = _RunningExchange(differences, sent, round_, exchange)
        if differences.is_overlapped:
            outer.begin_next()

    def _weight(self, fragments: tuple[int, ...]) -> int:
        """Return the weight of this site in a round of fragments, or 0 if it has not trained since the last round."""
        outer = self._outer
        tokens = self._context.position.tokens - min(outer.tokens[fragment] for fragment in fragments)
        return min(tokens, 1) if self._sites.weigh == "even" else tokens

    def _decide(self) -> None:
        """Wait for the exchange under way, and vote: the round becomes pending, or is skipped. Collective."""
        running, self._running_exchange = self._running_exchange, None
        if running is None:
            return
        differences = running.differences
        waiting_since_s = time.perf_counter()
        outer = self._outer
        exchanged, failure = running.wait(self._context.groups.recorder)
        waited_s = time.perf_counter() - waiting_since_s
        if self._meeting is not None and not self._vote(self._meeting, differences, failure):
            return
        assert exchanged is not None
        outer.num_rounds += 1
        for fragment in differences.fragments:
            outer.tokens[fragment] = differences.tokens
        if outer.residual and running.sent.num_coded:
            # The other sites read no values of weights that are not finite, and no residual is kept for the next round.
            decoded = exchanged.decoded[: len(differences.delta)] if differences.is_finite else differences.delta
            outer.keep_residual(differences.fragments, differences.delta, decoded)
        round_ = PendingRound(
            differences.step, differences.due, differences.fragments, differences.delta, exchanged.mean
        )
        outer.pending = outer.with_received_values(round_, running.sent, exchanged, running.round.members)
        self._record_exchange(running, exchanged, waited_s)

    def _vote(self, meeting: SiteMeeting, differences: _Differences, failure: str) -> bool:
        """Vote on a round, and return whether it is applied. Otherwise it is skipped. Collective."""
        failures = [text for text in current_world().all_gather_object(failure) if text]
        why = meeting.vote(self._calendar.rounds_until(differences.step), failures)
        if why:
            if differences.is_finite and differences.is_overlapped:
                reshard_parameters(self._context.training.model.stages)
                self._outer.cancel(differences.fragments, differences.delta)
            self._skip(differences.step, why)
        return not why

    def _record_exchange(self, running: _RunningExchange, exchanged: ExchangeResult, waited_s: float) -> None:
        """Record the metrics of an exchange. Collective."""
        self._record |= {
            "members": len(running.round.members),
            "sent_bytes": _sum_of_ranks(self._context, [float(exchanged.sent_bytes)])[0],
            "exchange_s": exchanged.seconds,
            "wait_s": waited_s,
            "round_s": time.perf_counter() - running.differences.began_s,
        }
        if self._calendar.is_probed(running.differences.step):
            own = running.round.members.index(self._sites.number)
            counts = (
                (0, 0)
                if exchanged.probes is None
                else count_equal_choices(exchanged.probes, running.round.weights, own)
            )
            equal, compared = _sum_of_ranks(self._context, [float(count) for count in counts])
            self._record["routing_overlap"] = equal / compared if compared else None

    def _apply(self, *, is_overlapped: bool) -> dict[str, Any]:
        """Take the outer step of the pending round, if any, and return the metrics of the round. Collective."""
        outer = self._outer
        pending, outer.pending = outer.pending, None
        if pending is None:
            outer.skip()
        else:
            reshard_parameters(self._context.training.model.stages)
            # A checkpoint has the mean `g` of a pending round, but not the difference that this site sent.
            knows_own = "members" in self._record
            if knows_own and self._model.has_moe_layers and not pending.is_mean_of_weights:
                squares = _sum_of_ranks(self._context, router_squares(outer, pending))
                self._record["router_distance"] = (squares[0] / squares[1]) ** 0.5 if squares[1] else 0.0
            norms, metrics = outer.apply(pending, self._context.groups, is_overlapped=is_overlapped)
            self._record |= metrics
            if self._sites.moments == "reset":
                self._context.training.reset_moments()
            difference, mean, product, weights, averaged = _sum_of_ranks(self._context, list(astuple(norms)))
            if knows_own:
                self._record |= {
                    "difference": (difference / weights) ** 0.5 if weights else 0.0,
                    "agreement": product / (averaged * mean) ** 0.5 if averaged * mean else 0.0,
                }
        return self._record | {"rounds": outer.num_rounds, "num_skipped": self._num_skipped}

    def _skip(self, step: int, why: str) -> None:
        self._num_skipped += 1
        self._record["skipped"] = why
        if self._context.log is not None:
            self._context.log.log_skipped_round(step, why)


def hash_of_ranks(tensors: Mapping[str, Tensor], device: torch.device) -> int:
    """Return a hash of the named tensors of all ranks of the site, below 2**63. It is collective."""
    hasher = TensorHasher(device)
    local = _hash({name: hasher.digest(tensor).tolist() for name, tensor in tensors.items()})
    return _hash(current_world().all_gather_object(local))


def _hash(value: object) -> int:
    text = json.dumps(value, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def router_squares(outer: OuterOptimizer, pending: PendingRound) -> list[float]:
    """Return two sums of squares over the routers of this rank, each logical element counted once.

    The first sum is over the differences between this site's weights and the mean weights of the sites, the second
    over the outer weights.
    """
    distance = weights_square = 0.0
    for name, own_d, mean_g, weights, replicas in outer.visit_round(pending):
        if ".router." in name and replicas:
            distance += float((own_d - mean_g).double().square().sum()) / replicas
            weights_square += float(weights.double().square().sum()) / replicas
    return [distance, weights_square]


def describe_wait(answer: Message, address: str) -> str:
    """Return the log line that tells why a site waits, from the answer of the meeting point."""
    if "unreachable" in answer:
        return f"waiting for `moefold meet`: {answer['unreachable']}"
    awaited = describe_sites(answer["missing"]) if "missing" in answer else "the state of another site"
    refused = "".join(f"; site {n} cannot take part: {why}" for n, why in answer.get("refused_sites", {}).items())
    return f"waiting for {awaited} at {address}{refused}"


def _sum_of_ranks(context: TrainingContext, numbers: list[float]) -> list[float]:
    """Return the sums of numbers over the ranks of the site. It is collective."""
    local = torch.tensor(numbers, dtype=torch.float64, device=context.groups.device)
    return all_reduce_sum(local, context.groups.world).tolist()
