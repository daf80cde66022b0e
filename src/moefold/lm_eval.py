"""Registration of `--model moefold` with lm-eval, on import of this module."""

from lm_eval.api.registry import register_model

from moefold.inference.lm_eval_model import MoefoldLM

register_model("moefold")(MoefoldLM)
