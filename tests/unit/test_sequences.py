"""Packing and scoring of responses, against plain full forward passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
)

from rllib_gigpo.sequences import (
    MicroBatch,
    ResponseLogps,
    check_output_layer,
    pack,
    response_logps,
)
from tests.contract.tiny_models import VOCAB_SIZE, forward_logps, tiny_model


def ids(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    draws = np.random.default_rng(seed)
    return [draws.integers(3, VOCAB_SIZE, length).astype(np.int32) for length in lengths]


# Packing -----------------------------------------------------------------------------------------


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_a_micro_batch_by_hand():
    (batch,) = pack([array(1, 2, 3), array(4)], [array(5), array(6, 7)], token_budget=8)
    # Sorted by length: the second row (3 tokens) comes before the first (4 tokens).
    assert batch.rows.tolist() == [0, 1]
    assert batch.index.tolist() == [1, 0]
    assert batch.input_ids.tolist() == [[4, 6, 7, 0], [1, 2, 3, 5]]
    assert batch.lengths.tolist() == [3, 4]
    # A token's logits stand one position before it: 6 and 7 at 0 and 1, 5 at 2.
    assert batch.positions.tolist() == [[0, 1], [2, 0]]
    assert batch.targets.tolist() == [[6, 7], [5, 0]]
    assert batch.mask.tolist() == [[True, True], [True, False]]


def test_equal_rows_share_one_sequence():
    prompts = [array(1, 2), array(3), array(1, 2), array(1, 2)]
    responses = [array(4), array(4), array(4), array(5)]
    (batch,) = pack(prompts, responses, token_budget=100)
    assert batch.input_ids.shape == (3, 3)
    assert batch.index[0] == batch.index[2]
    assert len({int(batch.index[row]) for row in (0, 1, 3)}) == 3


def test_the_border_between_prompt_and_response_tells_rows_apart():
    # The same tokens, but in the first row one of them is spoken, in the second two.
    (batch,) = pack([array(1, 2), array(1)], [array(3), array(2, 3)], token_budget=100)
    assert batch.input_ids.tolist() == [[1, 2, 3], [1, 2, 3]]
    assert batch.mask.sum(1).tolist() == [1, 2]


def test_the_budget_counts_padded_tokens():
    prompts, responses = ids(3, 3, 7), ids(1, 1, 1, seed=1)
    # Lengths 4, 4, 8: two of 4 are 8 tokens, all three padded to 8 are 24.
    assert [len(b.lengths) for b in pack(prompts, responses, 23)] == [2, 1]
    assert [len(b.lengths) for b in pack(prompts, responses, 24)] == [3]
    assert [len(b.lengths) for b in pack(prompts, responses, 7)] == [1, 1, 1]


def test_a_sequence_over_the_budget_goes_alone():
    batches = pack(ids(3, 30), ids(1, 1, seed=1), token_budget=10)
    assert [b.input_ids.shape for b in batches] == [(1, 4), (1, 31)]


def test_no_rows_make_no_micro_batch():
    assert pack([], [], 100) == []


@pytest.mark.parametrize(
    ("prompt", "response", "numbers"), [((), (1,), "0 prompt and 1"), ((1,), (), "1 prompt and 0")]
)
def test_an_empty_prompt_or_response_is_refused(prompt, response, numbers):
    with pytest.raises(ValueError, match=f"row 1 has {numbers} response tokens"):
        pack([array(1), array(*prompt)], [array(1), array(*response)], 100)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(rows=st.lists(st.tuples(TOKENS, TOKENS), max_size=20), budget=st.integers(1, 60))
def test_every_row_is_in_exactly_one_micro_batch_and_can_be_read_back(rows, budget):
    prompts = [array(*prompt) for prompt, _ in rows]
    responses = [array(*response) for _, response in rows]
    batches = pack(prompts, responses, budget)
    assert sorted(row for b in batches for row in b.rows.tolist()) == list(range(len(rows)))
    distinct = {(tuple(prompt), tuple(response)) for prompt, response in rows}
    assert sum(len(b.lengths) for b in batches) == len(distinct)
    for b in batches:
        assert b.input_ids.numel() <= budget or len(b.lengths) == 1
        assert b.input_ids.shape[1] == int(b.lengths.max())
        assert sorted(set(b.index.tolist())) == list(range(len(b.lengths)))
        for row, u in zip(b.rows.tolist(), b.index.tolist(), strict=True):
            prompt, response = rows[row]
            assert b.input_ids[u, : b.lengths[u]].tolist() == [*prompt, *response]
            assert b.targets[u, b.mask[u]].tolist() == response
            spoken_at = (b.positions[u, b.mask[u]] + 1).tolist()
            assert b.input_ids[u, spoken_at].tolist() == response
            assert spoken_at[0] == len(prompt)


# Scoring -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def model(request):
    return tiny_model(request.param, tied=request.param == "qwen2")


PROMPTS = ids(5, 1, 12, 5, 3)
RESPONSES = ids(4, 7, 1, 2, 4, seed=1)


def scored(batches: Sequence[MicroBatch], model, **settings) -> dict[int, ResponseLogps]:
    found = {}
    for batch in batches:
        result = response_logps(model, batch, **settings)
        for place, row in enumerate(batch.rows.tolist()):
            found[row] = ResponseLogps(
                *(None if column is None else column[place] for column in result)
            )
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("budget", [1, 40, 1000])
def test_log_probabilities_equal_those_of_a_plain_forward_pass(model, temperature, budget):
    with torch.no_grad():
        found = scored(pack(PROMPTS, RESPONSES, budget), model, temperature=temperature)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        expected = forward_logps(model, prompt, response, temperature)
        got = found[row]
        np.testing.assert_allclose(got.logps[got.mask].numpy(), expected, atol=2e-5)
        assert got.mask.sum() == len(response)
        assert (got.logps[~got.mask] == 0).all()
        assert got.logps.dtype == torch.float32


def test_temperature_0_counts_as_1(model):
    batches = pack(PROMPTS, RESPONSES, 1000)
    with torch.no_grad():
        greedy, plain = (scored(batches, model, temperature=t) for t in (0.0, 1.0))
    for row in greedy:
        assert torch.equal(greedy[row].logps, plain[row].logps)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_is_that_of_the_whole_distribution(model, temperature):
    with torch.no_grad():
        found = scored(pack(PROMPTS, RESPONSES, 1000), model, temperature=temperature)
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            whole = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
            logits = model(input_ids=whole).logits[0, len(prompt) - 1 : -1] / temperature
            expected = torch.distributions.Categorical(logits=logits).entropy()
            got = found[row]
            torch.testing.assert_close(got.entropy[got.mask], expected, atol=2e-5, rtol=1e-5)
            assert (got.entropy[~got.mask] == 0).all()


def gradient(model, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_shared_sequences_give_the_gradient_of_separate_ones(model):
    # Rows 0, 2 and 3 are equal, with different weights in the loss.
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0]]
    responses = [RESPONSES[0], RESPONSES[1], RESPONSES[0], RESPONSES[0]]
    weights = [0.5, -1.0, 2.0, -0.25]

    (batch,) = pack(prompts, responses, 1000)
    assert len(batch.lengths) == 2
    shared = response_logps(model, batch).logps.sum(1)
    together = gradient(model, (torch.tensor(weights) * shared).sum())

    apart = torch.zeros_like(together)
    for prompt, response, weight in zip(prompts, responses, weights, strict=True):
        whole = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
        logps = model(input_ids=whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logps.gather(1, whole[0, len(prompt) :, None])
        apart += gradient(model, weight * chosen.sum())
    assert together.norm() > 1.0
    torch.testing.assert_close(together, apart, atol=1e-4 * float(apart.norm()), rtol=1e-3)


@pytest.mark.parametrize("wanted", [True, False])
def test_entropy_carries_a_gradient_only_where_wanted(model, wanted):
    (batch,) = pack(PROMPTS, RESPONSES, 1000)
    result = response_logps(model, batch, entropy_grad=wanted)
    assert result.entropy.requires_grad is wanted
    assert result.logps.requires_grad
    with torch.no_grad():
        assert not response_logps(model, batch, entropy_grad=True).entropy.requires_grad


def test_the_output_layer_runs_at_response_positions_only(model):
    (batch,) = pack(PROMPTS, RESPONSES, 1000)
    seen = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda module, args, logits: seen.append(tuple(logits.shape))
    )
    with torch.no_grad():
        response_logps(model, batch)
    hook.remove()
    # 4 + 7 + 1 + 2 + 4 response tokens.
    assert seen == [(18, VOCAB_SIZE)]


# The output layer --------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


@pytest.mark.parametrize(
    "config",
    [
        # Their defaults: logits capped at 30, multiplied by 0.0625, divided by 4.
        Gemma2Config(**SMALL),
        CohereConfig(**SMALL),
        GraniteConfig(**SMALL, logits_scaling=4.0),
    ],
    ids=["soft cap", "scale", "divisor"],
)
def test_models_that_change_their_logits_are_refused(config: PreTrainedConfig):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"{type(model).__name__} changes its logits") as error:
        check_output_layer(model)
    assert "use a Qwen, Llama" in str(error.value)


def test_models_that_do_not_are_accepted_and_left_as_they_were(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    check_output_layer(model)
    assert model.training
    model.eval()
    check_output_layer(model)
    assert not model.training
    assert not model.get_output_embeddings()._forward_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("has_own_forward", [False, True])
def test_nothing_before_the_output_layer_runs(model, has_own_forward):
    """Kernels that need a GPU may stand there, while the model is on the CPU still."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no GPU")

    body = model.base_model
    hooks = [layer.register_forward_pre_hook(refuse) for layer in body.modules()]
    if has_own_forward:
        body.forward = refuse
    expected = dict(vars(body))
    with pytest.raises(RuntimeError, match="no GPU"):
        model(input_ids=torch.tensor([[0]]))
    for hook in hooks[:1]:  # the body's own, which is called and does not compute
        hook.remove()
    check_output_layer(model)
    assert dict(vars(body)) == expected


def test_an_output_layer_of_zeros_is_accepted():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=False))
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    check_output_layer(model)
