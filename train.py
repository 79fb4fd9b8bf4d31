"""python train.py [group=option ...] [key=value ...]; see README.md."""

import sys

if __name__ == "__main__":
    try:
        from grpo_lightning.train import main
    except KeyboardInterrupt:  # importing takes seconds
        print("grpo_lightning: interrupted before anything was done", file=sys.stderr)
        sys.exit(130)
    main()
