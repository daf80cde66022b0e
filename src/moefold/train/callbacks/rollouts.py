"""Callbacks of reinforcement learning: held-out reward, files of rollouts, and a message if nothing is learnt."""

import json
from contextlib import suppress
from typing import Any, TextIO

from moefold.inference.rollouts import rollout_records, token_records
from moefold.metrics.writer import MISMATCH_FILE, ROLLOUTS_FILE, truncate_metrics
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.callbacks.run_log import is_due
from moefold.train.rollout_loader import RolloutLoader
from moefold.train.step_fault import MismatchError

SILENT_STEPS = 20
"""Steps without a mixed group until the log reports that nothing is learnt."""


class RolloutRounds(Callback):
    """Callback that saves and stops a run only between rounds; before callbacks that read `rl` or `signals`."""

    def on_start(self, context: TrainingContext) -> None:
        """Let each save wait for the ordered rounds, and the ranks that only sample end after the last save."""
        queue = rollout_loader(context).queue
        context.before_save.append(queue.receive_ordered)
        context.at_end.append(queue.finish)

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        """Set the metrics of the rollouts, and leave out signals within a round, whose last steps would be lost."""
        loader = rollout_loader(context)
        step.rl = dict(loader.metrics)
        if not loader.is_round_complete:
            step.signals.clear()


class RewardEvaluation(Callback):
    """Callback that computes the mean reward of greedy completions of held-out prompts.

    Args:
        every: train.eval_every; 0: never.
        reset_patience: rl.reset_patience.
    """

    def __init__(self, every: int, reset_patience: int) -> None:
        self._every = every
        self._reset_patience = reset_patience

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        """Evaluate if an evaluation is due and no signal stops the run; collective."""
        assert step.rl is not None
        step.rl["eval_reward"] = None
        if not (is_due(self._every, step.number) or (self._every > 0 and step.is_last)) or step.signals:
            return
        loader = rollout_loader(context)
        reward = loader.evaluate_reward()
        step.rl["eval_reward"] = reward
        if context.log is not None:
            result = "no reward" if reward is None else f"greedy reward {reward:.4f}"
            context.log.message(f"step {step.number}: {result} on held-out prompts")
        if reward is None:
            return
        if loader.kl_reference.record(reward):
            context.training.reset_moments()
            if context.log is not None:
                context.log.message(
                    f"step {step.number}: the reference model is the current policy, and the optimizer moments are 0: "
                    f"no higher reward in {self._reset_patience} evaluations"
                )


class RolloutLogging(Callback):
    """Callback that writes rollouts with their texts and rewards, and reports runs that learn nothing, on rank 0.

    Args:
        every: metrics.rollouts_every; 0: no rollouts are written.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._file: TextIO | None = None
        self._silent_steps = 0
        self._reports_none = False
        """True if the log has reported that no rollout has a reward."""

    def on_start(self, context: TrainingContext) -> None:
        """Open rollouts.jsonl; removes the lines past the checkpoint that the run continues from."""
        if not context.is_first_rank or not self._every:
            return
        assert context.log is not None
        self._file = context.log.outputs.attempt(ROLLOUTS_FILE, lambda: self._open(context))

    @staticmethod
    def _open(context: TrainingContext) -> TextIO:
        path = context.folder / ROLLOUTS_FILE
        truncate_metrics(path, context.position.step)
        return path.open("a", encoding="utf-8")

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        """Write the rollouts of the step if they are due."""
        assert step.rl is not None
        loader = rollout_loader(context)
        if context.log is not None:
            self._report_silence(context, step)
        if self._file is not None and is_due(self._every, step.number):
            assert context.log is not None
            records = [record for group in loader.round for record in rollout_records(group, loader.completion_text)]
            context.log.outputs.attempt(ROLLOUTS_FILE, lambda: self._append(step.number, records))

    def _append(self, step: int, records: list[dict[str, Any]]) -> None:
        assert self._file is not None
        self._file.writelines(json.dumps({"step": step, **record}) + "\n" for record in records)
        self._file.flush()

    def on_error(self, context: TrainingContext, error: Exception) -> None:
        """Write the rollouts of a sampler that differs from training."""
        if context.log is None or not isinstance(error, MismatchError):
            return
        loader = rollout_loader(context)
        records = [record for group in loader.round for record in token_records(group, loader.completion_text)]
        text = "".join(json.dumps({"step": context.position.step + 1, **record}) + "\n" for record in records)
        path = context.folder / MISMATCH_FILE
        context.log.outputs.attempt(MISMATCH_FILE, lambda: path.write_text(text, encoding="utf-8"))

    def on_end(self, context: TrainingContext, status: int) -> None:
        """Close the file."""
        if self._file is not None:
            # The buffer of a file that has failed cannot be written.
            with suppress(OSError):
                self._file.close()

    def _report_silence(self, context: TrainingContext, step: FinishedStep) -> None:
        """Log, once each, that no rollout had a reward, and that no group had two rewards for many steps.

        Rewards give no gradient then.
        """
        assert step.rl is not None
        assert context.log is not None
        if step.rl["reward"] is None and not self._reports_none:
            self._reports_none = True
            context.log.message(
                f"step {step.number}: no rollout has a reward, so nothing is learnt from them: the functions of "
                "reward.use returned None for all of them, or failed"
            )
        self._silent_steps = 0 if step.rl["mixed_groups"] else self._silent_steps + 1
        if self._silent_steps == SILENT_STEPS:
            reward = step.rl["reward"]
            if reward is None:
                cause = "no rollout has a reward; let a function of reward.use return numbers"
            else:
                cause = "the prompts are solved" if reward >= 1 else "no rollout is better than others"
                cause += (
                    f" (mean reward {reward}); use other prompts, a better start (checkpoint.init_from), a larger "
                    "rl.group_size or a higher rollout.temperature"
                )
            context.log.message(
                f"step {step.number}: no group has had two different rewards for {SILENT_STEPS} steps, so nothing is "
                f"learnt: {cause}"
            )


def rollout_loader(context: TrainingContext) -> RolloutLoader:
    """Return the data loader of a run of reinforcement learning."""
    assert isinstance(context.data, RolloutLoader)
    return context.data
