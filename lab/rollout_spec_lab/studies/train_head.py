"""A one-layer EAGLE-3 head for the demo's policy, trained from the policy's own rollouts on a CPU.

    python lab/rollout_spec_lab/studies/train_head.py --output DIR

DIR gets rollouts, which a plain engine serves once (`val` is held out), and `head`, for vLLM's `eagle3`. Its
vocabulary is reduced. As EAGLE-3's (Li et al., 2025) it learns as it drafts: from what it gave before.

Printed is how often a held-out response has each draft token, where it has those before: the likeliest ones,
those drawn with the noise of coupled verification (`shared`), and the bound (`best`), 1 - total variation.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama as llama

from rollout_spec.cli.inputs import device_arguments, number, tokenized
from rollout_spec.config import UserError
from rollout_spec.trace import Rollout, append_lines, read_trace, to_line
from rollout_spec.verification.blocks import BLOCK_SIZE
from rollout_spec_lab.bench.engine import WORKER, Load, Plan, answer
from rollout_spec_lab.cli.inputs import model_folder
from rollout_spec_lab.demo.data import make_rows

NUM_PROMPTS, NUM_HELD_OUT, SAMPLES = 64, 24, 4
TEMPERATURES = (1.0, 0.7, 0.0)  # of what is held out
NUM_PASSES, DRAFT_VOCAB_SIZE = 3, 4096
BATCH_SIZE, LEARNING_RATE, WARM_UP_STEPS = 4, 1e-3, 20
DRAFTERS = ("argmax", "shared", "best")


class Text(NamedTuple):
    """A prompt with a response, and what the policy makes of it."""

    tokens: Tensor  # int64 [n]
    num_prompt_tokens: int
    aux: Tensor  # [n, 3 * hidden_size], the hidden states that the head reads
    last: Tensor  # [n, hidden_size], those that the policy's output layer reads

    def rows(self, k: int) -> slice:
        """Where a draft begins whose token k, from 0, is inside the response and behind its first."""
        return slice(self.num_prompt_tokens - 1, len(self.tokens) - k - 2)


class Head(nn.Module):
    """vLLM's `Eagle3LlamaForCausalLM`, with its checkpoint's names; it embeds as the policy does."""

    def __init__(self, policy: Any, texts: Iterable[Text], draft_vocab_size: int) -> None:
        super().__init__()
        self.config, size = policy.config, policy.config.hidden_size
        self.input_norm = nn.RMSNorm(3 * size, self.config.rms_norm_eps)
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = llama.LlamaDecoderLayer(self.config, 0)
        self.midlayer.hidden_norm = nn.RMSNorm(size, self.config.rms_norm_eps)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):  # they read the token's embedding beside the state
            setattr(attention, name, nn.Linear(2 * size, getattr(attention, name).out_features, bias=False))
        self.norm = copy.deepcopy(policy.model.norm).float().requires_grad_()
        responses = torch.cat([text.tokens[text.num_prompt_tokens :] for text in texts])
        counts = responses.bincount(minlength=self.config.vocab_size)
        self.draft_ids = counts.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values
        self.lm_head = nn.Linear(size, draft_vocab_size, bias=False).requires_grad_(False)
        self.lm_head.weight.data.copy_(policy.lm_head.weight[self.draft_ids])
        self._rotary = llama.LlamaRotaryEmbedding(self.config)
        self._embed = policy.model.embed_tokens.weight.detach()

    def forward(self, tokens: Tensor, aux: Tensor) -> Iterator[Tensor]:
        """Of each pass what `lm_head` reads, [batch, n, hidden_size]; of padded tokens [batch, n] and `aux`.

        In row i, pass k, from 0, reads token i + k + 1 and proposes the next; the last rows have none.
        """
        state, positions = self.fc(self.input_norm(aux)).float(), torch.arange(tokens.shape[1])[None]
        layer, attention, cache = self.midlayer, self.midlayer.self_attn, []
        for k in range(NUM_PASSES):
            embedded = nn.functional.embedding(tokens.roll(-k - 1, 1), self._embed).float()
            state = layer.hidden_norm(state)
            joined = torch.cat([layer.input_layernorm(embedded), state], -1)
            query, key, value = (
                project(joined).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = llama.apply_rotary_pos_emb(query, key, *self._rotary(joined, positions + k))
            cache.append([llama.repeat_kv(x, attention.num_key_value_groups) for x in (key, value)])
            state = state + attention.o_proj(_attend(query, cache).transpose(1, 2).flatten(2))
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            yield self.norm(state)

    def save(self, folder: Path) -> None:
        """As vLLM reads it: `d2t` is what to add to a draft token's number, `t2d` which tokens have one."""
        config = copy.deepcopy(self.config)
        config.update({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(self.draft_ids)})
        config.update({"norm_before_fc": True, "norm_before_residual": True, "tie_word_embeddings": False})
        config.num_hidden_layers = 1
        config.save_pretrained(folder)
        weights = {name: value.to(self.config.dtype) for name, value in self.state_dict().items()}
        weights["d2t"] = self.draft_ids - torch.arange(len(self.draft_ids))
        weights["t2d"] = torch.isin(torch.arange(self.config.vocab_size), self.draft_ids)
        save_file(weights, folder / "model.safetensors")


def _attend(query: Tensor, cache: Sequence[Sequence[Tensor]]) -> Tensor:
    """A row sees the first pass of all rows up to its own, and the later passes of its own."""
    (keys, values), *later = cache
    length = query.shape[2]
    scores = (query @ keys.mT).masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    own = [(query * key).sum(-1, keepdim=True) for key, _ in later]
    weights = (torch.cat([scores, *own], -1).float() * query.shape[3] ** -0.5).softmax(-1).to(query.dtype)
    first = weights[..., :length] @ values
    return sum((weights[..., i, None] * value for i, (_, value) in enumerate(later, length)), first)


def rollouts(file: Path, policy: str, temperature: float, num_prompts: int, seed: int) -> list[Rollout]:
    """Responses to the demo's prompts, of the split that the file is named after; served if not there."""
    if not file.exists():
        prompts = tokenized(policy, make_rows(num_prompts, seed, file.stem.split("-")[0]))
        load = Load(prompts, SAMPLES, max_tokens=256, natural_ends=True, temperature=temperature, seed=seed)
        engine = {"max_num_seqs": 256, "max_model_len": 1024, "kv_cache_memory_bytes": 2 << 30}
        job = Plan(load, ["off"], policy, "bfloat16", device_arguments() | engine, {}).job(0, "off")
        found = answer(WORKER, job, file.name, file.parent)["responses"]
        groups = (found[i * SAMPLES :][:SAMPLES] for i in range(num_prompts))
        append_lines(file, (to_line(str(i), None, prompts[i], group) for i, group in enumerate(groups)))
    return list(read_trace(file))


@torch.no_grad()
def read_texts(policy: Any, lines: Iterable[Rollout]) -> Iterator[Text]:
    """Every response, through the policy. The head reads what comes out of vLLM's default layers."""
    num_layers = policy.config.num_hidden_layers
    for line in tqdm(lines, desc="reading rollouts", leave=False):
        for response in line.responses:
            tokens = torch.tensor([*line.prompt_token_ids.tolist(), *response.tolist()])
            states = policy.model(tokens[None], output_hidden_states=True, use_cache=False).hidden_states
            aux = torch.cat([states[i][0] for i in (2, num_layers // 2, num_layers - 3)], -1)
            yield Text(tokens, len(line.prompt_token_ids), aux, states[-1][0])


def train(head: Head, texts: Sequence[Text], shares: Iterable[float], seed: int) -> Iterator[float]:
    """One step for each of `shares`, the share of the training that is over; gives the loss of each.

    It is the cross-entropy with the policy's distribution over the draft vocabulary, less of later passes.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(head.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step, share in enumerate(shares, 1):
        batch = rng.sample(texts, min(BATCH_SIZE, len(texts)))
        tokens, aux = (nn.utils.rnn.pad_sequence([text[i] for text in batch], True) for i in (0, 2))
        loss = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            for k, state in enumerate(head(tokens, aux.float())):
                own = torch.cat([each[text.rows(k)] for each, text in zip(state, batch, strict=True)])
                last = torch.cat([text.last[text.num_prompt_tokens + k : -1] for text in batch])
                wanted, logits = head.lm_head(last).float().softmax(-1), head.lm_head(own).float()
                loss = loss + 0.8**k * nn.functional.cross_entropy(logits, wanted)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, step / WARM_UP_STEPS) * (1 - 0.95 * share)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def acceptance(head: Head, policy: Any, texts: Iterable[Text], temperature: float) -> Tensor:
    """Of each drafter and draft token, [3, NUM_PASSES], where a draft ends inside the response."""
    sums = torch.zeros(len(DRAFTERS), NUM_PASSES + 1)
    for text in texts:
        rows = text.rows(NUM_PASSES - 1)
        reached = torch.ones(len(DRAFTERS), max(0, rows.stop - rows.start))
        sums[:, 0] += reached.sum(1)
        for k, state in enumerate(head(text.tokens[None], text.aux[None].float())):
            targets = policy.lm_head(text.last[rows.start + k + 1 : rows.stop + k + 1]).float()
            logits = torch.full_like(targets, -torch.inf)
            logits[:, head.draft_ids] = head.lm_head(state[0, rows])
            drawn = text.tokens[rows.start + k + 2 : rows.stop + k + 2]
            reached *= kept(targets, logits, drawn, temperature)
            sums[:, k + 1] += reached.sum(1)
    return sums[:, 1:] / sums[:, :-1]


def kept(target: Tensor, draft: Tensor, drawn: Tensor, temperature: float) -> Tensor:
    """The probability that each drafter has proposed the token that the target has drawn, [3, n]."""
    drawn = drawn[:, None]
    argmax = (draft.argmax(-1, True) == drawn).float()
    if not temperature:
        return argmax.mT.expand(len(DRAFTERS), -1)
    p, q = ((logits / temperature).softmax(-1) for logits in (target, draft))
    p_drawn = p.gather(1, drawn).clamp_min(1e-20)
    whole = (0, -p.shape[1] % BLOCK_SIZE)
    blocks = nn.functional.pad(torch.stack([p, q]), whole).unflatten(2, (-1, BLOCK_SIZE))
    block, place = drawn // BLOCK_SIZE, drawn % BLOCK_SIZE
    inside = blocks.take_along_dim(block[None, ..., None], 2)[:, :, 0]
    shared = _wins_both(blocks.sum(-1), block) * _wins_both(inside, place)
    return torch.cat([argmax, *((x / p_drawn).clamp_max(1) for x in (shared, q.gather(1, drawn)))], 1).mT


def _wins_both(masses: Tensor, runner: Tensor) -> Tensor:
    """The probability that it wins two races of masses [2, n, runners] with the same noise, [n, 1]."""
    return 1 / torch.maximum(*(x / x.gather(1, runner).clamp_min(1e-20) for x in masses)).sum(1, True)


def clock(minutes: float) -> Iterator[float]:
    """The share of so many minutes that is over."""
    begin = time.monotonic()
    with tqdm(total=round(60 * minutes), unit="s", desc="training") as bar:
        while bar.n < bar.total:
            yield bar.n / bar.total
            bar.update(round(time.monotonic() - begin) - bar.n)


def run(output: Path, minutes: float, seed: int) -> None:
    torch.manual_seed(seed)
    output.mkdir(parents=True, exist_ok=True)
    folder = model_folder(None, "bfloat16")
    policy = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    texts = list(read_texts(policy, rollouts(output / "train.jsonl", folder, 1.0, NUM_PROMPTS, seed)))
    head = Head(policy, texts, DRAFT_VOCAB_SIZE)
    losses = list(train(head, texts, clock(minutes), seed))
    print(f"{len(losses)} steps; the loss fell from {losses[0]:.2f} to {losses[-1]:.2f}")
    head.save(output / "head")
    for temperature in TEMPERATURES:
        lines = rollouts(output / f"val-{temperature}.jsonl", folder, temperature, NUM_HELD_OUT, seed)
        found = acceptance(head, policy, read_texts(policy, lines), temperature)
        for name, row in zip(DRAFTERS, found.tolist(), strict=True):
            print(f"| {temperature} | {name} |", " | ".join(f"{value:.3f}" for value in row), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=number(float, 0.1), default=12, help="of training alone (12)")
    parser.add_argument("--seed", type=number(int, 0), default=0)
    try:
        run(**vars(parser.parse_args()))
    except (UserError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
