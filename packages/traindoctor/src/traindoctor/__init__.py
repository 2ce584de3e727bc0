"""traindoctor: finds faults in PyTorch training code, applies safe fixes and can undo them.

`engine.audit` finds, `fixing.plan` turns findings into new file contents, `transactions` writes them and undoes them.
Nothing in here imports torch; only `probe` and `preflight` do, inside their functions.
"""

__version__ = "0.1.0"
