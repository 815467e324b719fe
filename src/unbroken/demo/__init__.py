"""``unbroken demo``: a training run that is killed and resumed, held against one that never stopped."""

from unbroken.demo.data import Data
from unbroken.demo.play import Plan, run_demo
from unbroken.demo.processes import find_trainer
from unbroken.errors import DemoError

__all__ = ["Data", "DemoError", "Plan", "find_trainer", "run_demo"]
