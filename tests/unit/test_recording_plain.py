"""What is written of a run as plain JSON, and what is kept out of it."""

import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.recording.describe import start_of
from rllib_gigpo.recording.folder import (
    RunFolder,
)
from rllib_gigpo.recording.plain import HIDDEN, jsonable, without_secrets
from rllib_gigpo.recording.receipt import Costs, receipt_of, receipt_text
from tests.recorded import RUN

TELLING = (
    "api_key",
    "apiKey",
    "apiKeys",
    "OPENAI_API_KEY",
    "password",
    "passwords",
    "dbPassword",
    "hf_token",
    "HFToken",
    "apiToken",
    "accessToken",
    "access_tokens",
    "client-secret",
    "clientSecrets",
    "auth.token",
    "credentials",
)
KINDS = (
    *("word", "option", "flag", "secret", "secret=", "VARIABLE", "json"),
    *("header", "header:", "header=", "-H", "scheme"),
)
NOT_TELLING = ("max_prompt_tokens", "tokenizer", "stop_token_ids", "monkey", "gae_level")


@dataclass
class Settings:
    name: str
    score: float


class TestPlain:
    def test_turns_settings_into_json(self):
        value = {
            "number": np.float64(0.5),
            "nothing": math.nan,
            "pair": (1, 2),
            "set": {"b", "a"},
            "path": Path("a/b"),
            "class": RunFolder,
            "settings": Settings("x", math.inf),
            3: np.array([1, 2]),
        }
        assert jsonable(value) == {
            "number": 0.5,
            "nothing": None,
            "pair": [1, 2],
            "set": ["a", "b"],
            "path": "a/b",
            "class": "rllib_gigpo.recording.folder:RunFolder",
            "settings": {"type": "Settings", "name": "x", "score": None},
            "3": [1, 2],
        }

    def test_an_object_has_no_address(self):
        assert jsonable(object()) == "<object object>"

    @pytest.mark.parametrize("name", TELLING)
    def test_telling_names_are_hidden(self, name):
        assert without_secrets({"a": [{name: "x1"}]}) == {"a": [{name: HIDDEN}]}
        nested = {name: ["x1", {"b": ["x2", 3, None, True, ""]}]}
        hidden = {name: [HIDDEN, {"b": [HIDDEN, 3, None, True, ""]}]}
        assert without_secrets(nested) == hidden

    @pytest.mark.parametrize("name", [*NOT_TELLING, "token_budget", "tokenLimit"])
    def test_other_names_are_not(self, name):
        assert without_secrets({name: "token"}) == {name: "token"}
        assert without_secrets({"api_key": None, "token": 5}) == {"api_key": None, "token": 5}

    @pytest.mark.parametrize(
        ("text", "left"),
        [
            ("use hf_ABCDEFGHIJKLMNOPqrst now", "use *** now"),
            ("https://ann:pass@host/v1", "https://***@host/v1"),
            ("Authorization: Bearer abcdefgh123", "Authorization: Bearer ***"),
            ("python t.py --api-key abc --seed 3", "python t.py --api-key *** --seed 3"),
            ("python t.py --api-key=abc", "python t.py --api-key=***"),
            ("WANDB_API_KEY=abc python t.py", "WANDB_API_KEY=*** python t.py"),
            ("python t.py --max-prompt-tokens 64", "python t.py --max-prompt-tokens 64"),
            ("sk-proj-abcdefghijklmnop", "***"),
            ("python -m train --api-key abc", "python -m train --api-key ***"),
            ("t.py --verbose --password hunter2", "t.py --verbose --password ***"),
            ("t.py run --token abc", "t.py run --token ***"),
            ("t.py run --api-token=a=b&c", "t.py run --api-token=***"),
            ("t.py --env WANDB_API_KEY=abc -v", "t.py --env WANDB_API_KEY=*** -v"),
            ("mcp:server --token abc", "mcp:server --token ***"),
            ("t.py --env 'mcp:server --token abc'", "t.py --env 'mcp:server --token ***'"),
            ("t.py --password 'my secret phrase' -v", "t.py --password *** -v"),
            ("t.py --password='my secret phrase' -v", "t.py --password=*** -v"),
            ("""t.py --password 'it'"'"'s mine' -v""", "t.py --password *** -v"),
            ("http://h/?a=1&token=abc&b=2", "http://h/?a=1&token=***&b=2"),
            ("t.py --url 'http://h/?a=1&token=abc'", "t.py --url 'http://h/?a=1&token=***'"),
            (
                """t.py --env-config '{"password": "open-sesame", "size": 3}'""",
                """t.py --env-config '{"password": "***", "size": 3}'""",
            ),
            (
                """t.py '--env-config={"api_keys": ["open", "sesame"]}'""",
                """t.py '--env-config={"api_keys": ["***", "***"]}'""",
            ),
            ("""{"password": "open sesame"}""", """{"password": "***"}"""),
            ("""t.py --set "{'password': 'a b'}" """, """t.py --set "{'password': '***'}" """),
            (
                """mcp:npx mcp-remote https://h --header "X-API-Key: HUSH" """,
                """mcp:npx mcp-remote https://h --header 'X-API-Key: ***' """,
            ),
            (
                """curl -H 'Authorization: Basic dXNlcjpwYXNz' https://h""",
                """curl -H 'Authorization: Basic ***' https://h""",
            ),
            ("t.py --header=X-API-Key:HUSH -v", "t.py --header=X-API-Key:*** -v"),
            ("t.py --header X-API-Key:HUSH -v", "t.py --header X-API-Key:*** -v"),
            ("t.py -H password:HUSH -v", "t.py -H password:*** -v"),
            ("t.py --extra-headers 'password:HUSH'", "t.py --extra-headers 'password:***'"),
            ("t.py --header='token: my phrase' -v", "t.py '--header=token: ***' -v"),
            ("t.py --header X-API-Key: HUSH -v", "t.py --header X-API-Key: *** -v"),
            ("t.py --header=X-API-Key: HUSH -v", "t.py --header=X-API-Key: *** -v"),
            ("t.py -H password: HUSH -v", "t.py -H password: *** -v"),
            ("t.py Authorization: Basic HUSH -v", "t.py Authorization: Basic *** -v"),
            ("t.py proxy-authorization: HUSH -v", "t.py proxy-authorization: *** -v"),
            ("Authorization: Token HUSH", "Authorization: Token ***"),
            ("Authorization:HUSH", "Authorization:***"),
            ("HF_TOKEN:HUSH", "HF_TOKEN:***"),
            ("Host: h\nX-Api-Key: my phrase\nAge: 3", "Host: h\nX-Api-Key: ***\nAge: 3"),
        ],
    )
    def test_telling_texts_are_hidden(self, text, left):
        assert without_secrets([text]) == [left]
        assert without_secrets([left]) == [left]

    @pytest.mark.parametrize(
        "text",
        [
            "python -m train --seed 3 --verbose run 'two words' \"three\"  spaces\n",
            "it's a token, and don't you forget the password",
            "--token-budget 16384 --max-prompt-tokens 64 --tokenizer x",
            "C:\\data\\games \\'",
            '{"size": 3,  "view": "local"}',
            "[" * 5_000,
            "t.py --password",
            "t.py --password --verbose",
            "mcp:npx mcp-remote https://h:80 --header 'Accept: text/plain' -H Age:3",
            "Note: find the token: it is red. The password: two words. At 12:30:01 C:\\data",
            "envs.password_game:Env",
            "secret_santa:Env --policy token_policies:best --profile my.api_key:profile",
            "t.py --env=TokenGame:Env secret://vault/name",
            "t.py --header",
            "t.py -H X-API-Key: --verbose",
            "max_prompt_tokens: 64",
        ],
    )
    def test_other_texts_stay_as_they_are(self, text):
        assert without_secrets([text]) == [text]

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(KINDS),
                st.sampled_from([*TELLING]),
                st.text("ab'\" {}[]=&\\", max_size=4),
            ),
            max_size=6,
        ),
        st.integers(0, 2),
    )
    def test_no_place_of_a_command_line_shows_a_secret(self, parts, depth):
        arguments = ["python", "-m", "train"]
        for kind, name, text in parts:
            name = re.sub(r"[^\w-]", "_", name)
            secret = f"HUSH{text}HUSH"
            arguments += {
                "word": ["run"],
                "option": ["--seed", "3"],
                "flag": ["--verbose"],
                "secret": [f"--{name}", secret],
                "secret=": [f"--{name}={secret}"],
                "VARIABLE": [f"{name}={secret}"],
                "header": ["--header", f"{name}: {secret}"],
                "header:": ["--header", f"{name}:{secret}"],
                "header=": [f"--header={name}:{secret}"],
                "-H": [f"-HX-{name}: {secret}"],
                "scheme": ["--header", f"Authorization: Basic {secret}"],
                "json": ["--env-config", json.dumps({"a": [{name: [secret, {"b": secret}]}]})],
            }[kind]
        line = shlex.join(arguments)
        for _ in range(depth):  # a command line in a command line
            line = shlex.join(["python", "-c", line])
        hidden = without_secrets(line)
        assert "HUSH" not in hidden
        assert hidden.count("run") == line.count("run")
        assert hidden.count("--seed 3") == line.count("--seed 3")

    def test_a_run_file_shows_no_secret_of_its_command(self):
        config = GiGPOConfig()
        line = 'python -m train --api-key HUSH --env-config \'{"passwords": ["HUSH"]}\''
        config.record_command = line
        told = {"env": "mcp:server --token HUSH", "env_config": {"apiToken": "HUSH"}}
        found = {**told, "command": line, "settings": {**told, "record_command": line}}
        assert "HUSH" not in json.dumps(without_secrets(jsonable(found)))
        assert "HUSH" not in json.dumps(start_of(config, 0))
        receipt = receipt_of({**RUN, **without_secrets(jsonable(found))}, Costs())
        assert "HUSH" not in json.dumps(receipt) + receipt_text(receipt)

    def test_what_the_environment_keeps_secret_is_hidden_everywhere(self, monkeypatch):
        monkeypatch.setenv("MY_SERVICE_TOKEN", "plain-words-9")
        monkeypatch.setenv("KEY_FILE_TOKEN", "/etc/keys/token")
        assert without_secrets({"url": "http://h?k=plain-words-9"}) == {"url": "http://h?k=***"}
        assert without_secrets("/etc/keys/token") == "/etc/keys/token"
