"""A site's side of the meeting point: rank 0 talks to it, and all ranks get its answers."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from moefold.checkpoint.checkpoint_meta import model_sizes
from moefold.comm.groups import current_world
from moefold.comm.site_links import SiteLinks, SiteRound
from moefold.config.base.part import Part, keys_of, kind_or_part, without_source
from moefold.config.chosen import chosen_in
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.keys.paths import flat_settings
from moefold.config.model import ModelConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.config.sections.train import TrainConfig
from moefold.errors import ConfigError, RunError
from moefold.launch.meet_client import Heartbeat, MeetConnection, MeetError, MeetStore, parse_address
from moefold.launch.signed_lines import Message, read_secret
from moefold.launch.site_round import PAIRS_SETTING
from moefold.topology.fragments import RoundCalendar
from moefold.topology.layout import DEGREES

POLL_S = 0.5
"""Interval between two questions of a site whether the other sites have arrived."""
ANSWER_GRACE_S = 15.0
"""Time for an answer of the meeting point beyond sites.timeout_s."""
_EQUAL_PARALLEL_KEYS = (
    *("world_size", *DEGREES, "order", "moe_order"),
    *("schedule", "virtual_stages", "pipeline_layout", "zero"),
)
_OWN_SITES_KEYS = frozenset({"number", "meet", "secret", "timeout_s", "every", "first", "overlap"})
ROUNDS_SETTING = "the rounds of the run (by run.steps, sites.every and sites.first)"
"""Name of the setting that stands for keys which may differ between sites, in proportion."""
_FREE_MODEL_KEYS = frozenset({"preset", "init_std"})


def equal_settings(
    run: RunConfig,
    sizes: ModelConfig,
    mapping: ParallelConfig,
    train: TrainConfig,
    lora: LoraConfig,
    sites_config: SitesConfig,
) -> dict[str, Any]:
    """Return the settings that all sites must share, by name."""
    model = flat_settings(
        {f"model.{key}": value for key, value in model_sizes(sizes).items() if key not in _FREE_MODEL_KEYS}
    )
    schedule = kind_or_part(mapping.schedule)
    parallel = keys_of(mapping) | {"schedule": schedule.as_table() if isinstance(schedule, Part) else schedule}
    own_keys = _OWN_SITES_KEYS - ({"every", "first"} if sites_config.part.counts_steps else set())
    keys = {key: without_source(value, "file") for key, value in keys_of(sites_config).items()}
    sites = {f"sites.{key}": value for key, value in keys.items() if key not in own_keys}
    return (
        sites
        | {f"parallel.{key}": parallel[key] for key in _EQUAL_PARALLEL_KEYS}
        | {PAIRS_SETTING: "pairs" if sites_config.part.in_pairs else "all"}
        | {
            "run.seed": run.seed,
            ROUNDS_SETTING: RoundCalendar(run, sizes, sites_config).round_order(),
            "run.dtype": run.dtype,
        }
        | _optimizer_states(train)
        | {f"lora.{key}": getattr(lora, key) for key in ("rank", "alpha", "targets")}
        | model
    )


def _optimizer_states(train: TrainConfig) -> dict[str, Any]:
    """Return the settings that decide which states the optimizer has, by name."""
    optimizer = chosen_in(train, OptimizerPart)
    table = without_source(optimizer.as_table(), "file")
    fields = {f"{optimizer.key}.{name}": table[name] for name in optimizer.state_fields}
    source = {f"{optimizer.key}.from": table["from"]} if "from" in table else {}
    return {optimizer.key: optimizer.kind, **source, **fields}


class Arrival(Enum):
    """End of the wait for the other sites."""

    READY = auto()
    MISSED = auto()
    """The other sites have applied rounds without this site."""
    STOPPED = auto()
    """A signal ended the wait."""


@dataclass(frozen=True)
class RoundAnswer:
    """Answer of the meeting point to the request for a round."""

    round: SiteRound | None
    """Members and weights, or None if this site exchanges nothing."""
    nonfinite: tuple[int, ...]
    """Sites of the round whose weights are not finite."""
    is_unpaired: bool
    """True if this site has no pair in the round."""
    skip: str
    """Reason why there is no round."""
    transfer_order: Message | None
    """Order to send the state to another site after the round."""


class SiteMeeting:
    """Connections of this rank to the meeting point. `links` connects it to the same ranks of the other sites.

    Args:
        settings: the settings that all sites must share, by name: `equal_settings`, and the hash of the frozen weights,
            which no round makes equal.
    """

    def __init__(self, sites: SitesConfig, settings: dict[str, Any], rank: int) -> None:
        self._sites = sites
        self._settings = settings
        self.number = sites.number
        self._rank = rank
        host, port = parse_address(sites.meet)
        secret = read_secret(sites.secret, "sites.secret")
        timeout_s = sites.timeout_s + ANSWER_GRACE_S
        self._connection = MeetConnection(host, port, secret, timeout_s) if rank == 0 else None
        self._links_connection = MeetConnection(host, port, secret, timeout_s)
        self._heartbeat = Heartbeat(MeetConnection(host, port, secret, ANSWER_GRACE_S), sites.number)
        self.links: SiteLinks | None = None

    def ask(self, message: Message) -> Message:
        """Ask the meeting point, and return its answer on all ranks. It is collective.

        The answer is {"unreachable": reason} if there is none.
        """
        answer: Message | None = None
        if self._connection is not None:
            try:
                answer = self._connection.ask(message | {"site": self.number})
            except MeetError as error:
                answer = {"unreachable": str(error)}
        return current_world().all_gather_object(answer)[0]

    def ask_until_ready(self, registration: Message, poll: Callable[[Message], bool]) -> Arrival:
        """Register until all sites are here. It is collective.

        Args:
            poll: called on all ranks with each answer to wait. It returns whether to stop waiting.

        Raises:
            ConfigError: the settings or weights differ from the other sites'.
            RunError: the meeting point cannot be reached, or a site was refused and did not come back.
        """
        message = registration | {
            "do": "hello",
            "host": socket.gethostname(),
            "settings": self._settings,
        }
        started_s = time.monotonic()
        while True:
            answer = self.ask(message)
            if "ready" in answer:
                return Arrival.READY
            if "missed" in answer:
                return Arrival.MISSED
            self.raise_if_refused(answer)
            if not {"unreachable", "refused_sites"} & answer.keys():
                started_s = time.monotonic()
            is_too_late = time.monotonic() - started_s > self._sites.timeout_s
            # Rank 0 decides, as the clocks of the ranks differ.
            if current_world().all_gather_object(is_too_late)[0]:
                if "unreachable" in answer:
                    raise RunError(
                        f"sites.meet={self._sites.meet!r}: {answer['unreachable']}; start `moefold meet` there"
                    )
                number, why = next(iter(answer["refused_sites"].items()))
                waited = f"and did not come back within {self._sites.timeout_s:g} s"
                raise RunError(f"site {number} cannot take part in the run, {waited}: {why}")
            if poll(answer):
                return Arrival.STOPPED
            time.sleep(POLL_S)

    def ask_for_round(self, request: Message) -> RoundAnswer | None:
        """Ask for the members of a round. None: the others applied rounds without this site. It is collective.

        Raises:
            ConfigError, RunError: as `raise_if_refused`.
        """
        answer = self.ask(request)
        if "missed" in answer:
            return None
        self.raise_if_refused(answer)
        round_: SiteRound | None = None
        if "members" in answer:
            round_ = SiteRound(answer["epoch"], tuple(answer["members"]), tuple(answer["weights"]))
        return RoundAnswer(
            round=round_,
            nonfinite=tuple(answer.get("nonfinite", ())),
            is_unpaired="rests" in answer,
            skip=str(answer.get("skip") or answer.get("unreachable")),
            transfer_order=answer.get("give"),
        )

    def vote(self, index: int, failures: list[str]) -> str:
        """Vote on an exchanged round, and return why it is skipped. Return "" if it is applied. It is collective.

        Args:
            failures: reasons of this site's ranks whose exchange failed.
        """
        answer = self.ask({"do": "vote", "round": index, "ok": not failures})
        if answer.get("apply"):
            return ""
        if self.links is not None:
            self.links.drop()
        return str(failures[0] if failures else answer.get("why") or answer.get("unreachable") or answer.get("refused"))

    def ask_for_sender(self, poll: Callable[[Message], bool]) -> Message | None:
        """Wait for a site that gives its state to this one. Return None if `poll` stops the wait. It is collective.

        Raises:
            RunError: the other sites have ended, or the meeting point cannot be reached.
        """
        started_s = time.monotonic()
        while True:
            answer = self.ask({"do": "join"})
            if "giver" in answer:
                return answer
            if "ended" in answer:
                raise RunError(
                    f"site {self.number} lacks rounds that the other sites have applied, and they have ended; start "
                    "all sites again, or go on from a checkpoint of another site with checkpoint.init_from"
                )
            self.raise_if_refused(answer)
            is_too_late = time.monotonic() - started_s > self._sites.timeout_s
            if "unreachable" in answer and current_world().all_gather_object(is_too_late)[0]:
                raise RunError(f"sites.meet={self._sites.meet!r}: {answer['unreachable']}")
            if poll(answer):
                return None
            time.sleep(POLL_S)

    def connect(self, greeting: Callable[[], Message]) -> SiteLinks:
        """Prepare for rounds, once all sites are here, and return the links to the other sites.

        Args:
            greeting: returns position and weights of the site, for a connection after the first connection was lost.

        Raises:
            RunError: the meeting point cannot be reached.
        """
        if self._connection is not None:
            settings = {"do": "hello", "site": self.number, "host": socket.gethostname(), "again": True}
            settings["settings"] = self._settings
            self._connection.greet(lambda: greeting() | settings)
            self._heartbeat.start()
        try:
            # Opens the connection, whose local address the other sites can reach.
            self._links_connection.ask({"do": "beat", "site": self.number})
            self._links_connection.greet(lambda: {"do": "beat", "site": self.number})
        except MeetError as error:
            raise RunError(f"sites.meet={self._sites.meet!r}: {error}") from None
        store = MeetStore(self._links_connection, self._sites.timeout_s)
        self.links = SiteLinks(store, self._links_connection.local_host, self.number, self._rank, self._sites.timeout_s)
        return self.links

    def raise_if_refused(self, answer: Message) -> None:
        """Raise an error if an answer excludes the site.

        Raises:
            ConfigError: the settings or weights differ from the other sites'.
            RunError: the outer weights are damaged.
        """
        if "refused" in answer:
            raise ConfigError(f"site {self.number} cannot take part in the run: {answer['refused']}")
        if "error" in answer:
            raise RunError(
                f"site {self.number}: {answer['error']}: memory or a file of one of them is damaged; resume all sites "
                "from checkpoints of the same step with checkpoint.resume"
            )

    def leave(self) -> None:
        """Tell the meeting point that the site has ended, and close the connections."""
        if self._connection is not None and self.links is not None:
            with suppress(MeetError):
                self._connection.ask({"do": "left", "site": self.number})
        self.close()

    def close(self) -> None:
        """Close the connections, which tells the meeting point that the site is gone."""
        self._heartbeat.stop()
        if self.links is not None:
            self.links.close()
        self._links_connection.close()
        if self._connection is not None:
            self._connection.close()
