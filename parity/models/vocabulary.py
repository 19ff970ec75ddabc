"""The tiny models' vocabulary.

Token id ``b`` is the byte ``b``, so text and bytes are real and every text round-trips.
"""

from __future__ import annotations

from gguf import GGUFWriter, TokenType

BOS, EOS, PAD = 256, 257, 258
CONTROL_TOKENS = ("<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>")
N_VOCAB = 256 + len(CONTROL_TOKENS)  # 264: a multiple of 8, so that quantised output rows can be repacked


def printable_bytes() -> list[str]:
    """GPT-2's table of one printable character for each byte (``bytes_to_unicode`` of its encoder)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    table = {byte: chr(byte) for byte in kept} | {byte: chr(256 + place) for place, byte in enumerate(moved)}
    return [table[byte] for byte in range(256)]


def add_byte_vocabulary(writer: GGUFWriter) -> None:
    """Write a byte-level BPE vocabulary of 256 bytes and 8 control tokens into ``writer``'s metadata.

    GGUF has no empty arrays, so there is one merge; it can't apply, because its halves are longer than any
    symbol that a text is split into. So every token is one byte.
    """
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*printable_bytes(), *CONTROL_TOKENS])
    writer.add_token_types([TokenType.NORMAL] * 256 + [TokenType.CONTROL] * len(CONTROL_TOKENS))
    writer.add_token_merges(["<s> </s>"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_vocab_size(N_VOCAB)
