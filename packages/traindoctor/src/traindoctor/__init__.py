"""traindoctor: reads anybody's training code, says what is wrong, fixes what is safe and can take it back.

`engine.audit` finds, `fixing.plan` turns findings into new file contents, `transactions` writes them and undoes them.
Nothing in here imports torch; only `probe` and `preflight` do, inside their functions.
"""

__version__ = "0.1.0"
