"""Mutated requests from a fixed seed: request number `index` of a method is the same in every run.

Half are bytes of a valid request with a few of them wrong, half are messages that parse with odd values in some places.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

SEED = 20_240
ODD_TEXTS = (
    "", "r", "x", "a" * 70_000, "\x00", "../../x", "/dev/null", "%s%n", "🏳️‍🌈" * 50, "\u202e", "127.0.0.1:1", "nowhere",
    "[::1]:1", "unix:/nowhere", "host:99999", ":", "1:0:0", "NaN", "-1", "actor.update", "response_ids", "score/x",
)  # fmt: skip
ODD_INTEGERS = (0, 1, 2, 3, 5, 127, 255, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
ODD_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e308, 1e-308, float("nan"), float("inf"), float("-inf"))
ODD_JSON = (
    None, True, 0, -1, 1e308, 2**70, "", "x", "a" * 5000, [], {}, [[]], {"": 0}, "nan", "../x", 0.5, [1] * 500,
    {"a": {"b": {}}}, "module:name",
)  # fmt: skip


def mutant(method: Any, seeds: Sequence[Any], index: int) -> bytes:
    """The index-th mutated request of a method, made of one of the valid requests `seeds`."""
    rng = random.Random(f"{SEED}:{method.path}:{index}")
    message = type(seeds[0])()
    message.CopyFrom(rng.choice(seeds))
    if "operation" in message.DESCRIPTOR.fields_by_name:
        # Each is work of its own: another payload under a known id would be refused before it is looked at.
        message.operation.id.part = str(index)
    if rng.random() < 0.5:
        return _wrong_bytes(rng, message.SerializeToString(deterministic=True))
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change(rng, message)
    return message.SerializeToString(deterministic=True)


def _wrong_bytes(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        place = rng.randrange(len(out) + 1)
        kind = rng.randrange(7)
        if kind == 0 and place < len(out):
            out[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and place < len(out):
            out[place] = rng.randrange(256)
        elif kind == 2:
            del out[place : place + rng.choice((1, 2, 8, 64))]
        elif kind == 3:
            out[place:place] = rng.randbytes(rng.choice((1, 2, 8, 64)))
        elif kind == 4:
            out[place:place] = out[max(0, place - rng.randrange(64)) : place] * rng.choice((1, 2, 50))
        elif kind == 5:
            # A length or number far too large, a group that never ends, a field of a wrong type.
            out[place:place] = rng.choice((b"\xff" * 9 + b"\x01", b"\x0b" * 200, b"\x0a\xff\xff\xff\xff\x07", b"\x07"))
        else:
            del out[place:]
    return bytes(out)


def _change(rng: random.Random, message: Any) -> None:
    """Changes one field, here or further down."""
    fields = [field for field in message.DESCRIPTOR.fields if not _is_map(field)]
    if not fields:
        return
    field = rng.choice(fields)
    if field.is_repeated:
        _change_list(rng, getattr(message, field.name), field)
    elif field.message_type is not None:
        if rng.random() < 0.1:
            message.ClearField(field.name)
        else:
            _change(rng, getattr(message, field.name))
    elif field.name.endswith("_json") and rng.random() < 0.9:
        setattr(message, field.name, odd_json(rng, getattr(message, field.name)))
    else:
        setattr(message, field.name, _odd(rng, field, getattr(message, field.name)))


def _change_list(rng: random.Random, items: Any, field: Any) -> None:
    kind = rng.randrange(5)
    if items and kind == 0:
        del items[rng.randrange(len(items))]
    elif items and kind == 1:
        items.extend([rng.choice(items)] * rng.choice((1, 2, 1000)))
    elif kind == 2:
        del items[:]
    elif field.message_type is not None:
        _change(rng, rng.choice(items) if items and kind == 3 else items.add())
    elif items and kind == 3:
        items[rng.randrange(len(items))] = _odd(rng, field, items[0])
    else:
        items.append(_odd(rng, field, items[0] if items else None))


def _odd(rng: random.Random, field: Any, before: Any) -> Any:
    if field.type == field.TYPE_STRING:
        return rng.choice((*ODD_TEXTS, f"{before}{before}", f"{before}"[:-1]))
    if field.type == field.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 1000)))
    if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return rng.choice(ODD_FLOATS)
    if field.cpp_type == field.CPPTYPE_BOOL:
        return not before
    if field.cpp_type == field.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 4, 77))
    bits = 32 if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 64
    signed = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
    top = 2 ** (bits - signed) - 1
    value = min(rng.choice(ODD_INTEGERS), top)
    return -value - 1 if signed and rng.random() < 0.3 else value


def odd_json(rng: random.Random, text: str) -> str:
    """The JSON text with one value changed, or no JSON at all."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        tree = {}
    if rng.random() < 0.1:
        return rng.choice(("[" * 100_000, '{"a":' * 50_000, text[:-1], f"{text}x", "null", "[]", "1e999", "\ufeff{}"))
    _change_json(rng, tree)
    return json.dumps(tree)


def _change_json(rng: random.Random, tree: Any) -> None:
    while True:
        if not isinstance(tree, dict) or not tree:
            return
        key = rng.choice([*tree, "new"])
        inner = tree.get(key)
        if isinstance(inner, dict) and inner and rng.random() < 0.8:
            tree = inner
            continue
        if rng.random() < 0.1:
            tree.pop(key, None)
        else:
            tree[key] = rng.choice(ODD_JSON)
        return


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
