"""An obviously correct, slow model of the native index: dictionaries of substrings, no automaton.

The words match, earliest, frequent and count are defined in native/rollout_spec_native.h.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

Text = tuple[int, ...]

COUNTED_STATES = 8
MAX_BRANCHES = 64
UNSEEN_COUNT = 0.25


def suffixes(text: Text) -> list[Text]:
    """Longest first, without the empty one."""
    return [text[start:] for start in range(len(text))]


@dataclass(frozen=True, kw_only=True)
class Options:
    num_speculative_tokens: int
    mode: str = "frequent"
    min_match_len: int = 2
    max_spec_factor: float = 4.0
    min_token_prob: float = 0.1


class GroupOracle:
    """Everything that was indexed in one group."""

    def __init__(self, prompt: Sequence[int], options: Options) -> None:
        self.options = options
        self.prompt: Text = tuple(prompt)
        self.followers: dict[Text, list[int]] = defaultdict(list)
        self.positions: dict[Text, int] = {}
        self.ends: dict[Text, set[int]] = defaultdict(set)
        self.counts: dict[Text, int] = defaultdict(int)
        text: Text = ()
        for token in self.prompt:
            text = self.extend(text, token)

    def extend(self, text: Text, token: int) -> Text:
        """Index one token that comes after the text; returns the longer text."""
        for suffix in [*suffixes(text), ()]:
            if token not in self.followers[suffix]:
                self.followers[suffix].append(token)
        text += (token,)
        position = self.positions.setdefault(text, len(self.positions))
        for suffix in suffixes(text):
            self.ends[suffix].add(position)
        num_classes, ends = 0, None
        for suffix in suffixes(text):
            if self.ends[suffix] != ends:
                num_classes, ends = num_classes + 1, self.ends[suffix]
            if num_classes <= COUNTED_STATES:
                self.counts[suffix] += 1
        return text

    def match(self, text: Text) -> Text:
        """The longest suffix of the text that has been followed."""
        return next((suffix for suffix in suffixes(text) if self.followers[suffix]), ())

    def draft(self, text: Text, max_draft_tokens: int) -> tuple[int, list[int]]:
        """The match length and the draft tokens."""
        if max_draft_tokens == 0:
            return 0, []
        options = self.options
        context = self.match(text)
        match_len = len(context)
        most = min(options.num_speculative_tokens, max_draft_tokens, int(options.max_spec_factor * match_len))
        draft: list[int] = []
        probability = 1.0
        while len(draft) < most:
            context = self.match(context)
            if len(context) < options.min_match_len:
                break
            token = self.followers[context][0]
            if options.mode == "frequent":
                candidates = self.followers[context][:MAX_BRANCHES]
                counts = [self.counts[(*context, candidate)] for candidate in candidates]
                token = candidates[counts.index(max(counts))]
                probability *= max(counts) / (sum(counts) + UNSEEN_COUNT)
                if probability < options.min_token_prob:
                    break
            draft.append(token)
            context += (token,)
        return match_len, draft


@dataclass
class SequenceOracle:
    """One request: its text so far and the draft that is not verified yet."""

    group: GroupOracle
    after_prompt: bool
    text: Text = ()
    last_draft: list[int] = field(default_factory=list)
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __post_init__(self) -> None:
        self.text = self.start

    @property
    def start(self) -> Text:
        return self.group.prompt if self.after_prompt else ()

    def index(self, row: Sequence[int]) -> None:
        """The first half of a step: the row has these tokens now."""
        if len(row) < len(self.text):
            self.text = self.start
        else:
            new_tokens = list(row[len(self.text) :])
            for drafted, token in zip(self.last_draft, new_tokens[:-1], strict=False):
                if drafted != token:
                    break
                self.num_accepted_tokens += 1
        for token in row[len(self.text) :]:
            self.text = self.group.extend(self.text, token)

    def draft(self, max_draft_tokens: int) -> tuple[int, list[int]]:
        """The second half, after every row of the step was indexed."""
        match_len, self.last_draft = self.group.draft(self.text, max_draft_tokens)
        self.num_drafts += bool(self.last_draft)
        self.num_draft_tokens += len(self.last_draft)
        return match_len, self.last_draft
