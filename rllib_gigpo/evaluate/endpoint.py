"""A model behind an OpenAI-compatible server (`/v1/chat/completions`), by the standard library."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rllib_gigpo.agent.prompt import Message
from rllib_gigpo.vision.files import png_of_picture
from rllib_gigpo.vision.pictures import Picture, split_marks
from rllib_gigpo_wire import TooLargeError, open_url, read_json, read_refusal, read_whole

_TRIES = 5
_FIRST_PAUSE_S = 1.0
_MAX_RESPONSE_BYTES = 64 << 20
_SHOWN = 300
_PASSING = (408, 409, 429, 500, 502, 503, 504)


class EndpointError(RuntimeError):
    """The server does not answer, or refuses."""


class Endpoint:
    """Asks a server for responses; may be called from many threads at once.

    Stop strings are looked for here and not sent: a server leaves them out of its text, and an
    action without its closing tag would count as invalid.

    Args:
        url: Address up to and with `/v1`.
        model: The server's name of the model.
        temperature: Of the responses; 0 is greedy.
        max_tokens: Limit of a response.
        stop: Strings that end a response; they stay in it.
        api_key: Sent as a bearer token where it is not empty.
        timeout_s: Seconds that connecting, sending and the whole answer of one request may take,
            each.
        pause_s: Seconds before the first retry; every further one waits twice as long.
        max_response_bytes: Largest answer that is read.

    Raises:
        ValueError: The address is none, or holds a password, which would be written down with it.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        temperature: float = 0.4,
        max_tokens: int = 512,
        stop: Sequence[str] = (),
        api_key: str = "",
        timeout_s: float = 300.0,
        pause_s: float = _FIRST_PAUSE_S,
        max_response_bytes: int = _MAX_RESPONSE_BYTES,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {url!r}: expected an address such as http://host:8000/v1")
        if urlsplit(url).username is not None:
            raise ValueError(
                "the endpoint's address holds a user name: addresses are written down; put the key "
                "into the variable that --api-key-env names"
            )
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._fixed = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._stop = tuple(stop)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._max_response_bytes = max_response_bytes

    def __call__(
        self, messages: Sequence[Message], pictures: Mapping[str, Picture], seed: int
    ) -> str:
        """Return the response to chat messages.

        Raises:
            EndpointError: The server refuses the request, or does not answer in five tries.
        """
        body = {**self._fixed, "seed": seed, "messages": [_sent(m, pictures) for m in messages]}
        answer = self._post(json.dumps(body).encode())
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            shown = repr(answer)[:_SHOWN]
            raise EndpointError(f"{self._url} answered without a message: {shown}") from error
        if not isinstance(text, str | None):
            raise EndpointError(f"{self._url} answered with no text: {repr(text)[:_SHOWN]}")
        return cut_after(text or "", self._stop)

    def close(self) -> None:
        """Nothing is held."""

    def _post(self, body: bytes) -> Any:
        for number in range(_TRIES):
            request = urllib.request.Request(self._url, body, self._headers)
            try:
                with open_url(request, self._timeout_s) as response:
                    content = read_whole(response, self._timeout_s, self._max_response_bytes)
                return read_json(content)
            except urllib.error.HTTPError as error:
                with error:
                    text = read_refusal(error, self._timeout_s, _SHOWN)
                told = f"HTTP {error.code}: {error.reason[:_SHOWN]} {text}".rstrip()
                if error.code not in _PASSING:
                    raise EndpointError(f"{self._url} refuses the request, {told}") from error
            except TooLargeError as error:
                raise EndpointError(
                    f"{self._url} does not answer as a model does: {error}"
                ) from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                told = f"{type(error).__name__}: {str(error)[:_SHOWN]}"
            if number < _TRIES - 1:
                time.sleep(self._pause_s * 2**number)
        raise EndpointError(f"{self._url} did not answer in {_TRIES} tries; the last one: {told}")


def cut_after(text: str, stop: Sequence[str]) -> str:
    """Return a text up to and with the first stop string."""
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return text[: min(ends)] if ends else text


def _sent(message: Message, pictures: Mapping[str, Picture]) -> dict[str, Any]:
    """Return a message as the protocol has it; one with pictures in parts."""
    parts = split_marks(message["content"], pictures)
    if not any(isinstance(part, Picture) for part in parts):
        return dict(message)
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png_of_picture(part)}"}}
        if isinstance(part, Picture)
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {**message, "content": content}
