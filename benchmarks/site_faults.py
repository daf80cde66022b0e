"""Measure the effect of a site's faults on the other sites: the table of docs/log.md.

    PYTHONPATH=. python -m benchmarks.site_faults                      all faults, 10 minutes on 2 cores
    PYTHONPATH=. python -m benchmarks.site_faults --only "cable|NaN"   faults whose name matches

Three sites of one rank in network namespaces around a switch, where the meeting point runs; 40 tiny steps in float64, a
round every 4. Reports the message of the fault, the longest time without a step of another site after it, and the
rounds that another site has skipped. Also compares the loss of the last step, on all sites that reach it, with the
oracle of sites: a run whose rounds have these members by plan. The largest relative difference must be below
`TOLERANCE`. Needs root.
"""

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.site_network import SWITCH, StepTimes, ip, port_of, records, start, switch
from moefold.config.schema import Config
from moefold.recipe import load_config
from moefold.verify.oracle import Weights
from tests.train.oracle_sites import OracleSites, SitesState

STEPS, EVERY, FAULT_STEP, COUNT = 40, 4, 12, 3
LOST = 2
"""The site with the fault."""
TOLERANCE = 1e-9
WAIT_S = 300.0
PORT = 29600
RECIPE = f"""
[run]
seed = 3
steps = {STEPS}
device = "cpu"
dtype = "float64"
[model]
layers = 2
hidden_size = 16
attention.num_heads = 4
attention.num_kv_heads = 2
attention.head_dim = 4
vocab_size = 32
ffn.moe.num_experts = 8
ffn.moe.top_k = 2
ffn.moe.intermediate_size = 8
init_std = 0.2
[train]
seq_len = 16
micro_batch_size = 1
global_batch_size = 4
lr = 1e-2
lr_schedule = "constant"
warmup_steps = 0
[data]
kind = "synthetic"
[sites]
count = {COUNT}
every = {EVERY}
timeout_s = 8
[faults]
timeout_s = 600
[checkpoint]
every = 8
at_end = false
keep = 0
"""


class Trial:
    """Three sites and a meeting point in network namespaces."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder = folder
        self._names = names
        self.recipe = folder / "sites.toml"
        self.recipe.write_text(RECIPE)
        self._secret = folder / "secret.txt"
        self._secret.write_text(secrets.token_hex(32))
        self._secret.chmod(0o600)
        self.sites: dict[int, subprocess.Popen[bytes]] = {}
        self.steps = {number: StepTimes(self.run_dir(number)) for number in range(COUNT)}
        self.start_meet()

    def run_dir(self, number: int) -> Path:
        """Return the run folder of a site."""
        return self.folder / f"site-{number}" / "run"

    def start_meet(self) -> None:
        """Start the meeting point."""
        words = ["-m", "moefold", "meet", "--host", SWITCH, "--port", str(PORT), "--secret", str(self._secret)]
        self.meet = start(self._names[-1], words, self.folder / "meet.log")

    def start(self, faults: Mapping[int, tuple[str, int]] | None = None, *only: int) -> None:
        """Start sites, some of them with a fault at a step."""
        for number in only or range(COUNT):
            fault, step = (faults or {}).get(number, ("none", 0))
            folder = self.folder / f"site-{number}"
            folder.mkdir(exist_ok=True)
            words = ["-m", "benchmarks.site_fault_job", fault, str(step), str(folder), "train", str(self.recipe)]
            words += [f"sites.number={number}", f"sites.meet={SWITCH}:{PORT}", f"sites.secret={self._secret}"]
            self.sites[number] = start(self._names[number], [*words, f"run.dir={folder / 'run'}"], self.log(number))

    def log(self, number: int) -> Path:
        """Return the output of a site."""
        return self.folder / f"site-{number}.log"

    def text(self) -> str:
        """Return all output so far."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def wait(self, condition: Callable[[], bool]) -> float:
        """Wait until a condition holds and return the time."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            has_ended = bool(self.sites) and all(site.poll() is not None for site in self.sites.values())
            if (has_ended and not condition()) or time.monotonic() > deadline_s:
                raise TimeoutError(self.text())
            time.sleep(0.01)
        return time.time()

    def wait_for_step(self, step: int, number: int = 0) -> float:
        """Wait until a site has taken a step."""
        return self.wait(lambda: self.steps[number].last() >= step)

    def fault_time(self) -> float:
        """Wait for the fault that a site injects into itself, and return its time."""
        path = self.folder / f"site-{LOST}" / "fault"
        self.wait(path.exists)
        return float(path.read_text())

    def wait_for_end(self) -> None:
        """Wait until all sites have ended."""
        self.wait(lambda: all(site.poll() is not None for site in self.sites.values()))

    def cut(self, *, is_up: bool) -> None:
        """Take the cable of the lost site out, or put it in again."""
        ip("-n", self._names[-1], "link", "set", port_of(LOST), "up" if is_up else "down")

    def close(self) -> None:
        """Kill what still runs."""
        for process in (*self.sites.values(), self.meet):
            if process.poll() is None:
                process.kill()
            process.wait()
        for steps in self.steps.values():
            steps.stop()


@dataclass
class Plan:
    """Members, shares and followers of each round of a trial, and the giver and taker of each state."""

    rounds: dict[int, tuple[list[int], list[float], list[int]]] = field(default_factory=dict)
    """By step: members, their shares, and the sites that applied the round."""
    joins: dict[int, dict[int, int]] = field(default_factory=dict)
    """By step: giver of each site that takes a state."""
    taken: dict[int, int] = field(default_factory=dict)
    """By site that took a state: the steps of its process before, whose samples it has read."""


def read_plan(trial: Trial) -> Plan:
    """Read the plan of a finished trial."""
    plan = Plan()
    for number in range(COUNT):
        path = trial.folder / f"site-{number}" / "rounds.jsonl"
        for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            if line.get("applied"):
                _, _, followers = plan.rounds.setdefault(line["step"], (line["members"], line["weights"], []))
                followers.append(number)
    for site, giver, index in re.findall(r"site (\d) takes the state of site (\d) after round (\d+)", trial.text()):
        plan.joins.setdefault(EVERY * int(index), {})[int(site)] = int(giver)
        before = re.findall(r"after step (\d+): took the state of site", trial.log(int(site)).read_text())
        plan.taken[int(site)] = int(before[-1])
    return plan


class _Samples:
    """Samples in a site's order after it took a state: it continues after the samples that it has read."""

    def __init__(self, data: Any, count: int) -> None:
        self._data = data
        self._count = count
        self.skipped = dict.fromkeys(range(count), 0)
        """Samples that a site has not read, because its step number jumped."""

    def annotated_sample(self, index: int) -> Any:
        """Return the sample that replaces a sample of an undisturbed site."""
        return self._data.annotated_sample(index - self._count * self.skipped[index % self._count])


@dataclass(frozen=True)
class _Data:
    train: _Samples


class PlannedSites(OracleSites):
    """Oracle of sites whose rounds have the members of a plan."""

    def __init__(self, cfg: Config, plan: Plan) -> None:
        super().__init__(cfg)
        self._plan = plan
        self._step_number = 0
        self._samples = _Samples(self._data.train, cfg.sites.count)
        self._data = _Data(self._samples)  # type: ignore[assignment]

    def _send(self, fragments: list[int]) -> list[Weights | None]:
        members, weights, followers = self._plan.rounds.get(self._step_number, ([], [], []))
        mean = {
            name: sum(
                weight * (self.outer[site][name] - self.sites[site].weights[name].detach())
                for site, weight in zip(members, weights, strict=True)
                if weight
            )
            for name in self.outer[0]
        }
        return [mean if site in followers else None for site in range(len(self.sites))]

    def _step(self, step: int) -> SitesState:
        self._step_number = step
        state = super()._step(step)
        for site, giver in self._plan.joins.get(step, {}).items():
            self._take_state(site, giver)
            self._samples.skipped[site] = (step - self._plan.taken[site]) * self.cfg.train.global_batch_size
        return state

    def _take_state(self, site: int, giver: int) -> None:
        for name, phi in self.outer[giver].items():
            self.outer[site][name] = phi.clone()
            self.sites[site].weights[name].data.copy_(phi)
        ours, theirs = (self.sites[number]._optimizer for number in (site, giver))
        ours._states = deepcopy(theirs._states)
        ours._moment_updates = theirs._moment_updates


@dataclass(frozen=True)
class Outcome:
    """Message, time and survivors of a fault."""

    message: str
    """Regular expression of the message about the fault, in the output of the others or of the meeting point."""
    fault_s: float
    survivors: tuple[int, ...] = (0, 1)
    is_resumed: bool = False
    """All sites have ended and were started again."""


def _killed(trial: Trial) -> Outcome:
    trial.start({LOST: ("killed", FAULT_STEP)})
    return Outcome(r"round \d+ is not applied: .*|the exchange with .* failed.*", trial.fault_time())


def _stopped(trial: Trial) -> Outcome:
    trial.start({LOST: ("stopped", FAULT_STEP)})
    fault_s = trial.fault_time()
    trial.wait_for_step(FAULT_STEP + 2 * EVERY)
    # Only the rank's process is stopped at the site.
    for pid in _stopped_children(trial.sites[LOST].pid):
        os.kill(pid, signal.SIGCONT)
    return Outcome(r"round \d+ is not applied: .*", fault_s)


def _stopped_children(pid: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    below = [stopped for child in listed for stopped in _stopped_children(int(child))]
    is_stopped = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return [*([pid] if is_stopped else []), *below]


def _cable(trial: Trial) -> Outcome:
    trial.start()
    trial.wait_for_step(FAULT_STEP - 1)
    fault_s = time.time()
    trial.cut(is_up=False)
    trial.wait_for_step(FAULT_STEP + 2 * EVERY)
    trial.cut(is_up=True)
    return Outcome(rf"round \d+ is not applied: .*|site {LOST} on .*was silent.*|.*did not come within.*", fault_s)


def _meet_killed(trial: Trial) -> Outcome:
    trial.start()
    trial.wait_for_step(FAULT_STEP - 1)
    fault_s = time.time()
    trial.meet.kill()
    trial.meet.wait()
    trial.wait_for_step(FAULT_STEP + 2 * EVERY)
    trial.start_meet()
    return Outcome(r"the round of the sites is skipped: .*", fault_s)


def _vote_lost(trial: Trial) -> Outcome:
    trial.start({LOST: ("vote", FAULT_STEP)})
    return Outcome(rf"site {LOST} takes the state of .*", trial.fault_time())


def _newcomer(trial: Trial) -> Outcome:
    trial.start({LOST: ("killed", EVERY), 0: ("wait", 4 * EVERY + 2), 1: ("wait", 4 * EVERY + 2)})
    trial.fault_time()
    trial.wait(lambda: trial.sites[LOST].poll() is not None)
    shutil.rmtree(trial.folder / f"site-{LOST}")
    trial.start(None, LOST)
    arrival = re.compile(rf"site {LOST} on \S+ is here, at step 0 after 0 rounds")
    trial.wait(lambda: len(arrival.findall((trial.folder / "meet.log").read_text())) == 2)
    trial.wait_for_step(4 * EVERY + 1)
    fault_s = time.time()
    for number in (0, 1):
        (trial.folder / f"site-{number}" / "go").touch()
    return Outcome(rf"site {LOST} takes the state of .*", fault_s)


def _bit(trial: Trial) -> Outcome:
    trial.start({LOST: ("bit", FAULT_STEP)})
    fault_s = trial.fault_time()
    trial.wait_for_end()
    # All of them resume from step 8.
    trial.start()
    return Outcome(r"the outer weights of .* differ from the weights of the other sites", fault_s, is_resumed=True)


def _nan(trial: Trial) -> Outcome:
    trial.start({LOST: ("nan", FAULT_STEP)})
    return Outcome(r"step \d+: .* sent weights that are not finite; weight 0 in this round", trial.fault_time())


FAULTS: dict[str, Callable[[Trial], Outcome]] = {
    "kill -9 of a site in an exchange": _killed,
    "SIGSTOP of a site in an exchange, SIGCONT later": _stopped,
    "cable of a site out, and in again": _cable,
    "`moefold meet` killed, and started again": _meet_killed,
    "answer to the vote of a site lost": _vote_lost,
    "a new site in the place of a lost one, at round 5": _newcomer,
    "bit of phi flipped, all sites resumed": _bit,
    "NaN in the weights of a site": _nan,
}


def run_trial(main: Callable[[Trial], Outcome]) -> tuple[str, float, int, float]:
    """Run a trial and return message, pause, skipped rounds of site 0 and the relative difference of the last loss."""
    with tempfile.TemporaryDirectory() as temporary, switch(COUNT) as names:
        trial = Trial(Path(temporary), names)
        try:
            outcome = main(trial)
            trial.wait_for_end()
            for number in outcome.survivors:
                if trial.sites[number].returncode:
                    raise RuntimeError(trial.text())
            time.sleep(0.1)
            pause_s = max(trial.steps[number].pause_after(outcome.fault_s) for number in outcome.survivors)
        finally:
            trial.close()
        match = re.search(outcome.message, trial.text())
        if match is None:
            raise RuntimeError(f"no message {outcome.message}\n{trial.text()}")
        skipped = sum(bool(record["sites"] and record["sites"]["skipped"]) for record in records(trial.run_dir(0)))
        expected = PlannedSites(load_config(trial.recipe, ["sites.number=0"]), read_plan(trial)).run(STEPS)[-1].losses
        losses = {number: records(trial.run_dir(number))[-1] for number in range(COUNT)}
        differences = [
            abs(line["loss"] / expected[number] - 1) for number, line in losses.items() if line["step"] == STEPS
        ]
        return match[0].strip(), pause_s, skipped, max(differences)


def main() -> int:
    """Print the table and return 1 if a loss differs from the loss of the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="run only faults whose name matches")
    args = parser.parse_args()
    print("| fault | message | the others train on after | rounds that they skip | difference of the last loss |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    is_wrong = False
    for name, trial_main in FAULTS.items():
        if re.search(args.only, name):
            message, pause_s, skipped, difference = run_trial(trial_main)
            is_wrong |= not difference <= TOLERANCE
            print(f"| {name} | {message} | {pause_s:.1f} s | {skipped} | {difference:.0e} |", flush=True)
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
