#!/usr/bin/env python3
"""The monitor under its old name: live health, alerts, recommendations and a summary at the end.

python scripts/monitor_training.py train_logs/train_*.log --interval 10

Everything else is that of `runwatch`; `--help` lists it. It needs no installation of this project: only typer, rich and
pyyaml must be there.
"""

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "packages" / "runwatch"

if __name__ == "__main__":
    if (PACKAGE / "src").is_dir():  # the checkout works without an installation
        sys.path.insert(0, str(PACKAGE / "src"))
    try:
        import rich  # noqa: F401
        import yaml  # noqa: F401
        from runwatch.cli import main
    except ImportError as error:
        wanted = PACKAGE if PACKAGE.is_dir() else "runwatch"
        sys.exit(f"monitor_training.py: {error}; install it with: {sys.executable} -m pip install {wanted}")
    main()
