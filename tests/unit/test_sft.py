"""The warm start: its loss, what it teaches, and the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from rllib_gigpo.models import ModelSpec, load_causal_lm, load_tokenizer, materialize
from rllib_gigpo.record import Example, save_examples
from rllib_gigpo.sft import WarmStart, main, warm_start

TEXTS = ("go where key is", "<action> north </action>", "<action> south </action>")
NORTH = Example([{"role": "user", "content": "go where"}], "<action> north </action>")
SOUTH = Example([{"role": "user", "content": "key is"}], "<action> south </action>")


@pytest.fixture(scope="module")
def tiny():
    return materialize(ModelSpec("tiny", TEXTS, options={"hidden_size": 32}))


def response_loss(folder, example) -> float:
    """Mean negative log-probability of the response tokens, by one plain forward pass."""
    tokenizer, model = load_tokenizer(str(folder)), load_causal_lm(str(folder))
    prompt = tokenizer.apply_chat_template(
        example.messages, add_generation_prompt=True, return_dict=False
    )
    response = tokenizer(example.response, add_special_tokens=False)["input_ids"]
    response += [tokenizer.eos_token_id] * example.ends_turn
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0]
    logps = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return -float(logps[torch.arange(len(response)), response].mean())


@pytest.mark.parametrize("ends_turn", [True, False])
def test_the_loss_is_over_the_response_and_the_end_of_the_turn(tiny, tmp_path, ends_turn):
    example = Example(NORTH.messages, NORTH.response, ends_turn)
    losses = []
    warm_start(
        tiny,
        [example],
        tmp_path,
        settings=WarmStart(steps=1, batch_size=1, lr=0.0, warmup_steps=0),
        on_step=lambda step, loss: losses.append(loss),
    )
    np.testing.assert_allclose(losses, [response_loss(tiny, example)], rtol=1e-5)


def test_the_order_of_the_examples_is_a_function_of_the_seed(tiny, tmp_path):
    def losses(seed):
        found = []
        warm_start(
            tiny,
            [NORTH, SOUTH],
            tmp_path / str(seed),
            settings=WarmStart(steps=8, batch_size=1, lr=0.0, warmup_steps=0, seed=seed),
            on_step=lambda step, loss: found.append(round(loss, 4)),
        )
        return found

    assert losses(0) == losses(0)
    assert len({tuple(losses(seed)) for seed in range(4)}) > 1
    # Every pass sees both examples once.
    pair = set(losses(0))
    assert len(pair) == 2
    assert all(set(losses(0)[start : start + 2]) == pair for start in range(0, 8, 2))


def test_what_was_shown_is_learned(tiny, tmp_path, capfd):
    folder = warm_start(
        tiny,
        [NORTH, SOUTH],
        tmp_path,
        settings=WarmStart(steps=60, batch_size=2, lr=1e-2, warmup_steps=5),
    )
    assert response_loss(tiny, NORTH) > 1.0
    assert max(response_loss(folder, example) for example in (NORTH, SOUTH)) < 0.05
    assert capfd.readouterr().err == ""  # no progress bar of the saved files


def test_nothing_to_learn_from_and_too_long_a_prompt_are_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="at least one example"):
        warm_start(tiny, [], tmp_path)
    # <user> go where <assistant>: 4 tokens.
    with pytest.raises(ValueError, match="has 4 tokens, max_prompt_tokens is 3"):
        warm_start(tiny, [NORTH], tmp_path, max_prompt_tokens=3)


def test_a_write_that_fails_leaves_what_was_there(tiny, tmp_path, monkeypatch):
    def train(lr: float) -> None:
        once = WarmStart(steps=1, batch_size=1, lr=lr, warmup_steps=0)
        warm_start(tiny, [NORTH], tmp_path / "model", settings=once)

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    with monkeypatch.context() as broken:
        # The tokenizer is written last, when config and weights are there already.
        broken.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", fail)
        with pytest.raises(OSError, match="No space left"):
            train(lr=0.0)
        assert list(tmp_path.iterdir()) == []
    train(lr=0.0)
    before = files()
    with monkeypatch.context() as broken:
        broken.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", fail)
        with pytest.raises(OSError, match="No space left"):
            train(lr=0.1)
    assert files() == before
    train(lr=0.1)
    assert files()["model.safetensors"] != before["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_of_something_else_is_not_replaced(tiny, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="exists and is no model: name a folder that is new"):
        warm_start(tiny, [NORTH], tmp_path)
    with pytest.raises(SystemExit):
        main(["--model=tiny", "--data=none.jsonl", f"--output={tmp_path / 'thesis.tex'}"])
    assert "exists and is no model" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_lies_beside_a_model_is_not_deleted_with_it(tiny, tmp_path):
    output, once = tmp_path / "model", WarmStart(steps=1, batch_size=1, warmup_steps=0)
    warm_start(tiny, [NORTH], output, settings=once)
    (output / ".git").mkdir()
    (output / "notes.md").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds '\.git', 'notes\.md' beside the files of a model"):
        warm_start(tiny, [NORTH], output, settings=once)
    (output / ".git").rmdir()
    (output / "notes.md").rename(tmp_path / "model.previous")
    with pytest.raises(
        ValueError, match=r"replaced.*model\.previous' would be lost: move or remove"
    ):
        warm_start(tiny, [NORTH], output, settings=once)
    assert (tmp_path / "model.previous").read_text() == "years of work"
    # A model that replaces none takes no other name.
    output.rename(tmp_path / "old")
    warm_start(tiny, [NORTH], output, settings=once)
    assert (tmp_path / "model.previous").read_text() == "years of work"


def test_the_command_trains_a_tiny_model_on_the_words_of_the_data(tmp_path, capsys):
    save_examples([NORTH, SOUTH], tmp_path / "data.jsonl")
    settings = ["--steps", "12", "--batch-size", "2", "--warmup-steps", "2", "--lr", "0.01"]
    main(
        [
            *("--model", "tiny", "--data", str(tmp_path / "data.jsonl")),
            *("--output", str(tmp_path / "out"), *settings),
        ]
    )
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "2 examples; 12 steps of 2, lr 0.01"
    losses = [float(line.rpartition(" ")[2]) for line in told if line.startswith("step")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert told[-1] == f"GiGPOConfig().llm(model={str(tmp_path / 'out')!r})"
    vocabulary = load_tokenizer(str(tmp_path / "out")).get_vocab()
    assert {"go", "where", "key", "is", "north", "south"} <= set(vocabulary)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
