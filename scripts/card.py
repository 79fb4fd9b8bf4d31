"""Print the algorithm card of a configuration, without running it.

python scripts/card.py algorithm=dapo clip.epsilon_high=0.3
"""

import sys

from grpo_lightning import config
from grpo_lightning.card import card
from grpo_lightning.errors import UsageError
from grpo_lightning.objective.load import compose


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    try:
        overrides = config.normalise(sys.argv[1:])
        cfg = config.compose_checked(overrides)
    except UsageError as error:
        sys.exit(f"wrong usage: {error}")
    choices = compose("train", overrides, with_hydra=True).hydra.runtime.choices
    print(card(cfg, config.check(cfg), choices))


if __name__ == "__main__":
    main()
