"""A second implementation of models of the Llama type, Mixtral and Qwen3-MoE: weights and activations in f32."""

import numpy as np


def _rope_frequencies(config, head_dim):
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    frequencies = 1 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind == "llama3":
        length = rope["original_max_position_embeddings"]
        wavelengths = 2 * np.pi / frequencies
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = (length / wavelengths - low) / (high - low)
        between = (1 - share) * frequencies / rope["factor"] + share * frequencies
        scaled = np.where(wavelengths > length / low, frequencies / rope["factor"], between)
        return np.where(wavelengths < length / high, frequencies, scaled)
    assert kind == "default", kind
    return frequencies


def _norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(eps)) * weight


def _silu(x):
    return x / (1 + np.exp(-x))


def has_experts(config, layer):
    if config["model_type"] == "mixtral":
        return True
    is_sparse = (layer + 1) % config.get("decoder_sparse_step", 1) == 0 and layer not in config.get("mlp_only_layers", [])
    return config["model_type"] == "qwen3_moe" and is_sparse


def _experts(config, weights, layer, x):
    is_mixtral = config["model_type"] == "mixtral"
    block = f"{layer}.block_sparse_moe" if is_mixtral else f"{layer}.mlp"

    def expert(number):  # gate, up, down
        if f"{block}.switch_mlp.up_proj.weight" in weights:  # as MLX has them
            return (weights[f"{block}.switch_mlp.{name}_proj.weight"][number] for name in ("gate", "up", "down"))
        names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        return (weights[f"{block}.experts.{number}.{name}.weight"] for name in names)

    scores = np.exp(x @ weights[f"{block}.gate.weight"].T)
    scores /= scores.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, : config["num_experts_per_tok"]]
    shares = np.take_along_axis(scores, chosen, axis=-1)
    if is_mixtral or config.get("norm_topk_prob"):
        shares /= shares.sum(axis=-1, keepdims=True)
    y = np.zeros_like(x)
    for number in range(scores.shape[-1]):
        gate, up, down = expert(number)
        rows, slots = np.nonzero(chosen == number)
        y[rows] += shares[rows, slots, None] * (_silu(x[rows] @ gate.T) * (x[rows] @ up.T) @ down.T)
    return y


def logits(config, weights, tokens):
    """[len(tokens), vocab] after each of `tokens`; weights: {name: f32 array}."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    eps, count = config["rms_norm_eps"], len(tokens)
    angles = np.arange(count)[:, None] * _rope_frequencies(config, head_dim)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    mask = np.triu(np.full((count, count), -np.inf, np.float32), 1)

    def linear(x, module):
        return x @ weights[f"{module}.weight"].T + weights.get(f"{module}.bias", np.float32(0))

    def split(x):  # [heads, count, head_dim]
        return x.reshape(count, -1, head_dim).transpose(1, 0, 2)

    def rotate(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = _norm(x, weights[f"{layer}.input_layernorm.weight"], eps)
        q, k, v = (split(linear(h, f"{layer}.self_attn.{p}_proj")) for p in "qkv")
        if config["model_type"] == "qwen3_moe":
            q, k = (_norm(rows, weights[f"{layer}.self_attn.{p}_norm.weight"], eps) for p, rows in (("q", q), ("k", k)))
        q, k = rotate(q), np.repeat(rotate(k), heads // kv_heads, axis=0)
        scores = q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(head_dim)) + mask
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        attended = scores @ np.repeat(v, heads // kv_heads, axis=0)
        x = x + linear(attended.transpose(1, 0, 2).reshape(count, -1), f"{layer}.self_attn.o_proj")
        h = _norm(x, weights[f"{layer}.post_attention_layernorm.weight"], eps)
        if has_experts(config, i):
            x = x + _experts(config, weights, layer, h)
        else:
            inner = _silu(linear(h, f"{layer}.mlp.gate_proj")) * linear(h, f"{layer}.mlp.up_proj")
            x = x + linear(inner, f"{layer}.mlp.down_proj")
    x = _norm(x, weights["model.norm.weight"], eps)
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return linear(x, head)


def losses(config, weights, text, window, windows):
    """[windows, window - 1]: nats of each byte of a window behind the first."""
    result = []
    for begin in range(0, windows * window, window):
        tokens = np.frombuffer(text, np.uint8, window, begin).astype(np.int64)
        row = logits(config, weights, tokens[:-1]).astype(np.float64)
        row -= row.max(axis=-1, keepdims=True)
        row -= np.log(np.exp(row).sum(axis=-1, keepdims=True))
        result.append(-row[np.arange(window - 1), tokens[1:]])
    return np.array(result)
