"""GiGPO (Group-in-Group Policy Optimization) for LLM agents as a Ray RLlib Algorithm."""

from ray.tune.registry import register_trainable

from rllib_gigpo.agent import (
    Action,
    AgentProfile,
    ChatTemplate,
    LastSteps,
    NoMemory,
    PromptContext,
    TagParser,
)
from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.gigpo import GiGPO
from rllib_gigpo.lora import LoRASettings
from rllib_gigpo.registry import register_llm_env

__version__ = "0.1.0"

register_trainable("GiGPO", GiGPO)

__all__ = [
    "Action",
    "AgentProfile",
    "ChatTemplate",
    "GiGPO",
    "GiGPOConfig",
    "LastSteps",
    "LoRASettings",
    "NoMemory",
    "PromptContext",
    "TagParser",
    "register_llm_env",
]
