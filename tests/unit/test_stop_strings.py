"""A response ends at the first token that completes a stop string, whatever the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rllib_gigpo.engines.stop_strings import StopRule

CORPUS = [
    "<action> go left </action>",
    "<think>the key is north</think><action>take key</action>\n",
    "a > b, c > d; </actions> <action>> été naïve 日本語 👍🏽 </act",
]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as in GPT-2, Qwen and Llama 3: tokens may end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces with a word-boundary mark, as in Llama 2: the first space of a text is dropped."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "<action>", "</action>", "go", "left", "took", "</act", "ion>", ">", "é"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    "sentencepiece": sentencepiece_tokenizer(),
    "words": word_tokenizer(),
}
STOPS = ["</action>", ">", "> ", " left </", "é", "té na", "日本", "👍🏽", "</act ion>", "go left"]


def decode(name: str, token_ids: Sequence[int]) -> str:
    return str(
        TOKENIZERS[name].decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


def first_end(rule: StopRule, token_ids: Sequence[int]) -> int | None:
    """Length of the response that the rule ends, or None."""
    return next((n for n in range(1, len(token_ids) + 1) if rule.ends(token_ids[:n])), None)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(TOKENIZERS)))
def test_ends_where_decoding_everything_says_so(data: st.DataObject, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    size = len(tokenizer)
    stop = tuple(data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=3)))
    pieces = st.one_of(
        st.sampled_from(CORPUS + STOPS).map(
            lambda text: tokenizer.encode(text, add_special_tokens=False)
        ),
        st.lists(st.integers(0, size - 1), max_size=6),
    )
    token_ids = [token for piece in data.draw(st.lists(pieces, max_size=4)) for token in piece]
    expected = next(
        (
            n
            for n in range(1, len(token_ids) + 1)
            if any(string in decode(name, token_ids[:n]) for string in stop)
        ),
        None,
    )
    assert first_end(StopRule(tokenizer, stop, ()), token_ids) == expected


def test_a_stop_string_may_span_several_tokens() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = [*tokenizer.encode("x"), *(tokenizer.convert_tokens_to_ids(c) for c in "</action>")]
    assert len(token_ids) == 10
    assert first_end(StopRule(tokenizer, ("</action>",), ()), [*token_ids, 5]) == 10


def test_special_tokens_are_text_too() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = [*tokenizer.encode("go"), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert StopRule(tokenizer, ("<|im_end|>",), ()).ends(token_ids)


def test_stop_token_ids_need_no_tokenizer() -> None:
    assert first_end(StopRule(None, (), (7, 9)), [1, 2, 9, 7]) == 3
    assert first_end(StopRule(None, (), ()), [1, 2, 9, 7]) is None


def test_most_tokens_cost_no_decoding() -> None:
    class Counting:
        calls = 0

        def decode(self, token_ids: list[int], **kwargs: bool) -> str:
            Counting.calls += 1
            return decode("words", token_ids)

    rule = StopRule(Counting(), ("</action>",), ())  # pyright: ignore[reportArgumentType]
    go, left, end = 3, 4, 2
    assert first_end(rule, [go, left] * 500 + [end]) == 1001
    assert Counting.calls == 6  # each of the three tokens alone and doubled


@pytest.mark.parametrize(
    ("tokenizer", "stop", "message"),
    [(None, ("</a>",), "tokenizer"), (TOKENIZERS["words"], ("</a>", ""), "empty")],
)
def test_impossible_stop_strings_raise(
    tokenizer: PreTrainedTokenizerFast | None, stop: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StopRule(tokenizer, stop, ())
