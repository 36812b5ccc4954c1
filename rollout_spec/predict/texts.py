"""Texts of rollouts as the policy's tokens."""

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_spec.predict.row_fields import RowGroup
from rollout_spec.trace import Rollout, TraceError


def encoded(found: Iterable[Rollout | RowGroup], tokenizer: Path | None, where: Path) -> Iterator[Rollout]:
    """All with token ids. `where`: what `_load_tokenizer` calls the texts."""
    load = functools.cache(functools.partial(_load_tokenizer, tokenizer, where))  # for the first text
    for one in found:
        if isinstance(one, Rollout):
            yield one
            continue
        texts = [one.prompt, *one.responses]
        tokens = iter(_encode([text for text in texts if isinstance(text, str)], load))
        prompt, *responses = (next(tokens) if isinstance(text, str) else text for text in texts)
        yield Rollout(one.group, one.step, prompt, responses)


def _encode(texts: list[str], load: Callable[[], Any]) -> list[npt.NDArray[np.int32]]:
    """The token ids of each text. `load`: gives the tokenizer, and is not called where all are empty."""
    if not any(texts):
        return [np.empty(0, np.int32) for _ in texts]
    whole = [text.encode(errors="replace").decode() for text in texts]  # JSON may have lone surrogates
    encoded = load().encode_batch_fast(whole, add_special_tokens=False)
    return [np.array(one.ids, np.int32) for one in encoded]


def _load_tokenizer(path: Path | None, where: Path) -> Any:
    """Of `--tokenizer`, a tokenizer.json or a folder with one.

    Raises TraceError: it is not there or none, or None was named; `where` are the texts.
    """
    if path is None:
        raise TraceError(
            f"{where}: it holds texts, and drafts are made of tokens: --tokenizer DIR names the "
            "policy's Hugging Face folder, as the trainer has it, or the tokenizer.json in it"
        )
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise TraceError(
            f"--tokenizer {file}: no such file or folder here, and a name at a hub is not looked up. "
            "transformers writes the folder: AutoTokenizer.from_pretrained(NAME).save_pretrained(DIR)"
        )
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers has no class of its own
        raise TraceError(f"--tokenizer {file}: no tokenizer.json: {error}") from error
