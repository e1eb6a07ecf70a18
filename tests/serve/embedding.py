"""The files of an embedding checkpoint in the layout of sentence-transformers, and its texts."""

import json

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

LETTERS = ["<end>", "?", *"abcdefghijklmnopqrstuvwxyz -"]
TEXTS = ["sort me", "a", "which planet is the largest of all that go round the sun", "planet", "b" * 40]
FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def tokenizer() -> Tokenizer:
    """Return a tokenizer of letters that ends each text with <end>, as that of Qwen3-Embedding does."""
    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.add_special_tokens(["<end>"])
    made.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 0)])
    return made


def write_modules(folder, mode="lasttoken", *, normalize=True, prompts=None, settings=None, **fields):
    """Write modules.json and the files that it names, as Qwen3-Embedding has them.

    Args:
      prompts, settings: contents of config_sentence_transformers.json and sentence_bert_config.json.
      fields: fields of the pooling.
    """
    names = ["Transformer", "Pooling", "Normalize"][: 2 + normalize]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    pooling = {"word_embedding_dimension": 32, **{flag: one == mode for one, flag in FLAGS.items()}}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for file, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {**pooling, "include_prompt": True, **fields}),
        ("config_sentence_transformers.json", prompts or {"prompts": {"query": "q: "}, "default_prompt_name": None}),
        ("sentence_bert_config.json", settings or {"max_seq_length": 64, "do_lower_case": False}),
    ):
        (folder / file).write_text(json.dumps(content))
    tokenizer().save(str(folder / "tokenizer.json"))
