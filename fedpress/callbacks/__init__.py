"""Callbacks that receive a run's figures as its rounds close: TensorBoard, MLflow, W&B, your own.

docs/callbacks.md has the interface, the figures' names and the command line.
"""

from fedpress.callbacks.delivery import Delivery as Delivery
from fedpress.callbacks.interface import Callback as Callback
from fedpress.callbacks.interface import ClosedRound as ClosedRound
from fedpress.callbacks.interface import Result as Result
from fedpress.callbacks.interface import Run as Run
from fedpress.callbacks.options import from_options as from_options
