"""What turns a language model into an agent: prompt, memory, action parsing.

An `AgentProfile` is the sum of the three. Environments stay free of prompts, so the same
environment serves any agent, and the same agent code serves any environment.
"""

from rllib_gigpo.agent.memory import Joined, LastSteps, Memory, NoMemory
from rllib_gigpo.agent.memory_events import KeyEvents
from rllib_gigpo.agent.memory_knowledge import Knowledge, Passages, Skill, Skills
from rllib_gigpo.agent.memory_summary import RunningSummary, SummaryParser
from rllib_gigpo.agent.parsing import Action, ActionParser, TagParser
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import ChatTemplate, Message, PromptContext, PromptTemplate

__all__ = [
    "Action",
    "ActionParser",
    "AgentProfile",
    "ChatTemplate",
    "Joined",
    "KeyEvents",
    "Knowledge",
    "LastSteps",
    "Memory",
    "Message",
    "NoMemory",
    "Passages",
    "PromptContext",
    "PromptTemplate",
    "RunningSummary",
    "Skill",
    "Skills",
    "SummaryParser",
    "TagParser",
]
