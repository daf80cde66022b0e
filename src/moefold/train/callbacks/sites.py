"""Callback that exchanges the weights with the other sites of the run, by the outer optimizer."""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_sum
from moefold.comm.groups import current_world
from moefold.comm.site_links import Exchanged, SiteRound
from moefold.comm.wire_codes import make_wire_code
from moefold.config.schema import Config
from moefold.launch.exit import SIGNAL_STATUS
from moefold.launch.meet_client import MeetError
from moefold.launch.meeting import describe_sites
from moefold.launch.signed_lines import Message
from moefold.optim.outer import OuterOptimizer, PendingRound
from moefold.parallel.fsdp import reshard_parameters
from moefold.parallel.replica_check import TensorHasher
from moefold.topology.fragments import fragments_due
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.signals import SIGNALS
from moefold.train.site_meeting import SiteMeeting

WAIT_S = 1.0
"""Interval in which a rank that waits for an exchange reports progress."""


@dataclass
class _Flight:
    """An exchange that has begun and that the sites have not voted on."""

    step: int
    due: int
    fragments: tuple[int, ...]
    own: Tensor
    members: tuple[int, ...]
    exchange: "Future[Exchanged] | None"
    """None in a round of one site."""
    began_s: float


class SiteRounds(Callback):
    """Callback that takes the outer step of a round; a round that is skipped changes nothing."""

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._sites = cfg.sites
        self._meeting: SiteMeeting | None = None
        self._flight: _Flight | None = None
        self._record: dict[str, Any] = {}
        self._num_skipped = 0

    def on_start(self, run: TrainingContext) -> None:
        """Meet the other sites; collective.

        Raises:
            ConfigError: the settings or weights are not those of the other sites.
            RunError: the meeting point cannot be reached, or the other sites are ahead.
        """
        run.before_save.append(lambda: self._decide(run))
        if self._sites.count == 1:
            return
        self._meeting = SiteMeeting(self._cfg, run.groups.rank)
        outer = _outer_of(run)
        hello = {"weights": self._digest(run), "step": run.position.step, "version": outer.num_rounds}
        has_told = False

        def poll(answer: Message) -> bool:
            nonlocal has_told
            run.groups.recorder.set_phase("waiting for the other sites")
            if "missing" in answer and run.log is not None and not has_told:
                run.log.message(f"waiting for {describe_sites(answer['missing'])} at {self._sites.meet}")
                has_told = True
            raised = [any(flags) for flags in zip(*current_world().all_gather_object(run.stop.flags), strict=True)]
            if any(raised):
                run.status = SIGNAL_STATUS + SIGNALS[raised.index(True)]
            return any(raised)

        if self._meeting.ask_until_ready(hello, poll):
            # The round after the present step is still to come.
            self._meeting.connect(lambda: hello | {"step": run.position.step - 1, "version": _outer_of(run).num_rounds})

    def after_step(self, run: TrainingContext, step: FinishedStep) -> None:
        """Apply the round that is due, and begin one; collective."""
        is_last = step.number == self._cfg.run.steps
        outer = _outer_of(run)
        due = self._flight.due if self._flight is not None else outer.pending.due if outer.pending is not None else 0
        if due and (step.number >= due or is_last):
            run.groups.recorder.set_phase("waiting for the exchange with the other sites")
            self._decide(run)
            step.sites = self._apply(run, self._sites.keep_local)
        fragments = fragments_due(self._cfg, step.number)
        if not fragments:
            return
        run.groups.recorder.set_phase("exchanging weights with the other sites")
        overlap = 0 if is_last else self._sites.overlap
        self._begin(run, step.number, fragments, overlap)
        if not overlap:
            self._decide(run)
            step.sites = self._apply(run, 0.0)

    def on_end(self, run: TrainingContext, status: int) -> None:
        """Leave the meeting point."""
        if self._meeting is not None:
            self._meeting.leave()

    def on_error(self, run: TrainingContext, error: Exception) -> None:
        """Close the connections, by which the meeting point knows that the site is gone."""
        if self._meeting is not None:
            self._meeting.close()

    def _begin(self, run: TrainingContext, step: int, fragments: tuple[int, ...], overlap: int) -> None:
        """Take the differences of fragments, and start to exchange them; collective."""
        began_s = time.perf_counter()
        outer = _outer_of(run)
        reshard_parameters(run.training.model.stages)
        own = outer.difference(fragments)
        self._record = {"fragment": fragments[0] if len(fragments) == 1 else -1, "members": 0, "skipped": None}
        is_finite = all(current_world().all_gather_object(bool(torch.isfinite(own).all())))
        if self._meeting is None:
            if is_finite:
                self._flight = _Flight(step, step + overlap, fragments, own, (0,), None, began_s)
            else:
                self._skip(run, step, "the weights are not finite")
            return
        question = {
            "do": "round",
            "step": step,
            "version": outer.num_rounds,
            "tokens": run.position.tokens - min(outer.tokens[fragment] for fragment in fragments),
            "finite": is_finite,
            "digest": self._digest(run),
            "timeout_s": self._sites.timeout_s,
        }
        answer = self._meeting.ask(question)
        self._meeting.raise_if_refused(answer)
        if "members" not in answer:
            self._skip(run, step, str(answer.get("skip") or answer.get("unreachable")))
            return
        if answer["nonfinite"] and run.log is not None:
            run.log.message(f"step {step}: {describe_sites(answer['nonfinite'])} sent no finite weights and counts 0")
        members = tuple(answer["members"])
        exchange = None
        if len(members) > 1:
            assert self._meeting.links is not None
            round_ = SiteRound(answer["epoch"], members, tuple(answer["weights"]))
            code = make_wire_code(self._sites.precision, own.dtype)
            exchange = self._meeting.links.begin(round_, own, outer.num_coded(fragments), code)
        self._flight = _Flight(step, step + overlap, fragments, own, members, exchange, began_s)

    def _decide(self, run: TrainingContext) -> None:
        """Wait for the exchange under way, and vote: the round becomes pending, or is skipped. Collective."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        waiting_since_s = time.perf_counter()
        exchanged, failure = _result(flight, run)
        waited_s = time.perf_counter() - waiting_since_s
        outer = _outer_of(run)
        if self._meeting is not None:
            failures = [text for text in current_world().all_gather_object(failure) if text]
            vote = self._meeting.ask({"do": "vote", "step": flight.step, "ok": not failures})
            if not vote.get("apply"):
                if self._meeting.links is not None:
                    self._meeting.links.drop()
                why = failures[0] if failures else vote.get("why") or vote.get("unreachable") or vote.get("refused")
                self._skip(run, flight.step, str(why))
                return
        assert exchanged is not None
        outer.num_rounds += 1
        for fragment in flight.fragments:
            outer.tokens[fragment] = run.position.tokens
        if outer.residual:
            outer.keep_residual(flight.fragments, flight.own, exchanged.decoded)
        outer.pending = PendingRound(flight.step, flight.due, flight.fragments, flight.own, exchanged.mean)
        self._record |= {
            "members": len(flight.members),
            "sent_bytes": _sum_of_ranks(run, [float(exchanged.sent_bytes)])[0],
            "exchange_s": exchanged.seconds,
            "wait_s": waited_s,
            "round_s": time.perf_counter() - flight.began_s,
        }

    def _apply(self, run: TrainingContext, keep_local: float) -> dict[str, Any]:
        """Take the outer step of the pending round, if any; return the metrics of the round. Collective."""
        outer = _outer_of(run)
        pending, outer.pending = outer.pending, None
        if pending is not None:
            reshard_parameters(run.training.model.stages)
            norms = outer.step(pending.own, pending.mean, pending.fragments, keep_local=keep_local)
            difference, mean, product, weights = _sum_of_ranks(run, norms.to_tensor().tolist())
            self._record |= {
                "difference": (difference / weights) ** 0.5 if weights else 0.0,
                "agreement": product / (difference * mean) ** 0.5 if difference * mean else 0.0,
            }
        return self._record | {"rounds": outer.num_rounds, "num_skipped": self._num_skipped}

    def _skip(self, run: TrainingContext, step: int, why: str) -> None:
        self._num_skipped += 1
        self._record["skipped"] = why
        if run.log is not None:
            run.log.log_skipped_round(step, why)

    def _digest(self, run: TrainingContext) -> int:
        """Return a hash of the outer weights of all ranks of the site; collective."""
        hasher = TensorHasher(run.groups.device)
        local = sum(int(hasher.digest(tensor)[1]) for tensor in _outer_of(run).weights.values())
        return int(sum(current_world().all_gather_object(local)) % 2**63)


def _result(flight: _Flight, run: TrainingContext) -> tuple[Exchanged | None, str]:
    """Wait for an exchange of this rank; return its result, or why it failed."""
    if flight.exchange is None:
        return Exchanged(flight.own, flight.own, 0, 0.0), ""
    try:
        while True:
            try:
                return flight.exchange.result(WAIT_S), ""
            except TimeoutError:
                if flight.exchange.done():
                    raise
                # Every part of the exchange has a limit of its own.
                run.groups.recorder.note_progress()
    except (RuntimeError, MeetError, TimeoutError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, f"the exchange with {describe_sites(flight.members)} failed: {first_line[:160]}"


def _sum_of_ranks(run: TrainingContext, numbers: list[float]) -> list[float]:
    """Return the sums of numbers over the ranks of the site; collective."""
    local = torch.tensor(numbers, dtype=torch.float64, device=run.groups.device)
    sums: list[float] = all_reduce_sum(local, run.groups.world).tolist()
    return sums


def _outer_of(run: TrainingContext) -> OuterOptimizer:
    assert run.training.outer is not None, "a run with sites has an outer optimizer"
    return run.training.outer
