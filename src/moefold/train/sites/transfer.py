"""Transfer of the state of a site to a site that lacks rounds: outer state, moments, buffers, and place in the run."""

import torch
from torch import Tensor

from moefold.comm.groups import current_world
from moefold.comm.site_links import SiteLinks
from moefold.errors import RunError
from moefold.launch.meet_client import MeetError
from moefold.launch.signed_lines import Message
from moefold.message_text import first_line
from moefold.model.local_param import local_tensor
from moefold.optim.outer import OuterOptimizer
from moefold.optim.states import named_moments
from moefold.parallel.fsdp import reshard_parameters
from moefold.topology.fragments import RoundCalendar
from moefold.train.callbacks.callback import TrainingContext


def outer_of(context: TrainingContext) -> OuterOptimizer:
    """Return the outer optimizer of a run with sites."""
    assert context.training.outer is not None, "a run with sites has an outer optimizer"
    return context.training.outer


class SiteStateTransfer:
    """Sends and receives the state of a site over its links. The meeting point says which sites."""

    def __init__(self, calendar: RoundCalendar, links: SiteLinks) -> None:
        self._calendar = calendar
        self._sites = calendar.sites
        self._links = links

    def receive(self, context: TrainingContext, offer: Message) -> None:
        """Take over weights, moments and position of the site that an offer names. It is collective.

        Raises:
            RunError: the state did not arrive.
        """
        sender = offer["giver"]
        context.groups.recorder.set_phase(f"receiving the state of site {sender}")
        header = torch.zeros(5, dtype=torch.int64)
        failure = ""
        try:
            self._links.receive_state(offer["gift"], [header, *self._tensors(context)])
        except (RuntimeError, MeetError) as error:
            failure = first_line(error)
        if failures := [text for text in current_world().all_gather_object(failure) if text]:
            raise RunError(
                f"site {self._sites.number} did not receive the state of site {sender}: {failures[0]}; start it again"
            )
        before = context.position.step
        self._adopt(context, header)
        if context.log is not None:
            adopted = f"took the state of site {sender} after round {header[0]}, and goes on from step"
            context.log.message(f"after step {before}: {adopted} {context.position.step}")

    def send(self, context: TrainingContext, order: Message) -> None:
        """Send the state of this site to a joining site, as the meeting point orders. Local to each rank."""
        context.groups.recorder.set_phase(f"sending the state to site {order['to']}")
        tensors = [torch.tensor(self._header(context, order["round"])), *self._tensors(context)]
        try:
            self._links.send_state(order["gift"], tensors)
            text = f"gave its state to site {order['to']}"
        except (RuntimeError, MeetError) as error:
            text = f"site {order['to']} did not receive the state: {first_line(error)}"
        if context.log is not None:
            context.log.message(f"after step {context.position.step}: {text}")

    def _header(self, context: TrainingContext, index: int) -> list[int]:
        """Return round, steps since, rounds applied, updates of the moments, and a number of the method of sites."""
        outer = outer_of(context)
        since = context.position.step - self._calendar.step_of_round(index)
        return [index, since, outer.num_rounds, context.training.moment_updates, outer.transferred_state]

    def _tensors(self, context: TrainingContext) -> list[Tensor]:
        """Return this rank's tensors of the state: outer state, moments and buffers.

        If sites own experts, each site keeps the moments of its own experts.
        """
        training = context.training
        outer = outer_of(context)
        owned = outer.experts if self._sites.owns_experts else ()
        shared = {name: p for name, p in training.optimized.items() if name not in owned}
        moments = named_moments(training.optimizer, shared)
        tensors = outer.entries(("weights", "momentum"))
        tensors = tensors | {f"optimizer.{name}": moment for name, moment in moments.items()} | dict(training.buffers)
        return [local_tensor(tensors[name]) for name in sorted(tensors)]

    def _adopt(self, context: TrainingContext, header: Tensor) -> None:
        """Continue from a received state: the weights become the outer weights.

        The step stays this site's own: a site may take more or fewer steps between two rounds.
        """
        index, since, num_rounds, moment_updates, transferred_state = header.tolist()
        training = context.training
        reshard_parameters(training.model.stages)
        outer_of(context).transferred_state = transferred_state
        outer_of(context).adopt(num_rounds, context.position.tokens)
        training.restore_moment_updates(moment_updates)
        step = self._calendar.step_of_round(index)
        context.position.adopt(step + min(since, self._sites.overlap))
