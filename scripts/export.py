"""Write the policy of a run's checkpoint as a Hugging Face folder, for transformers, vLLM and the rest.

    python scripts/export.py CHECKPOINT OUT         CHECKPOINT: outputs/runs/.../checkpoints/rollout=000010.ckpt

The run's config.yaml says which model it is; with LoRA, the adapters are merged into it. A finished run has written
such a folder itself: checkpoints/model.
"""

import sys
from pathlib import Path

import transformers

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.export import export_checkpoint


def main() -> None:
    if len(sys.argv) != 3 or any(argument.startswith("-") for argument in sys.argv[1:]):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    checkpoint, folder = map(Path, sys.argv[1:])
    transformers.utils.logging.disable_progress_bar()
    try:
        export_checkpoint(checkpoint, folder)
    except (UsageError, RunError) as error:
        print(f"export: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    print(f"{folder} is ready: {', '.join(sorted(file.name for file in folder.iterdir()))}")


if __name__ == "__main__":
    main()
