"""Recurrent layers for engines on CPUs: plain torch, a token at a time, in float32.

vLLM's own CPU kernels do not serve rows with drafts of different lengths. These read and write the slots
that vLLM's GPU kernels do: a row reads the slot of its last accepted token, and writes the state after its
token t to slot t. Which slots those are, and how many tokens were accepted, is vLLM's own doing, and what
is tested. What torch computes with other last bits in larger tensors is computed in float64, so that a token
has the same bits alone and in a draft.
"""

import typing

import torch
from torch.nn import functional

Tensor = torch.Tensor


def replace_layers():
    """Let engines of this process that are made from now on have these layers."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    if hasattr(ops, "causal_conv1d_weight_pack"):  # that of vLLM 0.29 fails for float32
        ops.causal_conv1d_weight_pack = lambda weight: weight
    # A custom operator is registered from its annotations.
    hints = typing.get_type_hints(gdn_attention.cpu_gdn_attention_core)
    gated_delta.__annotations__ = hints | {"return": None}
    gdn_attention.cpu_gdn_attention_core = gated_delta
    mamba_mixer2.causal_conv1d_update = convolve_rows
    mamba_mixer2.causal_conv1d_fn = convolve_prompts
    mamba_mixer2.selective_state_update = scan_rows


def convolved(x, before, weight, bias, activation):
    """Of tokens [q, dim], with [dim, width - 1] before them: [q, dim]."""
    width = weight.shape[1]
    whole = torch.cat([before.float(), x.T.float()], 1)
    out = torch.zeros(x.shape[1], x.shape[0])
    for k in range(width):
        out = out + whole[:, k : k + x.shape[0]] * weight[:, k, None].float()
    if bias is not None:
        out = out + bias.float()[:, None]
    if activation in ("silu", "swish", True):
        out = out * torch.sigmoid(out.double()).float()
    return out.T


def convolve_speculative(x, states, weight, bias, activation, slot, accepted):
    """Of a speculative row: its one slot holds what came before, after it the tokens of its last draft."""
    state, width = states[slot], weight.shape[1]
    before = state[:, accepted - 1 : accepted + width - 2].clone()
    out = convolved(x, before, weight, bias, activation)
    kept = torch.cat([before[:, 1:], x.T.to(state.dtype)], 1)
    state[:, : kept.shape[1]] = kept
    return out


def convolve_plain(x, states, weight, bias, activation, slot, has_state):
    state, most = states[slot], weight.shape[1] - 1
    before = state[:, :most].clone() if has_state else torch.zeros_like(state[:, :most])
    out = convolved(x, before, weight, bias, activation)
    state[:, :most] = torch.cat([before, x.T.to(state.dtype)], 1)[:, -most:]
    return out


def convolve_rows(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, num_accepted_tokens=None,
    query_start_loc=None, **_,
):  # fmt: skip
    """vLLM's `causal_conv1d_update`."""
    out = torch.empty_like(x)
    slots = conv_state_indices if conv_state_indices.dim() == 1 else conv_state_indices[:, 0]
    for i, slot in enumerate(slots.tolist()):
        begin, end = (i, i + 1) if query_start_loc is None else query_start_loc[i : i + 2].tolist()
        given = conv_state, weight, bias, activation, slot
        if begin == end:
            continue
        if num_accepted_tokens is None:
            out[begin:end] = convolve_plain(x[begin:end], *given, True).to(out.dtype)
        else:
            accepted = int(num_accepted_tokens[i])
            out[begin:end] = convolve_speculative(x[begin:end], *given, accepted).to(out.dtype)
    return out


def convolve_prompts(
    x, weight, bias, conv_states=None, query_start_loc=None, cache_indices=None, has_initial_state=None,
    activation="silu", **_,
):  # fmt: skip
    """vLLM's `causal_conv1d_fn`; x is [dim, tokens]."""
    out = torch.empty_like(x)
    for i, slot in enumerate(cache_indices.flatten().tolist()):
        begin, end = query_start_loc[i : i + 2].tolist()
        if begin < end:
            has_state = has_initial_state is not None and bool(has_initial_state[i])
            given = conv_states, weight, bias, activation, slot, has_state
            out[:, begin:end] = convolve_plain(x[:, begin:end].T, *given).T.to(out.dtype)
    return out


def scan_rows(
    state, x, dt,
    A, B, C, D=None,  # noqa: N803
    dt_bias=None, z=None, dt_softplus=False, state_batch_indices=None, dst_state_batch_indices=None,
    out=None, num_accepted_tokens=None, cu_seqlens=None, **_,
):  # fmt: skip
    """vLLM's `selective_state_update` of Mamba 2; x is [tokens, heads, dim]."""
    assert z is None
    reads = state_batch_indices.reshape(len(state_batch_indices), -1)
    writes = reads if dst_state_batch_indices is None else dst_state_batch_indices.reshape(len(reads), -1)
    repeats = x.shape[1] // B.shape[1]
    for i in range(len(reads)):
        begin, end = (i, i + 1) if cu_seqlens is None else cu_seqlens[i : i + 2].tolist()
        if begin == end:
            continue
        accepted = 1 if num_accepted_tokens is None else int(num_accepted_tokens[i])
        s = state[int(reads[i, accepted - 1])].float().clone()
        for t in range(begin, end):
            step = dt[t].float() + (0 if dt_bias is None else dt_bias.float())
            step = functional.softplus(step) if dt_softplus else step
            b, c = (each[t].float().repeat_interleave(repeats, 0) for each in (B, C))
            s = s * torch.exp(A.float() * step[..., None]) + (step * x[t].float())[..., None] * b[:, None]
            y = (s * c[:, None]).sum(-1)
            out[t] = (y if D is None else y + x[t].float() * D.float()).to(out.dtype)
            if num_accepted_tokens is not None:
                state[int(writes[i, t - begin])] = s.to(state.dtype)
        if num_accepted_tokens is None:
            state[int(writes[i, 0])] = s.to(state.dtype)


def delta_rule(layer, conv, b, a, states, read, writes):
    """The gated delta rule over a row's tokens [q, dim]; the state after token t goes to slot writes[t]."""
    q, k, v = (each[0].float() for each in layer.rearrange_mixed_qkv(conv.contiguous()))
    repeats = v.shape[1] // k.shape[1]
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True).double() + 1e-6).float() for x in (q, k))
    q, k = q.repeat_interleave(repeats, 1) * q.shape[-1] ** -0.5, k.repeat_interleave(repeats, 1)
    rate = torch.exp(layer.A_log.double()) * functional.softplus(a.double() + layer.dt_bias.double())
    decay, beta = torch.exp(-rate).float(), torch.sigmoid(b.double()).float()
    num_slots, num_heads, dim_v, dim_k = states.shape
    pool = states.view(num_slots, num_heads, dim_k, dim_v)
    s = torch.zeros(num_heads, dim_k, dim_v) if read is None else pool[read].float().clone()
    out = torch.empty_like(v)
    for t in range(len(conv)):
        s = s * decay[t][:, None, None]
        error = (v[t] - (k[t][:, :, None] * s).sum(1)) * beta[t][:, None]
        s = s + k[t][:, :, None] * error[:, None]
        out[t] = (q[t][:, :, None] * s).sum(1)
        if writes[t] is not None:
            pool[writes[t]] = s.to(pool.dtype)
    return out


def gated_delta(mixed_qkv, b, a, core_attn_out, layer_name):
    """vLLM's `cpu_gdn_attention_core`: writes into core_attn_out [tokens, heads, dim]."""
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    metadata = None if context.attn_metadata is None else context.attn_metadata[layer.prefix]
    if metadata is None or metadata.num_actual_tokens == 0:
        return
    packed = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    weight = layer.conv1d.weight if packed is None else packed
    weight = weight.view(weight.shape[0], -1)
    cache = layer.kv_cache
    conv_states, states = cache[0] if isinstance(cache[0], (list, tuple)) else cache
    if conv_states.shape[-1] == weight.shape[0]:
        conv_states = conv_states.transpose(-1, -2)
    kernel = conv_states, weight, layer.conv1d.bias, layer.activation

    def put(tokens, conv, read, writes):
        given = delta_rule(layer, conv, b[tokens], a[tokens], states, read, writes)
        core_attn_out[tokens] = given.to(core_attn_out.dtype)

    speculative, plain = tokens_of(metadata)
    for i, tokens in enumerate(speculative):
        slots, accepted = metadata.spec_state_indices_tensor[i].tolist(), int(metadata.num_accepted_tokens[i])
        if len(tokens):
            conv = convolve_speculative(mixed_qkv[tokens], *kernel, slots[0], accepted)
            put(tokens, conv, slots[accepted - 1], slots)
    for i, tokens in enumerate(plain):
        if len(tokens):
            slot = int(metadata.non_spec_state_indices_tensor[i])
            has_state = i < metadata.num_decodes or bool(metadata.has_initial_state[i])
            conv = convolve_plain(mixed_qkv[tokens], *kernel, slot, has_state)
            put(tokens, conv, slot if has_state else None, [None] * (len(tokens) - 1) + [slot])


def tokens_of(metadata):
    """The places of the tokens of each speculative row, and of each other row."""
    every = torch.arange(metadata.num_actual_tokens)
    num_plain = metadata.num_decodes + metadata.num_prefills
    if metadata.spec_sequence_masks is None:
        return [], rows_of(every, metadata.non_spec_query_start_loc, num_plain)
    if not num_plain:
        return rows_of(every, metadata.spec_query_start_loc, metadata.num_spec_decodes), []
    speculative, plain = metadata.spec_token_indx.long(), metadata.non_spec_token_indx.long()
    return (
        rows_of(speculative, metadata.spec_query_start_loc, metadata.num_spec_decodes),
        rows_of(plain, metadata.non_spec_query_start_loc, num_plain),
    )


def rows_of(tokens, starts, num_rows):
    ends = starts.tolist()
    return [tokens[ends[i] : ends[i + 1]] for i in range(num_rows)]
