"""Composing configurations: where the YAML files are, and how overrides turn them into an objective."""

from collections.abc import Sequence
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.version import VersionBase
from omegaconf import DictConfig

from grpo_lightning.objective.objective import Objective


def conf_dir() -> Path:
    """The folder of YAML files: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "objective.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no conf folder in {package} or beside it: the installation is incomplete")


def compose(config_name: str, overrides: Sequence[str] = (), *, with_hydra: bool = False) -> DictConfig:
    """The configuration `config_name` of `conf_dir()` with Hydra `overrides`, e.g. ["algorithm=dapo", "clip.c=5"].

    with_hydra: its node `hydra` too, where hydra.runtime.choices has the option of every group.
    Works inside a running Hydra application, whose global state is the same afterwards.
    """
    # Hydra keeps the running application and the behaviour of its version in singletons, and refuses a second one.
    kinds: tuple[type, ...] = (GlobalHydra, VersionBase)
    running = {kind: Singleton._instances.pop(kind) for kind in kinds if kind in Singleton._instances}
    try:
        with initialize_config_dir(str(conf_dir()), job_name=config_name, version_base="1.3"):
            return hydra_compose(config_name, list(overrides), return_hydra_config=with_hydra)
    finally:
        for kind in kinds:
            Singleton._instances.pop(kind, None)
        Singleton._instances.update(running)


def load_objective(overrides: Sequence[str] = ()) -> Objective:
    """An objective from the groups in conf/objective.yaml, e.g. load_objective(["algorithm=dapo", "clip=higher"])."""
    return Objective.from_config(compose("objective", overrides))
