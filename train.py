"""python train.py [group=option ...] [key=value ...]; see README.md."""

from grpo_lightning.train import main

if __name__ == "__main__":
    main()
