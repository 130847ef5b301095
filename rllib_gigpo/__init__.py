"""GiGPO (Group-in-Group Policy Optimization) for LLM agents as a Ray RLlib Algorithm."""

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
from rllib_gigpo.correction import RolloutCorrection
from rllib_gigpo.family import (
    DAPO,
    GRPO,
    GSPO,
    HGPO,
    LLMPPO,
    RLOO,
    DAPOConfig,
    DrGRPO,
    DrGRPOConfig,
    GiGPODynamic,
    GiGPODynamicConfig,
    GiGPONoEpisode,
    GiGPONoEpisodeConfig,
    GiGPONoStd,
    GiGPONoStdConfig,
    GiGPONoStep,
    GiGPONoStepConfig,
    GRPOConfig,
    GSPOConfig,
    HGPOConfig,
    LLMPPOConfig,
    LLMPPOToken,
    LLMPPOTokenConfig,
    REINFORCEpp,
    REINFORCEppBaseline,
    REINFORCEppBaselineConfig,
    REINFORCEppConfig,
    RLOOConfig,
    register_family,
)
from rllib_gigpo.gigpo import GiGPO
from rllib_gigpo.lora import LoRASettings
from rllib_gigpo.registry import register_llm_env

__version__ = "0.1.0"

register_family()

__all__ = [
    "DAPO",
    "GRPO",
    "GSPO",
    "HGPO",
    "LLMPPO",
    "RLOO",
    "Action",
    "AgentProfile",
    "ChatTemplate",
    "DAPOConfig",
    "DrGRPO",
    "DrGRPOConfig",
    "GRPOConfig",
    "GSPOConfig",
    "GiGPO",
    "GiGPOConfig",
    "GiGPODynamic",
    "GiGPODynamicConfig",
    "GiGPONoEpisode",
    "GiGPONoEpisodeConfig",
    "GiGPONoStd",
    "GiGPONoStdConfig",
    "GiGPONoStep",
    "GiGPONoStepConfig",
    "HGPOConfig",
    "LLMPPOConfig",
    "LLMPPOToken",
    "LLMPPOTokenConfig",
    "LastSteps",
    "LoRASettings",
    "NoMemory",
    "PromptContext",
    "REINFORCEpp",
    "REINFORCEppBaseline",
    "REINFORCEppBaselineConfig",
    "REINFORCEppConfig",
    "RLOOConfig",
    "RolloutCorrection",
    "TagParser",
    "register_llm_env",
]
