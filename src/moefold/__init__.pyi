from moefold.api import Config as Config
from moefold.api import ConfigError as ConfigError
from moefold.api import EvalOptions as EvalOptions
from moefold.api import GenerateOptions as GenerateOptions
from moefold.api import Layout as Layout
from moefold.api import LoadedRecipe as LoadedRecipe
from moefold.api import Planner as Planner
from moefold.api import PlanOptions as PlanOptions
from moefold.api import RunError as RunError
from moefold.api import SamplingParams as SamplingParams
from moefold.api import build_model as build_model
from moefold.api import check_config as check_config
from moefold.api import evaluate as evaluate
from moefold.api import fold as fold
from moefold.api import generate as generate
from moefold.api import load_config as load_config
from moefold.api import load_recipe as load_recipe
from moefold.api import plan as plan
from moefold.api import result_as_dict as result_as_dict
from moefold.api import train_model as train_model
from moefold.train.callbacks.callback import Callback as Callback

__version__: str
