"""Run one site of a run with a fault at a step: `python -m benchmarks.site_fault_job FAULT STEP FOLDER train ...`.

FAULT is one of FAULTS, or "none". The process writes the time of the fault to FOLDER/fault, and the members, shares and
votes of each round to FOLDER/rounds.jsonl. Each step takes at least `PACE_S`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moefold.cli.main import main as moefold
from moefold.launch.signed_lines import Message
from moefold.train.callbacks.callback import FinishedStep, TrainingContext
from moefold.train.sites.meeting import SiteMeeting
from moefold.train.sites.rounds import SiteRounds

PACE_S = 0.1
FAULTS = {
    "killed": "SIGKILL in an exchange",
    "stopped": "SIGSTOP in an exchange",
    "vote": "the answer to the vote of the round is lost",
    "bit": "a bit of an outer weight is flipped before the round",
    "nan": "a weight is NaN before the round",
    "wait": "the site waits before the step until FOLDER/go exists",
}


class Injector:
    """Patches of `SiteRounds` and `SiteMeeting` that inject a fault after a step and record the sites' decisions."""

    def __init__(self, fault: str, step: int, folder: Path) -> None:
        self._fault = fault
        self._step = step
        self._folder = folder
        self._present = 0
        self._round: dict[str, Any] = {}

    def install(self) -> None:
        """Patch the classes."""
        complete = SiteRounds.complete
        ask = SiteMeeting.ask

        def patched_complete(rounds: SiteRounds, context: TrainingContext, step: FinishedStep) -> FinishedStep:
            time.sleep(PACE_S)
            self._present = step.number
            while self._is_now("wait") and not (self._folder / "go").exists():
                time.sleep(0.01)
            if step.number == self._step and self._fault in ("bit", "nan"):
                self._damage(context)
            return complete(rounds, context, step)

        def patched_ask(meeting: SiteMeeting, message: Message) -> Message:
            answer = ask(meeting, message)
            if message["do"] == "round" and self._is_now("killed", "stopped") and "members" in answer:
                self._mark()
                os.kill(os.getpid(), signal.SIGKILL if self._fault == "killed" else signal.SIGSTOP)
            if message["do"] == "vote" and self._is_now("vote"):
                self._mark()
                answer = {"unreachable": "the answer was lost"}
            self._note(message, answer)
            return answer

        SiteRounds.complete = patched_complete  # type: ignore[method-assign]
        SiteMeeting.ask = patched_ask  # type: ignore[method-assign]

    def _is_now(self, *faults: str) -> bool:
        return self._fault in faults and self._present == self._step

    def _mark(self) -> None:
        path = self._folder / "fault"
        path.with_suffix(".new").write_text(str(time.time()))
        path.with_suffix(".new").rename(path)

    @torch.no_grad()
    def _damage(self, context: TrainingContext) -> None:
        self._mark()
        if self._fault == "nan":
            next(iter(context.training.parameters.values())).data.view(-1)[0] = torch.nan
        else:
            assert context.training.outer is not None
            weights = next(iter(context.training.outer.weights.values())).view(-1)
            weights.view(torch.int64)[0] ^= 1

    def _note(self, message: Message, answer: Message) -> None:
        if message["do"] == "round":
            self._round = {"step": self._present}
            if "members" in answer:
                self._round |= {"members": answer["members"], "weights": answer["weights"]}
        elif message["do"] == "vote":
            self._write(self._round | {"applied": bool(answer.get("apply"))})
        elif message["do"] == "join" and "giver" in answer:
            self._write({"joined": True, "giver": answer["giver"]})

    def _write(self, line: dict[str, Any]) -> None:
        with (self._folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def main(words: Sequence[str]) -> int:
    """Run the site and return the exit status of `moefold`."""
    fault, step, folder, *command = words
    if fault not in ("none", *FAULTS):
        raise SystemExit(f"FAULT={fault!r} must be none or one of {', '.join(FAULTS)}")
    Injector(fault, int(step), Path(folder)).install()
    return moefold(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
