"""The texts of every prompt, packed: what its last samples said, as tokens. Four bytes a token.

A sequence of the index has its text too, while it runs or waits for its sample's next turn. The automaton of
a group that is indexed can be made again from here.
"""

import dataclasses
import hashlib
import uuid
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator

import numpy as np

from rollout_spec.drafting.history_pieces import KEY_BYTES, NAME_BYTES, Entry, read_piece, to_pieces
from rollout_spec.drafting.native import Int32Array

_OVERHEAD_BYTES = 200  # that a text and a prompt take beyond their tokens
MAX_TEXTS = 64  # of one sample


@dataclasses.dataclass(eq=False)
class Text:
    """What a sample said after a prompt, in one request or in several that went on after each other. The same
    object however its tokens grow; the history and the groups of the index know it."""

    sample: bytes  # of `sample_key`
    training_step: int = 0  # in which it got its end
    tokens: Int32Array = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))

    def entry(self, prompt_key: bytes) -> Entry:
        """For a piece, as it is now: it may grow while that is on its way."""
        return prompt_key + self.sample, self.training_step, self.tokens


class History:
    """The texts of the last samples of every prompt, within a budget.

    Args:
        num_samples: kept per prompt: those of the latest training steps, whoever served them.
        max_bytes: of everything; beyond it the prompts that have most samples lose their earliest, in turn,
            first the prompt that was seen longest ago. So as many prompts as possible keep one.
        vocab_size: a piece with other tokens is refused.
    """

    def __init__(self, num_samples: int, max_bytes: int, vocab_size: int = 1 << 31) -> None:
        self.num_samples, self.training_step = num_samples, 0
        self._vocab_size = vocab_size
        self._max_bytes = max_bytes
        self._texts: dict[bytes, list[Text]] = {}
        self._kept = set[Text]()  # all of these
        # By number of samples, the prompts that have that many; first the one that has had it longest.
        self._prompts_with: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self._new: dict[Text, bytes] = {}  # those of this engine that were not taken yet, with their prompts
        self.num_bytes = 0
        self._num_dropped = 0

    def add(
        self,
        prompt_key: bytes,
        tokens: Int32Array,
        sample: bytes | None = None,
        text: Text | None = None,
        *,
        is_cut: bool = False,
    ) -> Text:
        """Keep a text of this engine as the latest of its prompt, if it has tokens and none is negative.

        prompt_key: of `prompt_key` or `group_key`.
        sample: of `sample_key`; None: one that says no more than this.
        text: what this call's tokens go on after, and whose place they take.
        is_cut: they go on soon, perhaps in another engine; `take_new` leaves them out until then.
        """
        text = text or Text(sample or uuid.uuid4().bytes[:NAME_BYTES])
        text.training_step = self.training_step
        self._new.pop(text, None)
        if self._keep(prompt_key, text, tokens) and not is_cut:
            self._new[text] = prompt_key
        return text

    def _keep(self, prompt_key: bytes, text: Text, tokens: Int32Array) -> bool:
        """Give a text of a prompt these tokens, if they can be kept; whether it is kept."""
        is_text = len(tokens) > 0 and tokens.min() >= 0
        if not self.num_samples or not is_text or tokens.nbytes + 2 * _OVERHEAD_BYTES > self._max_bytes:
            return self.keeps(text)
        if self.keeps(text):
            self.num_bytes += tokens.nbytes - text.tokens.nbytes
        text.tokens = tokens
        texts = _placed(text, self.texts(prompt_key))
        samples = list(dict.fromkeys(each.sample for each in texts))
        left = set(samples[-self.num_samples :])
        self._set(prompt_key, [each for each in texts if each.sample in left])
        self._drop_samples()
        return self.keeps(text)

    def _drop_samples(self) -> None:
        """Until all fits: the earliest of the prompts that have most."""
        while self.num_bytes > self._max_bytes:
            most = next(iter(self._prompts_with[max(self._prompts_with)]))
            texts = self.texts(most)
            self._set(most, [each for each in texts if each.sample != texts[0].sample])
            self._num_dropped += 1

    def _set(self, prompt_key: bytes, texts: list[Text]) -> None:
        before = self._texts.pop(prompt_key, [])
        if before:
            self.num_bytes -= _size(before)
            number = _num_samples(before)
            del self._prompts_with[number][prompt_key]
            if not self._prompts_with[number]:
                del self._prompts_with[number]
        if texts:
            self.num_bytes += _size(texts)
            self._texts[prompt_key] = texts
            self._prompts_with[_num_samples(texts)][prompt_key] = None
        self._kept.difference_update(before)
        self._kept.update(texts)
        for each in before:
            if each not in self._kept:
                self._new.pop(each, None)

    def keeps(self, text: Text) -> bool:
        return text in self._kept

    def texts(self, prompt_key: bytes) -> list[Text]:
        """What is kept of a prompt, the earliest sample first."""
        return self._texts.get(prompt_key, [])

    def get(self, prompt_key: bytes) -> list[Int32Array]:
        """The same as tokens."""
        return [text.tokens for text in self.texts(prompt_key)]

    def all_pieces(self) -> Iterator[bytes]:
        """Everything that is there now, in pieces with a version and a checksum each; at least one."""
        return to_pieces([text.entry(key) for key, texts in self._texts.items() for text in texts])

    def take_num_dropped(self) -> int:
        """Samples that were dropped for want of memory since the last call."""
        taken, self._num_dropped = self._num_dropped, 0
        return taken

    def take_new(self) -> Iterator[bytes]:
        """What `add` has kept since the last call, in pieces for `merge` of other engines' histories."""
        taken, self._new = self._new, {}
        return to_pieces([text.entry(key) for text, key in taken.items()])

    def merge(self, content: bytes) -> None:
        """Keep a piece that another history has given, each text as of its training step.

        Raises HistoryError: it is of another version or vocabulary, or damaged; nothing was added.
        """
        where = "history of another engine or a checkpoint"
        for keys, step, tokens in read_piece(content, where, self._vocab_size):
            self._keep(keys[:KEY_BYTES], Text(keys[KEY_BYTES:], step), tokens)


def _placed(text: Text, texts: list[Text]) -> list[Text]:
    """A prompt's texts with this one, the latest of its sample, at the place of that sample's training step.

    It takes the place of texts of its sample that it begins with: of what was said before.
    """
    own = [each for each in texts if each.sample == text.sample and each is not text]
    own = [each for each in own if not np.array_equal(each.tokens, text.tokens[: len(each.tokens)])]
    others = [each for each in texts if each.sample != text.sample]
    last_steps = dict[bytes, int]()
    for each in (*others, *own, text):
        step = each.training_step
        last_steps[each.sample] = max(step, last_steps.get(each.sample, step))
    place = bisect_right(others, last_steps[text.sample], key=lambda each: last_steps[each.sample])
    return [*others[:place], *own[1 - MAX_TEXTS :], text, *others[place:]]


def _num_samples(texts: list[Text]) -> int:
    return len({each.sample for each in texts})


def _size(texts: list[Text]) -> int:
    return _OVERHEAD_BYTES + sum(text.tokens.nbytes + _OVERHEAD_BYTES for text in texts)


def _digest(content: bytes, num_bytes: int) -> bytes:
    return hashlib.blake2b(content, digest_size=num_bytes).digest()


def prompt_key(prompt_token_ids: Int32Array) -> bytes:
    return _digest(b"prompt" + prompt_token_ids.tobytes(), KEY_BYTES)


def group_key(group: Hashable) -> bytes:
    return _digest(f"group{type(group).__name__}{group}".encode(), KEY_BYTES)


def sample_key(sample: Hashable) -> bytes:
    """What a sample is known by, among those of its prompt."""
    return _digest(f"{type(sample).__name__}{sample}".encode(), NAME_BYTES)
