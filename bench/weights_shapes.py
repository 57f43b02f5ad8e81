"""Shapes of Llama models for bench/weights.py, and how vLLM cuts and fuses them."""

from collections.abc import Mapping

from shared.weights.plan import Layout, fused, sharded

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary
    "tiny": (256, 704, 4, 8, 4, 4096),
    "small": (1024, 2816, 8, 16, 8, 32000),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "7b": (4096, 11008, 32, 32, 32, 32000),
    "13b": (5120, 13824, 40, 40, 40, 32000),
}


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """Llama's tensors, by Hugging Face names."""
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[name]
    kv = hidden // heads * kv_heads
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for n in range(layers):
        at = f"model.layers.{n}."
        found |= {
            f"{at}self_attn.q_proj.weight": (hidden, hidden),
            f"{at}self_attn.k_proj.weight": (kv, hidden),
            f"{at}self_attn.v_proj.weight": (kv, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, hidden),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def tensor_parallel(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> Layout:
    """As vLLM holds them: o and down by columns, norms whole, the others by rows; qkv and gate-up fused."""
    dims = {n: 1 if ("o_proj" in n or "down_proj" in n) else -1 if "norm" in n else 0 for n in shapes}
    layers = sorted({n.rsplit(".", 3)[0] for n in shapes if ".self_attn." in n})
    groups = {f"{at}.qkv_proj": [f"{at}.self_attn.{x}_proj.weight" for x in "qkv"] for at in layers}
    groups |= {f"{at}.gate_up": [f"{at}.mlp.{x}_proj.weight" for x in ("gate", "up")] for at in layers}
    return fused(sharded(shapes, ranks, dims), groups)
