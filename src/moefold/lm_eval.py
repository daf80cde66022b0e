"""Importing this module makes `--model moefold` known to lm-eval in this process."""

from lm_eval.api.registry import register_model

from moefold.inference.lm_eval_model import MoefoldLM

register_model("moefold")(MoefoldLM)
