"""Callback that exchanges the weights with the other sites of the run, by the outer optimizer."""

import socket
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.checkpoint_dir import model_sizes
from moefold.comm.collectives import all_reduce_sum
from moefold.comm.groups import current_world
from moefold.comm.site_links import Exchanged, SiteLinks
from moefold.config.schema import Config
from moefold.errors import ConfigError, RunError
from moefold.launch.exit import SIGNAL_STATUS
from moefold.launch.meet_client import Heartbeat, MeetConnection, MeetError, MeetStore, parse_address
from moefold.launch.meeting import describe_sites
from moefold.launch.signed_lines import Message, read_secret
from moefold.optim.outer import OuterNorms, OuterOptimizer
from moefold.parallel.fsdp import reshard_parameters
from moefold.parallel.replica_check import TensorHasher
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.signals import SIGNALS

POLL_S = 0.5
"""Interval in which a site asks whether the others have come."""
ANSWER_GRACE_S = 15.0
"""Time for an answer of the meeting point beyond sites.timeout_s."""
_EQUAL_PARALLEL_KEYS = (
    *("world_size", "tp", "cp", "pp", "ep", "etp", "order", "moe_order"),
    *("schedule", "virtual_stages", "pipeline_layout", "zero"),
)
_EQUAL_SITES_KEYS = ["count", "every", "first", "lr", "momentum", "nesterov", "quorum"]
_FREE_MODEL_KEYS = frozenset({"preset", "init_std", "upcycle_from"})


def equal_settings(cfg: Config) -> dict[str, Any]:
    """Return the settings that all sites must share, by name."""
    model = {f"model.{key}": value for key, value in model_sizes(cfg.model).items() if key not in _FREE_MODEL_KEYS}
    parallel = asdict(cfg.parallel)
    sites = asdict(cfg.sites)
    return (
        {f"sites.{key}": sites[key] for key in _EQUAL_SITES_KEYS}
        | {f"parallel.{key}": parallel[key] for key in _EQUAL_PARALLEL_KEYS}
        | {"run.seed": cfg.run.seed, "run.steps": cfg.run.steps, "run.dtype": cfg.run.dtype}
        | model
    )


class SiteRounds(Callback):
    """Callback that takes the outer step of a round; a round that is skipped changes nothing.

    Rank 0 of the site talks to the meeting point; all ranks get its answers.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._sites = cfg.sites
        self._connection: MeetConnection | None = None
        self._heartbeat: Heartbeat | None = None
        self._links: SiteLinks | None = None
        self._num_skipped = 0

    def on_start(self, run: TrainingContext) -> None:
        """Meet the other sites; collective.

        Raises:
            ConfigError: the settings or weights are not those of the other sites.
            RunError: the meeting point cannot be reached, or the other sites are ahead.
        """
        if self._sites.count == 1:
            return
        sites = self._sites
        host, port = parse_address(sites.meet, "sites.meet")
        secret = read_secret(sites.secret, "sites.secret")
        links_connection = MeetConnection(host, port, secret, sites.timeout_s + ANSWER_GRACE_S)
        if run.is_first_rank:
            self._connection = MeetConnection(host, port, secret, sites.timeout_s + ANSWER_GRACE_S)
        if not self._say_hello(run):
            return
        if self._connection is not None:
            self._heartbeat = Heartbeat(MeetConnection(host, port, secret, ANSWER_GRACE_S), sites.number)
            self._heartbeat.start()
        try:
            # Opens the connection, whose local address the other sites can reach.
            links_connection.ask({"do": "beat", "site": sites.number})
        except MeetError as error:
            raise RunError(f"sites.meet={sites.meet!r}: {error}") from None
        self._links = SiteLinks(
            MeetStore(links_connection, sites.timeout_s),
            links_connection.local_host,
            sites.number,
            run.groups.rank,
            sites.timeout_s,
        )

    def after_step(self, run: TrainingContext, step: FinishedStep) -> None:
        """Take part in a round if it is due; collective."""
        if not self._sites.is_due(step.number, self._cfg.run.steps):
            return
        run.groups.recorder.set_phase("exchanging weights with the other sites")
        started_s = time.perf_counter()
        outer = _outer_of(run)
        reshard_parameters(run.training.model.stages)
        own = outer.difference()
        digest, is_finite = self._agree(run, own)
        if self._sites.count == 1:
            members = [0]
            exchanged, why = (Exchanged(own, 0, 0.0), "") if is_finite else (None, "the weights are not finite")
        else:
            members, exchanged, why = self._exchange(run, step.number, own, digest, is_finite)
        record: dict[str, Any] = {"members": len(members), "skipped": why or None}
        if exchanged is None:
            self._num_skipped += 1
            if run.log is not None:
                run.log.log_skipped_round(step.number, why)
        else:
            record |= self._step(run, own, exchanged)
        step.sites = record | {
            "rounds": outer.num_rounds,
            "num_skipped": self._num_skipped,
            "round_s": time.perf_counter() - started_s,
        }

    def on_end(self, run: TrainingContext, status: int) -> None:
        """Leave the meeting point."""
        if self._connection is not None and self._links is not None:
            with suppress(MeetError):
                self._connection.ask({"do": "left", "site": self._sites.number})
        self._close()

    def on_error(self, run: TrainingContext, error: Exception) -> None:
        """Close the connections, by which the meeting point knows that the site is gone."""
        self._close()

    def _close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._links is not None:
            self._links.close()
        if self._connection is not None:
            self._connection.close()

    def _say_hello(self, run: TrainingContext) -> bool:
        """Wait until all sites are here; return False after a signal. Collective."""
        outer = _outer_of(run)
        hello: Message = {
            "do": "hello",
            "site": self._sites.number,
            "host": socket.gethostname(),
            "settings": equal_settings(self._cfg),
            "weights": self._digest(run, outer),
            "step": run.position.step,
            "version": outer.num_rounds,
        }
        started_s = time.monotonic()
        has_told = False
        while True:
            run.groups.recorder.set_phase("waiting for the other sites")
            answer = self._ask(hello)
            if "ready" in answer:
                if self._connection is not None:
                    self._connection.greet(lambda: hello | self._position(run) | {"again": True})
                return True
            self._raise_if_refused(answer, outer)
            is_too_late = time.monotonic() - started_s > self._sites.timeout_s
            # Rank 0 decides, as the clocks of the ranks differ.
            if "unreachable" in answer and current_world().all_gather_object(is_too_late)[0]:
                raise RunError(f"sites.meet={self._sites.meet!r}: {answer['unreachable']}; start `moefold meet` there")
            if "missing" in answer and run.log is not None and not has_told:
                run.log.message(f"waiting for {describe_sites(answer['missing'])} at {self._sites.meet}")
                has_told = True
            raised = [any(flags) for flags in zip(*current_world().all_gather_object(run.stop.flags), strict=True)]
            if any(raised):
                run.status = SIGNAL_STATUS + SIGNALS[raised.index(True)]
                return False
            time.sleep(POLL_S)

    def _position(self, run: TrainingContext) -> Message:
        return {"step": run.position.step - 1, "version": _outer_of(run).num_rounds}

    def _raise_if_refused(self, answer: Message, outer: OuterOptimizer) -> None:
        number = self._sites.number
        if "refused" in answer:
            raise ConfigError(f"site {number} cannot take part in the run: {answer['refused']}")
        if "error" in answer:
            raise RunError(
                f"site {number}: {answer['error']}: memory or a file of one of them is damaged; resume all sites from "
                "checkpoints of the same step with checkpoint.resume"
            )
        if "missed" in answer:
            raise RunError(
                f"site {number} has applied {outer.num_rounds} rounds, and site {answer['giver']} "
                f"{answer['version']}: it missed the others; start all sites from checkpoints with the same number of "
                "rounds, which checkpoint.resume names"
            )

    def _agree(self, run: TrainingContext, own: Tensor) -> tuple[int, bool]:
        """Return the digest of the outer weights, and whether all ranks of the site have finite values; collective."""
        is_finite = bool(torch.isfinite(own).all())
        everywhere = all(current_world().all_gather_object(is_finite))
        return self._digest(run, _outer_of(run)), everywhere

    def _digest(self, run: TrainingContext, outer: OuterOptimizer) -> int:
        """Return a hash of the outer weights of all ranks of the site; collective."""
        hasher = TensorHasher(run.groups.device)
        local = sum(int(hasher.digest(tensor)[1]) for tensor in outer.weights.values())
        return int(sum(current_world().all_gather_object(local)) % 2**63)

    def _ask(self, message: Message) -> Message:
        """Ask the meeting point, and return its answer on all ranks; collective."""
        answer: Message | None = None
        if self._connection is not None:
            try:
                answer = self._connection.ask(message)
            except MeetError as error:
                answer = {"unreachable": str(error)}
        found: Message = current_world().all_gather_object(answer)[0]
        return found

    def _exchange(
        self, run: TrainingContext, step: int, own: Tensor, digest: int, is_finite: bool
    ) -> tuple[list[int], Exchanged | None, str]:
        """Exchange the differences of a round; return the members, the mean, and why there is none. Collective."""
        outer = _outer_of(run)
        question: Message = {
            "do": "round",
            "site": self._sites.number,
            "step": step,
            "version": outer.num_rounds,
            "tokens": run.position.tokens - outer.tokens,
            "finite": is_finite,
            "digest": digest,
            "timeout_s": self._sites.timeout_s,
        }
        answer = self._ask(question)
        self._raise_if_refused(answer, outer)
        if "members" not in answer:
            return [], None, str(answer.get("skip") or answer.get("unreachable"))
        members = list(answer["members"])
        if answer["nonfinite"] and run.log is not None:
            run.log.message(f"step {step}: {describe_sites(answer['nonfinite'])} sent no finite weights and counts 0")
        exchanged, failure = self._transfer(answer, own)
        failures = [text for text in current_world().all_gather_object(failure) if text]
        vote = self._ask({"do": "vote", "site": self._sites.number, "step": step, "ok": not failures})
        if vote.get("apply"):
            return members, exchanged, ""
        if self._links is not None:
            self._links.drop()
        why = failures[0] if failures else str(vote.get("why") or vote.get("unreachable") or vote.get("refused"))
        return members, None, why

    def _transfer(self, answer: Message, own: Tensor) -> tuple[Exchanged | None, str]:
        """Exchange this rank's vector; return the mean, or why it failed."""
        assert self._links is not None
        if len(answer["members"]) == 1 and answer["weights"][0]:
            return Exchanged(own, 0, 0.0), ""
        try:
            return self._links.begin(answer["epoch"], answer["members"], answer["weights"], own).result(), ""
        except (RuntimeError, MeetError) as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return None, f"the exchange with {describe_sites(answer['members'])} failed: {first_line[:160]}"

    def _step(self, run: TrainingContext, own: Tensor, exchanged: Exchanged) -> dict[str, Any]:
        """Take the outer step and return its metrics; collective."""
        outer = _outer_of(run)
        norms: OuterNorms = outer.step(own, exchanged.mean)
        outer.tokens = run.position.tokens
        sums = norms.to_tensor().to(run.groups.device)
        sent = torch.tensor([float(exchanged.sent_bytes)], dtype=torch.float64, device=sums.device)
        difference, mean, product, weights, sent_bytes = all_reduce_sum(
            torch.cat([sums, sent]), run.groups.world
        ).tolist()
        return {
            "difference": (difference / weights) ** 0.5 if weights else 0.0,
            "agreement": product / (difference * mean) ** 0.5 if difference * mean else 0.0,
            "sent_bytes": int(sent_bytes),
            "exchange_s": exchanged.seconds,
        }


def _outer_of(run: TrainingContext) -> OuterOptimizer:
    assert run.training.outer is not None, "a run with sites has an outer optimizer"
    return run.training.outer
