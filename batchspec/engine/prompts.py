"""Between text and token ids: prompts in, outputs and stop strings out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from batchspec.errors import RowError, UsageError
from batchspec.types import Request


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model directory. Raises UsageError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {path}: no tokenizer that transformers can read: {error}") from None


class PromptEncoder:
    """Turns a request into prompt token ids, once, and checks that its budget fits into the context."""

    def __init__(self, tokenizer: Any, context_tokens: int, neutralize_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._neutralize = neutralize_special_tokens
        bos = tokenizer.bos_token_id
        self._adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
        self._special_tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]

    def encode(self, request: Request) -> list[int]:
        """Prompt ids of at least one token.

        Raises RowError (template_error, empty_prompt, context_overflow), and UsageError for a messages row where the
        tokenizer has no chat template, since every further row would fail alike.
        """
        ids = self._encode_messages(request) if request.messages is not None else self._encode_prompt(request)
        if not ids:
            raise RowError("empty_prompt", "the prompt has no tokens")
        budget = request.sampling.max_new_tokens
        if len(ids) + budget > self._context_tokens:
            raise RowError(
                "context_overflow",
                f"{len(ids)} prompt tokens + max_new_tokens {budget} exceed the model's context of "
                f"{self._context_tokens} tokens; shorten the prompt or lower max_new_tokens",
            )
        return ids

    def _encode_prompt(self, request: Request) -> list[int]:
        text = request.prompt or ""
        ids: list[int] = self._tokenizer(text, split_special_tokens=self._neutralize)["input_ids"]
        # a prompt that spells the start token itself, under a tokenizer that adds one, would start twice
        return ids[1:] if self._adds_bos and ids[1:2] == [self._tokenizer.bos_token_id] else ids

    def _encode_messages(self, request: Request) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise UsageError(
                "the input has a messages column but the model's tokenizer has no chat template; use a prompt column "
                "or a model with a chat template"
            )
        from jinja2 import TemplateError

        messages = [dict(message) for message in request.messages or ()]
        markers: dict[str, str] = {}
        if self._neutralize:
            messages = self._mark_special_tokens(messages, markers)
        try:
            text: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError, KeyError) as error:
            raise RowError("template_error", f"the chat template refuses the conversation: {error}") from None
        # the template has written the special tokens already: adding them again would start the row twice
        if not markers:
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids
        return self._encode_marked(text, markers)

    def _mark_special_tokens(self, messages: list[dict[str, Any]], markers: dict[str, str]) -> list[dict[str, Any]]:
        """Replace special tokens spelled in content by private-use characters that the template passes through."""
        marked = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, str):
                for index, token in enumerate(self._special_tokens):
                    if token in content:
                        marker = chr(0xF0000 + index)
                        content = content.replace(token, marker)
                        markers[marker] = token
            marked.append({**message, "content": content})
        return marked

    def _encode_marked(self, text: str, markers: dict[str, str]) -> list[int]:
        """Encode around the markers; each marker becomes the plain-text spelling of its token."""
        ids: list[int] = []
        start = 0
        for place, character in enumerate([*text, None]):
            if character is not None and character not in markers:
                continue
            ids += self._tokenizer(text[start:place], add_special_tokens=False)["input_ids"]
            if character is not None:
                spelled = markers[character]
                ids += self._tokenizer(spelled, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            start = place + 1
        return ids


_MARGIN_CHARACTERS = 16


class OutputDecoder:
    """Turns output ids into text: one decode of all of them, special tokens left out."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, token_ids: Sequence[int]) -> str:
        decoded: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return decoded

    def _ending(self, token_ids: Sequence[int], num_checked: int, longest: int) -> str:
        """Text that holds whatever of at most `longest` characters the tokens behind `num_checked` complete. Some
        tokens more are decoded, since the first may read otherwise than in its place, but never a long output."""
        margin = longest + _MARGIN_CHARACTERS
        num_new = len(self.text(token_ids[num_checked:]))
        start = max(0, num_checked - margin)
        while True:
            ending = self.text(token_ids[start:])
            if start == 0 or len(ending) - num_new >= margin:
                return ending
            start = max(0, start - 2 * margin)  # some tokens have no text

    def find_stop(
        self, token_ids: Sequence[int], num_checked: int, stop: Sequence[str], min_new_tokens: int
    ) -> tuple[int, str] | None:
        """The first stop string to be complete, looking at prefixes longer than `num_checked` tokens.

        A match that was complete before `min_new_tokens` were out does not count. Returns how many tokens the output
        keeps (the one that completes the match is the last) and the text before the earliest match, or None.
        """
        ending = self._ending(token_ids, num_checked, max(map(len, stop)))
        if not any(string in ending for string in stop):
            return None
        ignored = len(self.text(token_ids[: min_new_tokens - 1])) if min_new_tokens > 1 else 0
        for count in range(max(num_checked, min_new_tokens - 1) + 1, len(token_ids) + 1):
            text = self.text(token_ids[:count])
            places = [text.find(string, max(0, ignored - len(string) + 1)) for string in stop]
            found = [place for place in places if place >= 0]
            if found:
                return count, text[: min(found)]
        return None
