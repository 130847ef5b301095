"""What is trained on is what the engine said, whatever the chat template makes of it later."""

from __future__ import annotations

import copy

import numpy as np

from rllib_gigpo.encoding import PromptEncoder
from rllib_gigpo.grouping import AnchorRule
from rllib_gigpo.rollout_types import Episode
from rllib_gigpo.rows import episodes_to_batch
from tests.fakes import ScriptedEngine
from tests.stage import PROFILE, TOKENIZER, Stage, task

THOUGHT = "<think> count to 0 </think> <action> down </action>"
# As Qwen3's template does: what an assistant thought is cut out of its earlier turns.
STRIPPING = (
    "{% for m in messages %}<{{ m['role'] }}> "
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }} "
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def stripping_tokenizer():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = STRIPPING
    return tokenizer


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_the_template_of_this_test_strips_thoughts():
    turns = [{"role": "user", "content": "left 1"}, {"role": "assistant", "content": THOUGHT}]
    told = stripping_tokenizer().apply_chat_template(turns, tokenize=True, return_dict=False)
    assert told == ids("<user> left 1 <assistant> <action> down </action>")


def play(stage: Stage) -> list[Episode]:
    return stage.play(task(0, size=2, start=3))


def test_responses_are_the_engines_tokens_with_their_thoughts():
    stage = Stage(THOUGHT)
    tokenizer = stripping_tokenizer()
    stage.engine = ScriptedEngine(tokenizer, lambda request: THOUGHT, weight_version=7)
    stage.encoder = PromptEncoder(tokenizer, PROFILE, 200)
    batch = episodes_to_batch(play(stage), AnchorRule(), lambda agent: "default_policy")
    rows = batch.policy_batches["default_policy"]
    assert len(rows["response_ids"]) == 6
    for response in rows["response_ids"]:
        np.testing.assert_array_equal(response, ids(THOUGHT))
    asked = sorted(request.prompt_ids.tolist() for request in stage.engine.requests)
    assert sorted(prompt.tolist() for prompt in rows["prompt_ids"]) == asked


def test_a_history_of_turns_may_be_stripped_but_the_rows_are_not():
    """An agent whose prompt repeats its own earlier turns as chat messages."""

    def with_turns(context):
        before = [{"role": "user", "content": "left 3"}, {"role": "assistant", "content": THOUGHT}]
        return [*before, {"role": "user", "content": context.observation}]

    tokenizer = stripping_tokenizer()
    stage = Stage(THOUGHT)
    stage.profile = copy.copy(PROFILE)
    object.__setattr__(stage.profile, "prompt", with_turns)
    stage.engine = ScriptedEngine(tokenizer, lambda request: THOUGHT, weight_version=7)
    stage.encoder = PromptEncoder(tokenizer, stage.profile, 200)
    batch = episodes_to_batch(play(stage), AnchorRule(), lambda agent: "default_policy")
    rows = batch.policy_batches["default_policy"]
    thought = ids("<think>")[0]
    for prompt, response in zip(rows["prompt_ids"], rows["response_ids"], strict=True):
        assert thought not in prompt
        np.testing.assert_array_equal(response, ids(THOUGHT))
    for request in stage.engine.requests:
        assert any(np.array_equal(request.prompt_ids, prompt) for prompt in rows["prompt_ids"])
