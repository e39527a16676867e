"""Make the model that the live tests serve: a two-layer Llama with random weights and a byte-level tokenizer.

Runs inside the environment of the live tests: ``python tiny_model.py DIRECTORY``. 560 kB, made in a few seconds,
the same on every machine that has the pinned torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

VOCABULARY = 512
CONTEXT = 32768
SHARPNESS = 40
"""Factor on the output layer: greedy decoding then has no near-ties, so that a resumed run takes the same way."""


def save(directory: Path) -> None:
    """Write tokenizer and weights in Hugging Face's layout."""
    import torch  # type: ignore[import-not-found]
    from tokenizers import (  # type: ignore[import-not-found]
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )
    from transformers import (  # type: ignore[import-not-found]
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE(vocab={symbol: at for at, symbol in enumerate(symbols)}, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level, eos_token="</s>", bos_token="<s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(directory)

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).to(torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPNESS)
    model.save_pretrained(directory)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
