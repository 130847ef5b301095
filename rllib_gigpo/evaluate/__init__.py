"""Evaluates models and prompted agents on a fixed panel of tasks: `rllib-gigpo evaluate`."""

from rllib_gigpo.evaluate.agents import PROMPTINGS, PromptedAgent
from rllib_gigpo.evaluate.endpoint import Endpoint
from rllib_gigpo.evaluate.panel import Panel, evaluate
from rllib_gigpo.evaluate.results import summarise

__all__ = ["PROMPTINGS", "Endpoint", "Panel", "PromptedAgent", "evaluate", "summarise"]
