"""Callbacks of reinforcement learning: held-out reward, files of rollouts, and a message if nothing is learnt."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TextIO

from moefold.inference.rollouts import rollout_records, token_records
from moefold.metrics.writer import MISMATCH_FILE, ROLLOUTS_FILE, truncate_metrics
from moefold.train.callbacks.callback import CallbackStage, FinishedStep, StageCallback, TrainingContext
from moefold.train.position import is_due, is_evaluation_due
from moefold.train.rl.rollout_loader import RolloutLoader
from moefold.train.step_fault import MismatchError

SILENT_STEPS = 20
"""Steps without a mixed group until the log reports that nothing is learnt."""


class RolloutRounds(StageCallback):
    """Callback that saves and stops a run only between rounds."""

    stage = CallbackStage.ROUNDS

    def __init__(self, loader: RolloutLoader) -> None:
        self._loader = loader

    def on_start(self, context: TrainingContext) -> None:
        """Let each save wait for the ordered rounds, and the ranks that only sample end after the last save."""
        queue = self._loader.queue
        context.before_save.append(queue.receive_ordered)
        context.at_end.append(queue.finish)

    def complete(self, context: TrainingContext, step: FinishedStep) -> FinishedStep:
        """Leave out signals within a round, whose last steps would be lost."""
        return step if self._loader.is_round_complete else replace(step, signals=())


class RewardEvaluation(StageCallback):
    """Callback that computes the mean reward of greedy completions of held-out prompts, and sets the metrics `rl`."""

    stage = CallbackStage.EVALUATION

    def __init__(self, loader: RolloutLoader, every: int, last_step: int, reset_patience: int) -> None:
        self._loader = loader
        self._every = every
        self._last_step = last_step
        self._reset_patience = reset_patience

    def on_start(self, context: TrainingContext) -> None:
        """Do an evaluation that a signal prevented earlier, with its effect on the reference model. Collective."""
        step = context.position.step
        if not context.is_resumed or not self._loader.kl_reference.lacks_evaluation:
            return
        reward = self._evaluate(context, step, ", made up after a signal")
        if context.log is not None and reward is not None:
            context.log.writer.add_held_out_reward(step, reward)

    def complete(self, context: TrainingContext, step: FinishedStep) -> FinishedStep:
        """Evaluate if an evaluation is due and no signal stops the run. It is collective."""
        reward: float | None = None
        is_evaluated = step.is_evaluated
        if is_evaluation_due(self._every, step.number, self._last_step):
            is_evaluated = not step.signals
            if is_evaluated:
                reward = self._evaluate(context, step.number)
            else:
                self._loader.kl_reference.note_evaluation(is_done=False)
        return replace(step, rl=self._loader.metrics | {"eval_reward": reward}, is_evaluated=is_evaluated)

    def _evaluate(self, context: TrainingContext, step: int, occasion: str = "") -> float | None:
        """Return the mean reward of held-out prompts. Reset the reference model if it has stopped to rise."""
        reward = self._loader.evaluate_reward()
        self._loader.kl_reference.note_evaluation(is_done=True)
        if context.log is not None:
            result = "no reward" if reward is None else f"greedy reward {reward:.4f}"
            context.log.message(f"step {step}: {result} on held-out prompts{occasion}")
        if reward is not None and self._loader.kl_reference.record(reward):
            context.training.reset_moments()
            if context.log is not None:
                context.log.message(
                    f"step {step}: the reference model is the current policy, and the optimizer moments are 0: "
                    f"no higher reward in {self._reset_patience} evaluations"
                )
        return reward


class RolloutLogging(StageCallback):
    """Callback that writes rollouts with their texts and rewards, and reports runs that learn nothing, on rank 0."""

    stage = CallbackStage.REPORTS

    def __init__(self, loader: RolloutLoader, every: int) -> None:
        self._loader = loader
        self._every = every
        self._file: TextIO | None = None
        self._silent_steps = 0
        self._reports_none = False
        """True if the log has reported that no rollout has a reward."""

    def on_start(self, context: TrainingContext) -> None:
        """Open rollouts.jsonl. It removes the lines past the checkpoint that the run continues from."""
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
        if context.log is not None:
            self._report_silence(context.log.message, step.number)
        if self._file is not None and is_due(self._every, step.number):
            assert context.log is not None
            text_of = self._loader.completion_text
            records = [record for group in self._loader.round for record in rollout_records(group, text_of)]
            context.log.outputs.attempt(ROLLOUTS_FILE, lambda: self._append(step.number, records))

    def _append(self, step: int, records: list[dict[str, Any]]) -> None:
        assert self._file is not None
        self._file.writelines(json.dumps({"step": step, **record}) + "\n" for record in records)
        self._file.flush()

    def on_error(self, context: TrainingContext, error: Exception) -> None:
        """Write the rollouts of a sampler that differs from training."""
        if context.log is None or not isinstance(error, MismatchError):
            return
        text_of = self._loader.completion_text
        records = [record for group in self._loader.round for record in token_records(group, text_of)]
        text = "".join(json.dumps({"step": context.position.step + 1, **record}) + "\n" for record in records)
        path = context.folder / MISMATCH_FILE
        context.log.outputs.attempt(MISMATCH_FILE, lambda: path.write_text(text, encoding="utf-8"))

    def on_end(self, context: TrainingContext, status: int) -> None:
        """Close the file."""
        if self._file is not None:
            # The buffer of a file that has failed cannot be written.
            with suppress(OSError):
                self._file.close()

    def _report_silence(self, say: Callable[[str], None], step: int) -> None:
        """Log, once each, that no rollout had a reward, and that no group had two rewards for many steps.

        Rewards give no gradient then.
        """
        metrics = self._loader.metrics
        if metrics["reward"] is None and not self._reports_none:
            self._reports_none = True
            say(
                f"step {step}: no rollout has a reward, so nothing is learnt from them: the functions of "
                "reward.use returned None for all of them, or failed"
            )
        self._silent_steps = 0 if metrics["mixed_groups"] else self._silent_steps + 1
        if self._silent_steps == SILENT_STEPS:
            reward = metrics["reward"]
            if reward is None:
                cause = "no rollout has a reward; let a function of reward.use return numbers"
            else:
                cause = "the prompts are solved" if reward >= 1 else "no rollout is better than others"
                cause += (
                    f" (mean reward {reward}); use other prompts, a better start (checkpoint.init_from), a larger "
                    "rl.group_size or a higher rollout.temperature"
                )
            say(
                f"step {step}: no group has had two different rewards for {SILENT_STEPS} steps, so nothing is "
                f"learnt: {cause}"
            )
