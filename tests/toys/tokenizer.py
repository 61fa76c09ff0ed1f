"""Tokenizers whose tokens may end inside a character: byte-level, and with byte fallback."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<|spare_1|>", "<|spare_2|>"]
PIECES = ["STOP", "STO", "Pq", "P\u00e2"]  # the last: "P" and the first byte of a euro sign


def byte_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: 256 bytes, a few longer pieces (used by id only) and five special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate([*alphabet, *PIECES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    fast.chat_template = CHAT_TEMPLATE if chat else None
    return fast


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """One of Llama 2's kind: pieces with a space, and bytes for characters that it does not know."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "1"]
    model = models.BPE(
        vocab={piece: id for id, piece in enumerate(pieces)},
        merges=[("\u2581", "a")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER, FALLBACK = byte_tokenizer(), fallback_tokenizer()


def ids(text: str) -> list[int]:
    """One token per byte."""
    return list(TOKENIZER(text)["input_ids"])


def piece(token: str) -> int:
    """The id of one merged token."""
    found = TOKENIZER.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found
