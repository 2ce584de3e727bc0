#!/usr/bin/env python3
"""The monitor under its old name: live health, alerts, recommendations and a summary at the end.

python scripts/monitor_training.py train_logs/train_*.log --interval 10

Everything else is that of `mmldlm monitor`; `--help` lists it.
"""

import sys
from pathlib import Path

# the checkout works without an installation of the package
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from mmldlm.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["monitor"]
    main()
