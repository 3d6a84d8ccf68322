"""Write a GGUF model as a Hugging Face directory of float32 safetensors.

All engines of a comparison then read the same weights from the same files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from tokentight.models.demo_model import demo_model_path


def export(gguf: Path, directory: Path) -> None:
    """Dequantise `gguf` to float32 in `directory`, with configuration, tokenizer and template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.to(torch.float32)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gguf", type=Path, help="instead of the demo model")
    arguments = parser.parse_args()
    export(arguments.gguf or demo_model_path(), arguments.directory)


if __name__ == "__main__":
    main()
