"""python train.py [group=option ...] [key=value ...]; see README.md."""

import sys

if __name__ == "__main__":
    try:
        from grpo_lightning.train import main
    except KeyboardInterrupt:  # importing takes seconds
        sys.exit("grpo_lightning: interrupted before anything was done")
    main()
