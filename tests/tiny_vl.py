"""A Qwen2.5-VL of two layers with random weights, its tokenizer and its image processor; no hub is asked."""

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|image_pad|>", "<|video_pad|>")  # fmt: skip
IMAGE = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
CHARACTERS = [chr(code) for code in range(10, 127)]
TOKENS = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
VOCAB_SIZE = 128
PATCH, SIDE = 14, 56  # pixels; an image of SIDE x SIDE is (SIDE / PATCH / 2) ** 2 = 4 tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_vl(folder):
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048,
        "bos_token_id": TOKENS["<|endoftext|>"], "eos_token_id": TOKENS["<|im_end|>"],
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": PATCH, "window_size": 2 * SIDE, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False,
        image_token_id=TOKENS["<|image_pad|>"], video_token_id=TOKENS["<|video_pad|>"],
        vision_start_token_id=TOKENS["<|vision_start|>"], vision_end_token_id=TOKENS["<|vision_end|>"],
    )  # fmt: skip
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(12)  # a peaked distribution, as a trained model's is
    model.save_pretrained(folder)
    make_processor().save_pretrained(folder)
    return str(folder)


def make_processor(stem="Qwen2_5_VL", numbers=TOKENS):
    """That of transformers' class with this stem; `numbers` are the tokens'."""
    characters = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, []))
    characters.decoder = tokenizers.decoders.Fuse()
    characters.add_special_tokens(list(SPECIAL))
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters, **marks)
    tokenizer.chat_template = CHAT_TEMPLATE
    pixels = {"min_pixels": SIDE * SIDE, "max_pixels": SIDE * SIDE}
    of_video = transformers.Qwen3VLVideoProcessor if stem == "Qwen3VL" else transformers.Qwen2VLVideoProcessor
    parts = {"tokenizer": tokenizer, "video_processor": of_video(patch_size=PATCH, **pixels)}
    parts["image_processor"] = transformers.Qwen2VLImageProcessor(patch_size=PATCH, **pixels)
    return getattr(transformers, f"{stem}Processor")(**parts, chat_template=CHAT_TEMPLATE)


def make_image(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8))


def tokens(*parts):
    found: list[str] = []
    for part in parts:
        found += IMAGE * part if isinstance(part, int) else part
    return [TOKENS[each] for each in found]
